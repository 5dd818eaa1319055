"""Model files against test rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedfuse.core.model import Apart, Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.federation.evaluate import Reading, evaluate_files
from fedfuse.wire.files import save_model

SPEC = Spec("mlp", {"inputs": 2, "hidden": [], "classes": 2})


@pytest.fixture
def source(tmp_path: Path) -> str:
    """Four test rows whose class is the larger of two inputs, and training rows far from them."""
    x = np.array([[1, 0], [0, 1], [2, 1], [1, 3]], np.float32)
    y = np.array([0, 1, 0, 1])
    np.savez(tmp_path / "rows.npz", x_train=10 * x + 5, y_train=y, x_test=x, y_test=y)
    return str(tmp_path / "rows.npz")


def saved(path: Path, sign: float) -> Single:
    names = list(SPEC.build().state_dict())
    model = Single(SPEC, Posterior(dict(zip(names, (sign * torch.eye(2), torch.zeros(2)), strict=True))))
    save_model(model, path)
    return model


def test_every_file_is_scored(tmp_path: Path, source: str) -> None:
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    both = Apart((saved(good, 1.0), saved(bad, -1.0)))
    save_model(both, tmp_path / "both.safetensors")
    scores, _ = evaluate_files([good, bad, tmp_path / "both.safetensors"], source)
    assert [s["accuracy"] for s in scores.values()] == [1.0, 0.0, 0.5]
    assert scores[str(good)]["confusion"] == [[2, 0], [0, 2]]


def test_rows_are_scaled_as_in_the_run(tmp_path: Path, source: str) -> None:
    saved(tmp_path / "m.safetensors", 1.0)
    plain, _ = evaluate_files([tmp_path / "m.safetensors"], source)
    scaled, _ = evaluate_files([tmp_path / "m.safetensors"], source, Reading(standardize=True))
    assert plain.keys() == scaled.keys()
    name = str(tmp_path / "m.safetensors")
    assert scaled[name]["nll"] != plain[name]["nll"]


def test_what_does_not_fit_is_one_sentence(tmp_path: Path, source: str) -> None:
    wide = Spec("mlp", {"inputs": 3, "hidden": [], "classes": 2})
    save_model(Single(wide, Posterior(dict(wide.build().state_dict()))), tmp_path / "wide.safetensors")
    with pytest.raises(ConfigError, match=r"cannot score .* whose rows are 2 in 2 classes") as caught:
        evaluate_files([tmp_path / "wide.safetensors"], source)
    assert "\n" not in str(caught.value)
    few = Spec("torch.nn:Linear", {"in_features": 2, "out_features": 1})
    save_model(Single(few, Posterior(dict(few.build().state_dict()))), tmp_path / "few.safetensors")
    with pytest.raises(ConfigError, match="does not name its classes and has 1 outputs, and .* has 2 classes"):
        evaluate_files([tmp_path / "few.safetensors"], source, trusted={"torch.nn:Linear"})
