"""Chatzikonstantinou et al., Federated Learning Aggregation based on Weight Distribution Analysis, 2023 (SWA).

The nearer a layer's weights are to a Gaussian, the less they have learned. With g_kl the distance of client k's weights
in layer l from one, by k-statistics (eqs. 3 to 5) or by a Rényi divergence (eqs. 1 and 2), the server fuses

    w_l = Σ_k (g_kl / Σ_j g_jl) w_kl                                                                (eqs. 7 and 8)

Four distances come first (`HigherOrder` is the paper's), then the mean, then how a layer is read and summed. What
clients do is FedAvg's, or MOON's with `contrastive`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedfuse.client.objectives import Contrastive, KeepModel
from fedfuse.core.messages import Cohort, Form
from fedfuse.core.params import Layer, Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import ServerPart, TaskLoss
from fedfuse.core.state import Bench, ServerState
from fedfuse.core.torch_utils import one_thread, use_large_pages
from fedfuse.errors import ConfigError
from fedfuse.kernels import why_not
from fedfuse.linalg.divergence import Density, k_statistics, non_gaussianity, power_sums, renyi_to_gaussian
from fedfuse.server.aggregate.mean import ALL_LAWS, BLOCK, is_loaded, is_plain, sum_runs, weighted_mean
from fedfuse.wire.codec import LazyParams, forms_of, piece_of

Level: TypeAlias = Literal["layer", "filter"]
Normalize: TypeAlias = Literal["sum", "max"]
Draw: TypeAlias = Callable[[], torch.Generator]

# Bytes of one layer, over all clients, that are kept between scoring and averaging; a larger one is read twice.
_MAX_CACHED_BYTES = 1 << 27
_LONG = 1 << 17  # weights of a layer that are worth loading compiled code
_MAX_THREADS = 4  # layers fused at a time, each by one thread: more would only wait for memory


class Distance(Protocol):
    """How far the numbers in each row are from Gaussian; NaN where that has no meaning."""

    def __call__(self, rows: Tensor, draw: Draw) -> Tensor:
        """One score per row, float64; `draw` gives a random stream, the same one for every client."""
        ...


def _sum_powers(vector: Tensor, begin: float) -> Sequence[float]:
    """Sums of powers by compiled code where a vector is long enough for it, else by torch."""
    count = vector.numel()
    if count < _LONG or why_not() or not is_plain(vector, count):
        return power_sums(vector, begin)
    from fedfuse.kernels import sums

    found: list[float] = sums.power_sums(vector.numpy(), begin).tolist()
    return found


@dataclass(frozen=True, slots=True)
class HigherOrder:
    """|k₃·k₄|, the product of the third and fourth k-statistics (SWA, eq. 5, with the released absolute value).

    It grows with the seventh power of the weights' scale. `standardized` divides the scale out and leaves
    |skewness · excess kurtosis|. `signed` is the literal equation, k₃·k₄ without the absolute value, whose sign is a
    coin's for symmetric weights: its shares may be negative and far from one.

    Example:
        >>> rows = torch.tensor([[1.0, 2.0, 3.0, 10.0], [2.0, 4.0, 6.0, 20.0]])
        >>> scores = HigherOrder()(rows, torch.Generator)
        >>> float(scores[1] / scores[0])
        128.0
    """

    standardized: bool = False
    signed: bool = False

    def __call__(self, rows: Tensor, draw: Draw) -> Tensor:  # noqa: ARG002 - the seam's signature
        """One product per row."""
        score = non_gaussianity(rows, standardized=self.standardized, per_row=True, sums=_sum_powers)
        if not self.signed:
            return score
        k = k_statistics(rows, per_row=True, sums=_sum_powers)
        return score * (k.k3 * k.k4).sign()


@dataclass(frozen=True, slots=True)
class Negentropy:
    """k₃²/12 + k₄²/48 of the standardized weights, the leading terms of their negentropy (Comon 1994); free of scale.

    Example:
        >>> rows = torch.tensor([[1.0, 2.0, 3.0, 10.0], [2.0, 4.0, 6.0, 20.0]])
        >>> a, b = Negentropy()(rows, torch.Generator)
        >>> bool((a - b).abs() < 1e-12)
        True
    """

    def __call__(self, rows: Tensor, draw: Draw) -> Tensor:  # noqa: ARG002 - the seam's signature
        """One estimate per row."""
        k = k_statistics(rows, per_row=True, sums=_sum_powers)
        return (k.k3 / k.k2**1.5).square() / 12 + (k.k4 / k.k2**2).square() / 48


@dataclass(frozen=True, slots=True)
class Wasserstein:
    """The 2-Wasserstein distance of the standardized weights from N(0, 1); free of scale, and tails count but once.

    W₂² = ∫ (F⁻¹(u) − Φ⁻¹(u))² du, with the sorted weights for F⁻¹ and the normal's mean over each n-th of its mass for
    Φ⁻¹; what n draws of a Gaussian would have on average stays in it, for all clients alike.

    Example:
        >>> rows = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(0))
        >>> bool(Wasserstein()(rows, torch.Generator) < 0.03)
        True
    """

    def __call__(self, rows: Tensor, draw: Draw) -> Tensor:  # noqa: ARG002 - the seam's signature
        """One distance per row; NaN where all weights are equal."""
        x = rows.double()
        n = x.shape[1]
        std = x.std(1, correction=0, keepdim=True)
        z = torch.where(std > 0, (x - x.mean(1, keepdim=True)) / std, torch.nan).sort(1).values
        edges = torch.special.ndtri(torch.arange(n + 1, dtype=torch.float64) / n)
        density = torch.exp(-0.5 * edges.square()) / math.sqrt(2 * math.pi)
        quantiles = n * (density[:-1] - density[1:])  # the normal's mean between its (i/n)- and ((i+1)/n)-quantiles
        # within a slice the weight is one number and the normal is not: its spread there, 1 − mean(q²), is left over
        within = (1 - quantiles.square().mean()).clamp(min=0)
        return ((z - quantiles).square().mean(1) + within).sqrt()


@dataclass(frozen=True, slots=True)
class Renyi:
    """Rényi divergence of the weights' distribution from N(0, 1) (SWA, eqs. 1–2).

    Attributes:
        order: 0, 1 (Kullback–Leibler) or any positive number.
        density: what stands for the weights' distribution; see `fedfuse.linalg.divergence.renyi_to_gaussian`.
        standardized: from the Gaussian with the weights' own mean and variance instead.

    Example:
        >>> rows = torch.randn(1, 10_000, generator=torch.Generator().manual_seed(0))
        >>> bool(Renyi(standardized=True)(rows, torch.Generator) < 0.02)
        True
    """

    order: float = 1.0
    density: Density = "histogram"
    standardized: bool = False

    def __call__(self, rows: Tensor, draw: Draw) -> Tensor:
        """One divergence per row."""
        options: dict[str, Any] = {"density": self.density, "reference": "fitted" if self.standardized else "standard"}
        generator = draw() if self.density == "samples" else None
        scores = [renyi_to_gaussian(row, self.order, generator=generator, **options) for row in rows]
        return torch.tensor(scores, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class NonGaussianMean(ServerPart):
    """SWA: w_l = Σ_k (g_kl / Σ_j g_jl) w_kl, where g_kl is client k's distance from Gaussian in layer l.

    Bias, norm and running statistics follow the layer they belong to; a tensor without a layer is averaged alike.
    A client without a score in a layer (fewer than four weights, all equal) counts nothing there; where no client has
    one, all count alike, which the record says. Example counts are not used unless mixed in.

    Attributes:
        distance: how far from Gaussian.
        normalize: "sum" makes the weights of a layer sum to one. "max" is the literal equation 8, which divides by
            the largest score and then adds up: it is no average, N alike clients come out as N times themselves.
        level: one weight per client and "layer", or per client and output "filter".
        mix: share of the example-count weights in the final ones, from 0 to 1.
        signed: keep negative scores as they are, instead of taking them for none.

    Example:
        >>> NonGaussianMean(Renyi(order=2), mix=0.5).laws == NonGaussianMean().laws
        True
    """

    distance: Distance = field(default_factory=HigherOrder)
    normalize: Normalize = "sum"
    level: Level = "layer"
    mix: float = 0.0
    signed: bool = False
    needs: ClassVar[frozenset[str]] = frozenset()

    @property
    def laws(self) -> frozenset[str]:
        """All of them; equation 8 taken literally does not leave agreeing clients unchanged."""
        return ALL_LAWS if self.normalize == "sum" else ALL_LAWS - {"agree"}

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Score, weigh and average layer by layer; a thread has one layer of all clients in hand at a time."""
        spec, sources = cohort.updates[0].spec, [u.posterior.mean for u in cohort]
        forms, following = forms_of(sources[0]), _following_tensors(sources)

        def fuse(layer: Layer) -> _FusedLayer:
            stack = _LayerStack.of(layer, sources, forms, following)
            draw = partial(bench.stream, "gaussianity", state.round, layer.name)
            by_filter = self.level == "filter" and layer.is_plain  # an embedding's rows are no filters
            scores = torch.stack([self.distance(rows, draw) for rows in stack.rows(by_filter)])
            shares, unscored = self._shares(scores, cohort.weights)
            return _FusedLayer(layer.name, stack.blend(shares), scores, shares, unscored)

        threads = min(os.cpu_count() or 1, _MAX_THREADS)
        with one_thread(), ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            layers = list(pool.map(fuse, spec.layout.layers))
        means = {name: t for layer in layers for name, t in layer.means.items()}
        equal_shares = self._shares(torch.zeros(len(cohort), 1), cohort.weights)[0][:, 0]
        mean = {n: means[n] if n in means else weighted_mean(sources, equal_shares, n) for n in cohort.names}
        return state.fused(mean, spec=spec).noting(**_facts(cohort.clients, layers))

    def _shares(self, scores: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Each client's weight, (clients × rows), and the rows in which no client has a score."""
        known = torch.where(scores.isfinite() & ((scores > 0) | self.signed), scores, 0.0).double()
        largest = known.amax(0)
        unscored = (largest == 0) | (known.sum(0) == 0)
        relative = known / largest  # equation 7; it also keeps the sum of huge scores from overflowing
        own = relative if self.normalize == "max" else relative / relative.sum(0)
        own = torch.where(unscored, 1 / len(known), own)
        return self.mix * counts[:, None] + (1 - self.mix) * own, unscored


class _FusedLayer(NamedTuple):
    """One layer after its fusion: its tensors, and per client and row the scores and weights they came from."""

    name: str
    means: Mapping[str, Tensor]
    scores: Tensor
    shares: Tensor
    unscored: Tensor


def _facts(clients: Sequence[str], layers: Sequence[_FusedLayer]) -> dict[str, Any]:
    """Each client's weight and distance in every layer (of filters, their mean), and the layers without scores."""

    def by_client(values: Tensor) -> dict[str, float | None]:
        numbers = (float(f"{v:.5g}") if math.isfinite(v) else None for v in values.tolist())  # short, for the ledger
        return dict(zip(clients, numbers, strict=True))

    uniform = []
    for layer in layers:
        if lost := int(layer.unscored.sum()):
            rows = len(layer.unscored)
            uniform.append(layer.name + (f" ({lost} of {rows} filters)" if rows > 1 else ""))
    return {
        "layer_weights": {layer.name: by_client(layer.shares.mean(1)) for layer in layers},
        "gaussianity": {layer.name: by_client(layer.scores.nanmean(1)) for layer in layers},
        **({"uniform_layers": uniform} if uniform else {}),
    }


@dataclass(frozen=True, slots=True)
class _LayerStack:
    """One layer of every client: its weight, in one run with what lies right behind it in every message.

    Attributes:
        sources: every client's tensors.
        cached: where the run is read from: what was read before, or the sources if that is too large to keep.
        run: the names that are read and averaged as one long tensor, the weight first.
        rest: the layer's other tensors.
        forms: of all tensors.
    """

    sources: Sequence[Params]
    cached: Sequence[Params]
    run: tuple[str, ...]
    rest: tuple[str, ...]
    forms: Mapping[str, Form]

    @classmethod
    def of(
        cls, layer: Layer, sources: Sequence[Params], forms: Mapping[str, Form], following: Mapping[str, str]
    ) -> _LayerStack:
        """One layer of all clients, read once if it is not too large to be kept."""
        others, run = [n for n in (layer.bias, *layer.log_variances, *layer.followers) if n is not None], [layer.weight]
        while (name := following.get(run[-1], "")) in others:
            run.append(name)
        size = sum(math.prod(forms[n].shape) for n in run)
        fits = size * forms[run[0]].dtype.itemsize * len(sources) <= _MAX_CACHED_BYTES
        cached = [{run[0]: piece_of(s, run[0], 0, size)} for s in sources] if fits else sources
        return cls(sources, cached, tuple(run), tuple(n for n in others if n not in run), forms)

    def rows(self, by_filter: bool) -> Iterator[Tensor]:
        """Every client's weight as one row, or as a row per filter."""
        count = self.forms[self.run[0]].shape[0] if by_filter else 1
        return (weight.reshape(count, -1) for weight in self._tensors(self.run[0]))

    def blend(self, shares: Tensor) -> dict[str, Tensor]:
        """The mean of every tensor of the layer; shares are (clients × 1) or (clients × filters)."""
        if shares.shape[1] > 1:
            return {n: self._by_filter(n, shares) for n in (*self.run, *self.rest)}
        weights = shares[:, 0].tolist()
        return self._run_mean(weights) | {n: weighted_mean(self.sources, weights, n) for n in self.rest}

    def _tensors(self, name: str) -> Iterator[Tensor]:
        """One tensor of every client, laid flat, one client at a time."""
        if name not in self.run:
            return (source[name].reshape(-1) for source in self.sources)
        sizes = [math.prod(self.forms[n].shape) for n in self.run[: self.run.index(name) + 1]]
        return (piece_of(source, self.run[0], sum(sizes[:-1]), sum(sizes)) for source in self.cached)

    def _run_mean(self, weights: Sequence[float]) -> dict[str, Tensor]:
        """The run as one long tensor, block by block in float64.

        The mean of whole models, made for long runs and threads of its own, would take an eighth longer on layers, many
        of which are short (`benchmarks/swa.py`).
        """
        sizes = [math.prod(self.forms[n].shape) for n in self.run]
        count = sum(sizes)
        means = use_large_pages(torch.empty(count, dtype=self.forms[self.run[0]].dtype))
        runs = (
            [piece_of(source, self.run[0], 0, count) for source in self.cached]
            if self.cached is not self.sources
            else []
        )
        compiled = is_loaded() or (count >= _LONG and not why_not())  # its bits are those of blocks
        if runs and compiled and all(is_plain(run, count) for run in runs):
            sum_runs(runs, weights, means)
        else:
            self._fill_by_blocks(means, weights)
        first, *others = (t.view(self.forms[n].shape) for n, t in zip(self.run, means.split(sizes), strict=True))
        return dict(
            zip(self.run, (first, *(t.clone() for t in others)), strict=True)
        )  # results must not share memory: one may be changed in place

    def _fill_by_blocks(self, means: Tensor, weights: Sequence[float]) -> None:
        sums = torch.empty(min(BLOCK, len(means)), dtype=torch.float64)
        for begin in range(0, len(means), BLOCK):
            mean = means[begin : begin + BLOCK]
            block = sums[: len(mean)].zero_()
            for source, weight in zip(self.cached, weights, strict=True):
                block.add_(piece_of(source, self.run[0], begin, begin + len(mean)), alpha=weight)
            mean.copy_(block)

    def _by_filter(self, name: str, shares: Tensor) -> Tensor:
        """One tensor with a weight for each of its rows, or with their mean where its rows are not the filters."""
        form, count = self.forms[name], shares.shape[1]
        if not form.dtype.is_floating_point or form.shape[:1] != (count,):
            return weighted_mean(self.sources, shares.mean(1), name)
        total = torch.zeros(count, math.prod(form.shape[1:]), dtype=torch.float64)
        for tensor, share in zip(self._tensors(name), shares, strict=True):
            total.addcmul_(tensor.reshape(count, -1).double(), share[:, None])
        return total.reshape(form.shape).to(form.dtype)


def _following_tensors(sources: Sequence[Params]) -> Mapping[str, str]:
    """For each tensor the one right behind it in every client's message, if all have the same layout."""
    lazy = [s for s in sources if isinstance(s, LazyParams)]
    alike = len(lazy) == len(sources) and all((s.offsets, s.forms) == (lazy[0].offsets, lazy[0].forms) for s in lazy)
    return dict(pair for run in lazy[0].runs() for pair in pairwise(run)) if alike else {}


@method(
    "swa", paper="Chatzikonstantinou et al., Federated Learning Aggregation based on Weight Distribution Analysis, 2023"
)
def swa(
    distance: Literal["hos", "renyi", "negentropy", "wasserstein"] = "hos",
    order: NonNegativeFloat = 1.0,
    density: Density = "histogram",
    scale: Literal["raw", "standardized"] = "raw",
    sign: Literal["absolute", "signed"] = "absolute",
    normalize: Normalize = "sum",
    level: Level = "layer",
    mix: Annotated[float, Field(ge=0, le=1)] = 0.0,
    contrastive: NonNegativeFloat = 0.0,
    temperature: PositiveFloat = 0.5,
) -> Recipe:
    """Average layer by layer, each client weighed by how far its layer's weights are from Gaussian.

    Client k weighs g_kl / Σ_j g_jl in layer l; example counts are not used unless mixed in, so show the
    example-weighted mean (`fedavg`) and the plain mean (`fedavg(uniform=true)`) beside it. Bias, norm and running
    statistics follow their layer.

    Args:
        distance: "hos", the product of the third and fourth k-statistics, or "renyi", a divergence from N(0, 1). Free
            of the weights' scale: "negentropy" by k-statistics, "wasserstein" distance from the fitted Gaussian.
        order: of the Rényi divergence: 0, 0.5, 1 (Kullback–Leibler), 2 or any other.
        density: of the Rényi divergence: "histogram", "samples" (the paper's text) or "grid" (its released code).
        scale: "raw" scores depend on the weights' scale ("hos" on its seventh power), "standardized" ones do not.
        sign: of "hos": "absolute" as released; "signed" is the printed equation, whose weights may be negative.
        normalize: "sum" gives an average; "max" is the printed equation 8, which is none.
        level: one weight per "layer", or per output "filter".
        mix: share of the example-count weights mixed in.
        contrastive: weight of MOON's term in the clients' loss (the paper takes 8, 5 and 3); 0 leaves it out.
        temperature: T of that term.
    """
    if distance != "renyi" and (order, density) != (1.0, "histogram"):
        raise ConfigError(
            f"method 'swa': order {order:g} and density {density!r} came with distance {distance!r}, which has "
            "neither; expected distance = 'renyi' with them"
        )
    signed, standardized = sign == "signed", scale == "standardized"
    if distance != "hos" and signed:
        raise ConfigError(f"method 'swa': distance {distance!r} has no sign; expected sign = 'signed' with 'hos' only")
    measures: dict[str, Distance] = {
        "hos": HigherOrder(standardized, signed),
        "renyi": Renyi(order, density, standardized),
        "negentropy": Negentropy(),
        "wasserstein": Wasserstein(),
    }
    return Recipe(
        objective=Contrastive(contrastive, temperature) if contrastive else TaskLoss(),
        memory=(KeepModel(),) if contrastive else (),
        aggregate=NonGaussianMean(measures[distance], normalize, level, mix, signed),
    )
