"""Folders of pictures that a hospital might have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

CLASSES = ("benign", "malignant", "normal")


Pictures = Callable[..., Path]


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
