"""Networks fused layer by layer from the inputs on, clients training the rest between two layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from fedfuse.core.messages import ClientUpdate, Cohort, Start
from fedfuse.core.params import Layer, Params
from fedfuse.core.seams import ServerPart
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState, filed, part
from fedfuse.errors import RecipeError
from fedfuse.linalg.atoms import Shared
from fedfuse.server.aggregate.chain import (
    Hidden,
    Matcher,
    class_shares,
    drawn_in,
    hidden_layers,
    same_depth,
    spread_out,
)
from fedfuse.server.aggregate.mean import largest, mean_by_examples


@dataclass(frozen=True, slots=True)
class MatchedLayers(ServerPart):
    """FedMA: one hidden layer is matched for good in every exchange, and clients train what comes after it.

    A unit is its incoming weights, patch by patch, and its bias; what a norm keeps of it is averaged over those who
    share it. An exchange matches every layer that is not settled yet, so that there is a whole model after each; the
    first of them is settled: clients get it, hold it and what is before it, and go on with their own later layers. When
    only the last layer is left, it is averaged, class by class, by the clients' shares of that class, and a pass is
    done: after it each client starts from the units it takes part in, and nothing is held. A pass over a network of H
    hidden layers takes H + 1 exchanges; the first alone is matching in one shot.

    Attributes:
        matcher: how units are matched.
    """

    matcher: Matcher = field(default_factory=partial(Matcher, gamma=7.0))
    needs: ClassVar[frozenset[str]] = frozenset({"counts", "network"})
    # one client alone is shrunk by the prior; another order of clients is another search
    laws: ClassVar[frozenset[str]] = frozenset({"scale", "pure", "dtype", "finite", "repeat"})
    mixes_networks: ClassVar[bool] = True

    def check_network(self, networks: Mapping[str, Spec], bench: Bench, rounds: int) -> None:  # noqa: ARG002
        """Every network is one layer after another, and all have the same ones; unseen inputs leave it for later."""
        try:
            chains = {client: hidden_layers("fedma", spec, bench) for client, spec in networks.items()}
        except RecipeError:  # nobody here knows what an input looks like
            return
        same_depth("fedma", chains)

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Match what is not settled, and settle its first layer."""
        chains = [hidden_layers("fedma", u.spec, bench) for u in cohort]
        same_depth("fedma", dict(zip(cohort.clients, chains, strict=True)))
        common = {n: state.single.posterior.mean[n] for n in part(state.memory, "held")}
        settled = sum(h.maker.weight in common for h in chains[0])
        clients: list[Params] = [dict(u.posterior.mean) | common for u in cohort]
        draw, memory, starts = bench.stream("sweeps", state.round), dict(state.memory), dict[str, Start]()
        for depth in range(settled, len(chains[0])):
            layers = [chain[depth] for chain in chains]
            found, made = self._match(layers, clients, draw)
            common |= made
            clients = [spread_out(c, h, p, len(found)) for c, h, p in zip(clients, layers, found.places, strict=True)]
            if depth == settled:
                starts = {u.client: _own(u, {**c, **common}) for u, c in zip(cohort, clients, strict=True)}
                places = dict(zip(cohort.clients, found.places, strict=True))
                memory |= _settled(layers[0]) | filed(f"places/{layers[0].maker.name}", places)
        common |= _last_layer(chains[0][-1].reader, clients, class_shares(cohort, _outputs(chains[0], clients)))
        mean = _whole(cohort, common)
        if settled == len(chains[0]):
            starts = _pass_done(cohort, chains[0], mean, memory)
            memory = {n: t for n, t in memory.items() if n.partition("/")[0] not in ("held", "places")}
        fused = replace(state.fused(mean, spec=cohort.updates[0].spec.resized(mean)), memory=memory, starts=starts)
        widths = {h.maker.name: len(mean[h.maker.weight]) for h in chains[0]}
        return fused.noting(widths=widths, settled=min(settled + 1, len(chains[0])))

    def _match(
        self, layers: Sequence[Hidden], clients: Sequence[Params], draw: torch.Generator
    ) -> tuple[Shared, dict[str, Tensor]]:
        """Who shares which unit of one layer, and the layer they make."""
        maker = layers[0].maker
        values = [h.maker.matrix(c).double() for h, c in zip(layers, clients, strict=True)]
        mean = values[0].new_zeros(values[0].shape[1])
        if maker.bias is not None:
            mean[-1] = self.matcher.bias_mean
        # a norm undoes any scale: shrunk weights would only be out of step with the statistics it keeps
        matcher = replace(self.matcher, shrink=False) if maker.followers else self.matcher
        found, units = matcher(values, [mean.new_ones(1)] * len(values), mean, draw)
        shape = clients[0][maker.weight].shape[1:]
        if maker.bias is None:
            made = {maker.weight: units.view(-1, *shape)}
        else:
            made = {maker.weight: units[:, :-1].reshape(-1, *shape), maker.bias: units[:, -1]}
        return found, made | {name: _followed(name, clients, found) for name in maker.followers}


def _followed(name: str, clients: Sequence[Params], found: Shared) -> Tensor:
    """What a norm keeps of common units: its mean over those who share a unit; a counter's largest value."""
    if not clients[0][name].is_floating_point():
        return largest(clients, name)
    total = torch.zeros(len(found), dtype=torch.float64)
    for client, place in zip(clients, found.places, strict=True):
        total[place] += client[name].double()
    return total / found.users


def _last_layer(last: Layer, clients: Sequence[Params], shares: Tensor) -> dict[str, Tensor]:
    """Σ_k s_kc w_kc: each class's weights by the clients' shares of its rows."""
    told: dict[str, Tensor] = {}
    for name in filter(None, (last.weight, last.bias)):
        sides = (1,) * (clients[0][name].ndim - 1)
        told[name] = sum((s.view(-1, *sides) * c[name] for s, c in zip(shares, clients, strict=True)), torch.zeros(()))
    return told


def _outputs(chain: Sequence[Hidden], clients: Sequence[Params]) -> int:
    return len(clients[0][chain[-1].reader.weight])


def _whole(cohort: Cohort, common: Params) -> dict[str, Tensor]:
    """The common network, tensors of no layer averaged, in the order and the dtypes of a client's."""
    first = cohort.updates[0].posterior.mean
    return {
        name: common[name].to(first[name].dtype, copy=True).contiguous()
        if name in common
        else mean_by_examples(cohort, name)
        for name in first
    }


def _own(update: ClientUpdate, params: Params) -> Start:
    """Where a client goes on: its own network with the common layers so far."""
    like = update.posterior.mean
    mean = {name: params[name].to(like[name].dtype, copy=True).contiguous() for name in like}
    return Start(update.spec.resized(mean), mean)


def _settled(hidden: Hidden) -> dict[str, Tensor]:
    """Everything of a layer, to be held by clients from now on."""
    maker = hidden.maker
    names = filter(None, (maker.weight, maker.bias, *maker.followers))
    return filed("held", {name: torch.ones((), dtype=torch.bool) for name in names})


def _pass_done(cohort: Cohort, chain: Sequence[Hidden], mean: Params, memory: Params) -> dict[str, Start]:
    """Every client that took part in all layers starts from its own units; the others from the whole network."""
    known = {h: part(memory, f"places/{h.maker.name}") for h in chain}
    starts: dict[str, Start] = {}
    for update in cohort:
        if all(update.client in places for places in known.values()):
            params = drawn_in(mean, {h: places[update.client] for h, places in known.items()})
            starts[update.client] = Start(update.spec.resized(params), params)
    return starts
