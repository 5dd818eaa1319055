"""Following positions: which positions of which weights a network's operations bind to each other.

Every axis of every tensor carries labels, one per position. A weight begins with labels of its own; an operation hands
them on and binds them: a product binds what it contracts, a sum what it adds, a norm a channel to its scale. What is
bound moves together or not at all. An operation that tells positions apart, or that nobody here knows, pins the labels
it touches: they stay where they are, and the reason is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Labels = npt.NDArray[np.int64]

FIXED, ANY = 0, -1  # the label of a position as such (a pixel, a row, an input), and of one that is like all others
POSITION, OUTPUT = "bound to positions", "outputs"


class Axis(NamedTuple):
    """The labels on one axis, and the split of an axis that it came from: its number, and which part it is."""

    labels: Labels
    split: tuple[int, int] | None = None


Axes = list[Axis]


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
        """What two axes have in common, position by position bound to each other."""
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


class Call(NamedTuple):
    """An operation that ran: what it was given, and what it made."""

    func: Any
    named: dict[str, Any]
    given: list[Tensor]
    made: list[Tensor]


class Recorder(TorchDispatchMode):
    """Writes down every operation that runs, and which constants were the same all along an axis when first read."""

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
        wanted, calls = {id(answer)}, list[Call]()
        for call in reversed(self.calls):
            if any(id(t) in wanted for t in call.made):
                wanted.update(map(id, call.given))
                calls.append(call)
        return calls[::-1]


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
        from fedfuse.nets.operations import hand_on  # the operations know this class

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
                        self._follow_reading(mine.labels, theirs.labels)

    def _follow_reading(self, mine: Labels, theirs: Labels) -> None:
        self.bindings.bind(mine, theirs)
        if not self.reading.isdisjoint(theirs.tolist()):
            self.reading.update(mine.tolist())

    def merge_labels(self, axes: Sequence[Axis]) -> Labels:
        """The labels of several axes laid out as one: those of the one among them that holds units."""
        shape = [len(a.labels) for a in axes]
        holding = [i for i, a in enumerate(axes) if (a.labels > 0).any()]
        if len(holding) > 1:
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
        rows = np.moveaxis(grid, holds, 0).reshape(shape[holds], -1)
        labels = rows[:, 0]
        for column in rows.T[1:]:
            labels = self.bindings.bind(labels, column)
        more = (number, holds) if len(allowed) > 1 else None
        return [Axis(labels, more) if k == holds else Axis(np.zeros(n, np.int64)) for k, n in enumerate(shape)]


class SplitDifferently(Exception):
    """A part of an axis was taken to hold units and does not; the network is followed anew."""


def follow(net: nn.Module, x: Tensor) -> Follower:
    """What a network binds when it answers these inputs; its answer's positions are pinned as outputs."""
    recorder = Recorder()
    plain = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with torch.no_grad(), plain, _slow_attention(), recorder:
        answer = tensors_in([net(x)])[0]
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


class _slow_attention:  # noqa: N801 - used as a context
    """Attention by its single operations, not by one that hides them."""

    def __enter__(self) -> None:
        self.before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch.backends.mha.set_fastpath_enabled(self.before)


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
