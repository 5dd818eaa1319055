"""The weighted mean of weights, exact to float64 and independent of which client answered first.

`mean_of` averages a cohort and `weighted_mean` one tensor. Both cut what is averaged into blocks (`_LongMean`), which
compiled code sums where it can and torch where it cannot, to the same bits.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate
from typing import ClassVar, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.params import Params
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.core.torch_utils import one_thread, use_large_pages
from fedfuse.kernels import why_not
from fedfuse.wire.codec import LazyParams, forms_of, piece_in
from fedfuse.wire.sums import SummedParams

# Elements per block: long enough that memory is read in long runs, short enough that the float64 sums stay in cache.
BLOCK = 1 << 18
_MIN_THREADED = 1 << 16  # elements that are not worth a second thread
_TOGETHER = 12  # pieces of files that are fetched side by side: as many as compiled code sums in registers
MIN_COMPILED = 1 << 21  # elements of all clients that are worth loading compiled code, which takes a while
MIN_COMPILED_FILES = 1 << 31  # of which each is read from a file, which takes longer than its sum

ALL_LAWS = frozenset({"order", "one", "agree", "scale", "pure", "dtype", "finite", "repeat"})


@dataclass(frozen=True, slots=True)
class Mean(ServerPart):
    """FedAvg: w = Σ_k (n_k / n) w_k, the mean where every client's geometry is flat.

    Attributes:
        uniform: weigh every client alike, whatever its number of examples.
    """

    uniform: bool = False
    needs: ClassVar[frozenset[str]] = frozenset()
    only_sums: ClassVar[bool] = True
    tensorwise: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = ALL_LAWS

    @property
    def sums_by(self) -> str:
        """By what clients weigh in the one sum it reads of them."""
        return "clients" if self.uniform else "examples"

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Average weights and running statistics; counters take the largest value."""
        weights = [float(u.sites) for u in cohort] if self.uniform else None
        return state.fused(mean_of(cohort, weights), spec=cohort.updates[0].spec)


def mean_of(cohort: Cohort, weights: Sequence[float] | Tensor | None = None) -> dict[str, Tensor]:
    """The weighted mean of every tensor, Σ w_k x_k / Σ w_k; by default each client weighs as its examples.

    Whole numbers of examples times float32 weights are exact in float64, and so nearly always is their sum. It is
    divided once, at the end, so the result does not depend on which client stands first; rounded shares n_k / n would.
    """
    sources = [u.posterior.mean for u in cohort]
    shares, total = exact_weights(cohort.num_examples if weights is None else weights, sources)
    means: dict[str, Tensor] = {}
    for run in _runs(sources):
        means |= _run_mean(sources, shares, run, total)
    return {name: means[name] for name in cohort.names}


def mean_by_examples(cohort: Cohort, name: str) -> Tensor:
    """The mean of one tensor, every client weighing as its examples: what `mean_of` gives of it, to the last bit."""
    sources = [u.posterior.mean for u in cohort]
    weights, total = exact_weights(cohort.num_examples, sources)
    return weighted_mean(sources, weights, name, total)


def weighted_mean(
    sources: Sequence[Params], weights: Sequence[float] | Tensor, name: str, total: float = 1.0
) -> Tensor:
    """Σ_k w_k x_k / total of one tensor over clients, accumulated in float64 in the given order, in its own dtype.

    Works block by block, so that beyond the result it needs one block of memory however many clients there are,
    and tensors on disk are never read whole. A counter (whole numbers) takes the largest value instead.

    Example:
        >>> weighted_mean([{"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}], [0.25, 0.75], "w")
        tensor([3.])
    """
    return _run_mean(sources, weights, (name,), total)[name]


def largest(sources: Sequence[Params], name: str) -> Tensor:
    """The elementwise largest value over clients: how counters are fused."""
    out = sources[0][name].clone()
    for source in sources[1:]:  # one at a time: a stack would hold every client's copy at once
        torch.maximum(out, source[name], out=out)
    return out


def sums_of(cohort: Cohort, weights: Sequence[float] | Tensor) -> dict[str, Tensor]:
    """Σ w_k x_k of every tensor in float64, in the order of the cohort; counters have no sum.

    Sums of sums go on from what those were rounded from.
    """
    sources, factors = _unrounded([u.posterior.mean for u in cohort], weights)
    totals: dict[str, Tensor] = {}
    for name, form in forms_of(cohort.updates[0].posterior.mean).items():
        if form.dtype.is_floating_point:
            totals[name] = torch.zeros(form.shape, dtype=torch.float64)
            _add(totals[name].view(-1), [source[name].reshape(-1) for source in sources], factors)
    return totals


