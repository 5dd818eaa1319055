"""Rules that drop most of every client's move before they fuse: the largest stay (TIES), or some by lot (DARE)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.params import Params
from fedfuse.core.seams import Aggregator, ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.server.aggregate.mean import exact_weights
from fedfuse.server.aggregate.moves import (
    BASE_LAWS,
    BeforeRule,
    TaskArithmetic,
    blocks_of,
    fuse_weights,
    sources_of,
    widen,
)
from fedfuse.wire.codec import LazyParams, forms_of, piece_of

Numbers: TypeAlias = npt.NDArray[Any]
_LOTS = 1 << 16  # elements whose lots are drawn together, so that any piece of a tensor can be asked for
_TILE = 1 << 15  # elements of all clients that are fused together, which stay in cache
_SAMPLE = 1 << 14  # numbers that tell about where the wanted one is
_BLOCK = 1 << 17  # numbers looked at together, which stay in cache
_DEVIATIONS = 6.0  # half of the interval the sample gives, in its own standard deviations


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
            moves = _trimmed_moves(sources, limits, base, name, begin, end)
            out[begin:end] = base.double() + self.scale * _elect(moves, shares)
        return out.view(form.shape)


@dataclass(frozen=True, slots=True)
class TrimAndElect(BeforeRule):
    """TIES with another rule's mean in place of its own: trim and elect, then fuse.

    A client that was trimmed or outvoted in a coordinate takes TIES' own mean there, so that its absence does not pull
    at the result: where clients weigh alike, the mean of what is left is that of TIES.

    Attributes:
        then: what fuses, such as a mean in the metric of the clients' factors.
        density: the share of each tensor's coordinates that stays.
    """

    then: Aggregator
    density: float = 0.2

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Trim, elect, and fuse."""
        start, sources = widen(state.single.posterior.mean), [widen(source) for source in sources_of(cohort)]
        shares = exact_weights(cohort.num_examples, sources)[0][:, None]
        ruled = frozenset(cohort.updates[0].spec.layout.with_role("weight", "bias", "norm"))

        @cache
        def limits(name: str) -> list[float]:
            return [_limit(source, start, name, self.density) for source in sources]

        def elect(place: int, name: str, begin: int, end: int) -> Tensor:
            base = piece_of(start, name, begin, end)
            moves = _trimmed_moves(sources, limits(name), base, name, begin, end)
            common = _elect(moves, shares)
            agrees = moves[place].sign() * common.sign() > 0
            return (base.double() + torch.where(agrees, moves[place].double(), common)).to(base.dtype)

        def change(place: int, mean: LazyParams) -> LazyParams:
            def fetch(name: str, begin: int, end: int) -> Tensor:
                if name not in ruled:
                    return mean.piece(name, begin, end)
                tiles = [(b, min(b + _TILE, end)) for b in range(begin, end, _TILE)]
                parts = [elect(place, name, *tile) for tile in tiles]
                return torch.cat(parts) if parts else mean.piece(name, begin, end)

            return LazyParams(mean.forms, fetch)

        return self.fuse_changed(cohort, change, state, bench)


def _limit(source: Params, start: Params, name: str, density: float) -> float:
    """The least |δ| that stays: the k-th largest of a tensor, with k the density's share of it, at least one."""
    form = forms_of(source)[name]
    size = math.prod(form.shape)
    sizes = torch.empty(size, dtype=torch.promote_types(form.dtype, torch.float32))
    for begin, end in blocks_of(source, name):
        sizes[begin:end] = _subtract(piece_of(source, name, begin, end), piece_of(start, name, begin, end)).abs_()
    return float(kth_largest(sizes, max(1, round(density * size)))) if size else 0.0


def _trimmed_moves(
    sources: Sequence[Params], limits: Sequence[float], base: Tensor, name: str, begin: int, end: int
) -> Tensor:
    """Elements [begin, end) of every client's trimmed move, clients × elements."""
    pairs = zip(sources, limits, strict=True)
    return torch.stack([_trim(_subtract(piece_of(s, name, begin, end), base), limit) for s, limit in pairs])


def _trim(move: Tensor, limit: float) -> Tensor:
    """The move without what is smaller than a limit, in one pass: `hardshrink` drops what is not larger than its own.

    Example:
        >>> _trim(torch.tensor([-3.0, 2.0, 1.0]), 2.0)
        tensor([-3.,  2.,  0.])
    """
    below = torch.nextafter(torch.tensor(limit, dtype=move.dtype), torch.zeros((), dtype=move.dtype))
    return F.hardshrink(move, float(below))


