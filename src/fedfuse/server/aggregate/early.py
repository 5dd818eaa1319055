"""Solves that are not finished on purpose: FedFisher's best step and MaTS's few iterations, of FedLPA's equation.

The farther a solve goes, the more it trusts factors that are only estimates of a curvature, and far from any client's
weights at that. Where it begins then matters too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.linalg.cg import Solution
from fedfuse.linalg.descent import descend, early_mean
from fedfuse.linalg.ridge import regression_mean
from fedfuse.linalg.subspace import written
from fedfuse.nets.blocks import Block
from fedfuse.server.aggregate.natural import (
    Equation,
    NaturalKron,
    informed_blocks,
    split_solutions,
    with_the_rest_averaged,
)

Begin: TypeAlias = Literal["mean", "regmean", "tasks"]
Early: TypeAlias = Literal["early", "adam"]

_TASKS = 0.3  # how far along the sum of all tasks task arithmetic goes where nothing is tuned


@dataclass(frozen=True, slots=True)
class _Begin:
    """Where a solve begins: Σ f_k M_k, the same equation with B = I, or M_0 + 0.3 Σ (M_k − M_0)."""

    at: Begin
    state: ServerState

    def __call__(self, block: Block, group: int, known: Equation) -> Tensor:
        shares = known.shares.tolist()
        if self.at == "regmean":
            return regression_mean(known.layers, [written(A) for A in known.inputs], shares)
        if self.at == "mean":
            return sum(
                (f * M.double() for f, M in zip(shares, known.layers, strict=True)),
                torch.zeros_like(known.layers[0], dtype=torch.float64),
            )
        base = block.matrices(self.state.single.posterior.mean)[group].double()
        return base + _TASKS * torch.stack([M.double() - base for M in known.layers]).sum(0)


@dataclass(frozen=True, slots=True)
class EarlyStopped(ServerPart):
    """MaTS: a few iterations of conjugate gradients from another merge (Tam et al., TMLR 2024).

    Attributes:
        of: the equation, with its damping and scales.
        begin: the "mean", "regmean", or "tasks" for task arithmetic.
        iterations: how many, for every layer.
    """

    of: NaturalKron = field(default_factory=NaturalKron)
    begin: Begin = "mean"
    iterations: int = 100
    layerwise: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = frozenset({"order", "scale", "pure", "dtype", "finite", "repeat"})

    @property
    def needs(self) -> frozenset[str]:
        """The factors, and for task arithmetic the common start."""
        return self.of.needs | _base_of(self.begin)

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Iterate layer by layer; the facts say how far each came."""
        start = _Begin(self.begin, state)
        mean: dict[str, Tensor] = {}
        solutions: dict[str, list[Solution]] = {}
        for block in informed_blocks(cohort):
            known = [self.of.equation(cohort, block, group) for group in range(block.groups)]
            solutions[block.name] = [
                early_mean(*one[:4], start=start(block, group, one), iterations=self.iterations, what=one.what)
                for group, one in enumerate(known)
            ]
            mean |= split_solutions(cohort, block, [s.x for s in solutions[block.name]])
        return with_the_rest_averaged(cohort, state, mean).noting(**self.of.facts(cohort, solutions))


@dataclass(frozen=True, slots=True)
class BestStep(ServerPart):
    """FedFisher: Adam from the mean, and of all steps the one with the least loss on the server's rows.

    Layers descend together, since they are judged together; the equations of all of them are held at once
    (Jhunjhunwala et al., AISTATS 2024).

    Attributes:
        of: the equation, with its damping and scales.
        begin: the "mean", "regmean", or "tasks" for task arithmetic.
        steps: how many at most.
        rate: Adam's.
        every: how many steps lie between two looks at the server's rows.
    """

    of: NaturalKron
    begin: Begin = "mean"
    steps: int = 2000
    rate: float = 0.01
    every: int = 100
    # it runs the network, which reads rows in the dtype it was built with and no other
    laws: ClassVar[frozenset[str]] = EarlyStopped.laws - {"dtype"}

    @property
    def needs(self) -> frozenset[str]:
        """The factors, rows to choose by and the network that answers to them."""
        return self.of.needs | {"server_rows", "network"} | _base_of(self.begin)

    def passes(self, clients: int, bench: Bench) -> float:  # noqa: ARG002 - the seam's signature
        """The server's rows at every look."""
        return (self.steps // self.every + 1) * float(len(bench.rows or ()))

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Descend and look, and keep the best."""
        best, losses = state, list[float]()
        for found in self._walk(cohort, state):
            losses.append(_loss(found, bench))
            best = found if losses[-1] <= min(losses) else best
        return best.noting(step=losses.index(min(losses)) * self.every, server_losses=losses)

    def _walk(self, cohort: Cohort, state: ServerState) -> Iterator[ServerState]:
        """The fused state at the beginning and at every look."""
        start = _Begin(self.begin, state)
        now: dict[Block, list[Tensor]] = {}
        walks: dict[Block, list[Iterator[Tensor]]] = {}
        for block in informed_blocks(cohort):
            known = [self.of.equation(cohort, block, group) for group in range(block.groups)]
            now[block] = [start(block, group, one) for group, one in enumerate(known)]
            walks[block] = [
                descend(*one[:4], start=M, rate=self.rate, every=self.every)
                for one, M in zip(known, now[block], strict=True)
            ]
        for look in range(self.steps // self.every + 1):
            if look:
                now = {block: [next(walk) for walk in mine] for block, mine in walks.items()}
            tensors = {n: t for block, found in now.items() for n, t in split_solutions(cohort, block, found).items()}
            yield with_the_rest_averaged(cohort, state, tensors)


def _base_of(begin: Begin) -> frozenset[str]:
    return frozenset({"start"} if begin == "tasks" else ())


@torch.no_grad()
def _loss(state: ServerState, bench: Bench) -> float:
    rows = bench.need_rows("FedFisher's choice of a step")
    total = sum(
        float(bench.task.loss(state.single.logits(x), y, "sum"))
        for x, y in zip(rows.x.split(1000), rows.y.split(1000), strict=True)
    )
    return total / len(rows)
