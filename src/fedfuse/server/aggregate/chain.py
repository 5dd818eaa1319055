"""Networks that are one layer after another, and how their hidden units become copies of common ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from fedfuse.core.messages import Cohort
from fedfuse.core.params import Layer, Params
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench
from fedfuse.errors import ConfigError
from fedfuse.linalg.atoms import AtomPrior, Odds, SharedAtoms, Units, share_atoms
from fedfuse.nets.channels import EMPTY, Group, channel_groups, move_units
from fedfuse.server.inputs import input_form

VarianceScale: TypeAlias = Literal["absolute", "layer"]


@dataclass(frozen=True, slots=True)
class Hidden:
    """A hidden layer: its units and every place they stand in, the layer that makes them, the one that reads them."""

    group: Group
    maker: Layer
    reader: Layer

    def outgoing(self, params: Params) -> Tensor:
        """What the next layer reads of each unit, one row per unit."""
        return self.group.readers[0].rows(params, self.group.size)


def hidden_layers(who: str, spec: Spec, bench: Bench) -> tuple[Hidden, ...]:
    """The hidden layers of a network that is one layer after another, from the inputs on.

    Raises:
        ConfigError: if it is no such network; the sentence begins with `who`.

    Example:
        >>> [h.maker.name for h in hidden_layers("fedma", Spec("lenet"), Bench())]
        ['conv1', 'conv2', 'fc1', 'fc2']
    """
    layers = {layer.weight: layer for layer in spec.layout.layers}
    found = [_hidden(group, layers) for group in channel_groups(spec, input_form(bench, spec).shape)]
    chain = [hidden for hidden in found if hidden is not None]
    if not found:
        raise ConfigError(f"{who} matches hidden units and model {spec.factory!r} has none; give it a hidden layer")
    if len(chain) < len(found) or any(a.reader != b.maker for a, b in pairwise(chain)):
        raise ConfigError(
            f"{who} goes layer by layer and model {spec.factory!r} is not one plain layer after another; "
            "use a network without shortcuts, grouped convolutions or Bayesian layers, or align by `otfusion`"
        )
    if mixing := [m for m in spec.skeleton().modules() if isinstance(m, nn.LayerNorm | nn.GroupNorm)]:
        raise ConfigError(
            f"{who} adds hidden units and model {spec.factory!r} normalizes over them by {type(mixing[0]).__name__}; "
            "use BatchNorm or no norm"
        )
    return tuple(chain)


def _hidden(group: Group, layers: Mapping[str, Layer]) -> Hidden | None:
    """The group as a hidden layer between two layers, if it is one."""
    makers = [layers[p.tensor] for p in group.makers if p.tensor in layers]
    readers = [layers[p.tensor] for p in group.readers if p.tensor in layers]
    plain = group.sections == 1 and all(p.blocks == 1 and p.offset == 0 for p in group.locations)
    plain = plain and all(layer.is_plain for layer in (*makers, *readers))  # a transposed convolution, say
    if not plain or len(makers) != 1 or len(group.readers) != 1 or len(readers) != 1:
        return None
    return Hidden(group, makers[0], readers[0])


def check_same_depth(who: str, chains: Mapping[str, tuple[Hidden, ...]]) -> None:
    """All chains are of the same layers, each as wide as it likes.

    Raises:
        ConfigError: naming the first two clients that differ, and how.
    """
    kinds = {client: [(h.maker.name, h.maker.kind) for h in chain] for client, chain in chains.items()}
    (first, most), *rest = kinds.items()
    for client, mine in rest:
        if mine != most:
            here, there = ("-".join(name for name, _ in layers) for layers in (mine, most))
            raise ConfigError(
                f"{who} matches layer with layer: {client or 'everybody else'} has {len(mine)} hidden layers ({here}) "
                f"and {first or 'everybody else'} {len(most)} ({there}); give all clients the same depth"
            )


@dataclass(frozen=True, slots=True)
class Matcher:
    """How units are matched: the Beta–Bernoulli process of `fedfuse.linalg.atoms`.

    Attributes:
        gamma: the process's mass; more makes more units.
        variance: σ², of a client's unit around the common one.
        prior_variance: σ₀², of common units around their prior's mean.
        bias_mean: the prior's mean of biases; weights have mean zero.
        sweeps: how often every client is matched again, at most.
        shrink: take the most probable units, which the prior shrinks, instead of the means of what was matched.
        odds: weigh a unit's popularity as derived, or as in the released code.
        scale: variances as they are ("absolute"), or as multiples of the mean square of a layer's weights, so that
            they mean the same in layers with large weights and with small ones ("layer").
    """

    gamma: float = 1.0
    variance: float = 1.0
    prior_variance: float = 1.0
    bias_mean: float = 0.1
    sweeps: int = 5
    shrink: bool = True
    odds: Odds = "exact"
    scale: VarianceScale = "absolute"

    def __call__(
        self, values: Sequence[Tensor], weights: Sequence[Tensor], mean: Tensor, draw: torch.Generator
    ) -> tuple[SharedAtoms, Tensor]:
        """Who shares which unit, and the shared units.

        Args:
            values: every client's units, one in each row.
            weights: for every client how much its coordinates count, or one number for all of them.
            mean: the prior's mean.
            draw: the order in which clients are matched again.
        """
        size = float(torch.cat(list(values)).square().mean()) if self.scale == "layer" else 1.0
        size = size or 1.0  # units that are all zero have no scale
        clients = [Units(v, w / (size * self.variance)) for v, w in zip(values, weights, strict=True)]
        belief = AtomPrior(mean, torch.ones_like(weights[0]) / (size * self.prior_variance), self.gamma, self.odds)
        found = share_atoms(clients, belief, sweeps=self.sweeps, draw=draw)
        return found, found.mode(belief) if self.shrink else found.mean()


def class_shares(cohort: Cohort, outputs: int) -> Tensor:
    """Each client's share of the rows of each class, n_kc / Σ_k n_kc; of a class without rows, an equal one.

    Returns:
        One row per client, one column per output of the network.
    """
    counts = torch.zeros(len(cohort), outputs, dtype=torch.float64)
    for row, update in zip(counts, cohort, strict=True):
        sent = update.notes["counts/labels"][:outputs]
        row[: len(sent)] = sent.double()
    total = counts.sum(0)
    return torch.where(total > 0, counts / total.clamp(min=1), 1 / len(cohort))


def expand_units(params: Params, hidden: Hidden, indices: Tensor, width: int) -> dict[str, Tensor]:
    """A client's network with its units at their common indices, among `width`; the other units are empty.

    It computes what it computed: nothing makes an empty unit, and nothing reads it.
    """
    order = torch.full((width,), EMPTY)
    order[indices.cpu()] = torch.arange(len(indices))
    return move_units(params, {hidden.group: order})


def select_units(params: Params, unit_indices: Mapping[Hidden, Tensor]) -> dict[str, Tensor]:
    """The part of the common network that is a client's own: for each hidden layer the units it takes part in."""
    widths = {h: len(params[h.maker.weight]) for h in unit_indices}
    return move_units(params, {replace(h.group, size=widths[h]): indices for h, indices in unit_indices.items()})
