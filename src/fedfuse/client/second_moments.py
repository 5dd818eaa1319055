"""Second moments of what a layer reads and of the gradients that come back to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.core.torch_utils import in_full
from fedfuse.linalg.factor import BlockDiagonal

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
Convolution: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d
Transposed: TypeAlias = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d

_SMALL = 1e-12


def input_moments(module: nn.Module, x: Tensor, one: bool) -> Tensor:
    """Σ a aᵀ over examples and positions, where a is what the layer reads, with a 1 appended if asked for.

    A linear layer reads vectors, a convolution one patch per output position, in the order of its flattened weight.
    A grouped convolution is as many layers as it has groups, each with its own channels. A transposed convolution is
    the convolution of inputs set apart. An embedding reads tokens, and tokens do not mix: theirs are counts.

    Returns:
        (groups × in × in), or (1 × tokens) of an embedding, float64.

    Example:
        >>> input_moments(nn.Conv1d(1, 1, 2), torch.tensor([[[1.0, 2.0, 3.0]]]), one=True).tolist()
        [[[5.0, 8.0, 3.0], [8.0, 13.0, 5.0], [3.0, 5.0, 2.0]]]
    """
    if isinstance(module, nn.Embedding):
        return _tokens(module, x.flatten()[None]).sum(0, keepdim=True)
    module, x = _as_convolution(module, in_full(x))
    if isinstance(module, CONVOLUTIONS):
        gram, total, count = _patch_moments(module, x)
    else:
        rows = x.reshape(-1, x.shape[-1])
        gram, total, count = (rows.mT @ rows).double()[None], rows.sum(0).double()[None], len(rows)
    return _with_one(gram, total[..., None], count) if one else gram


def run_moments(module: nn.Module, x: Tensor, one: bool, runs: Sequence[int]) -> list[Tensor]:
    """The blocks of `input_moments` along its diagonal, for runs of these lengths; a single run is all of it.

    Example:
        >>> [part.tolist() for part in run_moments(nn.Linear(2, 1), torch.tensor([[1.0, 2.0]]), False, [1, 1])]
        [[[[1.0]]], [[[4.0]]]]
    """
    if len(runs) == 1:
        return [input_moments(module, x, one)]
    if isinstance(module, (nn.Embedding, *CONVOLUTIONS, *TRANSPOSED)):
        return list(BlockDiagonal.of_sizes(input_moments(module, x, one), runs).parts)
    rows = in_full(x).reshape(-1, x.shape[-1])
    rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1) if one else rows
    return [(part.mT @ part).double()[None] for part in rows.split(list(runs), 1)]  # the whole is never laid out


def output_moments(module: nn.Module, grad: Tensor) -> tuple[Tensor, int]:
    """Σ g gᵀ over examples and positions, (groups × out × out) in float64, and how many those are."""
    columns = _gradient_columns(module, in_full(grad))
    return _gram(columns), columns.shape[-1]


def input_sums(module: nn.Module, x: Tensor, one: bool) -> Tensor:
    """Per example the sum over positions of what the layer reads, (examples × groups × in), float64.

    Example:
        >>> input_sums(nn.Conv1d(1, 1, 2), torch.tensor([[[1.0, 2.0, 3.0]]]), one=True).tolist()
        [[[3.0, 5.0, 2.0]]]
    """
    if isinstance(module, nn.Embedding):
        return _tokens(module, x.flatten(1))[:, None]
    module, x = _as_convolution(module, in_full(x))
    if isinstance(module, CONVOLUTIONS):
        sums, count = _patch_sums(module, x)
    else:
        rows = x.reshape(len(x), -1, x.shape[-1])
        sums, count = rows.sum(1, dtype=torch.float64)[:, None], rows.shape[1]
    return torch.cat([sums, sums.new_full((*sums.shape[:2], 1), count)], -1) if one else sums


def output_sums(module: nn.Module, grad: Tensor) -> tuple[Tensor, int]:
    """Per example the sum over positions of its gradients, (examples × groups × out), and the number of positions."""
    grad = in_full(grad).double()
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
        flat = grad.flatten(2)
        return flat.sum(-1).unflatten(1, (module.groups, -1)), flat.shape[-1]
    rows = grad.reshape(len(grad), -1, grad.shape[-1])
    return rows.sum(1)[:, None], rows.shape[1]


def outer_sum(rows: Tensor) -> Tensor:
    """Σ r rᵀ over the first axis of (examples × groups × size), as (groups × size × size)."""
    return _gram(rows.permute(1, 2, 0))


def _gram(columns: Tensor) -> Tensor:
    gram = columns @ columns.mT
    if float(gram.diagonal(dim1=-2, dim2=-1).amax()) < _SMALL:
        # a network that fits its rows has gradients whose squares no float32 can hold
        scale = float(columns.abs().max()) or 1.0
        columns = columns / scale
        return (columns @ columns.mT).double() * scale**2
    return gram.double()


def _gradient_columns(module: nn.Module, grad: Tensor) -> Tensor:
    """Gradients as (groups × out × examples·positions)."""
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
        last = grad.movedim(1, -1)
        if module.groups == 1 and last.is_contiguous():  # as they lie
            return last.view(1, -1, module.out_channels).mT
        return grad.transpose(0, 1).reshape(module.groups, module.out_channels // module.groups, -1)
    return grad.reshape(1, -1, grad.shape[-1]).mT


def _tokens(module: nn.Embedding, tokens: Tensor) -> Tensor:
    """How often each token stands in each row; the token that pads does not count, for nothing is learned of it."""
    counts = torch.zeros(len(tokens), module.num_embeddings, dtype=torch.float64, device=tokens.device)
    counts.scatter_add_(1, tokens.long(), torch.ones_like(tokens, dtype=torch.float64))
    if module.padding_idx is not None:
        counts[:, module.padding_idx] = 0.0
    return counts


def _as_convolution(module: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """A transposed convolution as the convolution it is, of the input with zeros between and around its pixels."""
    if not isinstance(module, TRANSPOSED):
        return module, x
    spread = x.new_zeros(
        *x.shape[:2], *((n - 1) * step + 1 for n, step in zip(x.shape[2:], module.stride, strict=True))
    )
    places: list[Any] = [..., *(slice(None, None, step) for step in module.stride)]
    spread[tuple(places)] = x
    amounts = []
    for axis in reversed(range(len(module.kernel_size))):
        around = module.dilation[axis] * (module.kernel_size[axis] - 1) - int(module.padding[axis])
        amounts += [around, around + module.output_padding[axis]]
    kind = CONVOLUTIONS[len(module.kernel_size) - 1]
    alike = kind(
        module.in_channels,
        module.out_channels,
        module.kernel_size,  # type: ignore[arg-type]
        dilation=module.dilation,  # type: ignore[arg-type]
        groups=module.groups,
        device="meta",
    )
    return alike, F.pad(spread, amounts)


def _patch_sums(conv: Convolution, x: Tensor) -> tuple[Tensor, int]:
    """Per example the sum of all patches, in the order of a flattened weight, and how many there are."""
    windows, axes = _pad_input(conv, x), len(conv.kernel_size)
    for axis, (size, step, gap) in enumerate(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True), 2):
        windows = windows.unfold(axis, gap * (size - 1) + 1, step)[..., ::gap]
    count = math.prod(windows.shape[2 : 2 + axes])
    sums = windows.sum(tuple(range(2, 2 + axes)), dtype=torch.float64)
    return sums.unflatten(1, (conv.groups, -1)).flatten(2), count


def _with_one(gram: Tensor, total: Tensor, count: int) -> Tensor:
    corner = total.new_full((len(total), 1, 1), count)
    return torch.cat([torch.cat([gram, total], -1), torch.cat([total.mT, corner], -1)], -2)


def _patch_moments(conv: Convolution, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Σ p pᵀ and Σ p over all patches p, and their number, without ever laying the patches out.

    Patches overlap. Along the first axis a patch is a stack of windows, and two windows that stand `lag` apart meet
    again in the next patch; so their product is taken once, and summed over the places where it counts. For a k × k
    kernel that is k times less work than the product of whole patches. Along the last axis a window is as wide as
    several patches that overlap, and the products of each stand in its product, side by side.
    """
    size, step, gap = conv.kernel_size[0], conv.stride[0], conv.dilation[0]
    reach, channels = gap * (size - 1), conv.in_channels // conv.groups
    padded, wide = _windows(conv, x, reach)
    groups, columns, places, width = padded.shape
    height = places - reach
    count = (height - reach - 1) // step + 1
    offsets, patches = torch.arange(size) * gap, torch.arange(count) * step
    meets = torch.zeros(size, height, dtype=torch.float64)  # which offset of some patch stands at which place
    meets.scatter_(1, offsets[:, None] + patches, 1.0)
    meets = meets.to(x.device)

    windows = padded[:, :, :height].transpose(1, 2)
    below = _windows_below(padded, height, size, gap)
    products = (meets @ (windows.mT @ below).flatten(2).double()).view(groups, size, width, size, width)
    total = (meets @ windows.sum(-2).double()).view(groups, size, width)
    if wide > 1:
        products, total = _sum_over_patches(conv, wide, products), _sum_over_patches(conv, wide, total)
    width = products.shape[2]
    gram = products.new_zeros(size, size, groups, width, width)
    for offset in range(size):
        rest = products[:, offset, :, : size - offset].permute(2, 0, 1, 3)
        gram[offset, offset:] = rest
        gram[offset:, offset] = rest.mT
    inner = width // channels
    gram = gram.view(size, size, groups, inner, channels, inner, channels).permute(2, 4, 0, 3, 6, 1, 5)
    total = total.view(groups, size, inner, channels).permute(0, 3, 1, 2)  # channels first, as a flattened weight
    return gram.reshape(groups, size * width, -1), total.reshape(groups, -1), count * wide * columns


