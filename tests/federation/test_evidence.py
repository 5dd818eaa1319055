"""Evidence for networks that were trained elsewhere: plain weights, the user's own class, any task."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.conftest import Fedfuse, Said
from torch import nn

import fedfuse as package
from fedfuse.wire.codec import read

NETWORK = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        return self.last(self.first(x.view(len(x), -1)).relu())
"""
NAMES = ("benign", "malignant", "normal")


class Net(nn.Module):
    """The same network here."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        out: torch.Tensor = self.last(self.first(x.view(len(x), -1)).relu())
        return out


def rows(seed: int, count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    return torch.randn(count, 4, generator=draw) + torch.eye(4)[y] * 3, y


def train(seed: int) -> Net:
    """As a site would, without us."""
    torch.manual_seed(0)
    net, (x, y) = Net(), rows(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net


@pytest.fixture
def sites(fedfuse: Fedfuse, tmp_path: Path) -> list[str]:
    """Two sites' plain weights and rows, and the network's code."""
    (tmp_path / "mine.py").write_text(NETWORK)
    for seed, name in enumerate(("north", "south"), 1):
        save_file(train(seed).state_dict(), tmp_path / f"{name}-own.safetensors")
        x, y = rows(seed)
        np.savez(tmp_path / f"{name}.npz", x=x.numpy(), y=y.numpy(), classes=np.array(NAMES))
    return ["north", "south"]


def bring(fedfuse: Fedfuse, site: str, *words: str) -> Said:
    own = (f"{site}-own.safetensors", "--data", f"{site}.npz", "--method", "fedlpa", "-o", f"{site}.safetensors")
    return fedfuse("evidence", *own, "--set", "min_rows=10", *words)


def test_plain_weights_of_the_users_class(fedfuse: Fedfuse, sites: list[str]) -> None:
    for site in sites:
        said = bring(fedfuse, site, "--model", "mine:Net")
        assert said.code == 0, said.err
        weights = read(Path(f"{site}-own.safetensors")).tensors
        brought = read(Path(f"{site}.safetensors"))
        assert all(torch.equal(brought.tensors[name], weights[name]) for name in weights), "nobody trained"
        assert any(name.startswith("~kron/") for name in brought.tensors)
        assert brought.header["class_names"] == list(NAMES)
    files = [f"{site}.safetensors" for site in sites]
    assert fedfuse("fuse", *files, "--method", "fedlpa", "-o", "all.safetensors").code == 0
    said = fedfuse("evaluate", "all.safetensors", "--data", "north.npz", "--model", "mine:Net", "--json")
    assert json.loads(said.out)["all.safetensors"]["accuracy"] > 0.8, said.err


def test_python_brings_the_same(fedfuse: Fedfuse, sites: list[str]) -> None:
    bring(fedfuse, "north", "--model", "mine:Net")
    update = package.bring_evidence(
        train(1), rows(1), package.recipe("fedlpa", min_rows=10), client="north", classes=NAMES
    )
    theirs, ours = read(Path("north.safetensors")).tensors, read(update.save("again.safetensors")).tensors
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in ours)
    fused = package.fuse([update, package.bring_evidence(train(2), rows(2), "fedlpa", classes=NAMES)], "fedlpa")
    assert not fused.refused


def test_a_federation_says_the_rest(fedfuse: Fedfuse, sites: list[str]) -> None:
    how = ("--shape", "4", "--classes", ",".join(NAMES), "--method", "fedlpa", "--set", "method.min_rows=10")
    assert fedfuse("init", "fed", "--model", "mine:Net", *how).code == 0
    own = ("north-own.safetensors", "--data", "north.npz", "-o", "north.safetensors")
    said = fedfuse("evidence", *own, "--federation", "fed", "--model", "mine:Net")
    assert said.code == 0, said.err
    assert read(Path("north.safetensors")).header["federation"] == "fed"
    said = fedfuse("evidence", *own, "--federation", "fed", "--model", "mine:Net", "--classes", "a,b,c")
    assert "--classes is said by the federation" in said.err


def test_what_does_not_fit_is_one_sentence(fedfuse: Fedfuse, sites: list[str]) -> None:
    said = bring(fedfuse, "north")
    assert said.code == 2
    assert "holds plain weights and does not say of which network; name it once" in said.err
    said = bring(fedfuse, "north", "--model", "mine:Net", "--set", "model.width=6")
    assert said.code == 2
    assert "the start does not fit the network 'mine:Net': first.bias is 5 float32, and there it is 6" in said.err
    torch.save(train(1).state_dict(), "north-own.safetensors")
    said = bring(fedfuse, "north", "--model", "mine:Net")
    assert said.code == 2
    assert "is no safetensors file" in said.err
