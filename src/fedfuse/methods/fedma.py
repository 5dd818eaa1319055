"""Wang et al., Federated Learning with Matched Averaging, ICLR 2020 (FedMA).

Hidden units of all clients are matched as in PFNM, but one layer an exchange, from the inputs on (Algorithm 1):

    server   units of layer l are matched by their incoming weights; the common layer is fixed      `MatchedLayers`
             each client's next layer is re-ordered and padded to the common units                  `expand_units`
    client   trains the layers after l, the fixed ones held                                         publishes "held"

The last layer is averaged class by class, by the clients' shares of each class, for which they send label counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from fedfuse.client.class_sums import LabelCounts
from fedfuse.core.messages import ClientUpdate, Cohort, Start
from fedfuse.core.params import Layer, Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import ServerPart
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState, entries_of, with_kind
from fedfuse.errors import RecipeError
from fedfuse.linalg.atoms import Odds, SharedAtoms
from fedfuse.server.aggregate.chain import (
    Hidden,
    Matcher,
    VarianceScale,
    check_same_depth,
    class_shares,
    expand_units,
    hidden_layers,
    select_units,
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

    reshapes: ClassVar[bool] = True
    matcher: Matcher = field(default_factory=partial(Matcher, gamma=7.0))
    needs: ClassVar[frozenset[str]] = frozenset({"counts", "network"})
    # one client alone is shrunk by the prior; another order of clients is another search
    laws: ClassVar[frozenset[str]] = frozenset({"scale", "pure", "dtype", "finite", "repeat"})
    mixes_networks: ClassVar[bool] = True

    def check_network(self, networks: Mapping[str, Spec], bench: Bench, rounds: int) -> None:  # noqa: ARG002
        """Every network is one layer after another, and all have the same ones; unseen inputs leave it for later."""
        try:
            chains = {client: hidden_layers("fedma", spec, bench) for client, spec in networks.items()}
        except RecipeError:  # the shape of an input is not known yet
            return
        check_same_depth("fedma", chains)

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Match what is not settled, and settle its first layer."""
        chains = [hidden_layers("fedma", u.spec, bench) for u in cohort]
        check_same_depth("fedma", dict(zip(cohort.clients, chains, strict=True)))
        common = {n: state.single.posterior.mean[n] for n in entries_of(state.memory, "held")}
        settled = sum(h.maker.weight in common for h in chains[0])
        clients: list[Params] = [dict(u.posterior.mean) | common for u in cohort]
        draw, memory, starts = bench.stream("sweeps", state.round), dict(state.memory), dict[str, Start]()
        for depth in range(settled, len(chains[0])):
            layers = [chain[depth] for chain in chains]
            found, tensors = self._match(layers, clients, draw)
            common |= tensors
            clients = [
                expand_units(c, h, p, len(found)) for c, h, p in zip(clients, layers, found.assignment, strict=True)
            ]
            if depth == settled:
                starts = {u.client: _client_start(u, {**c, **common}) for u, c in zip(cohort, clients, strict=True)}
                unit_indices = dict(zip(cohort.clients, found.assignment, strict=True))
                maker = layers[0].maker
                held = [n for n in (maker.weight, maker.bias, *maker.followers) if n is not None]
                memory |= with_kind("held", {n: torch.ones((), dtype=torch.bool) for n in held})
                memory |= with_kind(f"places/{maker.name}", unit_indices)
        last = chains[0][-1].reader
        common |= _last_layer(last, clients, class_shares(cohort, len(clients[0][last.weight])))
        mean = _complete_network(cohort, common)
        if settled == len(chains[0]):
            starts = _starts_after_pass(cohort, chains[0], mean, memory)
            memory = {n: t for n, t in memory.items() if n.partition("/")[0] not in ("held", "places")}
        fused = replace(
            state.fused(mean, spec=cohort.updates[0].spec.with_shapes_of(mean)), memory=memory, starts=starts
        )
        widths = {h.maker.name: len(mean[h.maker.weight]) for h in chains[0]}
        return fused.noting(widths=widths, settled=min(settled + 1, len(chains[0])))

    def _match(
        self, layers: Sequence[Hidden], clients: Sequence[Params], draw: torch.Generator
    ) -> tuple[SharedAtoms, dict[str, Tensor]]:
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
            tensors = {maker.weight: units.view(-1, *shape)}
        else:
            tensors = {maker.weight: units[:, :-1].reshape(-1, *shape), maker.bias: units[:, -1]}
        return found, tensors | {name: _fuse_follower(name, clients, found) for name in maker.followers}


