"""Three sites, three processes, three folders, one file each: run `python run.py [FOLDER]`.

Every site sees other digits, so none can tell all ten. Each trains in a process of its own that is given its own folder
and nothing else; then the three files are fused.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from network import Net
from safetensors.torch import save_file

from fedfuse.data import load

HERE = Path(__file__).resolve().parent
SITES = {"north": (0, 1, 2, 3), "east": (3, 4, 5, 6), "south": (6, 7, 8, 9, 0)}


def prepare(folder: Path) -> None:
    """Give every site its rows and all the same first weights."""
    digits = load("digits")
    torch.manual_seed(0)
    start = Net().state_dict()
    for site, labels in SITES.items():
        (folder / site).mkdir(parents=True, exist_ok=True)
        mine = digits.train.take(torch.isin(digits.train.y, torch.tensor(labels)).nonzero()[:, 0])
        save_file({"x": mine.x, "y": mine.y}, folder / site / "rows.safetensors")
        save_file(start, folder / site / "start.safetensors")
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
