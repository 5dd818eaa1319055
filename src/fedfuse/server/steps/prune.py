"""FedAP and HRank: whole channels go, and the network is smaller from the next round on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeAlias

import torch
from pydantic import Field
from torch import Tensor, nn

from fedfuse.core.messages import Cohort
from fedfuse.core.model import Single
from fedfuse.core.params import Params
from fedfuse.core.seams import TRAINING_PASSES, ServerPart
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState, entries_of, with_kind
from fedfuse.core.torch_utils import forward_hooks, in_full, one_thread
from fedfuse.errors import ConfigError
from fedfuse.linalg.lanczos import Spectrum
from fedfuse.nets.channels import Group, Location, channel_groups, keep_channels, move_units
from fedfuse.nets.cost import count_server_work
from fedfuse.nets.curvature import Curvature, CurvatureProbe, curvature_in
from fedfuse.nets.trace import removal_flaw
from fedfuse.server.inputs import input_form
from fedfuse.server.steps.repair import RestateNorms
from fedfuse.server.training import (
    MissingCounts,
    common_training,
    divergence,
    population_histogram,
    record_label_counts,
    train_on,
)

LayerRule: TypeAlias = Literal["magnitude", "uniform"]
ScoreRule: TypeAlias = Literal["rank", "magnitude", "random"]
RateRule: TypeAlias = Literal["plateau", "gap"]
Share = Annotated[float, Field(ge=0, lt=1)]
_BATCH = 100
_NEAR, _RUN = 0.005, 4  # so many shares in a row that differ by less make a plateau
_FIRST_STEP, _HALVINGS = 64, 40
_SMEAR = 1e-3  # of the spectrum's length: how far a Ritz value stands for its neighbours


class ExpectedRate(Protocol):
    """Which share of a network's weights may go."""

    @property
    def needs(self) -> frozenset[str]:
        """As for an aggregator."""
        ...

    def remember(self, state: ServerState, cohort: Cohort) -> ServerState:
        """The state that remembers what the rate will need of this round."""
        ...

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> tuple[float, dict[str, Any]]:
        """The rate, and what a reader wants to know of it."""
        ...


@dataclass(frozen=True, slots=True)
class FixedRate(ServerPart):
    """A rate the user chose."""

    rate: float = 0.6
    needs: ClassVar[frozenset[str]] = frozenset()

    def remember(self, state: ServerState, cohort: Cohort) -> ServerState:  # noqa: ARG002 - the seam's signature
        """Nothing is needed."""
        return state

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> tuple[float, dict[str, Any]]:  # noqa: ARG002
        """The rate as it is."""
        return self.rate, {}


