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
from fedfuse.core.state import Bench, ServerState, filed, part
from fedfuse.errors import ConfigError
from fedfuse.nets.channels import Group, channel_groups, narrowed, placed
from fedfuse.server.steps.lessons import input_form
from fedfuse.server.steps.ranks import feature_ranks
from fedfuse.server.steps.rates import ExpectedRate, FixedRate, magnitude_threshold, share_of_small

Spread: TypeAlias = Literal["magnitude", "uniform"]
Share = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, slots=True)
class Filters:
    """A group of channels that convolutions make, and which.

    Attributes:
        group: everywhere the channels stand.
        layers: the convolutions that make them; several where their outputs are added.
    """

    group: Group
    layers: tuple[str, ...]

    @property
    def weights(self) -> tuple[str, ...]:
        """The convolutions' weights."""
        return tuple(f"{layer}.weight" for layer in self.layers)


def filters_of(spec: Spec, shape: tuple[int, ...]) -> tuple[Filters, ...]:
    """The groups of a network whose channels are made by convolutions and by nothing else.

    Example:
        >>> [f.layers for f in filters_of(Spec("lenet"), (1, 28, 28))]
        [('conv1',), ('conv2',)]
    """
    kinds = {layer.weight: layer for layer in spec.layout.layers}
    found = []
    for group in channel_groups(spec, shape):
        makers = [kinds[place.tensor] for place in group.makers if place.tensor in kinds]
        if makers and all(layer.kind == "conv" for layer in makers):
            found.append(Filters(group, tuple(layer.weight.rpartition(".")[0] for layer in makers)))
    return tuple(found)


def layer_rates(model: Single, filters: tuple[Filters, ...], rate: float, spread: Spread) -> dict[str, float]:
    """How much of each group may go: all alike, or the share of its weights below the global threshold.

    The threshold is taken over every trainable weight of the network. Convolutions whose outputs are added share one
    rate, that of their weights together.
    """
    params = model.posterior.mean
    if spread == "uniform":
        return {f.group.name: rate for f in filters}
    trainable = [params[name] for name in model.spec.layout.trainable]
    threshold = magnitude_threshold(trainable, rate)
    return {f.group.name: share_of_small([params[w] for w in f.weights], threshold) for f in filters}


def kept_units(scores: Tensor, rate: float, rooms: int = 1) -> Tensor:
    """The units that stay when ⌊rate · size⌋ of the lowest scores go: at least one of each room, in their old order.

    Example:
        >>> kept_units(torch.tensor([3.0, 1.0, 2.0, 9.0]), 0.5), kept_units(torch.tensor([1.0, 2.0]), 0.99)
        (tensor([0, 3]), tensor([1]))
    """
    by_room = scores.view(rooms, -1)
    size = by_room.shape[1]
    gone = min(math.floor(rate * size + 1e-9), size - 1)
    best = by_room.sort(dim=1, descending=True, stable=True).indices[:, : size - gone].sort(dim=1).values
    return (best + size * torch.arange(rooms)[:, None]).flatten()


def group_scores(model: Single, filters: tuple[Filters, ...], x: Tensor, tolerance: float | None) -> list[Tensor]:
    """Each channel's mean feature-map rank, over the convolutions that make it."""
    ranks = feature_ranks(model, x, [layer for f in filters for layer in f.layers], tolerance)
    return [torch.stack([ranks[layer] for layer in f.layers]).mean(0) for f in filters]


@dataclass(frozen=True, slots=True)
class Prune(ServerPart):
    """Removes whole channels at the end of one round: the network narrows, and clients get the smaller one.

    One rate for all becomes a rate per group of channels, and of each group the channels with the lowest mean
    feature-map rank on the server's rows go, from every tensor they stand in. At least one always stays.

    Attributes:
        round: after which it happens, counted from 0.
        rate: which share of all weights may go.
        spread: how that becomes a rate per group.
        images: server rows whose feature maps are looked at.
        tolerance: of a feature map's rank; None is that of rounding.
    """

    round: int
    rate: ExpectedRate = field(default_factory=FixedRate)
    spread: Spread = "magnitude"
    images: int = 500
    tolerance: float | None = None

    @property
    def needs(self) -> frozenset[str]:
        """What its rate needs, and rows to look at."""
        return self.rate.needs | {"server_rows", "network"}

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
        if not filters_of(spec, input_form(bench, spec).shape):
            raise ConfigError(
                f"model {spec.factory!r} has no convolution whose channels could be removed; "
                "choose a convolutional network or a method that prunes single weights"
            )

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        """Prune, if this is the round."""
        state = self.rate.hear(state, cohort)
        if state.round != self.round:
            return state
        model = state.single
        filters = filters_of(model.spec, input_form(bench, model.spec).shape)
        rate, facts = self.rate(state, cohort, bench)
        rates = layer_rates(model, filters, rate, self.spread)
        scores = group_scores(model, filters, self._images(state, bench), self.tolerance)
        pairs = zip(filters, scores, strict=True)
        keep = {f.group: kept_units(score, rates[f.group.name], f.group.rooms) for f, score in pairs}
        smaller = shrunk(state, keep)
        widths = {g.name: [len(units), g.size] for g, units in keep.items()}
        return smaller.noting(pruned={"rate": rate, "layer_rates": rates, "kept": widths, **facts})

    def _images(self, state: ServerState, bench: Bench) -> Tensor:
        """Some of the server's inputs, drawn at random."""
        x = bench.need_rows("pruning by feature maps").x
        return x[torch.randperm(len(x), generator=bench.stream("ranks", state.round))[: self.images]]


def shrunk(state: ServerState, keep: Mapping[Group, Tensor]) -> ServerState:
    """The state with only these channels, in the model and in every memory of the model's shape.

    A round that is pruned later must find control variates and masks of the network's new shape; label counts and the
    like have no channels and stay as they are.
    """
    model = state.single
    spec, weights = narrowed(model.spec, model.posterior.mean, keep)
    kinds = {name.partition("/")[0] for name in state.memory if "/" in name}
    moved = {n: t for kind in sorted(kinds) for n, t in _moved(state.memory, kind, model.posterior.mean, keep).items()}
    return replace(state.fused(weights, spec=spec), memory={**state.memory, **moved})


def _moved(memory: Params, kind: str, params: Params, keep: Mapping[Group, Tensor]) -> dict[str, Tensor]:
    """One kind of memory, narrowed as the tensors it stands beside."""
    beside = {n: t for n, t in part(memory, kind).items() if n in params and t.shape == params[n].shape}
    there = {replace(g, places=tuple(p for p in g.places if p.tensor in beside)): units for g, units in keep.items()}
    return filed(kind, placed(beside, there))
