from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedfuse.data import load
from fedfuse.experiment.reproduce import all_figures, experiments_folder, load_figures

FIGURES = experiments_folder() / "figures"
seen: Any = load_figures(FIGURES / "widths.py")


@pytest.fixture(scope="module")
def found() -> seen.Growth:
    return seen.growth(load("digits", train_limit=300, test_limit=100), (2, 4), epochs=2)


def test_widths_lie_between_one_network_and_all_of_them_and_grow_with_mass(found: seen.Growth) -> None:
    for place, count in enumerate(found.counts):
        widths = [found.widths[gamma][place] for gamma in seen.GAMMAS]
        assert widths == sorted(widths)
        assert widths[0] >= seen.HIDDEN
        assert widths[-1] <= seen.HIDDEN * count
    assert all(0 <= a <= 1 for values in found.accuracy.values() for a in values)


def test_the_picture_is_drawn(found: seen.Growth, tmp_path: Path) -> None:
    assert all_figures()["pfnm-widths"].draw is seen.draw_widths
    path = seen._draw(found, tmp_path / "picture.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 20_000
