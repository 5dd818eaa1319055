"""Anywhere: fuse the update files that came, and look how good the result is. Run `python fuse.py FOLDER`.

No server, no connection: the files may have come by mail. The fused file is plain safetensors and is loaded here as any
user would load it, into the network itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from network import Net
from safetensors.torch import load_file

import fedfuse


def right(weights: Path, test: dict[str, torch.Tensor]) -> float:
    net = Net().eval()
    net.load_state_dict(load_file(weights))
    with torch.no_grad():
        return float((net(test["x"]).argmax(-1) == test["y"]).double().mean())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    updates = sorted(folder.glob("*/update.safetensors"))
    test = load_file(folder / "test.safetensors")
    for method in ("fedavg", "fedlpa"):
        fused = fedfuse.fuse(updates, method, model=Net())
        for refusal in fused.refused:
            print(f"refused {refusal['client']}: {refusal['field']} is {refusal['got']}")
        path = fused.save(folder / f"{method}.safetensors")
        kept = len(updates) - len(fused.refused)
        print(f"{method}: {kept} sites fused, {right(path, test):.0%} of the test digits right")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
