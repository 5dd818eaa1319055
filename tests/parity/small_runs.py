"""A federation of three small clients, a server with rows of its own, and how a run is compared with another."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from builders import rows
from fedfuse.core.inputs import InputForm
from fedfuse.core.model import Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines.local import Population
from fedfuse.errors import ConfigError
from fedfuse.nets.mixture import Mixture

sys.path.insert(0, str(Path(__file__).parents[1] / "flower"))  # where the tests of this folder find fake_grid

CLASSES, SIZES, SEED = 3, (14, 9, 22), 5
LOCAL = LocalSettings(batch_size=8, epochs=1, optimizer={"lr": 0.1, "momentum": 0.5})
MLP = Spec("mlp", {"inputs": 64, "hidden": [5], "classes": CLASSES})
CONV = Spec("lenet", {"size": 8, "maps": [4, 6], "hidden": [8], "classes": CLASSES})


def images(seed: int, n: int) -> Rows:
    return rows(n, 1, 8, 8, classes=CLASSES, seed=seed)


@cache
def population() -> Population:
    return Population.of({f"client-{i}": images(i, n) for i, n in enumerate(SIZES)})


def bench() -> Bench:
    server = images(99, 30)
    told = sum(SIZES)
    return Bench(server, server.x, len(SIZES), CLASSES, LOCAL, SEED, InputForm((1, 8, 8)), num_examples=told)


def rounds_of(recipe: Recipe) -> int:
    return 2 if recipe.result != "mixture" else 1


def start(recipe: Recipe) -> ServerState:
    """A small network that the recipe can work on."""
    torch.manual_seed(0)
    dense, conv = (ServerState(0, Single.of(spec.build(), spec)) for spec in (MLP, CONV))
    try:
        recipe.check(rounds_of(recipe), bench(), dense)
    except ConfigError:  # there are no channels to remove
        return conv
    return dense


def tensors(state: ServerState) -> dict[str, Tensor]:
    """Everything a state holds, by name."""
    found = {f"memory/{n}": t for n, t in state.memory.items()}
    for place, network in enumerate(state.model.members):
        found |= {f"{place}/{n}": t for n, t in network.posterior.mean.items()}
    if isinstance(state.model, Mixture):
        found["weights"] = state.model.weights
    return found
