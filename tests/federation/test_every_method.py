"""Every method from `init` to `predict`, by files: with networks of ours and one of a user's own, and for tables."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import builders
from tests.builders import ok
from tests.conftest import Fedfuse, Said

from fedfuse.core.registry import all_methods

OWN = """
from torch import nn


def net(channels=1, size=8, classes=3):
    body = nn.Sequential(nn.Conv2d(channels, 3, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(body, nn.Linear(3 * (size - 2) ** 2, 5), nn.ReLU(), nn.Linear(5, classes))


class Silent(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 3))
"""
NETWORKS = {
    "lenet": ("model.maps=[2,3]", "model.hidden=[5,4]"),
    "mlp": ("model.hidden=[5]",),
    "mine:net": (),
}
TABLES = {
    "binary": ("--target", "ill", "--classes", "no,yes"),
    "multilabel": ("--target", "fever,cough"),
    "regression": ("--target", "cost[EUR]"),
}
TRAIN = ("local.epochs=3", "local.batch_size=8", "local.optimizer.lr=0.1")
ONCE = ("method.at=1",)
OPTIONS = {"fedap": ONCE, "fedduap": ONCE, "hrank": ONCE, "imc": (*ONCE, "method.times=1")} | {
    "dense": ("method.epochs=1", "method.steps=1", "method.batch=8", "method.width=2")
}
"""What makes a method end after one exchange, and soon."""
NEVER = {
    "data_sharing": "lend its rows, which a federation of files cannot do; use `fedfuse run`",
    "hybrid_fl": "lend its rows, which a federation of files cannot do; use `fedfuse run`",
    "prunefl": "before the first round, which a federation of files cannot do; use `fedfuse run`",
    "local": "so there is nothing to fuse",
}
CLASSES_ONLY = ("ams", "dense", "fedap", "feddu", "fedduap", "fedma", "fedov", "imc", "pfnm", "temperature")
NO_CONVOLUTION = dict.fromkeys(("fedap", "fedduap", "hrank"), "has no convolution whose channels could be removed")
REFUSED = {
    "lenet": {"pfnm": "fully connected networks"},
    "mlp": NO_CONVOLUTION,
    "mine:net": {"pfnm": "fully connected networks"},
    "table": NO_CONVOLUTION | dict.fromkeys(CLASSES_ONLY, "needs rows of one class each"),
}
METHODS = tuple(all_methods())


def each_with(kinds: Sequence[str]) -> list[Any]:
    """All pairs; every method with one kind, in turn, the others behind the slow mark."""
    return [
        pytest.param(method, kind, marks=() if (i + j) % len(kinds) == 0 else pytest.mark.slow)
        for (i, method), (j, kind) in product(enumerate(METHODS), enumerate(kinds))
    ]


def bands(path: str, seed: int, count: int = 24) -> str:
    """Pictures of which each class has its own bright band."""
    draw = np.random.default_rng(seed)
    x, y = draw.normal(0, 0.3, (count, 1, 8, 8)).astype(np.float32), np.arange(count) % 3
    for row, label in enumerate(y):
        x[row, 0, 2 * label : 2 * label + 2] += 1
    np.savez(path, x=x, y=y, classes=np.array(["a", "b", "c"]))
    return path


def people(path: str, seed: int, count: int = 24) -> str:
    """A table of which two columns tell all targets."""
    x = np.random.default_rng(seed).normal(0, 1, (count, 2)).round(3)
    words = [(a, b, "yes" if a > 0 else "no", int(b > 0), int(a + b > 0), round(100 * a + b, 2)) for a, b in x.tolist()]
    lines = ("a,b,ill,fever,cough,cost", *(",".join(map(str, row)) for row in words))
    Path(path).write_text("\n".join(lines) + "\n")
    return path


def go(fedfuse: Fedfuse, method: str, init: Sequence[str], rows: Sequence[str], trust: Sequence[str] = ()) -> Said:
    """All commands from `init` on, if that makes a folder; what `evaluate` said, or else `init`."""
    sets = [word for text in (*TRAIN, *OPTIONS.get(method, ())) for word in ("--set", text)]
    said = fedfuse("init", "fed", "--method", method, *init, *sets)
    if said.code:
        return said
    folder, (one, two, test) = ("--federation", "fed"), rows
    if "wait for a common scale" in said.out:
        for data in (one, two):
            ok(fedfuse("moments", *folder, "--data", data, "-o", f"{data}.moments"))
        ok(fedfuse("scale", "fed", f"{one}.moments", f"{two}.moments"))
    recipe = all_methods()[method].recipe()
    ok(fedfuse("update", *folder, "--data", one, "-o", "one.safetensors", *trust))
    way = ("update",) if recipe.trains else ("evidence", "fed/w0.safetensors")
    ok(fedfuse(*way, *folder, "--data", two, "-o", "two.safetensors", *trust))
    lent = ("--server-data", one) if "server_rows" in recipe.needs else ()
    files = ("one.safetensors", "two.safetensors")
    assert "2 of 2 updates" in ok(fedfuse("fuse", *files, *folder, "-o", "all.safetensors", *lent, *trust)).out
    ok(fedfuse("predict", "all.safetensors", "--data", test, "-o", "p.csv", *trust))
    with Path("p.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 24
    return ok(fedfuse("evaluate", "all.safetensors", "--data", test, "--json", *trust))


def refused(said: Said, method: str, words: str) -> None:
    builders.refused(said, words)
    assert not Path("fed").exists(), method


@pytest.mark.parametrize(("method", "network"), each_with(tuple(NETWORKS)))
def test_from_init_to_predict(fedfuse: Fedfuse, method: str, network: str) -> None:
    Path("mine.py").write_text(OWN)
    sets = [word for text in NETWORKS[network] for word in ("--set", text)]
    init = ("--model", network, "--classes", "a,b,c", "--shape", "1,8,8", *sets)
    rows = [bands(f"{name}.npz", seed) for seed, name in enumerate(("one", "two", "test"))]
    said = go(fedfuse, method, init, rows, ("--model", network) if ":" in network else ())
    if words := {**REFUSED[network], **NEVER}.get(method):
        refused(said, method, words)
    else:
        assert json.loads(said.out)["all.safetensors"]["rows"] == 24


@pytest.mark.parametrize(("method", "task"), each_with(tuple(TABLES)))
def test_from_the_columns_of_a_table_to_predict(fedfuse: Fedfuse, method: str, task: str) -> None:
    rows = [people(f"{name}.csv", seed) for seed, name in enumerate(("one", "two", "test"))]
    init = ("--task", task, *TABLES[task], "--columns", "a,b", "--set", "model.hidden=[5]")
    said = go(fedfuse, method, init, rows)
    if words := {**REFUSED["table"], **NEVER}.get(method):
        refused(said, method, words)
    else:
        assert json.loads(said.out)["all.safetensors"]["rows"] == 24


def test_random_features_need_a_network_that_says_what_it_reads(fedfuse: Fedfuse) -> None:
    Path("mine.py").write_text(OWN)
    init = ("init", "fed", "--model", "mine:Silent", "--classes", "a,b,c", "--shape", "1,8,8", "--method", "ridge")
    refused(fedfuse(*init), "ridge", "features = 'given'")
    ok(fedfuse(*init, "--set", "method.features=given"))
