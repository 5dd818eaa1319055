"""Forms of tensors: in words, and one width of numbers for several files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch

from fedfuse.core.messages import Form
from fedfuse.core.params import Params
from fedfuse.wire.codec import LazyParams, Packet, forms_of, piece_of


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
