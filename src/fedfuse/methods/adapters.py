"""Low-rank adapters: FLoRA (NeurIPS 2024), FlexLoRA (NeurIPS 2024) and FedIT (ICASSP 2024).

An adapter adds B_k A_k to a frozen weight, B_k (outputs × R) and A_k (R × inputs). What clients learned is the
product, so the mean that is wanted is Σ f_k B_k A_k, of rank up to the sum of the clients' ranks:

    flora      [f_1 B_1, …, f_K B_K] [A_1; …; A_K], all of it                  `AdapterMean(stack=True)`, `merge_rounds`
    flexlora   its best approximation of a given rank, by a truncated SVD      `AdapterMean(rank)`
    fedit      (Σ f_k B_k)(Σ f_k A_k), which is another matrix: a baseline     `SeparateMeans`
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor

from fedfuse.client.layer_inputs import AdapterInputs, InputFactors
from fedfuse.core.messages import Cohort
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.linalg.factor import as_stack
from fedfuse.linalg.lowrank import ThinProduct, norm_of, truncate, truncate_for_inputs
from fedfuse.linalg.subspace import times, written
from fedfuse.models.adapted import INPUTS, MERGED, MergesRounds, Pair, pairs_in
from fedfuse.nets.kronecker import blocks_of, read_factor
from fedfuse.server.aggregate.mean import ALL_LAWS, mean_of


def factors(params: Params, pair: Pair) -> tuple[Tensor, Tensor]:
    """B, outputs × R, and A, R × inputs, in float64; those of convolutions laid out as matrices."""
    return params[pair.b].double().flatten(1), params[pair.a].double().flatten(1)


def _stack(cohort: Cohort, pair: Pair) -> tuple[Tensor, Tensor]:
    """[f_1 B_1, …] and [A_1; …], whose product is Σ f_k B_k A_k; what is zero on both sides is left out."""
    both = [factors(update.posterior.mean, pair) for update in cohort]
    left = torch.cat([share * b for share, (b, _) in zip(cohort.weights.tolist(), both, strict=True)], 1)
    right = torch.cat([a for _, a in both])
    used = (left != 0).any(0) | (right != 0).any(1)
    used[0] |= not bool(used.any())  # an untrained adapter keeps a rank of one
    return left[:, used], right[used]


def _columns(left: Tensor, like: Tensor) -> Tensor:
    return left.reshape(len(left), -1, *like.shape[2:]).to(like.dtype).contiguous()


@dataclass(frozen=True, slots=True)
class AdapterMean(ServerPart):
    """Σ_k f_k B_k A_k of every adapted module, exactly by stacking or as its best approximation of some rank.

    Everything that is no adapter is averaged, so without adapters this is FedAvg. `adapter_error` in the record is the
    norm of what was lost as a share of the mean's, over all modules; `adapter_errors` has it for each.

    Attributes:
        rank: of the result; None keeps that of the clients.
        stack: concatenate all factors instead: exact, of rank up to the sum of the clients' ranks.
        moments: measure what is lost by what clients' inputs C = Σ f_k C_k see of it, ‖(ΔW − X) C^½‖; modules whose
            inputs no client sent are measured as they are, and named in the record.
    """

    rank: int | None = None
    stack: bool = False
    moments: bool = False
    knows_adapters: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = ALL_LAWS

    @property
    def needs(self) -> frozenset[str]:
        """What adapted modules read, where the error is measured by that."""
        return frozenset({INPUTS} if self.moments else ())

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Fuse the products, and average what is left."""
        first, spec = cohort.updates[0].posterior.mean, cohort.updates[0].spec
        pairs = list(pairs_in(first))
        if self.stack and any(f"{pair.module}.{MERGED[0]}".removeprefix(".") in first for pair in pairs):
            return merge_rounds(cohort, state, bench, pairs)
        if pairs and spec.can_run and (self.stack or self.rank is not None):
            raise ConfigError(
                "the network of a run has adapters of one rank, and the fused ones would have another; fuse by flora, "
                "or by flexlora without a rank"
            )
        mean, found, unseen = mean_of(cohort), dict[str, ThinProduct](), list[str]()
        for pair in pairs:
            left, right = _stack(cohort, pair)
            seen = _seen_products(cohort, pair, right) if self.moments else None
            unseen += [pair.module] * (self.moments and seen is None)
            found[pair.module] = fused = self._fuse(left, right, len(first[pair.a]), seen)
            mean[pair.a] = fused.right.reshape(-1, *first[pair.a].shape[1:]).to(first[pair.a].dtype)
            mean[pair.b] = _columns(fused.left, first[pair.b])
        metric = {"adapter_metric": "inputs", "unseen_modules": unseen} if self.moments and found else {}
        return state.fused(mean, spec=spec).noting(**error_facts(found), **metric)

    def _fuse(self, left: Tensor, right: Tensor, width: int, seen: Tensor | None) -> ThinProduct:
        if self.stack:
            return ThinProduct(left, right, norm=norm_of(left, right))
        rank = width if self.rank is None else self.rank
        fused = truncate(left, right, rank) if seen is None else truncate_for_inputs(left, right, seen, rank)
        missing = rank - fused.left.shape[1]  # of fewer dimensions than were asked for
        wide = torch.nn.functional.pad
        return fused._replace(left=wide(fused.left, (0, missing)), right=wide(fused.right, (0, 0, 0, missing)))


