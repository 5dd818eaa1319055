"""At a site: train on the rows of this folder, write one file. Run `python site.py FOLDER`.

The folder holds `rows.safetensors` (x, y), which never leaves it, and `start.safetensors`, the common first weights.
What it sends is `update.safetensors`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from network import Net
from safetensors.torch import load_file

import fedfuse


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rows = load_file(folder / "rows.safetensors")
    update = fedfuse.local_update(
        Net(),
        (rows["x"], rows["y"]),
        fedfuse.recipe("fedlpa"),
        client=folder.name,
        start=folder / "start.safetensors",
        classes=10,
        epochs=5,
        batch_size=16,
        lr=0.02,
        momentum=0.9,
    )
    path = update.save(folder / "update.safetensors")
    print(
        f"{folder.name}: {update.num_examples:.0f} rows stay, {path.stat().st_size:,} bytes go; "
        f"they reveal {update.reveals[0]}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