def _subtract(piece: Tensor, base: Tensor) -> Tensor:
    """A move in float32 at least; of two numbers of float32 that is their exact difference, rounded once."""
    wide = torch.promote_types(piece.dtype, torch.float32)
    return piece.to(wide) - base.to(wide)


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


@dataclass(frozen=True, slots=True)
class DropAndRescale(BeforeRule):
    """DARE (Yu et al. 2024): coordinates of δ_k are dropped with probability p, the rest divided by 1 − p; then a rule.

    The expected move stays what it was. Lots are drawn by the run's seed, for each client and tensor apart.

    Attributes:
        drop: p.
        then: what fuses the thinned clients.
    """

    drop: float = 0.9
    then: Aggregator = field(default_factory=TaskArithmetic)

    @property
    def laws(self) -> frozenset[str]:
        """A client that is called otherwise draws other lots, and one client is thinned too."""
        return self.then.laws - {"order", "one", "agree"}

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Thin every client's move, and fuse."""
        wide = widen(state.single.posterior.mean)
        updates = cohort.updates
        return self.fuse_changed(cohort, lambda k, mean: self._thin(updates[k], mean, wide, bench), state, bench)

    def _thin(self, update: ClientUpdate, mean: LazyParams, start: Params, bench: Bench) -> LazyParams:
        ruled = frozenset(update.spec.layout.with_role("weight", "bias", "norm"))

        def fetch(name: str, begin: int, end: int) -> Tensor:
            piece = mean.piece(name, begin, end)
            if name not in ruled:
                return piece
            base = piece_of(start, name, begin, end)
            stays = _lots(lambda tile: bench.stream("dare", update.client, name, tile), begin, end) >= self.drop
            move = (piece.double() - base.double()) / (1 - self.drop)
            return torch.where(stays, base.double() + move, base.double()).to(piece.dtype)

        return LazyParams(mean.forms, fetch)


def _lots(stream: Callable[[int], torch.Generator], begin: int, end: int) -> Tensor:
    """Numbers from [0, 1) for the elements [begin, end), the same whichever pieces are asked for."""
    first, last = begin // _LOTS, -(-end // _LOTS)
    lots = [torch.rand(_LOTS, generator=stream(tile)) for tile in range(first, last)]
    return torch.cat(lots)[begin - first * _LOTS : end - first * _LOTS] if lots else torch.empty(0)


def kth_largest(values: Tensor, k: int) -> Tensor:
    """The k-th largest of a flat tensor, exactly; k counts from 1.

    A sample says between which two numbers it lies almost certainly. One pass counts what is above them and takes out
    what is between, a few per cent of all; where the sample was wrong, or there is little to choose from, all numbers
    are partitioned.

    Example:
        >>> kth_largest(torch.tensor([3.0, 1.0, 2.0]), 2)
        tensor(2.)
    """
    numbers: Numbers = values.numpy()  # it compares several times as fast as torch does
    if len(numbers) > 4 * _SAMPLE:
        low, high = _bracket(numbers, k)
        above, between = 0, []
        for block in (numbers[begin : begin + _BLOCK] for begin in range(0, len(numbers), _BLOCK)):
            above += int(np.count_nonzero(block > high))
            between.append(block[(block >= low) & (block <= high)])
        left, rank = np.concatenate(between), k - above
        if 1 <= rank <= len(left):
            return torch.tensor(low if low == high else _partition(left, rank))
    return torch.tensor(_partition(numbers.copy(), k))


def _bracket(numbers: Numbers, k: int) -> tuple[Any, Any]:
    """Two numbers between which the k-th largest lies, as far as a sample can tell."""
    stride = (len(numbers) // _SAMPLE) | 1  # odd, so that it shares no factor with the usual widths of layers
    drawn = np.sort(numbers[::stride])[::-1]
    share, count = k / len(numbers), len(drawn)
    room = math.ceil(_DEVIATIONS * math.sqrt(count * share * (1 - share))) + 2
    place = round(share * count)
    return drawn[min(place + room, count - 1)], drawn[max(place - room, 0)]


def _partition(numbers: Numbers, k: int) -> Any:
    """The k-th largest by putting it where it would stand if all were sorted; in place."""
    place = len(numbers) - k
    numbers.partition(place)
    return numbers[place]
