"""Drawing: scales, looks, heat maps; well formed whatever a client is called."""

from __future__ import annotations

import base64
import io
import re
from importlib import resources
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib import image

from fedfuse.report.read import finite
from fedfuse.report.svg import COLOURS, Scale, drawing, heat_map, line, look, marker, png, scale_for, tag

measured = st.floats(-1e9, 1e9).map(lambda value: finite(value) or 0.0)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.floats(0, 1))
def test_a_scale_is_straight(low: float, span: float, share: float) -> None:
    scale = Scale(low, low + span, 10, 110)
    if low + span > low:
        assert scale(low + share * span) == pytest.approx(10 + 100 * share, abs=1e-2)


def test_a_logarithmic_scale_is_straight_in_decades() -> None:
    scale = Scale(1, 10_000, 0, 4, log=True)
    assert [scale(10.0**k) for k in range(5)] == pytest.approx([0, 1, 2, 3, 4])
    assert scale.ticks() == [1, 10, 100, 1000, 10_000]


@given(st.lists(measured, min_size=1, max_size=5), st.booleans())
@example([1e9, 999999999.9999999], True)
def test_a_scale_holds_its_values_and_has_round_ticks(values: list[float], log: bool) -> None:
    scale = scale_for(values, 0, 100, log=log)
    assert all(-1e-6 <= scale(value) <= 100 + 1e-6 for value in values)
    ticks = scale.ticks()
    assert len(ticks) <= 12
    assert all(
        scale.low - 1e-6 * abs(scale.low) - 1e-9 <= tick <= scale.high + 1e-6 * abs(scale.high) + 1e-9 for tick in ticks
    )


@given(st.text(max_size=30))
def test_whatever_a_client_is_called_the_drawing_is_well_formed(name: str) -> None:
    svg = drawing(10, 10, name, tag("text", name, x=1.0), marker(3, 1, 1, title=name))
    root = ElementTree.fromstring(svg)
    assert [child.tag for child in root] == ["text", "path"]


def test_a_png_holds_its_shades() -> None:
    shades = np.array([[0.0, 0.5, 1.0], [0.2, 0.4, 0.6]])
    raw = base64.b64decode(png(shades, (10, 20, 30)).removeprefix("data:image/png;base64,"))
    read = image.imread(io.BytesIO(raw), format="png")
    np.testing.assert_allclose(read[..., 3], shades, atol=1 / 254)
    np.testing.assert_allclose(read[..., :3] * 255, np.broadcast_to([10, 20, 30], (2, 3, 3)), atol=1e-4)


def test_twelve_methods_differ_in_colour_and_in_print_too() -> None:
    looks = [look(at) for at in range(12)]
    assert len({found.colour for found in looks}) == 12
    assert len({(found.dash, found.shape) for found in looks}) == 12


def test_no_two_of_many_methods_look_the_same() -> None:
    drawn = {(line([(0, 0), (1, 1)], at), marker(at, 0, 0)) for at in range(48)}
    assert len(drawn) == 48


def test_the_pages_colours_are_these() -> None:
    style = resources.files("fedfuse.report").joinpath("page.css").read_text(encoding="utf-8")
    light = dict(re.findall(r"--c(\d+): (#[0-9a-f]{6})", style.split("@media")[0]))
    assert [light[str(at)] for at in range(12)] == list(COLOURS)
    assert all(f".ink{at} {{" in style for at in range(12))


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
