"""Three sites, three processes, three folders, one file each: run `python run.py [FOLDER]`.

Every site sees other digits, so none can tell all ten. Each trains in a process of its own that is given its own folder
and nothing else; then the three files are fused.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from fedfuse.data import load

HERE = Path(__file__).resolve().parent
SITES = {"north": (0, 1, 2, 3), "east": (3, 4, 5, 6), "south": (6, 7, 8, 9, 0)}


def agree(folder: Path, classes: Sequence[str]) -> None:
    """Once, for everybody: what all sites agree on, with the first weights of the network."""
    said = ("--model", "network:Net", "--shape", "1,8,8", "--classes", ",".join(classes), "--method", "fedlpa")
    training = ("local.epochs=5", "local.batch_size=16", "local.optimizer.lr=0.02")
    sets = [word for text in training for word in ("--set", text)]
    subprocess.run([sys.executable, "-m", "fedfuse", "init", folder, *said, *sets], check=True, cwd=HERE)


def prepare(folder: Path) -> None:
    """Give every site its rows and the federation folder."""
    digits = load("digits")
    agree(folder.resolve() / "federation", digits.classes)
    for site, labels in SITES.items():
        shutil.copytree(folder / "federation", folder / site / "federation")
        mine = digits.train.take(torch.isin(digits.train.y, torch.tensor(labels)).nonzero()[:, 0])
        np.savez(folder / site / "rows.npz", x=mine.x.numpy(), y=mine.y.numpy(), classes=np.array(digits.classes))
    save_file({"x": digits.test.x, "y": digits.test.y}, folder / "test.safetensors")


def main(folder: Path) -> None:
    prepare(folder)
    sites = [subprocess.Popen([sys.executable, HERE / "site.py", folder / site]) for site in SITES]
    if any(site.wait() for site in sites):
        raise SystemExit("a site failed; its message stands above")
    subprocess.run([sys.executable, HERE / "fuse.py", folder], check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as home:
            main(Path(home))