@dataclass(frozen=True, slots=True)
class Prune(ServerPart):
    """Removes whole channels at the end of one round: the network narrows, and clients get the smaller one.

    One rate for all becomes a rate per group of channels, and of each group the channels with the lowest scores go,
    from every tensor they stand in. At least one always stays. Then BatchNorm's running statistics are estimated again
    on the server's rows, where it has any: channels that are gone leave those behind them with other means.

    The paper prunes convolutions one by one. Where several add into one stream, as in a residual network, their
    channels stand in one group here: they share a rate, that of their weights together, and a mean score.

    Attributes:
        round: after which it happens, counted from 0.
        rate: which share of all weights may go.
        layer_rule: how that becomes a rate per group.
        images: server rows whose feature maps are looked at.
        tolerance: of a feature map's rank; None is that of rounding.
        by: a channel's score: the mean "rank" of its feature maps on the server's rows, the mean "magnitude" of its
            weights, or a "random" number, the control.
        inner: leave alone the channels in which several convolutions' outputs are added, as along a residual network's
            stream.
        renorm: whether to estimate running statistics again.
    """

    reshapes: ClassVar[bool] = True
    round: int
    rate: ExpectedRate = field(default_factory=FixedRate)
    layer_rule: LayerRule = "magnitude"
    images: int = 500
    tolerance: float | None = None
    by: ScoreRule = "rank"
    inner: bool = False
    renorm: bool = True

    @property
    def needs(self) -> frozenset[str]:
        """What its rate needs, and rows to look at where feature maps are ranked."""
        return self.rate.needs | {"network"} | ({"server_rows"} if self.by == "rank" else set())

    def check_network(self, networks: Mapping[str, Spec], bench: Bench, rounds: int) -> None:
        """Say before training if the network has nothing to prune, or the round never comes.

        Raises:
            ConfigError: in one sentence.
        """
        if self.round >= rounds:
            raise ConfigError(
                f"channels are to be pruned after round {self.round + 1} and the run ends after {rounds}; "
                "lower `at` or add rounds"
            )
        spec = networks[""]
        shape = input_form(bench, spec).shape
        filters = self._filters(spec, shape)
        if not filters:
            raise ConfigError(
                f"model {spec.factory!r} has no convolution whose channels could be removed; "
                "choose a convolutional network or a method that prunes single weights"
            )
        for group in (f.group for f in filters):
            if flaw := removal_flaw(spec, shape, group):
                raise ConfigError(
                    f"model {spec.factory!r}: channels of {group.name!r} cannot be removed: {flaw}; write its forward "
                    "without sizes (flatten(1) for view(-1, 400)), or choose a method that prunes single weights"
                )

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        """Prune, if this is the round."""
        state = self.rate.remember(state, cohort)
        if state.round != self.round:
            return state
        model = state.single
        filters = self._filters(model.spec, input_form(bench, model.spec).shape)
        rate, facts = self.rate(state, cohort, bench)
        looks = min(self.images, len(bench.rows)) if self.by == "rank" and bench.rows is not None else 0
        state = count_server_work(state, facts.pop("server_passes", 0.0) + looks, bench)
        rates = layer_rates(model, filters, rate, self.layer_rule)
        scores = self._scores(state, filters, bench)
        pairs = zip(filters, scores, strict=True)
        keep = {f.group: units_to_keep(score, rates[f.group.name], f.group.sections) for f, score in pairs}
        smaller = shrink_state(state, keep)
        widths = {g.name: [len(units), g.size] for g, units in keep.items()}
        if self.renorm and bench.rows is not None and len(bench.rows):
            smaller = count_server_work(RestateNorms()(smaller, cohort, bench), len(bench.rows), bench)
        return smaller.noting(pruned={"rate": rate, "layer_rates": rates, "kept": widths, **facts})

    def _filters(self, spec: Spec, shape: tuple[int, ...]) -> tuple[Filters, ...]:
        return tuple(f for f in filters_of(spec, shape) if not (self.inner and f.joined))

    def _scores(self, state: ServerState, filters: tuple[Filters, ...], bench: Bench) -> list[Tensor]:
        """A score per channel of each group."""
        if self.by == "magnitude":
            return magnitude_scores(state.single, filters)
        if self.by == "random":
            draw = bench.stream("channels", state.round)
            return [torch.rand(f.group.size, generator=draw) for f in filters]
        x = bench.need_rows("pruning by feature maps").x
        images = x[torch.randperm(len(x), generator=bench.stream("ranks", state.round))[: self.images]]
        return rank_scores(state.single, filters, images, self.tolerance)


def shrink_state(state: ServerState, keep: Mapping[Group, Tensor]) -> ServerState:
    """The state with only these channels, in the model and in every memory of the model's shape.

    A round that is pruned later must find control variates and masks of the network's new shape; label counts and the
    like have no channels and stay as they are.
    """
    model, moved = state.single, dict[str, Tensor]()
    spec, weights = keep_channels(model.spec, model.posterior.mean, keep)
    for kind in sorted({name.partition("/")[0] for name in state.memory if "/" in name}):
        entries = entries_of(state.memory, kind)
        shaped = {n: t for n, t in entries.items() if n in weights and t.shape == model.posterior.mean[n].shape}
        groups = {replace(g, locations=tuple(p for p in g.locations if p.tensor in shaped)): g for g in keep}
        moved |= with_kind(kind, move_units(shaped, {here: keep[g] for here, g in groups.items()}))
    return replace(state.fused(weights, spec=spec), memory={**state.memory, **moved})


