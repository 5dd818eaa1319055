"""Whether compiled kernels would be faster: a rule taken from measurements, so that no clock decides a result.

Measured against torch on one core for some twenty networks and batches of 1 to 256 (`benchmarks/train.py`): the gain is
what torch spends on calls and on narrow convolutions. It falls below 1.3 once a convolution multiplies some thousand
pairs of channels, or a batch some ten million weights of linear layers. Batches that leave lanes empty waste them.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedfuse.kernels.chain.description import Conv, Layer, Linear, Shape, shape_after

_PAIRS, _FEW_PAIRS = 1000, 128  # input times output channels of a convolution: for full lanes, and in any case
_PRODUCTS = 13_000_000  # batch size times weights of linear layers
_LANES = 16


def is_faster(layers: Sequence[Layer], shape: Shape, batch: int) -> bool:
    """Whether the kernels are expected to be at least 1.3 times as fast as torch.

    Args:
        layers: of the network.
        shape: of one example.
        batch: examples in a batch.

    Example:
        >>> is_faster([Linear("fc", 100, True)], (784,), batch=64), is_faster([Linear("fc", 4096, True)], (784,), 64)
        (True, False)
    """
    filled = batch / (-(-batch // _LANES) * _LANES)
    pairs, weights = 0, 0
    for layer in layers:
        if isinstance(layer, Conv):
            pairs = max(pairs, shape[0] * layer.outputs)
        elif isinstance(layer, Linear):
            weights += shape[0] * layer.outputs
        shape = shape_after(layer, shape)
    return pairs <= max(_PAIRS * filled, _FEW_PAIRS) and weights * batch <= _PRODUCTS
