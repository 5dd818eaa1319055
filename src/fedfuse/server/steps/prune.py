"""FedAP and HRank: whole channels go, and the network is smaller from the next round on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.model import Single
from fedfuse.core.params import Params
from fedfuse.core.seams import ServerPart
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState, entries_of, with_kind
from fedfuse.errors import ConfigError
from fedfuse.nets.channels import Group, Location, channel_groups, keep_channels, move_units
from fedfuse.nets.cost import count_server_work
from fedfuse.nets.inputs import input_form
from fedfuse.nets.removal import removal_flaw
from fedfuse.server.steps.ranks import feature_ranks
from fedfuse.server.steps.rates import ExpectedRate, FixedRate, magnitude_threshold, share_of_small
from fedfuse.server.steps.renorm import RestateNorms

LayerRule: TypeAlias = Literal["magnitude", "uniform"]
ScoreRule: TypeAlias = Literal["rank", "magnitude", "random"]
Share = Annotated[float, Field(ge=0, lt=1)]


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


def rank_scores(model: Single, filters: tuple[Filters, ...], x: Tensor, tolerance: float | None) -> list[Tensor]:
    """Each channel's mean feature-map rank, over the convolutions that make it."""
    ranks = feature_ranks(model, x, [layer for f in filters for layer in f.layers], tolerance)
    return [torch.stack([f.per_unit(i, ranks[layer]) for i, layer in enumerate(f.layers)]).mean(0) for f in filters]


def magnitude_scores(model: Single, filters: tuple[Filters, ...]) -> list[Tensor]:
    """Each channel's mean absolute weight, over the convolutions that make it (Li et al., "Pruning Filters", 2017)."""
    params = model.posterior.mean
    return [torch.stack([rows.double().abs().mean(1) for rows in f.rows(params)]).mean(0) for f in filters]


@dataclass(frozen=True, slots=True)
class Prune(ServerPart):
    """Removes whole channels at the end of one round: the network narrows, and clients get the smaller one.

    One rate for all becomes a rate per group of channels, and of each group the channels with the lowest scores go,
    from every tensor they stand in. At least one always stays. Then BatchNorm's running statistics are estimated anew
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
        renorm: whether to estimate running statistics anew.
    """

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
        return rank_scores(state.single, filters, self._images(state, bench), self.tolerance)

    def _images(self, state: ServerState, bench: Bench) -> Tensor:
        """Some of the server's inputs, drawn at random."""
        x = bench.need_rows("pruning by feature maps").x
        return x[torch.randperm(len(x), generator=bench.stream("ranks", state.round))[: self.images]]


def shrink_state(state: ServerState, keep: Mapping[Group, Tensor]) -> ServerState:
    """The state with only these channels, in the model and in every memory of the model's shape.

    A round that is pruned later must find control variates and masks of the network's new shape; label counts and the
    like have no channels and stay as they are.
    """
    model = state.single
    spec, weights = keep_channels(model.spec, model.posterior.mean, keep)
    kinds = {name.partition("/")[0] for name in state.memory if "/" in name}
    moved = {
        n: t
        for kind in sorted(kinds)
        for n, t in _shrink_memory(state.memory, kind, model.posterior.mean, keep).items()
    }
    return replace(state.fused(weights, spec=spec), memory={**state.memory, **moved})


def _shrink_memory(memory: Params, kind: str, params: Params, keep: Mapping[Group, Tensor]) -> dict[str, Tensor]:
    """One kind of memory, narrowed as the tensors it stands beside."""
    beside = {n: t for n, t in entries_of(memory, kind).items() if n in params and t.shape == params[n].shape}
    moves = {
        replace(g, locations=tuple(p for p in g.locations if p.tensor in beside)): units for g, units in keep.items()
    }
    return with_kind(kind, move_units(beside, moves))
