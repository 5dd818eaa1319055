"""Following positions: which positions of which weights a network's operations bind to each other.

Every axis of every tensor carries labels, one per position. A weight begins with labels of its own; an operation hands
them on and binds them: a product binds what it contracts, a sum what it adds, a norm a channel to its scale. What is
bound moves together or not at all. An operation that tells positions apart, or that is not in `_RULES`, pins the labels
it touches: they stay where they are, and the reason is kept. Read `follow` first, then `Follower` and `_RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Labels = npt.NDArray[np.int64]
FIXED, ANY = 0, -1  # the label of a position as such (a pixel, a row, an input), and of one that is like all others
POSITION, OUTPUT, POSITION_IN_BLOCK = "bound to positions", "outputs", "blocks"  # why labels are pinned


class Axis(NamedTuple):
    """The labels on one axis, and the split of an axis that it came from: its number, and which part it is."""

    labels: Labels
    split: tuple[int, int] | None = None


Axes = list[Axis]


def follow(net: nn.Module, x: Tensor) -> Follower:
    """What a network binds when it answers these inputs; its answer's positions are pinned as outputs."""
    recorder = Recorder()
    plain = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with torch.no_grad(), plain, _slow_attention(), recorder:
        answer = tensors_in([net(x)])[0]
    # `Follower.split` guesses which part of an axis holds the units, the first along which they change, and `pick`
    # finds a guess wrong. Then the network is followed again without that part: `excluded` only grows, so this ends
    # after at most one turn for every part of every split.
    calls, excluded = recorder.calls_for(answer), dict[int, set[int]]()
    while True:
        follower = Follower(net, x, recorder.constants, excluded)
        try:
            for call in calls:
                follower.apply(call)
        except SplitDifferently:
            continue
        follower.pin_all([answer], OUTPUT)
        follower.bind_unused(net)
        return follower


@contextmanager
def _slow_attention() -> Iterator[None]:
    """Attention by its single operations, not by one that hides them."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class Call(NamedTuple):
    """An operation that ran: what it was given, and what it made."""

    func: Any
    named: dict[str, Any]
    given: list[Tensor]
    made: list[Tensor]


class Recorder(TorchDispatchMode):
    """Writes down every operation that runs, and which constants were the same all along an axis when first read.

    Tensors are told apart by their `id`. That is safe only because `calls` holds every tensor that was given or made
    until the network has been followed: a freed tensor's id would soon be another's.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.constants: dict[int, Axes] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | (kwargs or {})
        given = tensors_in(named.values())
        for t in given:
            if id(t) not in self._made and id(t) not in self.constants:
                self.constants[id(t)] = [Axis(_constant_labels(t, axis)) for axis in range(t.ndim)]
        out = func(*args, **(kwargs or {}))
        made = tensors_in([out])
        if given:
            self._made.update(map(id, made))
            self.calls.append(Call(func, named, given, made))
        return out

    def calls_for(self, answer: Tensor) -> list[Call]:
        """The operations that an answer depends on, in their order."""
        # the others, such as those of a second answer, would pin labels for nothing
        wanted, calls = {id(answer)}, list[Call]()
        for call in reversed(self.calls):
            if any(id(t) in wanted for t in call.made):
                wanted.update(map(id, call.given))
                calls.append(call)
        return calls[::-1]


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """All tensors among some values and the lists in them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def _constant_labels(t: Tensor, axis: int) -> Labels:
    alike = t.shape[axis] <= 1 or bool((t == t.narrow(axis, 0, 1)).all())
    return np.full(t.shape[axis], ANY if alike else FIXED, dtype=np.int64)


class Bindings:
    """Sets of labels that are bound to each other, each known by one of them, and why some cannot move."""

    def __init__(self) -> None:
        self._parent = [FIXED]
        self._pins: dict[int, frozenset[str]] = {}

    def fresh(self, count: int) -> Labels:
        """New labels, bound to nothing."""
        first = len(self._parent)
        self._parent += range(first, first + count)
        return np.arange(first, first + count)

    def root(self, label: int) -> int:
        """The label that stands for all that are bound to this one."""
        while self._parent[label] != label:
            self._parent[label] = self._parent[self._parent[label]]
            label = self._parent[label]
        return label

    def roots(self, labels: Labels) -> Labels:
        """The same for many; positions as such and those like all others stay what they are."""
        return np.array([self.root(a) if a > 0 else a for a in labels.tolist()], dtype=np.int64)

    def pin(self, labels: Labels, why: str) -> None:
        """These labels cannot move."""
        for root in {self.root(a) for a in labels.tolist() if a > 0}:
            self._pins[root] = self._pins.get(root, frozenset()) | {why}

    def pins(self, label: int) -> frozenset[str]:
        """Why a label cannot move; nothing if it can."""
        return self._pins.get(self.root(label), frozenset())

    def bind(self, one: Labels, other: Labels) -> Labels:
        """What two axes have in common, position by position bound to each other.

        ANY with x gives x and binds nothing. FIXED with a label pins the label, for a position cannot move, and the
        label stands for both. A label with a label unites them.
        """
        if one is other or np.array_equal(one, other):
            return one
        for a, b in zip(one.tolist(), other.tolist(), strict=True):
            if a > 0 and b > 0:
                self._unite(self.root(a), self.root(b))
        both_known = (one != ANY) & (other != ANY)
        self.pin(np.concatenate([one[both_known & (other == FIXED)], other[both_known & (one == FIXED)]]), POSITION)
        return np.where((one == ANY) | ((one == FIXED) & (other > 0)), other, one)

    def _unite(self, a: int, b: int) -> None:
        if a != b:
            self._parent[max(a, b)] = min(a, b)
            if pins := self._pins.pop(max(a, b), frozenset()):
                self._pins[min(a, b)] = self._pins.get(min(a, b), frozenset()) | pins


class Wall(NamedTuple):
    """Positions that fall into equal adjacent parts between which nothing is exchanged."""

    labels: Labels
    parts: int


class Blocked(NamedTuple):
    """A grouped convolution's weight and what it reads, each of its groups from its own share of the units."""

    weight: int
    labels: Labels
    groups: int