@dataclass(frozen=True, slots=True)
class Filters:
    """A group of channels that convolutions make, and which.

    Attributes:
        group: everywhere the channels stand.
        layers: the convolutions that make them; several where their outputs are added.
        places: where each of the convolutions makes them, in its weight.
        joined: whether several convolutions' outputs are added in them, as along a residual network's stream.
    """

    group: Group
    layers: tuple[str, ...]
    places: tuple[Location, ...]
    joined: bool = False

    def rows(self, params: Params) -> list[Tensor]:
        """Of each convolution the weights that make the channels, one row per channel."""
        return [place.rows(params, self.group.size) for place in self.places]

    def per_unit(self, layer: int, values: Tensor) -> Tensor:
        """The mean of a convolution's values per output, over the outputs that belong to each channel."""
        place = self.places[layer]
        own = values[place.offset : place.offset + self.group.size * place.per]
        return own.view(self.group.size, place.per).mean(1)


def filters_of(spec: Spec, shape: tuple[int, ...]) -> tuple[Filters, ...]:
    """The groups of a network whose channels are made by convolutions, perhaps with linear layers that gate them.

    Example:
        >>> [f.layers for f in filters_of(Spec("lenet"), (1, 28, 28))]
        [('conv1',), ('conv2',)]
    """
    kinds = {layer.weight: layer for layer in spec.layout.layers}
    found = []
    for group in channel_groups(spec, shape):
        places = [p for p in group.makers if p.tensor in kinds and kinds[p.tensor].kind == "conv"]
        if places:
            joined = sum(kinds[place.tensor].groups == 1 for place in places) > 1  # a depthwise one adds nothing
            found.append(Filters(group, tuple(kinds[place.tensor].name for place in places), tuple(places), joined))
    return tuple(found)


def units_to_keep(scores: Tensor, rate: float, rooms: int = 1) -> Tensor:
    """The units that stay when ⌊rate · size⌋ of the lowest scores go: at least one of each room, in their old order.

    Example:
        >>> units_to_keep(torch.tensor([3.0, 1.0, 2.0, 9.0]), 0.5), units_to_keep(torch.tensor([1.0, 2.0]), 0.99)
        (tensor([0, 3]), tensor([1]))
    """
    by_room = scores.view(rooms, -1)
    size = by_room.shape[1]
    gone = min(math.floor(rate * size + 1e-9), size - 1)
    best = by_room.sort(dim=1, descending=True, stable=True).indices[:, : size - gone].sort(dim=1).values
    return (best + size * torch.arange(rooms)[:, None]).flatten()


def layer_rates(model: Single, filters: tuple[Filters, ...], rate: float, layer_rule: LayerRule) -> dict[str, float]:
    """How much of each group may go: all alike, or the share of its weights below the global threshold.

    The threshold is taken over every trainable weight of the network. Convolutions whose outputs are added share one
    rate, that of their weights together.
    """
    params = model.posterior.mean
    if layer_rule == "uniform":
        return {f.group.name: rate for f in filters}
    trainable = [params[name] for name in model.spec.layout.trainable]
    threshold = magnitude_threshold(trainable, rate)
    return {f.group.name: share_of_small(f.rows(params), threshold) for f in filters}