def _windows(conv: Convolution, x: Tensor, more: int) -> tuple[Tensor, int]:
    """Windows along all axes but the first, and how many patches each is wide along the last.

    They lie as (groups × examples·positions × places on the first axis × rest·channels), channels last as networks on
    this library's engines have them, so that what is copied are runs. So many `more` places of zeros follow the last.
    """
    windows, wide, channels = _pad_input(conv, x).movedim(1, -1), 1, conv.in_channels // conv.groups
    axes = list(zip(conv.kernel_size[1:], conv.stride[1:], conv.dilation[1:], strict=True))
    for axis, (size, step, gap) in enumerate(axes, 2):
        if axis == 1 + len(axes):
            wide = _patches_per_window(windows.shape[axis], size, step, gap, channels)
        windows = windows.unfold(axis, gap * (size - 1) + 1 + step * (wide - 1), step * wide)
        windows = windows[..., ::gap] if wide == 1 else windows
    rest = len(axes)
    split = windows.unflatten(2 + rest, (conv.groups, channels))  # examples, places, outer, groups, channels, inner
    outer, inner = range(2, 2 + rest), range(4 + rest, 4 + 2 * rest)
    grouped = split.permute(2 + rest, 0, *outer, 1, *inner, 3 + rest)
    places, axis = windows.shape[1], 2 + rest
    found = grouped.new_empty(*grouped.shape[:axis], places + more, *grouped.shape[axis + 1 :])
    found.narrow(axis, 0, places).copy_(grouped)
    found.narrow(axis, places, more).zero_()
    return found.view(conv.groups, -1, places + more, math.prod(grouped.shape[axis + 1 :])), wide


