"""Examples from where they lie into tables or lanes, and from lanes into tables and back."""

from __future__ import annotations

from fedfuse.kernels.convolve import pixel
from fedfuse.kernels.target import LANES, Floats, Ints, compile_kernel
from fedfuse.kernels.tiles import Four


@compile_kernel
def rows_in(count: int, x: Floats, order: Ints, begin: int, features: int, length: int, table: Floats) -> None:
    """table[i] = x[order[begin + i]], whose rows are `features` long."""
    for i in range(count):
        a, b = order[begin + i] * features, i * length
        for f in range(features):
            table[b + f] = x[a + f]


@compile_kernel
def images_in(count: int, x: Floats, order: Ints, begin: int, images: Floats, form: Four) -> None:
    """images[block, …, lane] = x[order[begin + i]], whose rows are [row][column][channel]; lanes without are zero."""
    height, width, _, channels = form
    line = width * channels
    for block in range((count + LANES - 1) // LANES):
        for lane in range(LANES):
            i = block * LANES + lane
            for h in range(height):
                b = pixel(form, block, h, 0) + lane
                if i < count:
                    a = order[begin + i] * height * line + h * line
                    for v in range(line):
                        images[b + v * LANES] = x[a + v]
                else:
                    for v in range(line):
                        images[b + v * LANES] = 0


@compile_kernel
def flatten(count: int, images: Floats, form: Four, table: Floats, length: int) -> None:
    """table[i] = image i as a row, [row][column][channel]; the images have no border."""
    features = form[0] * form[1] * form[3]
    for block in range((count + LANES - 1) // LANES):
        first = block * LANES
        lanes = min(LANES, count - first)
        for f in range(features):
            a = (block * features + f) * LANES
            for lane in range(lanes):
                table[(first + lane) * length + f] = images[a + lane]


@compile_kernel
def flatten_back(count: int, table: Floats, length: int, images: Floats, form: Four) -> None:
    """The inverse of `flatten`; lanes without an example become zero."""
    features = form[0] * form[1] * form[3]
    for block in range((count + LANES - 1) // LANES):
        first = block * LANES
        lanes = min(LANES, count - first)
        for f in range(features):
            a = (block * features + f) * LANES
            for lane in range(lanes):
                images[a + lane] = table[(first + lane) * length + f]
            for lane in range(lanes, LANES):
                images[a + lane] = 0
