"""Residual streams that may be turned: what every block reads behind a norm, and adds its answer to.

A norm that divides by a vector's length does not see by which axes the vector is written down, so the stream of such a
network may be turned by any orthogonal map Q if whatever writes to it is turned too, W → Q W, and whatever reads it
turns back, W → W Qᵀ. A norm that also takes off the mean allows those that keep it, Q 1 = 1. The scale g and shift b of
a norm stand in the way and go into what reads it: W (g ⊙ x + b) = (W diag g) x + W b. All this is found by watching the
network, and proved by turning it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fedfuse.core.params import Params
from fedfuse.core.rng import seeded, stream
from fedfuse.core.spec import Spec, drop_tied_names
from fedfuse.core.torch_utils import forward_hooks
from fedfuse.nets.channels import Group, Location, channel_groups
from fedfuse.nets.trace import answer, drawn_inputs, in_double, randomize, same_answers, without_noise


@dataclass(frozen=True, slots=True)
class NormReader:
    """A layer that reads what a norm gives: its weight, and its bias if it has one."""

    weight: str
    bias: str = ""


@dataclass(frozen=True, slots=True)
class StreamNorm:
    """A norm of the stream: its scale, its shift if it has one, and every layer that reads it."""

    scale: str
    shift: str
    readers: tuple[NormReader, ...]


@dataclass(frozen=True, slots=True)
class Stream:
    """A residual stream that may be turned.

    Attributes:
        group: its positions in all tensors but those of its norms.
        norms: what stands between the stream and its readers.
        keeps_mean: whether only maps that keep the mean over positions leave the network's function as it is.
    """

    group: Group
    norms: tuple[StreamNorm, ...]
    keeps_mean: bool

    def norm_before(self, place: Location) -> StreamNorm | None:
        """The norm through which a tensor reads the stream."""
        found = (norm for norm in self.norms for reader in norm.readers if reader.weight == place.tensor)
        return next(found, None) if place.reads else None

    def rows(self, params: Params, place: Location) -> Tensor:
        """What a tensor makes or reads of each position of the stream, a row each, norms' scales counted in."""
        rows = params[place.tensor].double().movedim(place.axis, 0).reshape(self.group.size, -1)
        norm = self.norm_before(place)
        return rows if norm is None else params[norm.scale].double()[:, None] * rows


def find_streams(spec: Spec, shape: Sequence[int]) -> tuple[tuple[Stream, ...], tuple[str, ...]]:
    """The streams of a network that may be turned, and for those that may not a reason each.

    Example:
        >>> streams, _ = find_streams(Spec("transformer", {"tokens": 5, "length": 4, "width": 4, "heads": 2}), (4,))
        >>> [(s.group.size, s.keeps_mean, len(s.norms)) for s in streams]
        [(4, True, 5)]
        >>> find_streams(Spec("mlp", {"inputs": 4, "hidden": [3]}), (4,))
        ((), ())
    """
    return _cached_streams(spec, tuple(shape))


@lru_cache(maxsize=16)
def _cached_streams(spec: Spec, shape: tuple[int, ...]) -> tuple[tuple[Stream, ...], tuple[str, ...]]:
    with seeded(0, "trace"):
        net = without_noise(spec.build())
        randomize(net)
    x = drawn_inputs(spec, shape)
    norms = _watch_norms(net, x)
    streams, refused = list[Stream](), list[str]()
    for group in channel_groups(spec, shape):
        inside = {place.tensor for place in group.locations}
        own = tuple(norm for norm in norms if norm.scale in inside)
        if not own:
            continue
        with in_double():
            found = _prove(spec, net, x, group, own)
        streams += [found] if isinstance(found, Stream) else []
        refused += [] if isinstance(found, Stream) else [found]
    return tuple(streams), tuple(refused)


def _is_norm(module: nn.Module) -> bool:
    """Whether a module's own weights are a scale and perhaps a shift, position by position."""
    own = dict(module.named_parameters(recurse=False))
    return "weight" in own and own.keys() <= {"weight", "bias"} and all(t.ndim == 1 for t in own.values())


def _watch_norms(net: nn.Module, x: Tensor) -> list[StreamNorm]:
    """Every norm, and the layers to which its answer goes as it is or in part."""
    norms = {name: module for name, module in net.named_modules() if _is_norm(module)}
    layers = {name: m for name, m in net.named_modules() if isinstance(getattr(m, "weight", None), Tensor)}
    made: dict[int, str] = {}  # by the memory of a norm's answer, of which a part is a view
    alive: list[Tensor] = []  # or the memory of a norm's answer would be given to another tensor
    readers: dict[str, list[NormReader]] = {name: [] for name in norms}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
            source = made.get(_memory(given[0])) if given and isinstance(given[0], Tensor) else None
            if source is not None and name not in norms:
                readers[source].append(NormReader(f"{name}.weight", _bias_name(name, module)))
            if name in norms and isinstance(out, Tensor):
                made[_memory(out)] = name
                alive.append(out)

        return hook

    with torch.no_grad(), forward_hooks((module, watch(name)) for name, module in layers.items()):
        net(x)
    return [
        StreamNorm(f"{name}.weight", _bias_name(name, module), tuple(readers[name])) for name, module in norms.items()
    ]


