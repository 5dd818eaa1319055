"""What the numbers of a reply may be, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from fedfuse.core.messages import Form
from fedfuse.core.params import Params
from fedfuse.core.torch_utils import one_thread
from fedfuse.errors import Refused
from fedfuse.wire.codec import LazyParams, Packet, forms_of, piece_of
from fedfuse.wire.messages import NOTE


def form_words(form: Form) -> str:
    """A form in words: "6×1×5×5 float32"."""
    return f"{'×'.join(map(str, form.shape)) or 'a scalar'} {str(form.dtype).removeprefix('torch.')}"


def widen_alike(packets: Sequence[Packet], start: Params | None) -> tuple[list[Packet], Params | None]:
    """Plain weights and their start with each tensor in the widest of its floating dtypes: no number is rounded.

    Example:
        >>> from fedfuse.wire.codec import decode, encode
        >>> half, full = (decode(encode({"w": torch.ones(2, dtype=d)}, {})) for d in (torch.bfloat16, torch.float32))
        >>> [packet.tensors["w"].dtype for packet in widen_alike([half, full], None)[0]]
        [torch.float32, torch.float32]
    """
    tables = [packet.tensors.forms for packet in packets] + ([] if start is None else [forms_of(start)])
    found: dict[str, set[torch.dtype]] = {}
    for name, form in (entry for table in tables for entry in table.items()):
        found.setdefault(name, set()).add(form.dtype)
    mixed = {n: d for n, d in found.items() if len(d) > 1 and all(dtype.is_floating_point for dtype in d)}
    wide = {name: reduce(torch.promote_types, sorted(dtypes, key=str)) for name, dtypes in mixed.items()}
    opened = [replace(packet, tensors=_widen(packet.tensors, wide)) for packet in packets]
    return opened, None if start is None else _widen(start, wide) if wide else start


def _widen(params: Params, wide: Mapping[str, torch.dtype]) -> LazyParams:
    forms = {n: Form(form.shape, wide.get(n, form.dtype)) for n, form in forms_of(params).items()}
    if isinstance(params, LazyParams) and forms == params.forms:
        return params
    return LazyParams(forms, lambda name, begin, end: piece_of(params, name, begin, end).to(forms[name].dtype))


_MAX_COUNT = 2**62  # a counter that others can still count on from
_COUNTS_PER_STEP = 100  # a norm may be used often in one step, and be asked several times
LEAST_LOG_VARIANCE = -30.0  # smaller variances are raised to this one: their precisions would drown everybody else's
_MOST_LOG_VARIANCE = 20.0  # a standard deviation of 22,000 is no belief about a weight
_BLOCK = 1 << 17  # elements looked at together: what was read is still in cache, and its memory is used again


def check_values(
    client: str, tensors: LazyParams, roles: Mapping[str, str], start: Params | None, steps: int
) -> dict[str, float]:
    """Refuse numbers that cannot be: not finite, variances below zero, counts that nobody could have reached.

    Returns:
        How long each tensor's way from the start is, since every number was looked at for that: see `lengths_of`.
    """
    lengths = lengths_of(tensors, start)
    for name, length in lengths.items():
        if not math.isfinite(length) and not all(is_finite(piece) for piece in _pieces(tensors, name)):
            raise Refused(client, name.removeprefix(NOTE), "not finite", "finite numbers")
    for name in tensors:
        role = roles.get(name)
        if role not in ("statistic", "log_variance", "counter"):
            continue
        tensor = tensors[name]
        if role == "statistic" and name.endswith("running_var") and bool((tensor < 0).any()):
            raise Refused(client, name, float(tensor.min()), "variances ≥ 0")
        if role == "log_variance" and tensor.numel() and float(tensor.max()) > _MOST_LOG_VARIANCE:
            raise Refused(client, name, float(tensor.max()), f"log-variances up to {_MOST_LOG_VARIANCE:g}")
        if role == "counter" and tensor.numel():
            _check_counts(client, name, tensor, start, steps)
    return lengths


def lengths_of(params: Params, start: Params | None = None) -> dict[str, float]:
    """The length of every floating tensor, or of its way from the start where that has it; not finite where it is not.

    Each is read once, block by block. A length may overflow where every number is finite.

    Example:
        >>> lengths_of({"w": torch.tensor([3.0, 4.0]), "seen": torch.tensor(5)})
        {'w': 5.0}
    """
    with one_thread():  # one glance at memory: several threads would mostly wait for each other
        return {
            name: math.hypot(*(_length(piece) for piece in _pieces(params, name, start)))
            for name, form in forms_of(params).items()
            if form.dtype.is_floating_point
        }


def _length(piece: Tensor) -> float:
    return float(torch.linalg.vector_norm(piece.float()))


def _pieces(params: Params, name: str, start: Params | None = None) -> Iterator[Tensor]:
    """A tensor laid flat, block by block, less the start's where that has one."""
    size = math.prod(forms_of(params)[name].shape)
    for begin, end in ((at, min(at + _BLOCK, size)) for at in range(0, size, _BLOCK)):
        piece = piece_of(params, name, begin, end)
        yield piece if start is None or name not in start else piece - piece_of(start, name, begin, end)


def _check_counts(client: str, name: str, tensor: Tensor, start: Params | None, steps: int) -> None:
    """Counts go on from where the brief has them, as far as the client's own steps can carry them."""
    begun = int(start[name].max()) if start is not None else 0
    most = begun + _COUNTS_PER_STEP * steps if start is not None else _MAX_COUNT
    if not 0 <= int(tensor.min()) <= int(tensor.max()) <= most:
        words = f"counts from 0 to {most:,}" + (f": {begun:,} in the brief, and its own steps" if start else "")
        raise Refused(client, name, [int(tensor.min()), int(tensor.max())], words)


def raise_log_variances(mean: Params, roles: Mapping[str, str]) -> tuple[Params, int]:
    """The tensors with every log-variance raised to the least one allowed, and how many had to be."""
    log_variances = frozenset(name for name, role in roles.items() if role == "log_variance" and name in mean)
    raised = sum(int((mean[name] < LEAST_LOG_VARIANCE).sum()) for name in log_variances)
    if not raised:
        return mean, 0

    def fetch(name: str, begin: int, end: int) -> Tensor:
        piece = piece_of(mean, name, begin, end)
        return piece.clamp(min=LEAST_LOG_VARIANCE) if name in log_variances else piece

    return LazyParams(forms_of(mean), fetch), raised


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite, in one pass: a finite sum has no NaN and no infinity in it.

    Example:
        >>> is_finite(torch.tensor([1.0, float("nan")])), is_finite(torch.full((9,), 3e38))
        (False, True)
    """
    if not tensor.is_floating_point() or math.isfinite(tensor.sum().item()):
        return True
    return bool(torch.isfinite(tensor).all())  # a sum of large numbers may overflow where none of them is infinite