class Follower:
    """The labels of every tensor of a network's run, and what its operations bind.

    Attributes:
        bindings: of all labels.
        weights: by the identity of each tensor of the network, its axes as they began.
        reading: labels of axes on which a weight reads.
        walls: of grouped convolutions and norms.
        blocked: what grouped convolutions read.
    """

    def __init__(self, net: nn.Module, x: Tensor, constants: Mapping[int, Axes], excluded: dict[int, set[int]]) -> None:
        self.bindings, self.excluded, self.splits = Bindings(), excluded, 0
        self.walls: list[Wall] = []
        self.blocked: list[Blocked] = []
        self.reading: set[int] = set()
        self.used: set[int] = set()
        own = {id(t): t.shape for t in net.state_dict(keep_vars=True).values()}
        self.weights = {key: [Axis(self.bindings.fresh(n)) for n in shape] for key, shape in own.items()}
        self._axes = {**constants, **self.weights, id(x): [Axis(np.zeros(n, dtype=np.int64)) for n in x.shape]}
        self._fixed = self._axes.keys() - {id(x)}  # tensors that do not depend on the inputs

    def apply(self, call: Call) -> None:
        """Bind what an operation binds, and label what it made."""
        fixed = all(id(t) in self._fixed for t in call.given)
        self.used.update(map(id, call.given))
        for t, axes in zip(call.made, hand_on(self, call), strict=False):
            self._axes[id(t)] = axes
            if fixed:
                self._fixed.add(id(t))
            else:
                self._fixed.discard(id(t))

    def of(self, t: Tensor) -> Axes:
        """A tensor's axes."""
        return self._axes[id(t)]

    def is_fixed(self, t: Tensor) -> bool:
        """Whether a tensor does not depend on the inputs."""
        return id(t) in self._fixed

    def pin_all(self, tensors: Iterable[Tensor], why: str) -> None:
        """Nothing of these tensors can move."""
        for t in tensors:
            for axis in self.of(t):
                self.bindings.pin(axis.labels, why)

    def pick(self, axis: Axis, why: str) -> None:
        """Single positions of an axis are picked out, so it holds no units; if it came of a split, another part may."""
        if axis.split is not None and (axis.labels > 0).any():
            number, part = axis.split
            self.excluded.setdefault(number, set()).add(part)
            raise SplitDifferently
        self.bindings.pin(axis.labels, why)

    def bind_unused(self, net: nn.Module) -> None:
        """What an answer does not touch, such as variances at rest, belongs to its layer's tensor of the same shape."""
        for layer in net.modules():
            own = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
            used = [t for t in own if id(t) in self.used]
            for t in own:
                if id(t) not in self.weights or id(t) in self.used:
                    continue
                same = next((u for u in used if u.shape == t.shape and id(u) in self.weights), None)
                if same is None:
                    self.pin_all([t], "unused")
                else:
                    for mine, theirs in zip(self.weights[id(t)], self.weights[id(same)], strict=True):
                        self.bindings.bind(mine.labels, theirs.labels)
                        if not self.reading.isdisjoint(theirs.labels.tolist()):
                            self.reading.update(mine.labels.tolist())

    def merge_labels(self, axes: Sequence[Axis]) -> Labels:
        """The labels of several axes laid out as one: those of the one among them that holds units."""
        shape = [len(a.labels) for a in axes]
        holding = [i for i, a in enumerate(axes) if (a.labels > 0).any()]
        if len(holding) > 1:  # every position is of two units at once, and could follow neither
            for i in holding:
                self.bindings.pin(axes[i].labels, "a flatten of two kinds of units")
            return np.zeros(math.prod(shape), dtype=np.int64)
        which = holding[0] if holding else next((i for i, a in enumerate(axes) if (a.labels == FIXED).any()), 0)
        view = [1] * len(shape)
        view[which] = shape[which]
        return np.broadcast_to(axes[which].labels.reshape(view), shape).reshape(-1)

    def split(self, axis: Axis, shape: Sequence[int]) -> Axes:
        """An axis laid out as several: the first along which units change holds them, the others their positions."""
        grid = axis.labels.reshape(shape)
        if not (grid > 0).any():
            same = ANY if bool((grid == ANY).all()) else FIXED
            return [Axis(np.full(n, same, dtype=np.int64)) for n in shape]
        roots = self.bindings.roots(axis.labels).reshape(shape)
        varying = [k for k in range(len(shape)) if (roots != roots.take([0], axis=k)).any()]
        number, self.splits = self.splits, self.splits + 1
        allowed = [k for k in varying if k not in self.excluded.get(number, ())] or varying[-1:] or [0]
        holds = allowed[0]
        # a unit is at one index of that part, whatever the others' indices: all its positions are bound
        rows = np.moveaxis(grid, holds, 0).reshape(shape[holds], -1)
        labels = rows[:, 0]
        for column in rows.T[1:]:
            labels = self.bindings.bind(labels, column)
        more = (number, holds) if len(allowed) > 1 else None
        return [Axis(labels, more) if k == holds else Axis(np.zeros(n, np.int64)) for k, n in enumerate(shape)]


