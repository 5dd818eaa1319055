"""Rules around a base: what is fused are the moves δ_k = w_k − w₀, and the base is where they begin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.params import Params
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.server.aggregate.mean import BLOCK, mean_by_examples, weighted_mean
from fedfuse.wire.codec import forms_of, piece_of

# A rule around a base may stop short of its clients or go beyond them: one of them alone is not returned as it came.
BASE_LAWS = frozenset({"order", "scale", "pure", "dtype", "finite", "repeat"})


def fuse_weights(cohort: Cohort, rule: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Every weight, bias and norm by the rule; running statistics and the like are no moves and are averaged."""
    ruled = frozenset(cohort.updates[0].spec.layout.with_role("weight", "bias", "norm"))
    return {name: rule(name) if name in ruled else mean_by_examples(cohort, name) for name in cohort.names}


def sources_of(cohort: Cohort) -> list[Params]:
    """Every client's tensors."""
    return [update.posterior.mean for update in cohort]


def blocks_of(params: Params, name: str, length: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Where the blocks of a tensor laid flat begin and end."""
    size = math.prod(forms_of(params)[name].shape)
    return ((begin, min(begin + length, size)) for begin in range(0, size, length))


def move_block(sources: Sequence[Params], start: Params | None, name: str, begin: int, end: int) -> Tensor:
    """Elements [begin, end) of everybody's move in one tensor, clients × elements, in float64; without a start of w_k.

    Example:
        >>> move_block([{"w": torch.tensor([1.0, 3.0])}], {"w": torch.ones(2)}, "w", 0, 2)
        tensor([[0., 2.]], dtype=torch.float64)
    """
    rows = torch.stack([piece_of(source, name, begin, end).double() for source in sources])
    return rows if start is None else rows.sub_(piece_of(start, name, begin, end).double())


def inner_products(sources: Sequence[Params], start: Params | None, name: str) -> Tensor:
    """⟨δ_j, δ_k⟩ of one tensor for all clients, read block by block; without a start ⟨w_j, w_k⟩."""
    total = torch.zeros(len(sources), len(sources), dtype=torch.float64)
    for begin, end in blocks_of(sources[0], name):
        rows = move_block(sources, start, name, begin, end)
        total += rows @ rows.T
    return total


def move_along(sources: Sequence[Params], start: Params, shares: Tensor, name: str) -> Tensor:
    """w₀ + Σ_k s_k δ_k = (1 − Σ s_k) w₀ + Σ s_k w_k of one tensor: a weighted mean of the start and the clients."""
    return weighted_mean([start, *sources], torch.cat([1 - shares.sum().reshape(1), shares]), name)


@dataclass(frozen=True, slots=True)
class TaskArithmetic(ServerPart):
    """w = w₀ + λ K Σ_k f_k δ_k, which for clients that weigh alike is w₀ + λ Σ_k δ_k (Ilharco et al. 2023).

    Attributes:
        scale: λ.
        average: leave out K: λ times the mean move, so that λ = 1 is FedAvg.
    """

    scale: float = 0.3
    average: bool = False
    needs: ClassVar[frozenset[str]] = frozenset({"start"})
    only_sums: ClassVar[bool] = True
    sums_by: ClassVar[str] = "examples"
    tensorwise: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = BASE_LAWS

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Add up the moves."""
        shares = self.scale * (1 if self.average else cohort.sites) * cohort.weights
        start, sources = state.single.posterior.mean, sources_of(cohort)
        mean = fuse_weights(cohort, lambda name: move_along(sources, start, shares, name))
        return state.fused(mean, spec=cohort.updates[0].spec)
