from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from fedfuse.data.partitions import client_ids
from fedfuse.data.show import PALETTE, heat_map, save_heat_map
from fedfuse.errors import ConfigError

CLASSES = tuple("0123456789")


def table(clients: int, classes: int = 10, seed: int = 0) -> torch.Tensor:
    draws = np.random.default_rng(seed).dirichlet([0.2] * clients, classes).T
    return torch.from_numpy((draws * 6000).astype(np.int64))


def shown(counts: torch.Tensor, names: tuple[str, ...], width: int, colour: str | None = None) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=colour, force_terminal=colour is not None)
    console.print(heat_map(counts, client_ids(len(counts)), names))
    return stream.getvalue().splitlines()


def test_few_clients_are_shown_with_their_numbers():
    counts = table(10)
    lines = shown(counts, CLASSES, 100)
    assert len(lines) == 11
    for line, own in zip(lines[1:], counts, strict=True):
        words = line.split()
        numbers = [0 if word == "·" else int(word) for word in words[1:12]]
        assert numbers == [*own.tolist(), int(own.sum())]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_long_names_are_shortened_before_numbers_go(width):
    names = tuple(f"class number {i}" for i in range(10))
    lines = shown(table(10), names, width)
    assert str(int(table(10).max())) in "\n".join(lines)
    assert "client-09" in lines[-1]
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("clients", "classes", "width"), [(100, 10, 80), (1000, 10, 80), (10, 200, 80), (300, 200, 60)]
)
@pytest.mark.parametrize("colour", [None, "truecolor"])
def test_many_clients_or_classes_fit_as_dots(clients, classes, width, colour):
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=colour, force_terminal=colour is not None)
    names = tuple(f"a long class name {i}" for i in range(classes))
    with console.capture() as capture:
        console.print(heat_map(table(clients, classes), client_ids(clients), names))
    from rich.text import Text

    lines = [Text.from_ansi(line).plain for line in capture.get().splitlines()]
    assert max(map(len, lines)) <= width
    assert len(lines) <= 42
    across = max(clients, classes)
    assert f"{across} {'clients' if clients >= classes else 'classes'} from left to right" in lines[-1]


def test_dots_grow_with_the_count_and_nothing_is_blank():
    counts = torch.zeros(50, 10, dtype=torch.int64)
    counts[0, 0], counts[1, 0], counts[2, 0] = 10_000, 1_000, 1
    lines = shown(counts, CLASSES, 80)
    assert lines[0] == "0 █▒░".ljust(52)
    assert lines[1].strip() == "1"


def test_colours_are_the_palettes():
    counts = torch.tensor([[100, 1], [0, 25]])
    text = "\n".join(shown(counts, ("a", "b"), 80, "truecolor"))

    def code(colour: str) -> str:
        return ";".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))

    assert f"48;2;{code(PALETTE[-1])}" in text
    assert f"48;2;{code(PALETTE[0])}" in text
    assert f"48;2;{code(PALETTE[4])}" in text  # the square root of a quarter is a half


def test_an_empty_table_can_be_shown():
    assert "·" in "\n".join(shown(torch.zeros(2, 2, dtype=torch.int64), ("a", "b"), 80))


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (10, 10), (100, 10), (10, 200)])
def test_a_picture_is_written_with_the_right_colours(tmp_path, clients, classes):
    counts = table(clients, classes)
    path = save_heat_map(tmp_path / "map.png", counts, client_ids(clients), [f"c{i}" for i in range(classes)])
    with Image.open(path) as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24)}
        assert min(picture.size) > 400
    assert (255, 255, 255) in colours
    assert (0x14, 0x28, 0x3F) in colours  # the fullest cell has the darkest colour
    assert len(colours) > 30


def test_pictures_are_the_same_bytes_and_leave_no_figures_behind(tmp_path):
    import sys

    one, two = (save_heat_map(tmp_path / f"{i}.png", table(10), client_ids(10), CLASSES).read_bytes() for i in "ab")
    assert one == two
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_names_must_fit_and_the_picture_is_a_file(tmp_path):
    with pytest.raises(ConfigError, match=r"counts have shape \(3, 10\), expected 2 clients by 10 classes"):
        heat_map(table(3), client_ids(2), CLASSES)
    with pytest.raises(ConfigError, match="cannot write"):
        save_heat_map(tmp_path, table(3), client_ids(3), CLASSES)