class SplitDifferently(Exception):
    """A part of an axis was taken to hold units and does not; the network is followed once more."""


Rule = Callable[[Follower, Any, Any, list[Tensor]], list[Axes]]


def hand_on(follower: Follower, call: Call) -> list[Axes]:
    """The axes of what an operation made, with everything bound that it binds."""
    name = call.func.overloadpacket.__name__.rstrip("_")
    if rule := _RULES.get(name):
        return rule(follower, call.named, name, call.made)
    if torch.Tag.pointwise in call.func.tags:
        return _pointwise(follower, call.named, name, call.made)
    follower.pin_all(call.given, name)
    return [[Axis(_blank(n, FIXED)) for n in t.shape] for t in call.made]


def _blank(size: int, label: int) -> Labels:
    return np.full(size, label, dtype=np.int64)


def _broadcast(follower: Follower, given: Sequence[Axes], shape: Sequence[int]) -> Axes:
    """The axes of tensors that meet position by position, aligned at the back."""
    result = []
    for back, size in zip(range(len(shape), 0, -1), shape, strict=True):
        here = [axes[-back] for axes in given if len(axes) >= back and len(axes[-back].labels) == size]
        labels, split = _blank(size, ANY), None
        for axis in here if size > 1 else ():
            labels, split = follower.bindings.bind(labels, axis.labels), split or axis.split
        result.append(Axis(labels, split) if size > 1 or not here else here[0])
    return result


