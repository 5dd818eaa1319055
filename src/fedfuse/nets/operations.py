"""What each operation of torch does to the labels of `fedfuse.nets.follow`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfuse.nets.follow import ANY, FIXED, POSITION, Axes, Axis, Blocked, Call, Follower, Labels, Wall, tensors_in

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
    if name == "copy" and not follower.is_fixed(given[1]):  # written into a part of something: nobody follows that
        follower.pin_all(given[1:], name)
    return [_broadcast(follower, [follower.of(g) for g in given], t.shape) for t in made]


def _same(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
    return [follower.of(next(iter(named.values())))] * len(made)


def _constant(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
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


def _convolution(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
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


POSITION_IN_BLOCK = "blocks"


def _channel_norm(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
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


def _trailing_norm(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
    """Layer norms: scale and shift are bound to the last axes."""
    tensors = [follower.of(t) for t in tensors_in(named.values())]
    rest: list[Axes] = [[Axis(_blank(n, FIXED)) for n in t.shape] for t in made[1:]]
    return [_broadcast(follower, tensors, made[0].shape), *rest]


def _pool(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
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
    if len(made) > 1 or name.startswith("arg"):  # it also tells where the largest is
        for i in gone if name.startswith("arg") else ():
            follower.pick(x[i], name)
    return [axes] * len(made)


def _permute(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
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


def _reshape(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
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


def _unsqueeze(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
    x = list(follower.of(named["self"]))
    x.insert(named["dim"] % (len(x) + 1), Axis(_blank(1, ANY)))
    return [x]


def _squeeze(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
    x = follower.of(named["self"])
    gone = _dims(named.get("dim"), len(x))
    return [[a for i, a in enumerate(x) if i not in gone or len(a.labels) != 1]]


def _expand(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
    return [_broadcast(follower, [follower.of(named["self"])], made[0].shape)]


def _select(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:
    """select, unbind: one position of an axis."""
    x = follower.of(named["self"])
    dim = named.get("dim", 0) % len(x)
    follower.pick(x[dim], name)
    return [[a for i, a in enumerate(x) if i != dim]] * len(made)


def _slice(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
    x = list(follower.of(named["self"]))
    dim = named.get("dim", 0) % len(x)
    cut = slice(named.get("start"), named.get("end"), named.get("step", 1))
    if len(made[0].shape) and made[0].shape[dim] != len(x[dim].labels) and x[dim].split is not None:
        follower.pick(x[dim], "slice")
    x[dim] = Axis(x[dim].labels[cut])
    return [x]


def _parts(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
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


def _cat(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
    given = [follower.of(t) for t in named["tensors"] if t.ndim == made[0].ndim and t.numel()]
    dim = named.get("dim", 0) % made[0].ndim
    axes = list(given[0])
    for i in range(len(axes)):
        for other in given[1:] if i != dim else ():
            axes[i] = Axis(follower.bindings.bind(axes[i].labels, other[i].labels), axes[i].split)
    axes[dim] = Axis(np.concatenate([a[dim].labels for a in given]))
    return [axes]


def _stack(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
    given = [follower.of(t) for t in named["tensors"]]
    dim = named.get("dim", 0) % made[0].ndim
    shape = [n for i, n in enumerate(made[0].shape) if i != dim]
    axes = _broadcast(follower, given, shape)
    axes.insert(dim, Axis(_blank(made[0].shape[dim], FIXED)))
    return [axes]


def _repeat(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
    x = follower.of(named["self"])
    lead = len(made[0].shape) - len(x)
    times = [n // len(a.labels) for n, a in zip(made[0].shape[lead:], x, strict=True)]
    return [
        [
            *(Axis(_blank(n, ANY)) for n in made[0].shape[:lead]),
            *(Axis(np.tile(a.labels, k)) for a, k in zip(x, times, strict=True)),
        ]
    ]


def _pad(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
    """Constants around a tensor: on an axis of units they are positions of nobody."""
    axes, pad = list(follower.of(named["self"])), named["pad"]
    for k in range(len(pad) // 2):
        dim, (before, after) = len(axes) - 1 - k, pad[2 * k : 2 * k + 2]
        if before or after:
            around = ANY if (axes[dim].labels > 0).any() else FIXED
            labels = axes[dim].labels[max(0, -before) : len(axes[dim].labels) - max(0, -after)]
            parts = [_blank(max(0, before), around), labels, _blank(max(0, after), around)]
            axes[dim] = Axis(np.concatenate(parts))
    return [axes]


def _gate(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
    """A gated linear unit: one half of an axis times a function of the other."""
    axes = list(follower.of(named["self"]))
    dim = named.get("dim", -1) % len(axes)
    one, other = np.split(axes[dim].labels, 2)
    axes[dim] = Axis(follower.bindings.bind(one, other))
    return [axes]


def _shuffle_pixels(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
    """Adjacent channels become the pixels of one."""
    x, (_, channels, *_) = follower.of(named["self"]), made[0].shape
    unit, _ = follower.split(x[1], [channels, len(x[1].labels) // channels])
    return [[x[0], unit, *(Axis(_blank(n, FIXED)) for n in made[0].shape[2:])]]


def _embedding(follower: Follower, named: Any, name: str, made: list[Tensor]) -> list[Axes]:  # noqa: ARG001
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
