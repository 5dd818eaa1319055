"""Folders of pictures that a hospital might have, and a command line to type at."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from fedfuse import cli

CLASSES = ("benign", "malignant", "normal")


class Said(NamedTuple):
    code: int
    out: str
    err: str


Fedfuse = Callable[..., Said]
Pictures = Callable[..., Path]


@pytest.fixture
def fedfuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fedfuse:
    """Types one command in a fresh folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str | Path) -> Said:
        monkeypatch.setattr(sys, "argv", ["fedfuse", *map(str, words)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        return Said(code, *capsys.readouterr())

    return call


@pytest.fixture
def pictures(tmp_path: Path) -> Pictures:
    """Makes a folder of class folders: each class has its own bright band; sizes and modes vary if asked."""

    def make(name: str, classes: Sequence[str] = CLASSES, seed: int = 0, count: int = 8, mixed: bool = False) -> Path:
        draw = np.random.default_rng(seed)
        for one in classes:
            band = CLASSES.index(one) if one in CLASSES else 0
            (tmp_path / name / one).mkdir(parents=True)
            for i in range(count):
                shape = (18, 14) if mixed and i % 2 else (16, 16)
                pixels = draw.integers(0, 60, shape, dtype=np.uint8)
                pixels[5 * band : 5 * band + 5] += 150
                mode = ("L", "RGB", "RGBA")[i % 3] if mixed else "L"
                Image.fromarray(pixels).convert(mode).save(tmp_path / name / one / f"{i}.png")
        return tmp_path / name

    return make