def _pointwise(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    given = tensors_in(named.values())
    if name == "copy" and not follower.is_fixed(given[1]):  # written into a part of something, which is not followed
        follower.pin_all(given[1:], name)
    return [_broadcast(follower, [follower.of(g) for g in given], t.shape) for t in made]


def _same(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    return [follower.of(next(iter(named.values())))] * len(made)


def _constant(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    return [[Axis(_blank(n, ANY)) for n in t.shape] for t in made]


def _contract(follower: Follower, one: Axis, other: Axis, first: Tensor, second: Tensor) -> None:
    """Bind what a product sums over; the side that is a weight reads it."""
    follower.bindings.bind(one.labels, other.labels)
    weights = [a for a, t in ((one, first), (other, second)) if follower.is_fixed(t) and (a.labels > 0).any()]
    for axis in weights[:1]:
        follower.reading.update(axis.labels[axis.labels > 0].tolist())


def _mm(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    """mm, addmm, bmm, baddbmm, mv, dot: sums over the last axis of the one and the last but one of the other."""
    tensors = tensors_in(named.values())
    one, other = tensors[-2:]
    a, b = follower.of(one), follower.of(other)
    _contract(follower, a[-1], b[-2] if len(b) > 1 else b[-1], one, other)
    batch = [Axis(follower.bindings.bind(a[0].labels, b[0].labels))] if len(a) == 3 else []
    axes = [*batch, *(a[-2:-1] if len(a) > 1 else []), *(b[-1:] if len(b) > 1 else [])]
    if name in ("addmm", "baddbmm", "addmv"):
        axes = _broadcast(follower, [axes, follower.of(tensors[0])], made[0].shape)
    return [axes]


def _convolution(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    x, weight, groups = follower.of(named["input"]), follower.of(named["weight"]), named["groups"]
    makes, reads = (1, 0) if named["transposed"] else (0, 1)
    channels, out = x[1], weight[makes]
    for kernel in weight[2:]:
        follower.bindings.pin(kernel.labels, POSITION)
    if groups == 1:
        _contract(follower, channels, weight[reads], named["input"], named["weight"])
    elif named["transposed"]:
        follower.pin_all([named["input"], named["weight"]], "a transposed convolution with groups")
    else:
        _bind_groups(follower, channels, weight, groups, named["weight"])
    labels = out.labels if groups == 1 or not named["transposed"] else _blank(made[0].shape[1], FIXED)
    if isinstance(named["bias"], Tensor):
        labels = follower.bindings.bind(labels, follower.of(named["bias"])[0].labels)
    return [[x[0], Axis(labels), *(Axis(_blank(n, FIXED)) for n in made[0].shape[2:])]]


def _bind_groups(follower: Follower, channels: Axis, weight: Axes, groups: int, tensor: Tensor) -> None:
    """A depthwise convolution makes its outputs of one channel each, another reads in blocks and has walls."""
    bindings = follower.bindings
    if len(channels.labels) == groups:
        bindings.bind(np.repeat(channels.labels, len(weight[0].labels) // groups), weight[0].labels)
        return
    bindings.pin(weight[1].labels, POSITION_IN_BLOCK)
    follower.walls += [Wall(channels.labels, groups), Wall(weight[0].labels, groups)]
    if id(tensor) in follower.weights and (channels.labels > 0).all():
        follower.blocked.append(Blocked(id(tensor), channels.labels, groups))
    else:
        bindings.pin(channels.labels, "a convolution with groups")


def _channel_norm(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    """Batch and group norms: what belongs to a channel is bound to it; equal groups of channels are walls."""
    first, *others = tensors_in(named.values())
    axes = list(follower.of(first))
    labels = axes[1].labels
    for t in others:
        labels = follower.bindings.bind(labels, follower.of(t)[0].labels)
    if 1 < named.get("group", 1) < len(labels):
        follower.walls.append(Wall(labels, named["group"]))
    axes[1] = Axis(labels, axes[1].split)
    rest: list[Axes] = [[Axis(_blank(n, FIXED)) for n in t.shape] for t in made[1:]]
    return [axes, *rest]


def _trailing_norm(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    """Layer norms: scale and shift are bound to the last axes."""
    tensors = [follower.of(t) for t in tensors_in(named.values())]
    rest: list[Axes] = [[Axis(_blank(n, FIXED)) for n in t.shape] for t in made[1:]]
    return [_broadcast(follower, tensors, made[0].shape), *rest]


def _pool(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    """Pooling, padding and resizing of pictures: channels stay, pixels are pixels."""
    x = follower.of(next(iter(named.values())))
    return [[*x[:2], *(Axis(_blank(n, FIXED)) for n in t.shape[2:])] for t in made]


def _dims(value: Any, ndim: int) -> list[int]:
    if value is None:
        return list(range(ndim))
    return [d % ndim for d in (value if isinstance(value, list | tuple) else [value])] if ndim else []


def _reduce(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    """A sum, a mean, a maximum: the same in any order."""
    x = follower.of(next(iter(named.values())))
    gone = _dims(named.get("dim") or None if isinstance(named.get("dim"), list) else named.get("dim"), len(x))
    kept = [Axis(_blank(1, ANY)) if i in gone else a for i, a in enumerate(x)]
    axes = kept if named.get("keepdim") else [a for i, a in enumerate(x) if i not in gone]
    return [axes] * len(made)


def _permute(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    x = follower.of(named["self"])
    order = list(range(len(x)))
    if name == "permute":
        order = _dims(named["dims"], len(x))
    elif name == "t":
        order = order[::-1]
    else:
        a, b = _dims([named["dim0"], named["dim1"]], len(x))
        order[a], order[b] = b, a
    return [[x[i] for i in order]]


def _reshape(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    x, shape = follower.of(named["self"]), made[0].shape
    axes: Axes = []
    for old, new in _factors([len(a.labels) for a in x], list(shape)):
        if len(old) == len(new) == 1:
            axes.append(x[old[0]])
            continue
        whole = follower.merge_labels([x[i] for i in old]) if old else _blank(1, ANY)
        kept = x[old[0]].split if len(old) == 1 else None
        axes += [Axis(whole, kept)] if len(new) == 1 else follower.split(Axis(whole), [shape[k] for k in new])
    return [axes]


def _factors(old: list[int], new: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of old and new axes that hold the same positions."""
    i = k = 0
    while i < len(old) or k < len(new):
        a, b = ([i], [k]) if i < len(old) and k < len(new) else ([i], []) if i < len(old) else ([], [k])
        i, k = i + len(a), k + len(b)
        if not a or not b:  # axes of one position at the end
            yield a, b
            continue
        left, right = old[a[0]], new[b[0]]
        while left != right:
            if left < right:
                left, i = left * old[i], i + 1
                a.append(i - 1)
            else:
                right, k = right * new[k], k + 1
                b.append(k - 1)
        yield a, b


def _unsqueeze(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    x = list(follower.of(named["self"]))
    x.insert(named["dim"] % (len(x) + 1), Axis(_blank(1, ANY)))
    return [x]


def _squeeze(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    x = follower.of(named["self"])
    gone = _dims(named.get("dim"), len(x))
    return [[a for i, a in enumerate(x) if i not in gone or len(a.labels) != 1]]


def _expand(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    return [_broadcast(follower, [follower.of(named["self"])], made[0].shape)]


def _select(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    """select, unbind: one position of an axis."""
    x = follower.of(named["self"])
    dim = named.get("dim", 0) % len(x)
    follower.pick(x[dim], name)
    return [[a for i, a in enumerate(x) if i != dim]] * len(made)


def _slice(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    x = list(follower.of(named["self"]))
    dim = named.get("dim", 0) % len(x)
    cut = slice(named.get("start"), named.get("end"), named.get("step", 1))
    if len(made[0].shape) and made[0].shape[dim] != len(x[dim].labels) and x[dim].split is not None:
        follower.pick(x[dim], "slice")
    x[dim] = Axis(x[dim].labels[cut])
    return [x]


def _parts(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    """split, chunk: adjacent parts of an axis."""
    x, result, begin = follower.of(named["self"]), list[Axes](), 0
    dim = named.get("dim", 0) % len(x)
    if x[dim].split is not None and len(made) > 1:
        follower.pick(x[dim], "split")
    for t in made:
        end = begin + t.shape[dim]
        result.append([Axis(a.labels[begin:end]) if i == dim else a for i, a in enumerate(x)])
        begin = end
    return result


def _cat(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    given = [follower.of(t) for t in named["tensors"] if t.ndim == made[0].ndim and t.numel()]
    dim = named.get("dim", 0) % made[0].ndim
    axes = list(given[0])
    for i in range(len(axes)):
        for other in given[1:] if i != dim else ():
            axes[i] = Axis(follower.bindings.bind(axes[i].labels, other[i].labels), axes[i].split)
    axes[dim] = Axis(np.concatenate([a[dim].labels for a in given]))
    return [axes]


def _stack(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    given = [follower.of(t) for t in named["tensors"]]
    dim = named.get("dim", 0) % made[0].ndim
    shape = [n for i, n in enumerate(made[0].shape) if i != dim]
    axes = _broadcast(follower, given, shape)
    axes.insert(dim, Axis(_blank(made[0].shape[dim], FIXED)))
    return [axes]


def _repeat(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    x = follower.of(named["self"])
    lead = len(made[0].shape) - len(x)
    times = [n // len(a.labels) for n, a in zip(made[0].shape[lead:], x, strict=True)]
    return [
        [
            *(Axis(_blank(n, ANY)) for n in made[0].shape[:lead]),
            *(Axis(np.tile(a.labels, k)) for a, k in zip(x, times, strict=True)),
        ]
    ]


def _pad(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    """Constants around a tensor: on an axis of units they belong to no unit."""
    axes, pad = list(follower.of(named["self"])), named["pad"]
    for k in range(len(pad) // 2):
        dim, (before, after) = len(axes) - 1 - k, pad[2 * k : 2 * k + 2]
        if before or after:
            around = ANY if (axes[dim].labels > 0).any() else FIXED
            labels = axes[dim].labels[max(0, -before) : len(axes[dim].labels) - max(0, -after)]
            parts = [_blank(max(0, before), around), labels, _blank(max(0, after), around)]
            axes[dim] = Axis(np.concatenate(parts))
    return [axes]


def _gate(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    """A gated linear unit: one half of an axis times a function of the other."""
    axes = list(follower.of(named["self"]))
    dim = named.get("dim", -1) % len(axes)
    one, other = np.split(axes[dim].labels, 2)
    axes[dim] = Axis(follower.bindings.bind(one, other))
    return [axes]


def _shuffle_pixels(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    """Adjacent channels become the pixels of one."""
    x, (_, channels, *_) = follower.of(named["self"]), made[0].shape
    unit, _ = follower.split(x[1], [channels, len(x[1].labels) // channels])
    return [[x[0], unit, *(Axis(_blank(n, FIXED)) for n in made[0].shape[2:])]]


def _embedding(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    weight, indices = follower.of(named["weight"]), follower.of(named["indices"])
    follower.bindings.pin(weight[0].labels, POSITION)
    return [[*indices, weight[1]]]


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"), _mm),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit_no_training", "native_group_norm"), _channel_norm),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _trailing_norm),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax", "detach", "alias", "lift_fresh", "_to_copy"), _same),
    **dict.fromkeys(("clone", "contiguous", "positive"), _same),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones"), _constant),
    **dict.fromkeys(("new_full", "new_empty", "empty_strided", "new_empty_strided"), _constant),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool1d", "avg_pool2d"), _pool),
    **dict.fromkeys(("avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d"), _pool),
    **dict.fromkeys(("upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_linear1d"), _pool),
    **dict.fromkeys(("reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"), _pool),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min", "var", "std", "prod", "logsumexp"), _reduce),
    **dict.fromkeys(("linalg_vector_norm", "norm", "var_mean", "std_mean", "any", "all"), _reduce),
    **dict.fromkeys(("permute", "transpose", "t"), _permute),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), _reshape),
    **dict.fromkeys(("select", "unbind"), _select),
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "chunk"), _parts),
    "convolution": _convolution,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "slice": _slice,
    "cat": _cat,
    "stack": _stack,
    "repeat": _repeat,
    "constant_pad_nd": _pad,
    **dict.fromkeys(("_prelu_kernel", "log_sigmoid_forward", "native_dropout", "masked_fill"), _pointwise),
    "embedding": _embedding,
    "glu": _gate,
    "pixel_shuffle": _shuffle_pixels,
}
