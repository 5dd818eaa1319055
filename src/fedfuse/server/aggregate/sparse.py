"""Rules that drop most of every client's move before they fuse: the largest stay (TIES), or some by lot (DARE)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfuse.core.messages import ClientUpdate, Cohort, Form
from fedfuse.core.model import Single
from fedfuse.core.params import Params
from fedfuse.core.posterior import Posterior
from fedfuse.core.seams import Aggregator, Result, ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.linalg.select import kth_largest
from fedfuse.server.aggregate.mean import exact_weights
from fedfuse.server.aggregate.moves import (
    BASE_LAWS,
    TaskArithmetic,
    blocks_of,
    fuse_weights,
    sources_of,
)
from fedfuse.wire.codec import LazyParams, forms_of, piece_of

_LOTS = 1 << 16  # elements whose lots are drawn together, so that any piece of a tensor can be asked for
_TILE = 1 << 15  # elements of all clients that are fused together, which stay in cache


@dataclass(frozen=True, slots=True)
class TrimElectMerge(ServerPart):
    """TIES (Yadav et al. 2023): trim each move, elect a sign per coordinate, average those that agree with it.

    δ̂_k keeps the largest |δ_k| of every tensor; s = sign Σ_k f_k δ̂_k; w = w₀ + λ Σ f_k δ̂_k / Σ f_k over the k with
    sign δ̂_k = s, coordinate by coordinate.

    Attributes:
        density: the share of each tensor's coordinates that stays.
        scale: λ.
    """

    density: float = 0.2
    scale: float = 1.0
    needs: ClassVar[frozenset[str]] = frozenset({"start"})
    tensorwise: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = BASE_LAWS

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Trim, elect, merge."""
        start, sources = state.single.posterior.mean, sources_of(cohort)
        shares = exact_weights(cohort.num_examples, sources)[0][:, None]
        mean = fuse_weights(cohort, lambda name: self._merge(sources, start, shares, name))
        return state.fused(mean, spec=cohort.updates[0].spec)

    def _merge(self, sources: Sequence[Params], start: Params, shares: Tensor, name: str) -> Tensor:
        limits = [_limit(source, start, name, self.density) for source in sources]
        form = forms_of(sources[0])[name]
        out = torch.empty(math.prod(form.shape), dtype=form.dtype)
        for begin, end in blocks_of(sources[0], name, _TILE):
            base = piece_of(start, name, begin, end)
            pairs = zip(sources, limits, strict=True)
            moves = torch.stack([_trim(_subtract(piece_of(s, name, begin, end), base), limit) for s, limit in pairs])
            out[begin:end] = base.double() + self.scale * _elect(moves, shares)
        return out.view(form.shape)


def _trim(move: Tensor, limit: float) -> Tensor:
    """The move without what is smaller than a limit, in one pass: `hardshrink` drops what is not larger than its own.

    Example:
        >>> _trim(torch.tensor([-3.0, 2.0, 1.0]), 2.0)
        tensor([-3.,  2.,  0.])
    """
    below = torch.nextafter(torch.tensor(limit, dtype=move.dtype), torch.zeros((), dtype=move.dtype))
    return F.hardshrink(move, float(below))


def _elect(moves: Tensor, shares: Tensor) -> Tensor:
    """The mean of those moves, clients × elements, whose sign is that of their sum; zero where the sum is."""
    total = _add_up(moves, shares)
    agree = moves.sign().mul_(total.sign().to(moves.dtype)).clamp_(min=0)
    voters = _add_up(agree, shares)
    return _add_up(agree.mul_(moves), shares).div_(voters.clamp_(min=torch.finfo(voters.dtype).tiny))


def _add_up(rows: Tensor, shares: Tensor) -> Tensor:
    """Σ_k s_k x_k in float64; clients that weigh alike need no product."""
    even = bool((shares == 1.0).all())
    return rows.sum(0, dtype=torch.float64) if even else (rows * shares).sum(0)


