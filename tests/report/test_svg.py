from __future__ import annotations

import base64
import io
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib import image

from fedfuse.report.read import finite
from fedfuse.report.svg import Scale, drawing, marker, png, scale_for, tag

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
