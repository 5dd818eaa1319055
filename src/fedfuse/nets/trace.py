"""Following an input through a network to find which axes of its tensors hold the same units.

The paths are those of torch-pruning's dependency graph (Fang et al., "DepGraph: Towards Any Structural Pruning",
2023). It takes what it does not know for an elementwise operation, so what it finds is not believed but proved: the
network, with random weights, must answer the same with every group permuted.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from fedfuse.core.inputs import reads_tokens
from fedfuse.core.rng import seeded, stream
from fedfuse.core.spec import Spec, drop_tied_names
from fedfuse.errors import ConfigError
from fedfuse.nets.channels import Group, Location, by_axis, move_units

_ROWS = 4  # inputs that go through the network: enough to tell functions apart
_TOLERANCE = 1e-7  # relative, in float64: rounding is a million times smaller, a unit out of place far larger

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm, nn.PReLU)
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_REMEDY = (
    "write it with layers of torch.nn, or give the network an attribute `channel_groups` with groups of your own "
    "(fedfuse.nets.channels.Group)"
)


def traced_groups(spec: Spec, shape: Sequence[int]) -> tuple[Group, ...]:
    """The groups of a network, proved; see `channel_groups`.

    Example:
        >>> [g.size for g in traced_groups(Spec("mlp", {"inputs": 4, "hidden": [3, 5], "classes": 2}), (4,))]
        [3, 5]
    """
    with seeded(0, "trace"), torch.enable_grad():
        net = _without_noise(spec.build())
        _randomize(net)
        x = _inputs(spec, tuple(shape))
        declared = getattr(net, "channel_groups", None)
        groups = _in_order(net, _follow(spec, net, x)) if declared is None else tuple(declared)
        _check_apart(spec, groups)
        _prove(spec, net, x, groups)
    return groups


def _inputs(spec: Spec, shape: tuple[int, ...]) -> Tensor:
    """Inputs that tell functions apart: normal numbers, or for a network that reads tokens the first two of them."""
    x = torch.randn(_ROWS, *shape, generator=stream(0, "trace")).double()
    return (x > 0).long() if reads_tokens(spec, shape) else x


def _check_apart(spec: Spec, groups: Sequence[Group]) -> None:
    """No position of a tensor may hold units of two kinds, which only tied weights make happen.

    Raises:
        ConfigError: naming the tied tensors.
    """
    for (tensor, _), here in by_axis(groups):
        ends = [location.offset + group.size * location.per for group, location in here if location.blocks == 1]
        if all(end <= location.offset for end, (_, location) in zip(ends, here[1:], strict=False)):
            continue
        tied = next((same for same in spec.layout.tied if tensor in same), (tensor,))
        raise ConfigError(
            f"model {spec.factory!r}: {' and '.join(tied)} are one tensor and hold units of several layers, which "
            "cannot move apart; untie them, or fuse without moving units"
        )


def _without_noise(net: nn.Module) -> nn.Module:
    """The network as a plain function: no dropout, and Bayesian layers at their means."""
    for part in net.modules():
        if isinstance(getattr(part, "noise", None), bool) and "noise" in vars(part):
            part.noise = False  # type: ignore[assignment]
    return net.double().eval().requires_grad_(True)


@torch.no_grad()
def _randomize(net: nn.Module) -> None:
    """Weights among which no two units are alike, so that no misplaced unit goes unseen."""
    draw = stream(0, "trace", "weights")
    for name, t in net.state_dict(keep_vars=True).items():
        if not t.is_floating_point():
            continue
        noise = torch.rand(t.shape, generator=draw, dtype=torch.float64)
        if t.ndim > 1:
            t.copy_((noise - 0.5) * math.sqrt(24 / t[0].numel()))
        else:
            t.copy_(noise + 0.5 if name.endswith(("weight", "running_var")) else noise - 0.5)


def _in_order(net: nn.Module, groups: Iterable[Group]) -> tuple[Group, ...]:
    """Groups and their locations in the order of the state dict, each named after the first layer that makes it."""
    rank = {name: i for i, name in enumerate(net.state_dict())}
    found = [replace(g, locations=tuple(sorted(g.locations, key=lambda p: (rank[p.tensor], p.axis)))) for g in groups]
    found = [replace(g, name=_maker(g) + g.name) for g in found]
    return tuple(sorted(found, key=lambda g: (rank[g.makers[0].tensor], g.makers[0].offset)))


def _maker(group: Group) -> str:
    return group.makers[0].tensor.rpartition(".")[0] or group.makers[0].tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """One end of a path: a module (or a bare parameter), the side of it that is touched, and the units there."""

    target: nn.Module | nn.Parameter
    reads: bool
    axis: int
    positions: dict[int, list[int]]


def _follow(spec: Spec, net: nn.Module, x: Tensor) -> Iterator[Group]:
    """The groups as torch-pruning's graph has them, without those that reach the input or the output."""
    import torch_pruning as tp

    gated = _GatedNetwork(net, x)
    graph = tp.DependencyGraph()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about operations it guesses; they are proved below
        try:
            graph.build_dependency(gated, x, verbose=False)
        except Exception as why:  # the user's own forward runs in here: whatever it raises is told
            raise ConfigError(
                f"model {spec.factory!r} cannot be followed with an input of shape {tuple(x.shape[1:])}: "
                f"{str(why).splitlines()[0][:200] if str(why) else type(why).__name__}; {_REMEDY}"
            ) from why
    names = _names(net)
    for found in graph.get_all_groups():
        targets = [item.dep.target for item in found]
        if any(t.module is gated.gate or t.type == tp.ops.OPTYPE.OUTPUT for t in targets):
            continue
        items = [_item(graph, item) for item in found if _holds_tensors(item.dep.target.module)]
        yield from _groups(spec, found[0].dep.target.module, items, names)


