"""Fully connected networks fused unit by unit, from the last hidden layer to the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfuse.core.messages import Cohort, Start
from fedfuse.core.params import Params
from fedfuse.core.rows import Rows
from fedfuse.core.seams import ServerPart
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError
from fedfuse.server.aggregate.chain import (
    Hidden,
    Matcher,
    class_shares,
    drawn_in,
    hidden_layers,
    same_depth,
    spread_out,
)


class Fit(NamedTuple):
    """What clients' networks become: the common weights in float64, and for each client where its units went."""

    params: dict[str, Tensor]
    places: tuple[dict[Hidden, Tensor], ...]


@dataclass(frozen=True, slots=True)
class MatchedUnits(ServerPart):
    """PFNM: hidden units of all clients become noisy copies of common ones; the network is as wide as it must be.

    A unit is its bias and its outgoing weights, in the first hidden layer its incoming weights too. Layers are matched
    from the last to the first, outgoing weights re-ordered and padded with zeros to the next layer's common units. What
    a client says of class c counts by its share of that class's rows. Of several hyper-parameters those are taken that
    are best on the server's rows; without such rows the first of each. In a further round each client starts from the
    units it takes part in.

    Attributes:
        gammas: num_examples of the process to choose from.
        variances: σ² to choose from.
        prior_variances: σ₀² to choose from.
        matcher: the rest of how units are matched.
    """

    gammas: tuple[float, ...] = (1.0, 1e-3, 50.0)
    variances: tuple[float, ...] = (1.0, 0.1, 0.5)
    prior_variances: tuple[float, ...] = (1.0, 10.0)
    matcher: Matcher = field(default_factory=Matcher)
    needs: ClassVar[frozenset[str]] = frozenset({"counts", "network"})
    # one client alone is shrunk by the prior; another order of clients is another search
    laws: ClassVar[frozenset[str]] = frozenset({"scale", "pure", "dtype", "finite", "repeat"})
    mixes_networks: ClassVar[bool] = True

    def check_network(self, networks: Mapping[str, Spec], bench: Bench, rounds: int) -> None:  # noqa: ARG002
        """Every network is fully connected, and all have the same depth."""
        same_depth("pfnm", {client: _layers(spec, bench) for client, spec in networks.items()})

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Match with every choice of hyper-parameters and keep the best."""
        chains = {u.client: _layers(u.spec, bench) for u in cohort}
        same_depth("pfnm", chains)
        clients = [{n: t.double() for n, t in u.posterior.mean.items()} for u in cohort]
        first, layers = cohort.updates[0], chains[cohort.clients[0]]
        shares = class_shares(cohort, len(clients[0][layers[-1].reader.weight]))
        fits = {
            m: match_units(clients, list(chains.values()), shares, m, bench.stream("sweeps", state.round))
            for m in self._choices(bench)
        }
        best = max(fits, key=lambda m: _score(fits[m].params, first.spec, bench.rows))
        mean = {n: fits[best].params[n].to(t.dtype).contiguous() for n, t in first.posterior.mean.items()}
        starts = {
            u.client: Start(u.spec, drawn_in(mean, places)) for u, places in zip(cohort, fits[best].places, strict=True)
        }
        facts = {"gamma": best.gamma, "variance": best.variance, "prior_variance": best.prior_variance}
        widths = {h.maker.name: len(mean[h.maker.weight]) for h in layers}
        fused = state.fused(mean, spec=first.spec.resized(mean))
        return replace(fused, starts=starts).noting(widths=widths, **facts)

    def _choices(self, bench: Bench) -> Iterator[Matcher]:
        """Every combination, or the first one where there are no rows to choose by."""
        for gamma, variance, prior_variance in product(self.gammas, self.variances, self.prior_variances):
            yield replace(self.matcher, gamma=gamma, variance=variance, prior_variance=prior_variance)
            if bench.rows is None:
                return


def match_units(
    clients: Sequence[Params],
    chains: Sequence[tuple[Hidden, ...]],
    shares: Tensor,
    matcher: Matcher,
    draw: torch.Generator,
) -> Fit:
    """Match the hidden units of fully connected networks, the last layer first.

    Args:
        clients: everybody's weights, float64.
        chains: everybody's hidden layers, as many for each.
        shares: each client's share of each class.
        matcher: how units are matched.
        draw: the order of sweeps.
    """
    params, places = dict[str, Tensor](), tuple(dict[Hidden, Tensor]() for _ in clients)
    last = chains[0][-1].reader
    if last.bias is not None:
        params[last.bias] = _shared_bias(torch.stack([c[last.bias] for c in clients]), shares, matcher)
    ahead = shares  # how much what each client says of each unit of the next layer counts
    for depth in reversed(range(len(chains[0]))):
        layers = [chain[depth] for chain in chains]
        parts = [_coordinates(h, c, first=depth == 0) for h, c in zip(layers, clients, strict=True)]
        sizes = [part.shape[1] for part in parts[0]]
        mean = torch.cat(
            [torch.full((n,), m).double() for n, m in zip(sizes, (0.0, matcher.bias_mean, 0.0), strict=True)]
        )
        weights = F.pad(ahead, (sizes[0] + sizes[1], 0), value=1.0)
        found, units = matcher([torch.cat(p, 1) for p in parts], list(weights), mean, draw)
        params |= _weights(layers[0], units.split(sizes, 1))
        for mine, hidden, place in zip(places, layers, found.places, strict=True):
            mine[hidden] = place
        moves = zip(clients, layers, found.places, strict=True)
        clients = [spread_out(c, hidden, place, len(found)) for c, hidden, place in moves]
        ahead = torch.ones(len(clients), len(found), dtype=torch.float64)
    return Fit(params, places)


def _coordinates(hidden: Hidden, params: Params, first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A client's units: incoming weights where nothing was matched before them, biases, outgoing weights."""
    weight, bias = params[hidden.maker.weight], hidden.maker.bias
    nothing = weight[:, :0]
    return weight if first else nothing, nothing if bias is None else params[bias][:, None], hidden.outgoing(params)