def _bias_name(layer: str, module: nn.Module) -> str:
    return f"{layer}.bias" if getattr(module, "bias", None) is not None else ""


def _memory(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _prove(spec: Spec, net: nn.Module, x: Tensor, group: Group, norms: tuple[StreamNorm, ...]) -> Stream | str:
    """The stream, if turning it changes no answer; else why not."""
    weights = drop_tied_names(spec, net.state_dict())
    own = {name for norm in norms for name in (norm.scale, norm.shift)}
    places = tuple(p for p in group.locations if p.tensor in weights and p.tensor not in own)
    if flaw := _find_flaw(group, places, norms, weights):
        return f"{group.name}: {flaw}"
    draw = stream(0, "stream")
    like = {**weights, **{name: weights[name].flip(0) for name in own if name}}
    before = answer(net, weights, x)
    # any map first, which a norm that only divides by the length allows; a norm that takes off the mean fails that
    for keeps_mean in (False, True):
        found = Stream(replace(group, locations=places), norms, keeps_mean)
        turn = nearest_turn(torch.randn(group.size, group.size, generator=draw, dtype=torch.float64), keeps_mean)
        after = answer(net, turn_stream(weights, like, found, turn), x)
        if same_answers(before, after):
            return found
    tied = f" ({' and '.join(spec.layout.tied[0])} are one tensor)" if spec.layout.tied else ""
    return f"{group.name}: turning it changes the answers, as where norms stand on the stream itself{tied}"


def _find_flaw(group: Group, places: Sequence[Location], norms: Sequence[StreamNorm], weights: Params) -> str:
    """What keeps a stream from being turned, as far as its places tell."""
    if any(p.per > 1 or p.offset or p.blocks > 1 or weights[p.tensor].shape[p.axis] != group.size for p in places):
        return "it stands in parts of a tensor"
    for norm in norms:
        name = norm.scale.rpartition(".")[0]
        if not norm.readers:
            return f"the norm {name!r} is read by something else than a layer"
        bare = [reader.weight for reader in norm.readers if not reader.bias]
        if norm.shift and bare:
            return f"the norm {name!r} has a shift and {bare[0]!r}, which reads it, no bias to take it"
    return ""


def nearest_turn(matrix: Tensor, keeps_mean: bool = False) -> Tensor:
    """The orthogonal Q that makes tr(Qᵀ M) largest: Q = U Vᵀ of the SVD U Σ Vᵀ = M; of those with Q 1 = 1 if asked.

    Example:
        >>> nearest_turn(torch.tensor([[0.0, 2.0], [-1.0, 0.0]]))
        tensor([[ 0.,  1.],
                [-1.,  0.]])
    """
    if not keeps_mean:
        left, _, right = torch.linalg.svd(matrix)
        turn: Tensor = left @ right
        return turn
    size = len(matrix)
    mean = torch.full((size, 1), size**-0.5, dtype=matrix.dtype)
    basis = torch.linalg.svd(mean)[0][:, 1:]  # of everything at right angles to the mean
    within: Tensor = basis @ nearest_turn(basis.mT @ matrix @ basis) @ basis.mT
    return mean @ mean.mT + within


def turn_stream(params: Params, like: Params, stream: Stream, turn: Tensor) -> dict[str, Tensor]:
    """The weights of the same function with the stream turned, and the scales and shifts of norms those of `like`.

    Example:
        >>> (one,), _ = find_streams(Spec("transformer", {"tokens": 5, "length": 4, "width": 4, "heads": 2}), (4,))
        >>> net = Spec("transformer", {"tokens": 5, "length": 4, "width": 4, "heads": 2}).build().state_dict()
        >>> same = turn_stream(net, net, one, torch.eye(4, dtype=torch.float64))
        >>> all(torch.allclose(same[name], net[name]) for name in net)
        True
    """
    result = dict(params)
    for place in stream.group.locations:
        old, norm = params[place.tensor], stream.norm_before(place)
        rows = turn @ stream.rows(params, place)
        if norm is not None:
            rows = rows / like[norm.scale].double()[:, None]
            _move_shift(result, params, like, norm, place, rows)
        shape = [old.shape[place.axis], *(n for axis, n in enumerate(old.shape) if axis != place.axis)]
        result[place.tensor] = rows.view(shape).movedim(0, place.axis).to(old.dtype).contiguous()
    own = [name for norm in stream.norms for name in (norm.scale, norm.shift) if name]
    return result | {name: like[name].clone() for name in own}


def _move_shift(
    result: dict[str, Tensor], params: Params, like: Params, norm: StreamNorm, place: Location, rows: Tensor
) -> None:
    """Let a reader's bias take what the old shift gave it, less what the new one will."""
    bias = next(reader.bias for reader in norm.readers if reader.weight == place.tensor)
    if not norm.shift or not bias:
        return
    before = params[norm.shift].double() @ params[place.tensor].double().movedim(place.axis, 0).reshape(len(rows), -1)
    moved = params[bias].double() + before - like[norm.shift].double() @ rows
    result[bias] = moved.to(params[bias].dtype)
