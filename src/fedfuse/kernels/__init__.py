"""Compiled training steps for the networks they know: `chain_for` is the one way in.

Nothing here imports numba until a chain is made; without numba every network is torch's.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator, Set
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.errors import ConfigError
from fedfuse.kernels.chain.description import (
    Conv,
    Dropout,
    Layer,
    Linear,
    MeanFieldLinear,
    Norm,
    Shape,
    Uncovered,
    is_faster,
    shape_after,
)
from fedfuse.kernels.chain.trace import chain_of
from fedfuse.kernels.code_cache import is_cold

if TYPE_CHECKING:
    from fedfuse.kernels.chain.network import Chain, LayerReading

_log = logging.getLogger(__name__)
_INSTALL = "pip install 'fedfuse[fast]'"


@cache
def why_not() -> str:
    """Why nothing can be compiled here; empty if it can.

    Example:
        >>> isinstance(why_not(), str)
        True
    """
    try:
        import numba  # noqa: F401 - an installed one may still not load with this numpy
    except ImportError as why:
        return f"not installed: {_INSTALL}" if why.name in ("numba", "llvmlite") else f"numba does not load: {why}"
    return ""


def signature() -> str:
    """What else than our source decides a compiled chain's last bits: numba and the processor's instructions.

    Example:
        >>> signature() == signature()
        True
    """
    try:
        found = [version(name) for name in ("numba", "llvmlite")]
    except PackageNotFoundError:
        return "none"
    return " ".join([*found, platform.machine(), torch.backends.cpu.get_cpu_capability()])


def chain_for(module: nn.Module, rows: Rows, settings: LocalSettings, live: Set[str]) -> Chain | None:
    """The compiled chain that trains a network, or None where torch does.

    What is chosen depends on the network, the batch size and the settings, and on whether numba is there: never on a
    clock, so that every worker of a run chooses alike.

    Args:
        module: the network, set to training.
        rows: what it trains on.
        settings: how; its `kernel` is what the user asked for.
        live: the parameters in training.

    Raises:
        ConfigError: if the user insists on a compiled chain and there is none.
    """
    if settings.kernel == "torch":
        return None
    try:
        shape = tuple(rows.x.shape[1:])
        layers = _layers(module, shape)
        _check(module, rows, settings, live, layers, shape)
    except Uncovered as why:
        _insist(settings, f"cannot train this: it does not know {why}")
        return None
    if settings.kernel == "auto" and not is_faster(layers, shape, settings.batch_size):
        return None
    if why_not():
        _insist(settings, f"needs numba, which is {why_not()}")
        return None
    if is_cold():
        _log.info("compiling the kernels for this machine: some seconds, once")
    # room for no more rows than there are, in powers of two: clients of about one size share a chain
    batch = min(settings.batch_size, 1 << (len(rows) - 1).bit_length())
    return _chain(layers, shape, batch)


def inputs_of_head(module: nn.Module, rows: Rows, kernel: str, head: str, batch: int = 64) -> Iterator[Tensor] | None:
    """What a network's last layer reads of all rows, by a compiled pass forward; None where torch does it.

    Args:
        module: the network, in evaluation mode.
        rows: what is passed through it.
        kernel: the user's choice for training; "compiled" is no demand here.
        head: the path of a linear layer, which must be the last layer.
        batch: rows at a time.
    """
    chain, layers = _chain_to_read(module, rows, kernel, batch)
    last = layers[-1] if layers else None
    if chain is None or not isinstance(last, Linear) or last.name != head:
        return None
    return chain.read_before_head(module, rows.x)


def readings_of_layers(
    module: nn.Module, rows: Rows, kernel: str, names: Set[str], batch: int = 128
) -> Iterator[list[LayerReading]] | None:
    """What layers read of all rows, and the gradients of the summed cross entropy there; None where torch does it.

    Args:
        module: the network, in evaluation mode.
        rows: what is passed through it.
        kernel: the user's choice for training; "compiled" is no demand here.
        names: the paths of the layers that are wanted.
        batch: rows at a time.
    """
    chain, layers = _chain_to_read(module, rows, kernel, batch)
    if chain is None or not names <= {layer.name for layer in layers if isinstance(layer, Conv | Linear)}:
        return None
    return chain.read_layers(module, rows.x, rows.y)


def _chain_to_read(module: nn.Module, rows: Rows, kernel: str, batch: int) -> tuple[Chain | None, tuple[Layer, ...]]:
    """A chain whose layers do in evaluation what they do in training, and these layers; none where torch is asked."""
    if kernel == "torch" or not len(rows) or not rows.x.is_cpu:
        return None, ()
    settings, live = LocalSettings(batch_size=batch), {name for name, _ in module.named_parameters()}
    try:
        layers = _layers(module, tuple(rows.x.shape[1:]))
    except Uncovered:
        return None, ()
    if any(isinstance(layer, Norm | Dropout | MeanFieldLinear) for layer in layers):
        return None, ()
    return chain_for(module, rows, settings, live), layers


def _insist(settings: LocalSettings, why: str) -> None:
    """Say why there is no chain to a user who asked for nothing else."""
    if settings.kernel == "compiled":
        raise ConfigError(f'kernel = "compiled" {why}; use kernel = "auto" or "torch"')


def _layers(module: nn.Module, shape: Shape) -> tuple[Layer, ...]:
    """The layers of a network in the mode that each of its parts is in."""
    return _layers_in(module, shape, tuple(part.training for part in module.modules()))


@lru_cache(maxsize=8)  # by the modes too: dropout is a layer in training and none in evaluation
def _layers_in(module: nn.Module, shape: Shape, modes: tuple[bool, ...]) -> tuple[Layer, ...]:  # noqa: ARG001 - a key
    return chain_of(module, shape)


@lru_cache(maxsize=2)  # its buffers serve one client after another
def _chain(layers: tuple[Layer, ...], shape: Shape, batch: int) -> Chain:
    from fedfuse.kernels.chain.network import Chain

    return Chain(layers, shape, batch)


def _check(
    module: nn.Module, rows: Rows, settings: LocalSettings, live: Set[str], layers: tuple[Layer, ...], shape: Shape
) -> None:
    """What besides the network's layers must be as the kernels have it."""
    params = dict(module.named_parameters())
    if wrong := [f"{name!r} of {p.dtype}" for name, p in params.items() if p.dtype != torch.float32]:
        raise Uncovered(f"the parameter {wrong[0]}")
    if settings.device != "cpu" or rows.x.dtype != torch.float32:
        raise Uncovered(f"inputs of {rows.x.dtype} on {settings.device}")
    trained = {f"{layer.name}.{leaf}" for layer in layers for leaf in _leaves(layer)}  # type: ignore[union-attr]
    if trained ^ live or trained ^ params.keys():
        raise Uncovered(
            f"the parameter {min((trained ^ live) | (trained ^ params.keys()))!r}, held or not in the chain"
        )
    for layer in layers:
        shape = shape_after(layer, shape)
    if len(shape) != 1:
        raise Uncovered(f"scores of shape {shape}")
    if int(rows.y.min()) < 0 or int(rows.y.max()) >= shape[0]:
        raise Uncovered(f"labels outside 0 to {shape[0] - 1}")


def _leaves(layer: Layer) -> tuple[str, ...]:
    """The parameters of a layer."""
    if not hasattr(layer, "name"):
        return ()
    if isinstance(layer, MeanFieldLinear):
        return ("weight", "log_variance", "bias") if layer.bias else ("weight", "log_variance")
    return ("weight", "bias") if getattr(layer, "bias", True) else ("weight",)
