"""Whether a network's images may lie with a pixel's channels side by side, which is faster where it changes nothing."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedfuse.core.answers import logits_in
from fedfuse.core.inputs import convolves_images, example_inputs
from fedfuse.core.rng import seeded
from fedfuse.core.spec import Spec
from fedfuse.errors import FuseError

_ROWS = 2


class _Pass(NamedTuple):
    """What one pass forward and back gives."""

    logits: Tensor
    slopes: Tensor


@lru_cache(maxsize=16)
def suits_channels_last(spec: Spec, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> bool:
    """Whether a network that convolves images trains the same with channels last, and its rows may lie so.

    A network of ours does. Any other is tried once on inputs that are the same for every client: in evaluation, where
    nothing is drawn, logits and gradients must agree, and in training nothing may be raised. So a client's answer
    does not depend on who came first, and a network that asks how its tensors lie (by `view`) finds them as written.

    Raises:
        ConfigError: if the network gives no logits, before anybody trains.

    Example:
        >>> suits_channels_last(Spec("lenet"), (1, 28, 28), torch.float32, "cpu")
        True
    """
    images = convolves_images(spec, shape)
    if spec.is_ours and spec.prototype is None:
        return images
    with seeded(0, "layout"), torch.enable_grad():
        x = example_inputs(spec, shape, _ROWS, dtype).to(device)
        plain = _try_format(spec, x, torch.contiguous_format)
        other = _try_format(spec, x, torch.channels_last) if images and plain else None
    return plain is not None and other is not None and all(_agree(a, b) for a, b in zip(plain, other, strict=True))


def _try_format(spec: Spec, x: Tensor, form: torch.memory_format) -> _Pass | None:
    """One trial with tensors in this order, or None if the network raised something; a copy is used up for it."""
    module = spec.build().to(x.device)
    if form == torch.channels_last:
        module, x = module.to(memory_format=form), x.contiguous(memory_format=form)  # type: ignore[call-overload]
    try:
        found = _pass(module.eval(), x, spec)
        _pass(module.train(), x, spec)
    except FuseError:
        raise
    except Exception:  # the user's own forward: what it raises on real rows is told where it trains
        return None
    return found


def _pass(module: nn.Module, x: Tensor, spec: Spec) -> _Pass:
    with seeded(0, "layout", "pass"):
        logits = logits_in(module(x), spec.factory)
        params = [p for p in module.parameters() if p.requires_grad]
        slopes = torch.autograd.grad(logits.square().sum(), params, materialize_grads=True) if params else ()
    return _Pass(logits.detach().flatten(), torch.cat([logits.new_zeros(1), *(s.flatten() for s in slopes)]))


def _agree(a: Tensor, b: Tensor) -> bool:
    """Whether two results differ by rounding alone."""
    return bool((a - b).double().norm() <= torch.finfo(a.dtype).eps ** 0.5 * a.double().norm())
