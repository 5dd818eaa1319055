"""What the numbers of a reply may be, tensor by tensor: finite, variances not negative, counters within reach.

All numbers are read once, block by block, and that one pass also measures how far each tensor moved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedfuse.core.messages import Form
from fedfuse.core.params import Params
from fedfuse.core.torch_utils import one_thread
from fedfuse.errors import Refused
from fedfuse.wire.codec import LazyParams, forms_of, piece_of
from fedfuse.wire.messages import NOTE

# Counters are int64 and go on from the fused maximum: half of the range is left for the rounds that follow.
_MAX_COUNT = 2**62
# A norm may be used several times in a step (shared layers, gradient accumulation), and evidence asks it again.
_COUNTS_PER_STEP = 100
# e⁻³⁰ ≈ 10⁻¹³: a smaller variance has a precision that drowns all others' in any precision-weighted mean, so it is
# raised to this one. Training itself can get there, which is why it is raised and not refused.
LEAST_LOG_VARIANCE = -30.0
# e²⁰ is a standard deviation of 22,000, which is no belief about a weight; nothing that is trained comes near it.
_MOST_LOG_VARIANCE = 20.0
# 2¹⁷ float32 are 512 KiB: what was read is still in the cache when it is used, and a file's block needs no more memory.
_BLOCK = 1 << 17


def form_words(form: Form) -> str:
    """A form in words: "6×1×5×5 float32"."""
    return f"{'×'.join(map(str, form.shape)) or 'a scalar'} {str(form.dtype).removeprefix('torch.')}"


def check_values(
    client: str, tensors: LazyParams, roles: Mapping[str, str], start: Params | None, steps: int
) -> dict[str, float]:
    """Refuse numbers that cannot be: not finite, variances below zero, counts that no client could have reached.

    Returns:
        The length of each tensor's move from the start, a by-product of reading every number: see `lengths_of`.
    """
    lengths = lengths_of(tensors, start)
    for name, length in lengths.items():
        # A length is finite only if all its numbers are; one that overflowed says nothing, so then each is looked at.
        if not math.isfinite(length) and not _all_finite(tensors, name):
            raise Refused(client, name.removeprefix(NOTE), "not finite", "finite numbers")
    for name in tensors.forms:
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
    """The length of every floating tensor, or of its move from the start where that has it; not finite where it is not.

    Each is read once, block by block. A length may overflow where every number is finite.

    Example:
        >>> lengths_of({"w": torch.tensor([3.0, 4.0]), "seen": torch.tensor(5)})
        {'w': 5.0}
    """
    lengths = dict[str, float]()
    with one_thread():  # a single pass over memory: several threads would mostly wait for each other
        for name, form in forms_of(params).items():
            if not form.dtype.is_floating_point:
                continue
            origin = start if start is not None and name in start else None
            size, blocks = math.prod(form.shape), list[float]()
            for begin in range(0, size, _BLOCK):
                piece = piece_of(params, name, begin, end := min(begin + _BLOCK, size))
                if origin is not None:
                    piece = piece - piece_of(origin, name, begin, end)
                blocks.append(float(torch.linalg.vector_norm(piece.float())))
            lengths[name] = math.hypot(*blocks)  # scaled, so that squares of lengths do not overflow
    return lengths


def _all_finite(tensors: LazyParams, name: str) -> bool:
    size = math.prod(tensors.forms[name].shape)
    return all(is_finite(tensors.piece(name, at, min(at + _BLOCK, size))) for at in range(0, size, _BLOCK))


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite, in one pass: a finite sum has no NaN and no infinity in it.

    Example:
        >>> is_finite(torch.tensor([1.0, float("nan")])), is_finite(torch.full((9,), 3e38))
        (False, True)
    """
    if not tensor.is_floating_point() or math.isfinite(tensor.sum().item()):
        return True
    return bool(torch.isfinite(tensor).all())  # a sum of large numbers may overflow where none of them is infinite


def _check_counts(client: str, name: str, tensor: Tensor, start: Params | None, steps: int) -> None:
    # Counters are fused by their maximum and go into the next brief. Without a bound that begins at the brief's count,
    # one client could send 2⁵³ and every honest client of the next round would be refused.
    begun = int(start[name].max()) if start is not None else 0
    most = begun + _COUNTS_PER_STEP * steps if start is not None else _MAX_COUNT
    if not 0 <= int(tensor.min()) <= int(tensor.max()) <= most:
        words = f"counts from 0 to {most:,}" + (f": {begun:,} in the brief, and its own steps" if start else "")
        raise Refused(client, name, [int(tensor.min()), int(tensor.max())], words)


def raise_log_variances(mean: Params, roles: Mapping[str, str]) -> tuple[Params, int]:
    """The tensors with every log-variance raised to the least one allowed, and how many had to be."""
    log_variances, raised = set[str](), 0
    for name, role in roles.items():
        if role == "log_variance" and name in mean:
            log_variances.add(name)
            raised += int((mean[name] < LEAST_LOG_VARIANCE).sum())
    if not raised:
        return mean, 0

    def fetch(name: str, begin: int, end: int) -> Tensor:
        piece = piece_of(mean, name, begin, end)
        return piece.clamp(min=LEAST_LOG_VARIANCE) if name in log_variances else piece

    return LazyParams(forms_of(mean), fetch), raised