def _subtract(piece: Tensor, base: Tensor) -> Tensor:
    """A move in float32 at least; of two numbers of float32 that is their exact difference, rounded once."""
    wide = torch.promote_types(piece.dtype, torch.float32)
    return piece.to(wide) - base.to(wide)


def _limit(source: Params, start: Params, name: str, density: float) -> float:
    """The least |δ| that stays: the k-th largest of a tensor, with k the density's share of it, at least one."""
    form = forms_of(source)[name]
    size = math.prod(form.shape)
    sizes = torch.empty(size, dtype=torch.promote_types(form.dtype, torch.float32))
    for begin, end in blocks_of(source, name):
        sizes[begin:end] = _subtract(piece_of(source, name, begin, end), piece_of(start, name, begin, end)).abs_()
    return float(kth_largest(sizes, max(1, round(density * size)))) if size else 0.0


@dataclass(frozen=True, slots=True)
class DropAndRescale(ServerPart):
    """DARE (Yu et al. 2024): coordinates of δ_k are dropped with probability p, the rest divided by 1 − p; then a rule.

    The expected move stays what it was. Lots are drawn by the run's seed, for each client and tensor apart. Half
    precision is widened to float32 between dropping and the rule, so that a move is rounded once.

    Attributes:
        drop: p.
        then: what fuses the thinned clients.
    """

    drop: float = 0.9
    then: Aggregator = field(default_factory=TaskArithmetic)

    @property
    def needs(self) -> frozenset[str]:
        """The base, and what the inner rule needs."""
        return self.then.needs | {"start"}

    @property
    def tensorwise(self) -> bool:
        """As the inner rule."""
        return self.then.tensorwise

    @property
    def result(self) -> Result | None:
        """As the inner rule's."""
        return self.then.result

    @property
    def laws(self) -> frozenset[str]:
        """A client that is called otherwise draws other lots, and one client is thinned too."""
        return self.then.laws - {"order", "one", "agree"}

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Thin every client's move, and fuse."""
        start = state.single
        wide = _widen(start.posterior.mean)
        begin = replace(state, model=Single(start.spec, Posterior(wide)))
        thin = Cohort(tuple(self._thin(update, wide, bench) for update in cohort))
        after = self.then(thin, begin, bench)
        forms = forms_of(cohort.updates[0].posterior.mean)
        mean = {name: t.to(forms[name].dtype) for name, t in after.single.posterior.mean.items()}
        return replace(after.fused(mean, spec=cohort.updates[0].spec), facts=after.facts)

    def _thin(self, update: ClientUpdate, start: Params, bench: Bench) -> ClientUpdate:
        mean = _widen(update.posterior.mean)
        ruled = frozenset(update.spec.layout.with_role("weight", "bias", "norm"))

        def fetch(name: str, begin: int, end: int) -> Tensor:
            piece = mean.piece(name, begin, end)
            if name not in ruled:
                return piece
            base = piece_of(start, name, begin, end)
            stays = _lots(lambda tile: bench.stream("dare", update.client, name, tile), begin, end) >= self.drop
            move = (piece.double() - base.double()) / (1 - self.drop)
            return torch.where(stays, base.double() + move, base.double()).to(piece.dtype)

        return replace(update, posterior=replace(update.posterior, mean=LazyParams(mean.forms, fetch)))


def _lots(stream: Callable[[int], torch.Generator], begin: int, end: int) -> Tensor:
    """Numbers from [0, 1) for the elements [begin, end), the same whichever pieces are asked for."""
    first, last = begin // _LOTS, -(-end // _LOTS)
    lots = [torch.rand(_LOTS, generator=stream(tile)) for tile in range(first, last)]
    return torch.cat(lots)[begin - first * _LOTS : end - first * _LOTS] if lots else torch.empty(0)


def _widen(params: Params) -> LazyParams:
    """The tensors with half precision widened to float32 as they are read."""

    def wide(dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    forms = {name: Form(form.shape, wide(form.dtype)) for name, form in forms_of(params).items()}
    return LazyParams(forms, lambda name, begin, end: piece_of(params, name, begin, end).to(forms[name].dtype))
