"""Matching units by their activations on the same inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedfuse.core.spec import drop_tied_names
from fedfuse.core.state import Bench
from fedfuse.core.torch_utils import forward_hooks
from fedfuse.errors import ConfigError
from fedfuse.nets.channels import Group, Location
from fedfuse.server.align.nets import Moves, Net
from fedfuse.server.align.weights import PAIRWISE_LAWS, best_order
from fedfuse.server.inputs import input_form

Likeness = Literal["correlation", "distance"]
Inputs = Literal["auto", "server", "synthetic"]

_BATCH = 64
_WATCHED = (nn.Linear, nn.modules.conv._ConvNd)


@dataclass(frozen=True, slots=True)
class ByActivations:
    """Match every unit with the reference's unit whose activations are most like its own.

    Units are compared by what the layers that make them give, before any norm or ReLU, on the same inputs; one exact
    assignment per group, no iteration. Units that no linear layer or convolution makes, such as those of a recurrent
    layer or the heads of an attention, give nothing that could be watched and stay where they are.

    Attributes:
        likeness: "correlation" of two units' answers over inputs and positions, or their Euclidean "distance".
        inputs: the "server"'s rows, "synthetic" noise over the inputs' range, or "auto" for rows where there are any.
        rows: how many inputs at most.
    """

    likeness: Likeness = "correlation"
    inputs: Inputs = "auto"
    rows: int = 256
    any_width: ClassVar[bool] = False
    laws: ClassVar[frozenset[str]] = PAIRWISE_LAWS

    def __post_init__(self) -> None:
        check_rows(self.rows)

    @property
    def needs(self) -> frozenset[str]:
        """Rows, where the user insists on them."""
        return frozenset({"server_rows"}) if self.inputs == "server" else frozenset()

    def __call__(self, nets: Sequence[Net], reference: Net, bench: Bench) -> list[Moves]:
        """An order for every group of every network."""
        x = probes(reference, bench, self.inputs, self.rows)
        return [self._match(reference, net, x) for net in nets]

    def _match(self, reference: Net, net: Net, x: Tensor) -> Moves:
        moments = cross_moments(reference, net, x)
        orders = {}
        for group in net.groups:
            if (found := moments[group.name]).count:
                gain = found.correlation() if self.likeness == "correlation" else -found.distance()
                orders[group.name] = best_order(gain, group.sections)
        return orders


def check_rows(rows: int) -> None:
    """Refuse to compare activations on nothing."""
    if rows < 1:
        raise ConfigError(f"comparing activations: rows is {rows}, expected at least one")


def probes(net: Net, bench: Bench, inputs: Inputs, rows: int) -> Tensor:
    """The inputs on which units are compared: the server's, or noise."""
    if inputs == "server":
        return _sample_evenly(bench.need_rows("comparing activations on the server's rows").x, rows)
    if inputs == "auto" and bench.rows is not None and len(bench.rows):
        return _sample_evenly(bench.rows.x, rows)
    if inputs == "auto" and bench.unlabelled is not None and len(bench.unlabelled):
        return _sample_evenly(bench.unlabelled, rows)
    draw = bench.stream("probes")
    if bench.inputs is not None:
        return bench.inputs.noise(rows, draw)
    return torch.randn(rows, *input_form(bench, net.spec).shape, generator=draw)


def _sample_evenly(x: Tensor, rows: int) -> Tensor:
    """At most so many rows at even distances, since rows of one class often come one after the other."""
    return x[:: -(-len(x) // rows)]


@dataclass(slots=True, eq=False)
class PairMoments:
    """Sums over inputs and positions of two networks' answers a and b: Σ 1, Σ a, Σ b, Σ a², Σ b², Σ a bᵀ."""

    count: int
    a: Tensor
    b: Tensor
    aa: Tensor
    bb: Tensor
    ab: Tensor

    @classmethod
    def empty(cls, a: int, b: int) -> PairMoments:
        """The moments of no inputs at all."""
        zeros = [torch.zeros(shape, dtype=torch.float64) for shape in ((a,), (b,), (a,), (b,), (a, b))]
        return cls(0, *zeros)

    def add(self, a: Tensor, b: Tensor) -> None:
        """Add more activations, (units × samples) each."""
        self.count += a.shape[1]
        self.a += a.sum(1).double()
        self.b += b.sum(1).double()
        self.aa += a.square().sum(1).double()
        self.bb += b.square().sum(1).double()
        self.ab += (a @ b.mT).double()

    def correlation(self) -> Tensor:
        """Pearson's correlation of every pair of units; zero for a unit that always answers the same."""
        n = max(1, self.count)
        covariance = self.ab / n - self.a[:, None] * self.b / n**2
        sums = (self.a, self.aa), (self.b, self.bb)
        std_a, std_b = ((squares / n - (s / n).square()).clamp(min=0).sqrt() for s, squares in sums)
        scale = std_a[:, None] * std_b
        return torch.where(scale > 1e-12, covariance / scale.clamp(min=1e-12), 0.0)

    def distance(self) -> Tensor:
        """The Euclidean distance between the answers of every pair of units, per answer."""
        squares = self.aa[:, None] + self.bb - 2 * self.ab
        return (squares.clamp(min=0) / max(1, self.count)).sqrt()


@torch.no_grad()
def cross_moments(reference: Net, net: Net, x: Tensor) -> dict[str, PairMoments]:
    """Per group, the joint moments of two networks' activations."""
    pairs = list(zip(reference.groups, net.groups, strict=True))
    moments = {ours.name: PairMoments.empty(theirs.size, ours.size) for theirs, ours in pairs}
    for batch in x.split(_BATCH):
        a, b = (_activations(one, batch) for one in (reference, net))
        for theirs, ours in pairs:
            for mine, yours in zip(a[theirs.name], b[ours.name], strict=True):
                moments[ours.name].add(mine, yours)
    return moments


def _activations(net: Net, x: Tensor) -> Mapping[str, list[Tensor]]:
    """Per group, the output of each layer that makes its units, (units × samples)."""
    module = net.spec.skeleton()
    own = drop_tied_names(net.spec, net.params)
    params = {n: t.float() if t.is_floating_point() else t for n, t in own.items()}
    with _recording(module, net) as outputs:
        functional_call(module, params, (x,))
    return outputs


@contextmanager
def _recording(module: nn.Module, net: Net) -> Iterator[dict[str, list[Tensor]]]:
    """A list per group into which every output of a layer that makes its units is written."""
    outputs: dict[str, list[Tensor]] = {group.name: [] for group in net.groups}
    weights = frozenset(net.spec.layout.with_role("weight"))
    makers = ((group, place) for group in net.groups for place in group.makers if place.tensor in weights)
    hooks = (
        (layer, _ActivationHook(outputs[group.name], group, place))
        for group, place in makers
        if isinstance(layer := module.get_submodule(place.tensor.rpartition(".")[0]), _WATCHED)
    )
    with forward_hooks(hooks):
        yield outputs


@dataclass(frozen=True, slots=True, eq=False)
class _ActivationHook:
    """A forward hook that appends the outputs of a layer's units to a list."""

    outputs: list[Tensor]
    group: Group
    place: Location

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG002
        axis = output.ndim - 1 if isinstance(module, nn.Linear) else 1
        units = output.detach().narrow(axis, self.place.offset, self.group.size * self.place.per)
        self.outputs.append(units.movedim(axis, 0).reshape(self.group.size, -1))