def _fuse_follower(name: str, clients: Sequence[Params], found: SharedAtoms) -> Tensor:
    """What a norm keeps of common units: its mean over those who share a unit; a counter's largest value."""
    if not clients[0][name].is_floating_point():
        return largest(clients, name)
    total = torch.zeros(len(found), dtype=torch.float64)
    for client, indices in zip(clients, found.assignment, strict=True):
        total[indices] += client[name].double()
    return total / found.users


def _last_layer(last: Layer, clients: Sequence[Params], shares: Tensor) -> dict[str, Tensor]:
    """Σ_k s_kc w_kc: each class's weights by the clients' shares of its rows."""
    averaged: dict[str, Tensor] = {}
    for name in filter(None, (last.weight, last.bias)):
        sides = (1,) * (clients[0][name].ndim - 1)
        averaged[name] = sum(
            (s.view(-1, *sides) * c[name] for s, c in zip(shares, clients, strict=True)), torch.zeros(())
        )
    return averaged


def _complete_network(cohort: Cohort, common: Params) -> dict[str, Tensor]:
    """The common network, tensors of no layer averaged, in the order and the dtypes of a client's."""
    first = cohort.updates[0].posterior.mean
    return {
        name: common[name].to(first[name].dtype, copy=True).contiguous()
        if name in common
        else mean_by_examples(cohort, name)
        for name in first
    }


def _client_start(update: ClientUpdate, params: Params) -> Start:
    """Where a client goes on: its own network with the common layers so far."""
    like = update.posterior.mean
    mean = {name: params[name].to(like[name].dtype, copy=True).contiguous() for name in like}
    return Start(update.spec.with_shapes_of(mean), mean)


def _starts_after_pass(cohort: Cohort, chain: Sequence[Hidden], mean: Params, memory: Params) -> dict[str, Start]:
    """Every client that took part in all layers starts from its own units; the others from the whole network."""
    known = {h: entries_of(memory, f"places/{h.maker.name}") for h in chain}
    starts: dict[str, Start] = {}
    for update in cohort:
        if all(update.client in unit_indices for unit_indices in known.values()):
            params = select_units(mean, {h: unit_indices[update.client] for h, unit_indices in known.items()})
            starts[update.client] = Start(update.spec.with_shapes_of(params), params)
    return starts


@method("fedma", paper="arXiv:2002.06440", family="matched")
def fedma(
    gamma: PositiveFloat = 7.0,
    variance: PositiveFloat = 1.0,
    prior_variance: PositiveFloat = 1.0,
    bias_mean: float = 0.1,
    sweeps: PositiveInt = 5,
    shrink: bool = True,
    odds: Odds = "exact",
    scale: VarianceScale = "absolute",
) -> Recipe:
    """Match hidden units layer by layer from the inputs on; between two layers clients train what comes after.

    In every exchange one more hidden layer is settled: clients hold it and all before it. The last layer is averaged,
    class by class, by the clients' shares of each class. A network of H hidden layers takes H + 1 rounds for a pass,
    and further passes start from the units each client takes part in; with rounds = 1 all layers are matched at once.

    Args:
        gamma: mass of the process; more makes wider networks.
        variance: σ², how far a client's unit is from the common one.
        prior_variance: σ₀², how far common units are from the prior's mean.
        bias_mean: the prior's mean of biases; that of weights is zero.
        sweeps: how often every client is matched again, at most.
        shrink: take the most probable units, m/(m + σ²/σ₀²) of the mean of m clients' copies; else the mean itself.
            Before a norm, which undoes any scale, it is always the mean.
        odds: weigh a unit's popularity by 2 log(m/(J − m)), as derived ("exact"), or half as much ("released").
        scale: take variances as they are, or as multiples of the mean square of a layer's weights ("layer").
    """
    matcher = Matcher(gamma, variance, prior_variance, bias_mean, sweeps, shrink, odds, scale)
    return Recipe(evidence=(LabelCounts(),), aggregate=MatchedLayers(matcher), publishes=("held",))