def magnitude_threshold(weights: Sequence[Tensor], rate: float) -> float:
    """𝒱: the magnitude of the ⌊R p*⌋-th of all R weights in ascending order; 0 if that is none.

    Example:
        >>> round(magnitude_threshold([torch.tensor([0.1, -0.4]), torch.tensor([0.3, -0.2])], 0.75), 6)
        0.3
    """
    every = torch.cat([w.detach().flatten().abs() for w in weights])
    rank = math.floor(len(every) * rate + 1e-9)
    return float(every.kthvalue(rank).values) if rank else 0.0


def share_of_small(weights: Sequence[Tensor], threshold: float) -> float:
    """p_l: which share of some weights is smaller in magnitude than the threshold.

    Example:
        >>> share_of_small([torch.tensor([0.1, -0.4]), torch.tensor([0.3, -0.2])], 0.3)
        0.5
    """
    small = sum(int((w.abs() < threshold).sum()) for w in weights)
    return small / sum(w.numel() for w in weights)


def rank_scores(model: Single, filters: tuple[Filters, ...], x: Tensor, tolerance: float | None) -> list[Tensor]:
    """Each channel's mean feature-map rank, over the convolutions that make it."""
    ranks = feature_ranks(model, x, [layer for f in filters for layer in f.layers], tolerance)
    return [torch.stack([f.per_unit(i, ranks[layer]) for i, layer in enumerate(f.layers)]).mean(0) for f in filters]


def magnitude_scores(model: Single, filters: tuple[Filters, ...]) -> list[Tensor]:
    """Each channel's mean absolute weight, over the convolutions that make it (Li et al., "Pruning Filters", 2017)."""
    params = model.posterior.mean
    return [torch.stack([rows.double().abs().mean(1) for rows in f.rows(params)]).mean(0) for f in filters]


def feature_ranks(model: Single, x: Tensor, layers: Iterable[str], tolerance: float | None = None) -> dict[str, Tensor]:
    """Mean rank of each channel's feature maps over some inputs, as a share of the largest rank they could have.

    A layer's maps are taken after its norm and a ReLU, before any pooling: before the ReLU nearly every map has full
    rank and says nothing. A unit of a linear layer has maps of one pixel: its rank is how often it is lit.

    Args:
        model: the network.
        x: inputs.
        layers: names of linear or convolution layers.
        tolerance: see `map_ranks`.

    Example:
        >>> from fedfuse.core.spec import Spec
        >>> spec = Spec("lenet")
        >>> ranks = feature_ranks(Single.of(spec.build(), spec), torch.rand(2, 1, 28, 28), ["conv1"])
        >>> tuple(ranks["conv1"].shape), bool((ranks["conv1"] <= 1).all())
        ((6,), True)
    """
    known = {layer.name: layer for layer in model.spec.layout.layers}
    rank_sums = {name: _RankSum(tolerance) for name in layers}
    module = model.spec.skeleton()
    # a layer's maps are the output of its norm, or its own
    makers = {name: (known[name].followers or (known[name].weight,))[0].rpartition(".")[0] for name in rank_sums}
    hooks = ((module.get_submodule(makers[name]), rank_sum) for name, rank_sum in rank_sums.items())
    with forward_hooks(hooks), torch.no_grad():
        for part in x.split(_BATCH):
            model.logits(part)
    return {name: rank_sum.mean() for name, rank_sum in rank_sums.items()}


@dataclass(slots=True)
class _RankSum:
    """A forward hook that adds up the ranks of a module's outputs."""

    tolerance: float | None
    _sum: list[Tensor] = field(default_factory=list)
    _count: int = 0

    def __call__(self, _: nn.Module, __: object, out: Tensor) -> None:
        maps = in_full(out.detach()).relu()
        maps = maps[..., None, None] if maps.ndim == 2 else maps.flatten(3) if maps.ndim > 3 else maps[:, :, None]
        self._sum.append(map_ranks(maps, self.tolerance).double().sum(0) / min(maps.shape[-2:]))
        self._count += len(out)

    def mean(self) -> Tensor:
        """Mean over all inputs so far."""
        return torch.stack(self._sum).sum(0) / self._count


