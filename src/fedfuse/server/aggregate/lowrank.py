"""Low-rank adapters: the mean of products B_k A_k, which is not the product of the means of B_k and A_k."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.params import Params
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError
from fedfuse.linalg.lowrank import ThinProduct, norm_of, truncate
from fedfuse.server.aggregate.mean import ALL_LAWS, mean_of

_SIDES = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))


class Pair(NamedTuple):
    """The two factors of one module, by name; the update of its weight is B A."""

    module: str
    a: str
    b: str


def pairs_in(params: Params) -> Iterator[Pair]:
    """Every low-rank pair among a model's tensors.

    Example:
        >>> list(pairs_in({"fc.lora_A.weight": torch.ones(1, 2), "fc.lora_B.weight": torch.ones(3, 1)}))
        [Pair(module='fc', a='fc.lora_A.weight', b='fc.lora_B.weight')]
    """
    for name in params:
        parts = name.split(".")
        for side, other in _SIDES:
            if side in parts:
                place = parts.index(side)
                partner = ".".join([*parts[:place], other, *parts[place + 1 :]])
                if partner in params:
                    yield Pair(".".join(parts[:place]), name, partner)


def factors(params: Params, pair: Pair) -> tuple[Tensor, Tensor]:
    """B, outputs × R, and A, R × inputs, in float64; those of convolutions laid out as matrices."""
    return params[pair.b].double().flatten(1), params[pair.a].double().flatten(1)


def _stack(cohort: Cohort, pair: Pair) -> tuple[Tensor, Tensor]:
    """[f_1 B_1, …] and [A_1; …], whose product is Σ f_k B_k A_k; what is zero on both sides is left out."""
    both = [factors(update.posterior.mean, pair) for update in cohort]
    left = torch.cat([share * b for share, (b, _) in zip(cohort.weights.tolist(), both, strict=True)], 1)
    right = torch.cat([a for _, a in both])
    used = (left != 0).any(0) | (right != 0).any(1)
    used[0] |= not bool(used.any())  # an adapter nobody trained keeps a rank of one
    return left[:, used], right[used]


@dataclass(frozen=True, slots=True)
class AdapterMean(ServerPart):
    """Σ_k f_k B_k A_k of every adapted module, exactly by stacking or as its best approximation of some rank.

    Everything that is no adapter is averaged, so without adapters this is FedAvg. `adapter_error` in the record is the
    norm of what was lost as a share of the mean's, over all modules; `adapter_errors` has it for each.

    Attributes:
        rank: of the result; None keeps that of the clients.
        stack: keep all ranks beside each other instead: exact, and as wide as all clients together.
    """

    rank: int | None = None
    stack: bool = False
    needs: ClassVar[frozenset[str]] = frozenset()
    knows_adapters: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = ALL_LAWS

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Fuse the products, and average what is left."""
        first, spec = cohort.updates[0].posterior.mean, cohort.updates[0].spec
        pairs = list(pairs_in(first))
        if pairs and spec.can_run and (self.stack or self.rank is not None):
            raise ConfigError(
                "the network of a run has adapters of one rank, and the fused ones would have another; fuse by "
                "flexlora without a rank there, or fuse adapter folders"
            )
        mean, found = mean_of(cohort), dict[str, ThinProduct]()
        for pair in pairs:
            left, right = _stack(cohort, pair)
            found[pair.module] = fused = self._fuse(left, right, first[pair.a].shape[0])
            mean[pair.a] = fused.right.reshape(-1, *first[pair.a].shape[1:]).to(first[pair.a].dtype)
            mean[pair.b] = _columns(fused.left, first[pair.b])
        return state.fused(mean, spec=spec).noting(**error_facts(found))

    def _fuse(self, left: Tensor, right: Tensor, width: int) -> ThinProduct:
        if self.stack:
            return ThinProduct(left, right)
        rank = width if self.rank is None else self.rank
        fused = truncate(left, right, rank)
        missing = rank - fused.left.shape[1]  # of fewer dimensions than were asked for
        wide = torch.nn.functional.pad
        return ThinProduct(wide(fused.left, (0, missing)), wide(fused.right, (0, 0, 0, missing)), fused.error)


def _columns(left: Tensor, like: Tensor) -> Tensor:
    return left.reshape(len(left), -1, *like.shape[2:]).to(like.dtype).contiguous()


def error_facts(found: Mapping[str, ThinProduct]) -> dict[str, Any]:
    """Ranks and errors for a reader; nothing where there are no adapters."""
    if not found:
        return {}
    # what was kept is orthogonal to what was lost, so their squares add up to the mean's
    kept = {module: norm_of(x.left, x.right) for module, x in found.items()}
    wholes = {module: kept[module] / math.sqrt(1 - x.error**2) for module, x in found.items()}
    total, lost = math.hypot(*wholes.values()), math.hypot(*(found[m].error * whole for m, whole in wholes.items()))
    return {
        "adapter_error": lost / total if total else 0.0,
        "adapter_errors": {module: x.error for module, x in found.items()},
        "adapter_ranks": {module: x.left.shape[1] for module, x in found.items()},
    }


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