class _GatedNetwork(nn.Module):
    """The network between a norm and a product, so that a path which leads to its input or its output is seen."""

    def __init__(self, net: nn.Module, x: Tensor) -> None:
        super().__init__()
        kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
        known = x.ndim in kinds and x.is_floating_point()
        self.gate = kinds[x.ndim](x.shape[1]).double() if known else nn.Identity()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """What the network answers, in a step of its own."""
        return 1.0 * _first(self.net(self.gate(x)))


def _first(out: Any) -> Tensor:
    """The network's answer, or the first of several."""
    answer: Tensor = out[0] if isinstance(out, tuple | list) else out
    return answer


def _holds_tensors(target: nn.Module | nn.Parameter) -> bool:
    return isinstance(target, nn.Parameter) or any(True for _ in target.parameters(recurse=False))


def _item(graph: Any, item: Any) -> _Item:
    node = item.dep.target
    positions: dict[int, list[int]] = {}
    for position, root in zip(item.idxs, item.root_idxs, strict=True):
        positions.setdefault(root, []).append(position)
    handler = item.dep.handler
    reads = graph.is_in_channel_pruning_fn(handler) and not graph.is_out_channel_pruning_fn(handler)
    return _Item(node.module, reads, int(node.pruning_dim), positions)


def _names(net: nn.Module) -> dict[int, list[str]]:
    """Every name a tensor has in the state dict; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, t in net.state_dict(keep_vars=True).items():
        names.setdefault(id(t), []).append(name)
    return names


def _groups(spec: Spec, root: nn.Module, items: Sequence[_Item], names: dict[int, list[str]]) -> Iterator[Group]:
    """One group per stretch of units that stand in the same tensors."""
    units = sorted({unit for item in items for unit in item.positions})
    standing = {u: tuple(i for i, item in enumerate(items) if u in item.positions) for u in units}
    name = names[id(root.weight)][0].rpartition(".")[0] or "weight"
    for part, (here, stretch) in enumerate(groupby(units, key=standing.__getitem__)):
        run = list(stretch)
        locations: list[Location] = []
        section_sizes = [len(run)]
        for item in (items[i] for i in here):
            try:
                found = list(_locations(item, run, names))
            except _UnknownArrangement as why:
                raise ConfigError(
                    f"model {spec.factory!r}: the units of {name!r} reach {_what(item.target)} {why}; {_REMEDY}"
                ) from why
            spots = {(p.tensor, p.axis, p.offset) for p in locations}  # a tied weight may make and read the same units
            locations += [p for p in found if (p.tensor, p.axis, p.offset) not in spots]
            section_sizes.append(_section_size(item, len(run)))
        section_size = math.gcd(*section_sizes)
        if section_size > 1:
            yield Group(
                "" if len(run) == len(units) else f"[{part}]", len(run), tuple(locations), len(run) // section_size
            )


class _UnknownArrangement(Exception):
    """Units whose positions no `Location` can describe."""


def _what(target: object) -> str:
    return f"a layer {type(target).__name__}"


def _locations(item: _Item, run: Sequence[int], names: dict[int, list[str]]) -> Iterator[Location]:
    """The locations of a run of units in the tensors of one module."""
    target = item.target
    stretches = list(_stretches(item, run))
    blocks = target.groups if isinstance(target, _CONVS) and item.reads and not _is_depthwise(target) else 1
    if blocks > 1 and stretches != [(0, 1)]:
        raise _UnknownArrangement("with groups that do not fit the units before it")
    for tensor, axis in _axes(item):
        for name in names.get(id(tensor), []):
            reads = item.reads and not _is_depthwise(target)
            yield from (Location(name, axis, per, offset, blocks if axis else 1, reads) for offset, per in stretches)


def _axes(item: _Item) -> Iterable[tuple[Tensor, int]]:
    """The tensors of a module that hold the units, with the axis of each."""
    target = item.target
    own = [] if isinstance(target, nn.Parameter) else _own(target)
    match target:
        case nn.Parameter():
            return [(target, item.axis % target.ndim)]
        case nn.Linear() | nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            if item.reads and not _is_depthwise(target):
                return [(t, 1) for t in own if t.ndim > 1]
            return [(t, 0) for t in own]
        case nn.ConvTranspose1d() | nn.ConvTranspose2d() | nn.ConvTranspose3d() if target.groups == 1:
            return [(t, 0) for t in own if t.ndim > 1] if item.reads else [(t, 1 if t.ndim > 1 else 0) for t in own]
        case nn.LayerNorm():
            return [(t, t.ndim - 1) for t in own]
        case nn.Embedding():
            return [(t, 1) for t in own]
        case _ if isinstance(target, _NORMS):
            return [(t, 0) for t in own if t.numel() > 1]
    raise _UnknownArrangement("that fedfuse does not know")


def _own(part: nn.Module) -> list[Tensor]:
    """A module's floating tensors with at least one axis."""
    every = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    return [t for t in every if t.is_floating_point() and t.ndim]


