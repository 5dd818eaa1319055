from __future__ import annotations

import re

import numpy as np
import pytest

from fedfuse.report.svg import heat_map


def opacities(svg: str) -> list[float]:
    return [float(found) for found in re.findall(r'fill-opacity="([\d.]+)"', svg)]


def test_shades_grow_with_the_value_and_nothing_is_empty() -> None:
    values = np.array([[0.0, 25.0], [100.0, np.nan]])
    assert opacities(heat_map("x", ["a", "b"], ["c", "d"], values)) == pytest.approx(
        [0.06 + 0.94 * 0.25, 1.0], abs=0.01
    )
    assert opacities(heat_map("x", ["a", "b"], ["c", "d"], values, root=True)) == pytest.approx([0.53, 1.0], abs=0.01)


def test_cells_tell_their_number() -> None:
    svg = heat_map("x", ["a"], ["c", "d"], np.array([[0.25, 0.5]]), "percent", ends=["75"])
    assert "a, c: 25" in svg
    assert ">75</text>" in svg


def test_many_cells_become_one_picture() -> None:
    svg = heat_map("x", [f"c{k}" for k in range(1000)], list("abcdefghij"), np.ones((1000, 10)), ends=["1"] * 1000)
    assert svg.count("<image ") == 1
    assert "1,000 rows" in svg
    assert len(svg) < 20_000


def test_a_map_of_nothing_is_drawn() -> None:
    assert opacities(heat_map("x", ["a"], ["c"], np.zeros((1, 1)))) == []
