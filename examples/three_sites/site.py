"""At a site: train on the rows of this folder, write one file. Run `python site.py FOLDER`.

The folder holds `rows.npz`, which never leaves it, and `federation`, which `fedfuse init` made and every site has. It
sends `update.safetensors`. The same as `fedfuse update --federation federation --model network:Net --data rows.npz`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fedfuse.federation.agreement import read_federation
from fedfuse.federation.site import update_by_federation


def main(folder: Path) -> None:
    """Train as all agreed, and say what leaves."""
    torch.set_num_threads(1)
    federation = read_federation(folder / "federation", trusted=["network:Net"])
    done = update_by_federation(federation, str(folder / "rows.npz"), client=folder.name)
    path = done.update.save(folder / "update.safetensors")
    print(
        f"{folder.name}: {len(done.site)} rows stay, {path.stat().st_size:,} bytes go; "
        f"they reveal {done.update.reveals[0]}"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
