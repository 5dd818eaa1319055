from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.data import Dirichlet, load
from fedfuse.experiment.reproduce import all_figures, experiments_folder, load_figures

FIGURES = experiments_folder() / "figures"
features: Any = load_figures(FIGURES / "features.py")


def test_three_models_are_drawn_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec("mlp", {"inputs": 64, "hidden": [8], "classes": 10})
    tiny = features.Scene(load("digits", train_limit=200), spec, LocalSettings(), Dirichlet(alpha=1.0))
    monkeypatch.setattr(features, "scene", lambda: tiny)
    monkeypatch.setattr(features, "SHOWN", 60)
    drawn: list[list[features.View]] = []

    def watched(views: list[features.View], labels: np.ndarray, source: str, path: Path) -> Path:
        drawn.append(views)
        return real(views, labels, source, path)

    real = features._draw
    monkeypatch.setattr(features, "_draw", watched)
    (path,) = all_figures()["fedlpa-features"].draw(tmp_path)
    assert path.stat().st_size > 10_000
    assert [v.title.split(" (")[0] for v in drawn[0]] == ["one client", "FedAvg", "FedLPA"]
    assert all(v.places.shape == (60, 2) for v in drawn[0])


def test_without_mnist_the_bundled_digits_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "find", lambda _: None)
    assert features.scene().data.name == "digits"