def map_ranks(maps: Tensor, tolerance: float | None = None) -> Tensor:
    """The rank of every feature map (…, height, width): how many singular values exceed the tolerance.

    The tolerance is relative to the largest singular value; by default it is that of `numpy.linalg.matrix_rank`,
    max(height, width) times the dtype's rounding.

    Example:
        >>> map_ranks(torch.stack([torch.eye(3), torch.ones(3, 3), torch.zeros(3, 3)]))
        tensor([3, 1, 0])
    """
    relative = max(maps.shape[-2:]) * torch.finfo(maps.dtype).eps if tolerance is None else tolerance
    values: Tensor = torch.linalg.svdvals(maps)
    return (values > relative * values[..., :1]).sum(-1)


@dataclass(frozen=True, slots=True)
class SpectralRate(ServerPart):
    """FedAP's rate: each participant's own, from the spectrum of its curvature, combined by eq. 6.

    Participants are the clients of the round and the server, which trains the fused model on its rows to see the
    curvature there.

    Attributes:
        rule: how a rate is read off a spectrum.
        look: how closely the server looks at its own Hessian.
        eps: ε of eq. 6.
        unheard: what clients that never answered are taken to have.
    """

    rule: RateRule = "plateau"
    probe: CurvatureProbe = field(default_factory=CurvatureProbe)
    eps: float = 1e-4
    unheard: MissingCounts = "uniform"
    needs: ClassVar[frozenset[str]] = frozenset({"spectrum", "counts", "server_rows", "training", "network"})

    def remember(self, state: ServerState, cohort: Cohort) -> ServerState:
        """Who has which labels."""
        return record_label_counts(state, cohort)

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> tuple[float, dict[str, Any]]:
        """p*, and each participant's own rate and weight."""
        rows = bench.need_rows("FedAP")
        everyone = population_histogram(state.memory, bench.population, self.unheard)
        curvatures = {u.client: curvature_in(u.notes) for u in cohort} | {"server": self._server(state, cohort, bench)}
        rates = {who: self.rate_of(curvature) for who, curvature in curvatures.items()}
        num_examples = [*(u.num_examples for u in cohort), float(len(rows))]
        counts = [*(u.notes["counts/labels"] for u in cohort), rows.counts(bench.classes)]
        divergences = [divergence(c, everyone) for c in counts]
        rate, weights = combined_rate(list(rates.values()), num_examples, divergences, self.eps)
        facts = {"rates": rates, "rate_weights": dict(zip(rates, weights, strict=True))}
        # the server's training, and Hessian-vector products of twice a gradient's work
        epochs = common_training(cohort, bench, "FedAP").epochs
        products = self.probe.steps * self.probe.probes * min(len(rows), self.probe.rows)
        return rate, facts | {"server_passes": TRAINING_PASSES * (epochs * len(rows) + 2 * products)}

    def rate_of(self, curvature: Curvature) -> float:
        """One participant's rate."""
        return plateau_rate(curvature.spectrum) if self.rule == "plateau" else gap_rate(*curvature)

    def _server(self, state: ServerState, cohort: Cohort, bench: Bench) -> Curvature:
        model, rows = state.single, bench.need_rows("FedAP")
        start = {name: model.posterior.mean[name] for name in model.spec.layout.trainable}
        trained = train_on(rows, state, common_training(cohort, bench, "FedAP"), bench)
        module = model.spec.build()
        module.load_state_dict(trained.params)
        with one_thread():
            return self.probe(module, start, rows, bench.stream("spectrum", state.round), bench.task)


