"""Second moments of what a layer reads and of the gradients that come back to it."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.core.precision import in_full

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Convolution: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d

_SMALL = 1e-12


def input_moments(module: nn.Module, x: Tensor) -> Tensor:
    """Σ a aᵀ over examples and positions, where a is what the layer reads, with a 1 appended if it has a bias.

    A linear layer reads vectors, a convolution one patch per output position, in the order of its flattened weight.
    A grouped convolution is as many layers as it has groups, each with its own channels.

    Returns:
        (groups × in × in), float64.

    Example:
        >>> input_moments(nn.Conv1d(1, 1, 2), torch.tensor([[[1.0, 2.0, 3.0]]])).tolist()
        [[[5.0, 8.0, 3.0], [8.0, 13.0, 5.0], [3.0, 5.0, 2.0]]]
    """
    x = in_full(x)
    if isinstance(module, CONVOLUTIONS):
        gram, total, count = _patch_moments(module, x)
    else:
        rows = x.reshape(-1, x.shape[-1])
        gram, total, count = (rows.mT @ rows).double()[None], rows.sum(0).double()[None], len(rows)
    return gram if module.bias is None else _with_one(gram, total[..., None], count)


def output_moments(module: nn.Module, grad: Tensor) -> tuple[Tensor, int]:
    """Σ g gᵀ over examples and positions, (groups × out × out) in float64, and how many those are."""
    grad = in_full(grad)
    if isinstance(module, CONVOLUTIONS):
        columns = grad.transpose(0, 1).reshape(module.groups, module.out_channels // module.groups, -1)
    else:
        columns = grad.reshape(1, -1, grad.shape[-1]).mT
    gram = columns @ columns.mT
    if float(gram.diagonal(dim1=-2, dim2=-1).amax()) < _SMALL:
        # a network that fits its rows has gradients whose squares no float32 can hold
        scale = float(columns.abs().max()) or 1.0
        columns = columns / scale
        return (columns @ columns.mT).double() * scale**2, columns.shape[-1]
    return gram.double(), columns.shape[-1]


def _with_one(gram: Tensor, total: Tensor, count: int) -> Tensor:
    corner = total.new_full((len(total), 1, 1), count)
    return torch.cat([torch.cat([gram, total], -1), torch.cat([total.mT, corner], -1)], -2)


def _patch_moments(conv: Convolution, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Σ p pᵀ and Σ p over all patches p, and their number, without ever laying the patches out.

    Patches overlap. Along the first axis a patch is a stack of windows, and two windows that stand `lag` apart meet
    again in the next patch; so their product is taken once, and summed over the places where it counts. For a k × k
    kernel that is k times less work than the product of whole patches.
    """
    windows = _windows(conv, x)
    size, step, gap = conv.kernel_size[0], conv.stride[0], conv.dilation[0]
    reach = gap * (size - 1)
    groups, height, width, columns = windows.shape
    span = (height - reach - 1) // step * step + 1

    def over_places(t: Tensor) -> Tensor:
        """Per offset in the patch, the sum over all patches."""
        return t.unfold(1, span, gap)[:, :size, ..., ::step].sum(-1, dtype=torch.float64)

    below = F.pad(windows, (0, 0, 0, 0, 0, reach)).unfold(1, reach + 1, 1)[..., ::gap]  # the windows below each
    below = below.permute(0, 1, 4, 2, 3).reshape(groups, height, size * width, columns)
    products = over_places(windows @ below.mT).view(groups, size, width, size, width)
    gram = products.new_zeros(size, size, groups, width, width)
    for offset in range(size):
        rest = products[:, offset, :, : size - offset].permute(2, 0, 1, 3)
        gram[offset, offset:] = rest
        gram[offset:, offset] = rest.mT
    total = over_places(windows.sum(-1)).transpose(0, 1)
    count = ((span - 1) // step + 1) * columns
    return *_channel_major(conv, gram, total), count


def _channel_major(conv: Convolution, gram: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Moments from (offset, channel, rest) to (channel, offset, rest), as a flattened weight has them."""
    size, groups, channels = conv.kernel_size[0], conv.groups, conv.in_channels // conv.groups
    gram = gram.view(size, size, groups, channels, -1, channels, math.prod(conv.kernel_size[1:]))
    width = channels * math.prod(conv.kernel_size)
    total = total.reshape(size, groups, channels, -1).permute(1, 2, 0, 3)
    return gram.permute(2, 3, 0, 4, 5, 1, 6).reshape(groups, width, width), total.reshape(groups, width)


def _windows(conv: Convolution, x: Tensor) -> Tensor:
    """Windows along all axes but the first: (groups × places on it × channels·rest × examples·positions)."""
    windows = _pad_input(conv, x)
    axes = zip(conv.kernel_size[1:], conv.stride[1:], conv.dilation[1:], strict=True)
    for axis, (size, step, gap) in enumerate(axes, 3):
        windows = windows.unfold(axis, gap * (size - 1) + 1, step)[..., ::gap]
    rest = len(conv.kernel_size) - 1
    outer, inner = range(4, 4 + rest), range(4 + rest, 4 + 2 * rest)
    grouped: Tensor = windows.unflatten(1, (conv.groups, -1)).permute(1, 3, 2, *inner, 0, *outer)
    height = conv.in_channels // conv.groups * math.prod(conv.kernel_size[1:])
    return grouped.reshape(*grouped.shape[:2], height, -1)


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
