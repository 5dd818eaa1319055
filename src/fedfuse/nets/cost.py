"""What training a network costs, counted from the network and not by a clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor, nn

from fedfuse.core.inputs import run_once
from fedfuse.core.messages import Brief, ClientUpdate
from fedfuse.core.params import Params
from fedfuse.core.seams import TRAINING_PASSES, CurvatureEvidence, Effort, HasPasses, Work, passes_of
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState, entries_of
from fedfuse.core.torch_utils import forward_hooks
from fedfuse.errors import ConfigError

MASK = "mask"  # the kind of memory that says which weights a network has


class LayerCost(NamedTuple):
    """What one input costs a linear layer or a convolution."""

    weights: int
    positions: int  # how often each weight is used: once, or once per pixel of what a convolution gives

    @property
    def products(self) -> int:
        """Multiplications."""
        return self.weights * self.positions


@lru_cache(maxsize=64)
def layer_costs(spec: Spec, shape: tuple[int, ...]) -> Mapping[str, LayerCost]:
    """What one input of this shape costs each linear layer and convolution, found by running the network once.

    Example:
        >>> layer_costs(Spec("lenet"), (1, 28, 28))["conv2"]
        LayerCost(weights=2400, positions=64)
    """
    module, found = spec.skeleton(), dict[str, LayerCost]()
    paths = {part: path for path, part in module.named_modules()}

    def count(layer: nn.Module, _: object, out: Tensor) -> None:
        weight = layer.weight
        if isinstance(weight, Tensor):
            found[paths[layer]] = LayerCost(weight.numel(), out.numel() // len(weight))

    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    with forward_hooks((m, count) for m in paths if isinstance(m, kinds)):
        run_once(spec, shape)
    return MappingProxyType(found)


def pass_flops(spec: Spec, shape: tuple[int, ...], training: bool = False) -> int:
    """FLOPs of one pass of one input forward through a network: two operations per multiplication.

    Linear layers and convolutions are counted, as is usual; norms and activations cost little compared with them. In
    training a Bayesian layer computes its output's mean and its variance, which is twice the work.

    Example:
        >>> pass_flops(Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2}), (4,))
        36
    """
    roles = spec.layout.roles
    twice = {name.rpartition(".")[0] for name, role in roles.items() if role == "log_variance" and training}
    return sum(2 * cost.products * (2 if name in twice else 1) for name, cost in layer_costs(spec, shape).items())


def training_flops(spec: Spec, shape: tuple[int, ...]) -> int:
    """FLOPs to train plainly on one input once: three passes.

    Example:
        >>> training_flops(Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2}), (4,))
        108
    """
    return int(TRAINING_PASSES) * pass_flops(spec, shape, training=True)


class CohortFlops(NamedTuple):
    """What a round took of its clients: local training, the curvature of their losses, and other evidence."""

    training: int
    curvature: int
    evidence: int


def cohort_flops(
    updates: Iterable[ClientUpdate], work: Work, shape: tuple[int, ...] | None, round_: int = 0
) -> CohortFlops | None:
    """FLOPs of a round's clients; one has trained on each of its rows once per epoch, unless it was stopped.

    How many passes a row takes is what the objective and each evidence say (`core/effort.py`). What does not grow with
    rows, such as a pull towards other weights, is left out. A weight that a mask holds at zero is multiplied like any
    other, so masks save none. None where the shape of an input is not known, or the network does not read that shape.
    """
    if shape is None:
        return None
    training, looking = 0.0, {True: 0.0, False: 0.0}
    for u in updates:
        effort = Effort(u.spec, shape, round_, u.num_examples, work.settings)
        seen = min(work.settings.epochs * u.num_examples, u.steps * work.settings.batch_size)
        try:
            training += seen * passes_of(work.objective, effort) * pass_flops(u.spec, shape, training=True)
            for e in work.evidence:
                again = e.passes(effort) if isinstance(e, HasPasses) else 0.0
                looking[isinstance(e, CurvatureEvidence)] += u.num_examples * again * pass_flops(u.spec, shape)
        except ConfigError:
            return None
    return CohortFlops(int(training), int(looking[True]), int(looking[False]))


def training_passes(settings: LocalSettings, rows: int, steps: int) -> float:
    """Passes of single rows through a network that plain training took: three per row of every batch.

    Example:
        >>> training_passes(LocalSettings(epochs=2, batch_size=4), rows=10, steps=6)
        60.0
    """
    return TRAINING_PASSES * min(settings.epochs * rows, steps * settings.batch_size)


def count_server_work(state: ServerState, passes: float, bench: Bench) -> ServerState:
    """The state with these passes of single rows at the server added to the fact `server_flops`.

    Nothing is noted where the shape of an input is not known.
    """
    if bench.inputs is None:
        return state
    try:
        flops = int(passes * pass_flops(state.single.spec, bench.inputs.shape))
    except ConfigError:
        return state
    return state.noting(server_flops=state.facts.get("server_flops", 0) + flops)


class SparseSavings(NamedTuple):
    """Bytes that sparse messages would not carry."""

    up: int
    down: int


def sparse_savings(brief: Brief) -> SparseSavings:
    """What a sparse encoding of masked weights saves on one client, compared with the dense messages of the simulation.

    Down go the weights a mask leaves, and the mask itself as one bit per weight where the dense brief has a byte; up
    come the weights it leaves, for both sides know the mask. Without masks nothing is saved.

    Example:
        >>> import torch
        >>> brief = Brief(0, Spec("mlp"), {"w": torch.zeros(16)}, {"mask/w": torch.arange(16) < 4})
        >>> sparse_savings(brief)
        SparseSavings(up=48, down=62)
    """
    masks = {name: m for name, m in entries_of(brief.memory, MASK).items() if name in brief.params}
    up = sum(int((~m.bool()).sum()) * brief.params[name].element_size() for name, m in masks.items())
    bits = sum(m.nbytes - math.ceil(m.numel() / 8) for m in masks.values())
    return SparseSavings(up, up + bits)


def density(params: Params, memory: Params) -> float:
    """Which share of a network's weights its masks leave; 1 without masks.

    Example:
        >>> import torch
        >>> density({"w": torch.zeros(4), "b": torch.zeros(1)}, {"mask/w": torch.tensor([1, 0, 0, 0]).bool()})
        0.4
    """
    masks = entries_of(memory, MASK)
    gone = sum(int((~m.bool()).sum()) for m in masks.values())
    return 1 - gone / sum(t.numel() for t in params.values())