def exact_weights(weights: Sequence[float] | Tensor, sources: Sequence[Params]) -> tuple[Tensor, float]:
    """The weights and what to divide by; whole numbers without their common factor, so that one client counts 1."""
    shares = torch.as_tensor(weights, dtype=torch.float64)
    if any(map(_is_sum, sources)):  # a sum is times its weight already: keep it whole
        return shares, math.fsum(shares.tolist())
    if len(shares) == 1:  # its weights come back bit for bit, whatever the number of examples
        return torch.ones_like(shares), 1.0
    if shares.equal(shares.round()):
        # A float32 has 24 significant bits and a float64 53, so w·x is exact for whole w of up to 29 bits. Without
        # their common factor larger counts fit as well, and clients of one size need no product at all.
        shares = shares / reduce(math.gcd, map(int, shares.tolist()))
    return shares, math.fsum(shares.tolist())  # exactly rounded, so the same in every order


def _unrounded(sources: Sequence[Params], weights: Sequence[float] | Tensor) -> tuple[list[Params], list[float]]:
    """The sources with sums of several sites in the place of those sites' rounded means, and what each is times."""
    shares = torch.as_tensor(weights, dtype=torch.float64).tolist()
    pairs = [(s.totals, w / s.weight) if _is_sum(s) else (s, w) for s, w in zip(sources, shares, strict=True)]
    return [source for source, _ in pairs], [weight for _, weight in pairs]


def _is_sum(source: Params) -> TypeGuard[SummedParams]:
    # nothing derives from it, and isinstance takes five times as long with an abstract class
    return type(source) is SummedParams


def _runs(sources: Sequence[Params]) -> list[tuple[str, ...]]:
    """Groups of names whose tensors lie one behind the other, in one dtype, in every source.

    Updates that were admitted are messages of one layout, so a whole model is one run or two; each run is averaged as
    one long tensor, without a Python call per tensor and client.
    """
    lazy = [s for s in sources if isinstance(s, LazyParams)]
    # a run is read by the first client's offsets, so all tables must be the very same
    whole = len(lazy) == len(sources) and not any(map(_is_sum, sources))
    same = whole and all((s.offsets, s.forms) == (lazy[0].offsets, lazy[0].forms) for s in lazy)
    return lazy[0].runs() if same else [(name,) for name in sources[0]]


def _run_mean(
    sources: Sequence[Params], weights: Sequence[float] | Tensor, run: tuple[str, ...], total: float
) -> dict[str, Tensor]:
    """The weighted means of the tensors of a run."""
    means = {name: _empty_like(sources[0], name) for name in run}
    if not means[run[0]].is_floating_point():
        return {name: largest(sources, name) for name in run}
    out = [mean.view(-1) for mean in means.values()]
    mean = _LongMean(*_unrounded(sources, weights), total, run[0], out, list(accumulate(map(len, out))))
    fill, blocks = mean.plan()
    threads = min(torch.get_num_threads(), len(blocks)) if mean.ends[-1] > _MIN_THREADED else 1
    if threads == 1:
        fill(blocks)
    else:  # a block is one thread's alone, so the result stays the same; torch's own threads would spin between blocks
        with one_thread(), ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, (blocks[i::threads] for i in range(threads))))
    return means


def _empty_like(source: Params, name: str) -> Tensor:
    if isinstance(source, LazyParams):
        return use_large_pages(torch.empty(source.forms[name].shape, dtype=source.forms[name].dtype))
    new = torch.empty_like(source[name], memory_format=torch.contiguous_format, requires_grad=False)
    return use_large_pages(new)


Blocks: TypeAlias = list[tuple[int, int]]
_Add: TypeAlias = Callable[[Tensor, Sequence[Tensor], list[float]], None]