def _seen_products(cohort: Cohort, pair: Pair, right: Tensor) -> Tensor | None:
    """A C Aᵀ = Σ f_k A C_k Aᵀ, C_k the moments of what client k's module reads; None where a client sent none."""
    names = [block.name for block in blocks_of(cohort.updates[0].spec) if block.weight == pair.a and block.groups == 1]
    total = right.new_zeros(len(right), len(right))
    for share, update in zip(cohort.weights.tolist(), cohort, strict=True):
        moments = read_factor(update.notes, f"{INPUTS}/{names[0]}/in") if names else None
        if moments is None:
            return None
        total += share * times(right, written(as_stack(moments)[0])) @ right.mT
    return total if bool(total.any()) else None


def error_facts(found: Mapping[str, ThinProduct]) -> dict[str, Any]:
    """Ranks and errors for a reader; nothing where there are no adapters."""
    if not found:
        return {}
    total, lost = math.hypot(*(x.norm for x in found.values())), math.hypot(*(x.error * x.norm for x in found.values()))
    return {
        "adapter_error": lost / total if total else 0.0,
        "adapter_errors": {module: x.error for module, x in found.items()},
        "adapter_ranks": {module: x.left.shape[1] for module, x in found.items()},
    }


def merge_rounds(cohort: Cohort, state: ServerState, bench: Bench, pairs: Sequence[Pair]) -> ServerState:
    """Append the mean of the adapters to what earlier rounds have learned, exactly, and begin new ones.

    The stacked factors of all clients are appended to the network's merged ones, whose rank so grows by the sum of the
    clients' ranks, until writing the product out is smaller. New factors A are drawn, new B are zero (FLoRA).
    """
    before, mean = state.start.params, mean_of(cohort)
    ranks: dict[str, int] = {}
    for pair in pairs:
        left, right = _stack(cohort, pair)
        names = [f"{pair.module}.{name}".removeprefix(".") for name in MERGED]
        a, b = (before[name].double().flatten(1) for name in names)
        right, left = _shorten(torch.cat([a, right]), torch.cat([b, left], 1))
        shape = before[names[0]].shape[1:]
        mean[names[0]] = right.reshape(-1, *shape).to(before[names[0]].dtype)
        mean[names[1]] = _columns(left, before[names[1]])
        bound = 1 / math.sqrt(right.shape[1])
        draw = torch.rand(mean[pair.a].shape, generator=bench.stream("adapters", state.round, pair.a))
        mean[pair.a] = ((2 * draw - 1) * bound).to(mean[pair.a].dtype)
        mean[pair.b] = torch.zeros_like(mean[pair.b])
        ranks[pair.module] = len(right)
    spec = cohort.updates[0].spec
    after = state.fused(mean, spec=spec.with_shapes_of(mean) if spec.can_run else spec)
    return after.noting(adapter_error=0.0, merged_ranks=ranks)


def _shorten(right: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """The same product in factors of a rank no larger than its smaller side."""
    if len(right) <= min(right.shape[1], len(left)):
        return right, left
    whole = left @ right
    if len(left) <= right.shape[1]:
        return whole, torch.eye(len(left), dtype=whole.dtype)
    return torch.eye(right.shape[1], dtype=whole.dtype), whole


@dataclass(frozen=True, slots=True)
class SeparateMeans(ServerPart):
    """FedIT: the factors are averaged apart, (Σ f_k B_k)(Σ f_k A_k), which is not the mean of what clients learned.

    How far off it is stands in the record as `adapter_error`.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    knows_adapters: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = ALL_LAWS

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Average everything, and tell what that misses."""
        mean = mean_of(cohort)
        off = total = 0.0
        for pair in pairs_in(mean):
            left, right = _stack(cohort, pair)
            b, a = factors(mean, pair)
            off = math.hypot(off, norm_of(torch.cat([left, -b], 1), torch.cat([right, a])))
            total = math.hypot(total, norm_of(left, right))
        after = state.fused(mean, spec=cohort.updates[0].spec)
        if not total:
            return after
        words = f"means of the factors apart are {off / total:.0%} of its norm away from the mean of the adapters"
        return after.noting(adapter_error=off / total, remarks=[f"{words}; flora and flexlora fuse their products"])


@method("flora", paper="arXiv:2409.05976", family="adapters")
def flora() -> Recipe:
    """The exact mean of low-rank adapters: their factors stacked, so that the rank is the sum of the clients' ranks.

    In a run what a round has learned is merged beside the resting weights, and clients begin new adapters. What is no
    adapter is averaged, so without adapters this is FedAvg.
    """
    return Recipe(aggregate=AdapterMean(stack=True), prepare_model=MergesRounds())


@method("flexlora", paper="arXiv:2402.11505", family="adapters")
def flexlora(rank: PositiveInt | None = None, moments: bool = False, min_rows: PositiveInt | None = None) -> Recipe:
    """The mean of low-rank adapters as well as one of a given rank can be it: the truncated SVD of the mean product.

    What is no adapter is averaged, so without adapters this is FedAvg.

    Args:
        rank: of the fused adapter; by default the largest of the clients'. The record says how much is lost.
        moments: clients send second moments of what adapted layers read, and what is lost is measured by those.
        min_rows: a client with fewer rows sends how large they are alone; by default twice the batch it trains with.
    """
    if min_rows is not None and not moments:
        raise RecipeError("flexlora: min_rows is about moments of inputs and there are none; set moments too")
    if not moments:
        return Recipe(aggregate=AdapterMean(rank))
    return Recipe(evidence=(AdapterInputs(InputFactors(min_rows=min_rows)),), aggregate=AdapterMean(rank, moments=True))


@method("fedit", paper="arXiv:2305.05644", family="adapters")
def fedit() -> Recipe:
    """Average the two factors of low-rank adapters apart, which is not the mean of the adapters: a baseline.

    The record says how far off it is. What is no adapter is averaged, so without adapters this is FedAvg.
    """
    return Recipe(aggregate=SeparateMeans())