def _patches_per_window(length: int, size: int, step: int, gap: int, channels: int) -> int:
    """How many patches side by side a window takes in, so that products and copies are fewest.

    A window of p patches has s = reach + 1 + step (p - 1) numbers per channel and its product s² of them, for p patches
    that by themselves have `size`² each. Beside the products, each number costs about as much as eight of them to copy.
    """
    patches = (length - gap * (size - 1) - 1) // step + 1

    def price(wide: int) -> int:
        numbers = channels * (size if wide == 1 else gap * (size - 1) + 1 + step * (wide - 1))
        return patches // wide * numbers * (numbers + 8)

    return min((wide for wide in range(1, patches + 1) if patches % wide == 0), key=price)


def _sum_over_patches(conv: Convolution, wide: int, moments: Tensor) -> Tensor:
    """From windows of several patches to patches: entries (…, i + step·m, j + step·m, …) are summed over patches m.

    Args:
        conv: the convolution.
        wide: how many patches a window takes in along the last axis.
        moments: (groups × size × width) or (groups × size × width × size × width), contiguous.
    """
    size, step, gap = conv.kernel_size[-1], conv.stride[-1], conv.dilation[-1]
    span, channels = gap * (size - 1) + 1 + step * (wide - 1), conv.in_channels // conv.groups
    shape, strides, along, found = [len(moments)], [moments.stride(0)], 0, [len(moments)]
    for axis in range(1, moments.ndim, 2):
        height, width, run = moments.shape[axis], moments.shape[axis + 1], moments.stride(axis + 1)
        shape += [height, width // (span * channels), size, channels]
        strides += [moments.stride(axis), run * span * channels, run * gap * channels, run]
        along += run * step * channels
        found += [height, width // span * size]
    return moments.as_strided([*shape, wide], [*strides, along]).sum(-1).view(found)


def _windows_below(windows: Tensor, height: int, size: int, gap: int) -> Tensor:
    """For each of the first places, its window and those below that a patch has, one after the other."""
    groups, columns, _, width = windows.shape
    far, near = windows.stride()[:2]
    if gap == 1:  # they follow each other as they lie
        return windows.as_strided((groups, height, columns, size * width), (far, width, near, 1))
    stacked = windows.as_strided((groups, height, columns, size, width), (far, width, near, gap * width, 1))
    return stacked.flatten(3)


def _pad_input(conv: Convolution, x: Tensor) -> Tensor:
    """The input as the kernel meets it."""
    if isinstance(conv.padding, str):
        kernel = zip(conv.kernel_size, conv.dilation, strict=True)
        reach = [gap * (size - 1) if conv.padding == "same" else 0 for size, gap in kernel]
        sides = [(r // 2, r - r // 2) for r in reach]
    else:
        sides = [(p, p) for p in conv.padding]
    amounts = [amount for side in reversed(sides) for amount in side]
    if not any(amounts):
        return x
    return F.pad(x, amounts, mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)