def _weights(hidden: Hidden, units: Sequence[Tensor]) -> dict[str, Tensor]:
    """The inverse of `_coordinates`."""
    incoming, bias, outgoing = units
    told = {hidden.reader.weight: outgoing.T}
    if incoming.shape[1]:
        told[hidden.maker.weight] = incoming
    return told if hidden.maker.bias is None else told | {hidden.maker.bias: bias[:, 0]}


def _shared_bias(biases: Tensor, shares: Tensor, matcher: Matcher) -> Tensor:
    """The outputs' biases: each client's count by its share of the class, and the prior's mean as it is believed."""
    if not matcher.shrink:
        return (shares * biases).sum(0)
    ratio = matcher.variance / matcher.prior_variance
    return ((shares * biases).sum(0) + ratio * matcher.bias_mean) / (1 + ratio)  # shares sum to one


def _layers(spec: Spec, bench: Bench) -> tuple[Hidden, ...]:
    """The hidden layers of a fully connected network."""
    own = {name for layer in spec.layout.layers if layer.kind == "linear" for name in (layer.weight, layer.bias)}
    if other := [name for name in spec.layout.roles if name not in own]:
        raise ConfigError(
            f"pfnm matches the units of fully connected networks and model {spec.factory!r} has {other[0]!r}; "
            "use an mlp, or fedma for convolutions and BatchNorm"
        )
    return hidden_layers("pfnm", spec, bench)


def _score(params: Params, spec: Spec, rows: Rows | None) -> tuple[float, float]:
    """Accuracy on the server's rows; of equals, the lower cross entropy."""
    if rows is None:
        return 0.0, 0.0
    with torch.no_grad():
        logits = spec.resized(params).forward({n: t.to(rows.x.dtype) for n, t in params.items()}, rows.x)
    return float((logits.argmax(1) == rows.y).double().mean()), -float(F.cross_entropy(logits, rows.y))