@dataclass(frozen=True, slots=True)
class _LongMean:
    """Σ w_k x_k / total of a run, as if its tensors were one.

    There are two ways, to the same bits. Side by side: compiled code sums all clients' numbers in registers and writes
    each mean once, which is as fast as memory is read. In turn: clients are added to float64 sums that wait in the
    cache; it is for many clients' files, whose pieces side by side would weigh as much as the model, and for torch.

    Attributes:
        sources: the clients' tensors.
        weights: w_k.
        total: what sums are divided by, once.
        name: the run's first tensor.
        out: the run's means, flat, to be filled.
        ends: where each of them ends in the run.
    """

    sources: list[Params]
    weights: list[float]
    total: float
    name: str
    out: list[Tensor]
    ends: list[int]

    def plan(self) -> tuple[Callable[[Blocks], None], Blocks]:
        """Which way, and in which blocks."""
        count, clients, first = self.ends[-1], len(self.sources), self.out[0]
        worth = first.dtype == torch.float32 and first.is_cpu and count * clients >= MIN_COMPILED
        in_memory = worth and all(map(self._is_in_memory, self.sources))
        compiled = worth and (in_memory or is_loaded() or count * clients >= MIN_COMPILED_FILES) and not why_not()
        if compiled and in_memory:
            # nothing is fetched and no sum is kept, so blocks serve only to share the work among threads
            size = max(BLOCK, -(-count // max(1, torch.get_num_threads())))
            return partial(self.sum_side_by_side, True), _blocks(count, size)
        # The pieces fetched together take at most a tenth of the model's memory, by thread. Blocks are half of BLOCK at
        # most, so that pieces and sums stay in cache, and 4,096 at least, below which calls take longer than sums.
        # Twelve pieces of 4,096 are a tenth of a model of half a million: smaller ones are read a client at a time.
        together = min(clients, _TOGETHER) if compiled and count >= 4 * BLOCK else 1
        blocks = _blocks(count, max(1, min(BLOCK >> 1, max(BLOCK >> 6, count // (10 * together)), count)))
        if compiled and together == clients:
            return partial(self.sum_side_by_side, False), blocks
        return partial(self.sum_in_turn, _add_compiled if compiled else _add, together), blocks

    def _is_in_memory(self, source: Params) -> bool:
        # laying a strided tensor flat would copy it, once for every block
        return source.resident if isinstance(source, LazyParams) else source[self.name].is_contiguous()

    def sum_side_by_side(self, in_memory: bool, blocks: Blocks) -> None:
        """Sum these blocks straight into the tensors, by compiled code."""
        from fedfuse.kernels.sums import weighted_sums

        rooms, weights = self._rooms(len(self.sources), blocks), np.array(self.weights)
        for begin, end in blocks:
            views = (piece_in(room, s, self.name, begin, end) for room, s in zip(rooms, self.sources, strict=True))
            # a fetched piece lies at its address only while it is held; a thousand views would weigh as much as LeNet
            pieces = views if in_memory else list(views)
            addresses = np.fromiter((p.data_ptr() if is_plain(p, end - begin) else 0 for p in pieces), np.int64)
            if not addresses.all():
                self.sum_in_turn(_add, 1, [(begin, end)])
                continue
            for at, piece in self._slices(begin, end):
                weighted_sums(addresses, weights, self.total, at - begin, piece.numpy())

    def sum_in_turn(self, add: _Add, together: int, blocks: Blocks) -> None:
        """Sum these blocks over clients in float64; a few clients' pieces of a block are fetched at a time."""
        rooms = self._rooms(together, blocks)
        sums = torch.empty(_longest(blocks), dtype=torch.float64, device=self.out[0].device)
        for begin, end in blocks:
            block = sums[: end - begin].zero_()
            for k in range(0, len(self.sources), together):
                some = zip(rooms, self.sources[k : k + together], strict=False)
                pieces = [piece_in(room, source, self.name, begin, end) for room, source in some]
                add(block, pieces, self.weights[k : k + together])
            block = block if self.total == 1.0 else block.div_(self.total)
            for at, piece in self._slices(begin, end):
                piece.copy_(block[at - begin : at - begin + len(piece)])

    def _rooms(self, count: int, blocks: Blocks) -> list[Tensor]:
        """Buffers for pieces of files, if there are any; the same memory for all blocks stays in cache."""
        if not any(isinstance(source, LazyParams) and not source.resident for source in self.sources):
            return [torch.empty(0)] * count
        return [torch.empty(_longest(blocks), dtype=self.out[0].dtype) for _ in range(count)]

    def _slices(self, begin: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """The places of elements from `begin` to `end`, tensor by tensor, each with the element it begins at."""
        at = bisect_right(self.ends, begin)
        while begin < end:
            piece = self.out[at][begin - self.ends[at] :][: end - begin]
            yield begin, piece
            begin, at = begin + len(piece), at + 1


def _blocks(count: int, size: int) -> Blocks:
    return [(begin, min(begin + size, count)) for begin in range(0, count, size)]


def _longest(blocks: Blocks) -> int:
    return max((end - begin for begin, end in blocks), default=0)


def _add(block: Tensor, pieces: Sequence[Tensor], weights: list[float]) -> None:
    """Add Σ weight · piece, each product rounded before its sum: a fused step would depend on the processor."""
    wide = torch.empty_like(block)  # float64 before the product: a float32 one would round it twice
    for piece, weight in zip(pieces, weights, strict=True):
        wide.copy_(piece)
        block.add_(wide if weight == 1.0 else wide.mul_(weight))  # clients that weigh alike need no product


def _add_compiled(block: Tensor, pieces: Sequence[Tensor], weights: list[float]) -> None:
    """Add Σ weight · piece in one pass, to the bits of `_add`; pieces of another kind are left to torch."""
    if not all(is_plain(piece, len(block)) for piece in pieces):
        _add(block, pieces, weights)
        return
    from fedfuse.kernels.sums import add_rows

    addresses = np.array([piece.data_ptr() for piece in pieces], np.int64)
    add_rows(addresses, np.array(weights), 0, block.numpy())


def is_loaded() -> bool:
    """Whether the compiled sums are in this process already."""
    return "fedfuse.kernels.sums" in sys.modules


def is_plain(run: Tensor, count: int) -> bool:
    """Whether these are so many numbers of float32, side by side in this machine's memory."""
    return run.dtype == torch.float32 and run.is_cpu and run.is_contiguous() and run.numel() == count


def sum_runs(runs: Sequence[Tensor], weights: Sequence[float], out: Tensor) -> None:
    """Write Σ weight · run, for plain runs of float32 (see `is_plain`), by compiled code and in this thread."""
    from fedfuse.kernels.sums import weighted_sums

    addresses = np.array([run.data_ptr() for run in runs], np.int64)
    weighted_sums(addresses, np.array(weights, np.float64), 1.0, 0, out.numpy())
