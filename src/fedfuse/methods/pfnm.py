"""Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, ICML 2019 (PFNM).

A hidden unit is a vector: its incoming weights, bias and outgoing weights. Units of all clients are noisy copies of
common ones under a Beta–Bernoulli process,

    θ_i ~ N(μ₀, σ₀²),      v_kj | θ_i ~ N(θ_i, σ²)  for the unit j of client k that is assigned to i,

with mass γ: how readily units get a common one of their own. `match_units` goes through the layers from the last to the
first; in each, `Matcher` (aggregate/chain.py, linalg/atoms.py) assigns client after client by the Hungarian method and
takes the posterior mean of the m copies of a unit, Σ v / (m + σ²/σ₀²) for μ₀ = 0. Clients train as in FedAvg and send
their label counts, by which the last layer's answers are weighed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, ClassVar, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from fedfuse.client.class_sums import LabelCounts
from fedfuse.core.messages import Cohort, Start
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.rows import Rows
from fedfuse.core.seams import ServerPart
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError
from fedfuse.linalg.atoms import Odds
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


class Fit(NamedTuple):
    """What clients' networks become: the common weights in float64, and for each client where its units went."""

    params: dict[str, Tensor]
    unit_indices: tuple[dict[Hidden, Tensor], ...]


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

    reshapes: ClassVar[bool] = True
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
        check_same_depth("pfnm", {client: _layers(spec, bench) for client, spec in networks.items()})

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """Match with every choice of hyper-parameters and keep the best."""
        chains = {u.client: _layers(u.spec, bench) for u in cohort}
        check_same_depth("pfnm", chains)
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
            u.client: Start(u.spec, select_units(mean, unit_indices))
            for u, unit_indices in zip(cohort, fits[best].unit_indices, strict=True)
        }
        facts = {"gamma": best.gamma, "variance": best.variance, "prior_variance": best.prior_variance}
        widths = {h.maker.name: len(mean[h.maker.weight]) for h in layers}
        fused = state.fused(mean, spec=first.spec.with_shapes_of(mean))
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
        clients: all clients' weights, float64.
        chains: their hidden layers, equally many for each.
        shares: each client's share of each class.
        matcher: how units are matched.
        draw: the order of sweeps.
    """
    params, unit_indices = dict[str, Tensor](), tuple(dict[Hidden, Tensor]() for _ in clients)
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
        for mine, hidden, indices in zip(unit_indices, layers, found.assignment, strict=True):
            mine[hidden] = indices
        moves = zip(clients, layers, found.assignment, strict=True)
        clients = [expand_units(c, hidden, indices, len(found)) for c, hidden, indices in moves]
        ahead = torch.ones(len(clients), len(found), dtype=torch.float64)
    return Fit(params, unit_indices)


def _coordinates(hidden: Hidden, params: Params, first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """A client's units: incoming weights where nothing was matched before them, biases, outgoing weights."""
    weight, bias = params[hidden.maker.weight], hidden.maker.bias
    nothing = weight[:, :0]
    return weight if first else nothing, nothing if bias is None else params[bias][:, None], hidden.outgoing(params)


def _weights(hidden: Hidden, units: Sequence[Tensor]) -> dict[str, Tensor]:
    """The inverse of `_coordinates`."""
    incoming, bias, outgoing = units
    tensors = {hidden.reader.weight: outgoing.T}
    if incoming.shape[1]:
        tensors[hidden.maker.weight] = incoming
    return tensors if hidden.maker.bias is None else tensors | {hidden.maker.bias: bias[:, 0]}


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
        logits = spec.with_shapes_of(params).forward({n: t.to(rows.x.dtype) for n, t in params.items()}, rows.x)
    return float((logits.argmax(1) == rows.y).double().mean()), -float(F.cross_entropy(logits, rows.y))


Choices: TypeAlias = Annotated[tuple[PositiveFloat, ...], Field(min_length=1)]


@method("pfnm", paper="arXiv:1905.12022", family="matched")
def pfnm(
    gamma: Choices = (1.0, 1e-3, 50.0),
    variance: Choices = (1.0, 0.1, 0.5),
    prior_variance: Choices = (1.0, 10.0),
    bias_mean: float = 0.1,
    sweeps: PositiveInt = 5,
    shrink: bool = True,
    odds: Odds = "exact",
    scale: VarianceScale = "absolute",
) -> Recipe:
    """Match the hidden units of fully connected networks; the common network grows as wide as they differ.

    Every client's unit is a noisy copy of a common one, and a Beta–Bernoulli process says how many of those there are.
    The best choice of hyper-parameters on the server's rows is taken; without such rows the first of each.

    Args:
        gamma: masses of the process to choose from; more makes wider networks.
        variance: choices of σ², how far a client's unit is from the common one.
        prior_variance: choices of σ₀², how far common units are from the prior's mean.
        bias_mean: the prior's mean of biases; that of weights is zero.
        sweeps: how often every client is matched again, at most.
        shrink: take the most probable units, m/(m + σ²/σ₀²) of the mean of m clients' copies; else the mean itself.
        odds: weigh a unit's popularity by 2 log(m/(J − m)), as derived ("exact"), or half as much ("released").
        scale: take variances as they are, or as multiples of the mean square of a layer's weights ("layer").
    """
    matcher = Matcher(bias_mean=bias_mean, sweeps=sweeps, shrink=shrink, odds=odds, scale=scale)
    return Recipe(evidence=(LabelCounts(),), aggregate=MatchedUnits(gamma, variance, prior_variance, matcher))
