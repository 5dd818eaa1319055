from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfuse.experiment.reproduce import all_figures, experiments_folder, load_figures

FIGURES = experiments_folder() / "figures"
seen: Any = load_figures(FIGURES / "gaussianity.py")


@pytest.fixture(scope="module")
def found() -> seen.Behaviour:
    return seen.behaviour(trials=200)


def test_among_alike_clients_one_takes_most_unless_scores_are_renyis(found: seen.Behaviour) -> None:
    assert np.median(found.largest["|k₃·k₄|"]) > 0.55
    assert found.largest["Rényi 1"].max() < 1 / 3 + 0.02


def test_equation_eight_as_printed_rarely_sums_to_one(found: seen.Behaviour) -> None:
    assert np.mean(np.abs(found.total - 1) < 0.1) < 0.2
    assert found.total.min() < -5
    assert found.total.max() > 3


def test_scores_grow_with_the_seventh_power_or_not_at_all(found: seen.Behaviour) -> None:
    assert found.growth["|k₃·k₄|"] == pytest.approx(seen.SCALES**7)
    assert found.growth["standardized"] == pytest.approx(np.ones(len(seen.SCALES)))
    assert np.all(np.diff(found.growth["Rényi 1"]) < 0)


def test_the_picture_is_drawn(found: seen.Behaviour, tmp_path: Path) -> None:
    assert all_figures()["swa-gaussianity"].draw is seen.draw_gaussianity
    path = seen._draw(found, tmp_path / "picture.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 20_000