def combined_rate(
    rates: Sequence[float], num_examples: Sequence[float], divergences: Sequence[float], eps: float = 1e-4
) -> tuple[float, list[float]]:
    """The common rate (eq. 6), p* = Σ_k w_k p_k with w_k ∝ n_k / (D(P_k) + ε), and the weights w_k.

    Example:
        >>> rate, weights = combined_rate([0.2, 0.6], num_examples=[30, 10], divergences=[0.1, 0.1])
        >>> round(rate, 6), [round(w, 6) for w in weights]
        (0.3, [0.75, 0.25])
    """
    raw = [n / (d + eps) for n, d in zip(num_examples, divergences, strict=True)]
    weights = [w / sum(raw) for w in raw]
    return math.fsum(w * p for w, p in zip(weights, rates, strict=True)), weights


def gap_rate(spectrum: Spectrum, lipschitz: float) -> float:
    """FedAP's expected rate: m/d for the first m with λ_{m+1} − λ_m > 4 𝓛, eigenvalues ascending.

    Below such a gap the loss is so flat relative to its non-linearity that those directions may go. With a spectrum by
    quadrature m/d is the weight of the values up to the gap. Without any such gap nothing may go, and the rate is 0.

    The paper calls d the rank of the Hessian. A rank by quadrature is a guess, so d is the number of parameters here,
    and eigenvalues at zero count among the m.

    Example:
        >>> four = Spectrum(torch.tensor([[0.0, 0.1, 0.2, 9.0]]), torch.full((1, 4), 0.25))
        >>> gap_rate(four, lipschitz=1.0), gap_rate(four, lipschitz=3.0)
        (0.75, 0.0)
    """
    values, order = spectrum.values.double().flatten().sort()
    weights = spectrum.weights.double().flatten()[order] / len(spectrum.weights)
    wide = (values.diff() > 4 * lipschitz).nonzero()
    return float(weights[: int(wide[0]) + 1].sum()) if len(wide) else 0.0


def plateau_rate(spectrum: Spectrum) -> float:
    """The share of eigenvalues below the first plateau of their distribution from zero on.

    From t = 0 upwards in equal steps the share above t is followed until four in a row differ by less than 0.005; the
    rate is the share below. Steps so wide that half of what lies above zero is passed unseen are halved, and the walk
    begins again. Values are smeared over a thousandth of the spectrum's length, for a few of them stand for all.

    Example:
        >>> mostly_flat = Spectrum(torch.tensor([[-1.0, 0.5, 50.0]]), torch.tensor([[0.6, 0.3, 0.1]]))
        >>> round(plateau_rate(mostly_flat), 3)
        0.6
    """
    largest = float(spectrum.values.max())
    width = _SMEAR * (largest - float(spectrum.values.min()))
    above_zero = 1.0 - share_below(spectrum, 0.0, width)
    if largest <= 0 or above_zero <= 0:
        return 1.0 - above_zero
    step = largest / _FIRST_STEP
    for _ in range(_HALVINGS):
        found = _walk(spectrum, step, width, above_zero)
        if found is not None:
            return 1.0 - found
        step /= 2
    return 1.0 - above_zero


def _walk(spectrum: Spectrum, step: float, width: float, above_zero: float) -> float | None:
    """The share above the first plateau, or None if half of it went by before one was seen."""
    recent = [above_zero]
    t = 0.0
    while recent[-1] >= above_zero / 2:
        t += step
        recent = [*recent[-(_RUN - 1) :], 1.0 - share_below(spectrum, t, width)]
        if len(recent) == _RUN and all(abs(a - b) < _NEAR for a, b in pairwise(recent)):
            return recent[-1]
    return None


def share_below(spectrum: Spectrum, bound: float, width: float) -> float:
    """The share of eigenvalues up to a bound, each Ritz value smeared to a normal of this width.

    Example:
        >>> share_below(Spectrum(torch.tensor([[0.0, 2.0]]), torch.tensor([[0.5, 0.5]])), 0.0, width=0.1)
        0.25
    """
    if width <= 0:
        return spectrum.share_below(bound)
    below = torch.special.ndtr((bound - spectrum.values.double()) / width)
    return float((spectrum.weights.double() * below).sum() / len(spectrum.weights))
