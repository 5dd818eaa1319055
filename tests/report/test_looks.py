from __future__ import annotations

import re
from importlib import resources

from fedfuse.report.svg import COLOURS, line, look, marker


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
