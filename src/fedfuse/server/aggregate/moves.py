"""Rules around a base: what is fused are the moves δ_k = w_k − w₀, and the base is where they begin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedfuse.core.messages import Cohort, Form
from fedfuse.core.model import Single
from fedfuse.core.params import Params
from fedfuse.core.posterior import Posterior
from fedfuse.core.seams import Aggregator, Result, ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.server.aggregate.mean import BLOCK, mean_by_examples, weighted_mean
from fedfuse.wire.codec import LazyParams, forms_of, piece_of

# A rule around a base may stop short of its clients or go beyond them: one of them alone is not returned as it came.
BASE_LAWS = frozenset({"order", "scale", "pure", "dtype", "finite", "repeat"})


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


class BeforeRule(ServerPart):
    """What is done to clients' moves around another rule, which fuses them and says what it reads."""

    __slots__ = ()
    then: Aggregator

    @property
    def needs(self) -> frozenset[str]:
        """The base, and what the inner rule needs."""
        return self.then.needs | {"start"}

    @property
    def tensorwise(self) -> bool:
        """As the inner rule."""
        return self.then.tensorwise

    @property
    def layerwise(self) -> bool:
        """As the inner rule."""
        return self.then.layerwise

    @property
    def result(self) -> Result | None:
        """As the inner rule's."""
        return self.then.result

    @property
    def laws(self) -> frozenset[str]:
        """Those that both keep."""
        return self.then.laws & BASE_LAWS

    def fuse_changed(
        self, cohort: Cohort, change: Callable[[int, LazyParams], Params], state: ServerState, bench: Bench
    ) -> ServerState:
        """What the inner rule makes of changed clients, in the dtypes of those that came.

        Half precision is widened to float32 in between, so that a move is rounded once. Evidence stays what it was: it
        tells of the directions that a client's rows determine, whatever is left of its move.

        Args:
            cohort: as it came.
            change: the tensors of a client, by its place and its own, read when they are asked for.
            state: what the round began with.
            bench: what the server may touch.
        """
        start = state.single
        begin = replace(state, model=Single(start.spec, Posterior(widen(start.posterior.mean))))
        means = [change(place, widen(update.posterior.mean)) for place, update in enumerate(cohort)]
        changed = [replace(u, posterior=replace(u.posterior, mean=m)) for u, m in zip(cohort, means, strict=True)]
        after = self.then(Cohort(tuple(changed)), begin, bench)
        forms = forms_of(cohort.updates[0].posterior.mean)
        mean = {name: t.to(forms[name].dtype) for name, t in after.single.posterior.mean.items()}
        return replace(after.fused(mean, spec=cohort.updates[0].spec), facts=after.facts)


@dataclass(frozen=True, slots=True)
class ScaledMove(BeforeRule):
    """w = w₀ + λ K δ̄, where δ̄ = w̄ − w₀ is the move of another rule's mean w̄.

    Of a rule that takes the mean in the metric of the clients' factors it is their mean move in that metric: the
    equation Σ f_k B_k (M − M_k) A_k = 0 is one of moves as well, Σ f_k B_k (δ̄ − δ_k) A_k = 0.

    Attributes:
        then: what takes the mean.
        scale: λ.
        average: leave out K.
    """

    then: Aggregator
    scale: float = 1.0
    average: bool = False

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Take the mean, and go so far towards it."""
        after = self.fuse_changed(cohort, lambda _, mean: mean, state, bench)
        start, factor = state.single.posterior.mean, self.scale * (1 if self.average else cohort.sites)
        shares = torch.tensor([factor], dtype=torch.float64)
        found = after.single.posterior.mean
        alone = Cohort((replace(cohort.updates[0], posterior=Posterior(found)),))
        mean = fuse_weights(alone, lambda name: move_along([found], start, shares, name))
        return replace(after.fused(mean, spec=cohort.updates[0].spec), facts=after.facts)


def fuse_weights(cohort: Cohort, rule: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Every weight, bias and norm by the rule; running statistics and the like are no moves and are averaged."""
    ruled = frozenset(cohort.updates[0].spec.layout.with_role("weight", "bias", "norm"))
    return {name: rule(name) if name in ruled else mean_by_examples(cohort, name) for name in cohort.names}


def sources_of(cohort: Cohort) -> list[Params]:
    """Every client's tensors."""
    return [update.posterior.mean for update in cohort]


def move_along(sources: Sequence[Params], start: Params, shares: Tensor, name: str) -> Tensor:
    """w₀ + Σ_k s_k δ_k = (1 − Σ s_k) w₀ + Σ s_k w_k of one tensor: a weighted mean of the start and the clients."""
    return weighted_mean([start, *sources], torch.cat([1 - shares.sum().reshape(1), shares]), name)


def inner_products(sources: Sequence[Params], start: Params | None, name: str) -> Tensor:
    """⟨δ_j, δ_k⟩ of one tensor for all clients, read block by block; without a start ⟨w_j, w_k⟩."""
    total = torch.zeros(len(sources), len(sources), dtype=torch.float64)
    for begin, end in blocks_of(sources[0], name):
        rows = move_block(sources, start, name, begin, end)
        total += rows @ rows.T
    return total


def move_block(sources: Sequence[Params], start: Params | None, name: str, begin: int, end: int) -> Tensor:
    """Elements [begin, end) of all moves in one tensor, clients × elements, in float64; without a start of w_k.

    Example:
        >>> move_block([{"w": torch.tensor([1.0, 3.0])}], {"w": torch.ones(2)}, "w", 0, 2)
        tensor([[0., 2.]], dtype=torch.float64)
    """
    rows = torch.stack([piece_of(source, name, begin, end).double() for source in sources])
    return rows if start is None else rows.sub_(piece_of(start, name, begin, end).double())


def blocks_of(params: Params, name: str, length: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Where the blocks of a tensor laid flat begin and end."""
    size = math.prod(forms_of(params)[name].shape)
    return ((begin, min(begin + length, size)) for begin in range(0, size, length))


def widen(params: Params) -> LazyParams:
    """The tensors with half precision widened to float32 as they are read."""

    def wide(dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    forms = {name: Form(form.shape, wide(form.dtype)) for name, form in forms_of(params).items()}
    return LazyParams(forms, lambda name, begin, end: piece_of(params, name, begin, end).to(forms[name].dtype))