def _is_depthwise(target: object) -> bool:
    return isinstance(target, _CONVS) and target.groups == target.in_channels == target.out_channels > 1


def _stretches(item: _Item, run: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where the units stand on the axis: an offset and a width for every time they occur."""
    first = sorted(item.positions[run[0]])
    begin = 0
    for end in range(1, len(first) + 1):
        if end == len(first) or first[end] != first[end - 1] + 1:
            offset, per = first[begin], end - begin
            begin = end
            stands = all(offset + i * per + k in set(item.positions[u]) for i, u in enumerate(run) for k in range(per))
            if not stands:
                raise _UnknownArrangement("in an order that is neither a flatten's nor a concatenation's")
            yield offset, per


def _section_size(item: _Item, size: int) -> int:
    """How many adjacent units of this module may be permuted among themselves."""
    target = item.target
    if isinstance(target, nn.GroupNorm):
        return target.num_channels // target.num_groups
    if isinstance(target, _CONVS) and not _is_depthwise(target):
        return (target.in_channels if item.reads else target.out_channels) // target.groups
    return size


@torch.no_grad()
def _prove(spec: Spec, net: nn.Module, x: Tensor, groups: tuple[Group, ...]) -> None:
    """Permute every group; the network must not notice.

    Raises:
        ConfigError: naming the group whose units cannot be moved.
    """
    weights = drop_tied_names(spec, net.state_dict())
    before = _answer(net, weights, x)
    shuffled = {_within(group, weights): _shuffle(group) for group in groups}
    if _same(before, _answer(net, move_units(weights, shuffled), x)):
        return
    for group, order in shuffled.items():
        if not _same(before, _answer(net, move_units(weights, {group: order}), x)):
            raise ConfigError(
                f"model {spec.factory!r}: moving the units of {group.name!r} changes what the network answers"
                f"{_suspects(net, x)}{_ties(spec)}; {_REMEDY}"
            )


def _within(group: Group, weights: dict[str, Tensor]) -> Group:
    """The group without the further names of tied tensors."""
    return replace(group, locations=tuple(p for p in group.locations if p.tensor in weights))


def _answer(net: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    return _first(torch.func.functional_call(net, weights, (x,)))


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= _TOLERANCE * a.abs().max().clamp(min=1e-30))


def _shuffle(group: Group) -> Tensor:
    """A random order within the group's sections that leaves no unit where it was."""
    section_size = group.size // group.sections
    draw = stream(0, "trace", group.name)
    parts = []
    for start in range(0, group.size, section_size):
        order = torch.randperm(section_size, generator=draw)
        moved = torch.empty_like(order)
        moved[order] = order.roll(1)  # along one cycle, everybody moves
        parts.append(start + moved)
    return torch.cat(parts)


def _ties(spec: Spec) -> str:
    pairs = [" and ".join(same) for same in spec.layout.tied]
    return f" ({', '.join(pairs)} are one tensor, which moves as one)" if pairs else ""


def _suspects(net: nn.Module, x: Tensor) -> str:
    """The operations other than layers between here and the output, by autograd's names for them."""
    with torch.enable_grad():
        stack = [_first(net(x)).grad_fn]
    seen: set[Any] = set()
    names: list[str] = []
    while stack:
        step = stack.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        name = step.name().removesuffix("0").removesuffix("Backward")
        if name not in names and not name.startswith(_KNOWN):
            names.append(name)
        stack += [following for following, _ in step.next_functions]
    return f" (it uses {', '.join(names)}, which cannot be followed)" if names else ""


_KNOWN = (
    *("torch::autograd::AccumulateGrad", "Relu", "Add", "Mean", "MaxPool", "AvgPool", "AdaptiveAvgPool", "Cat", "View"),
    *("Addmm", "Mm", "T", "Convolution", "NativeBatchNorm", "NativeLayerNorm", "NativeGroupNorm", "Gelu", "Silu"),
    *("ReshapeAlias", "Dropout", "Mul", "Sub", "Div", "Sigmoid", "Tanh", "CudnnBatchNorm", "Unsafe", "Squeeze"),
)
