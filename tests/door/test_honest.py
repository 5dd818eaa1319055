"""Honest clients pass with an operator's default bounds, however different they are: as files, and in a Flower app.

Nobody vouches for their numbers of examples there, and nobody is told how many steps they should have taken.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fedfuse
from builders import UNLIKE, digits
from fedfuse.core.model import Single
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench

MLP = Spec("mlp", {"inputs": 64, "hidden": [16], "classes": 10})
EPOCHS = pytest.mark.parametrize(
    "epochs", [1, pytest.param(200, marks=pytest.mark.slow)], ids=["one epoch", "two hundred epochs"]
)
METHODS = ["fedavg", "swa", "fedlpa", "laplace", "rklb", "refit", "newton"]


def begin() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return MLP.build().state_dict()


@EPOCHS
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("regime", UNLIKE)
def test_as_files(regime: str, method: str, epochs: int) -> None:
    how = {"start": begin(), "classes": 10, "epochs": epochs, "batch_size": 32, "lr": 0.05, "momentum": 0.9}
    recipe = fedfuse.recipe("newton", ridge=1.0) if method == "newton" else fedfuse.recipe(method)
    sites = [
        fedfuse.local_update(MLP, rows, recipe, client=client, **how)
        for client, rows in digits(*UNLIKE[regime]).items()
    ]  # type: ignore[arg-type]
    assert fedfuse.fuse(sites, recipe, start=begin()).refused == ()


@EPOCHS
@pytest.mark.parametrize("method", ["fedavg", "fedlpa", "rklb"])
@pytest.mark.parametrize("regime", UNLIKE)
def test_in_a_flower_app(regime: str, method: str, epochs: int) -> None:
    pytest.importorskip("flwr")
    sys.path.insert(0, str(Path(__file__).parents[1] / "flower"))
    from fake_grid import Gathering
    from flwr.app import ArrayRecord, Context, Message

    from fedfuse.flower import FuseStrategy, train

    def app(rows: Rows, message: Message, context: Context) -> Message:
        return train(message, context, spec, rows)

    rows = digits(*UNLIKE[regime])
    local = LocalSettings(epochs=epochs, batch_size=32, optimizer={"lr": 0.05, "momentum": 0.9})
    bench = Bench(population=len(rows), classes=10, local=local)
    first = find_method(method).recipe().prepare_model(Single.of(MLP.build(), MLP), 10, 0)
    spec, grid = first.spec, Gathering()
    for place, (client, own) in enumerate(rows.items()):
        grid.add(partial(app, own), client, **{"partition-id": place})
    fuses = FuseStrategy({"name": method}, spec, clients="fedfuse", local=local, bench=bench, fraction_evaluate=0)
    fuses.start(grid, ArrayRecord(dict(first.posterior.mean)), num_rounds=2 if epochs == 1 else 1)  # type: ignore[arg-type]
    assert fuses.admission is not None
    assert (fuses.admission.refused, fuses.admission.dropped) == ([], [])
    assert len(fuses.admission.cohort) == len(rows)
