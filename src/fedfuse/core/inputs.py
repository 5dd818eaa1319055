"""What an input looks like, known without seeing one, and how each network reads it."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from fedfuse.core.answers import is_of_transformers, logits_in
from fedfuse.core.rng import seeded, stream
from fedfuse.core.spec import Spec, factory_of
from fedfuse.errors import ConfigError, FuseError, error_text

_TEXT = 16  # tokens of a text that is made up to look at a network


@dataclass(frozen=True, slots=True)
class InputForm:
    """The shape of one input and the range of its numbers, per channel or feature; or how many tokens there are.

    Example:
        >>> form = InputForm((1, 2, 2), low=(-1.0,), high=(3.0,))
        >>> form.squash(torch.zeros(1, 1, 2, 2)).flatten()
        tensor([1., 1., 1., 1.])
    """

    shape: tuple[int, ...]
    low: tuple[float, ...] = (0.0,)
    high: tuple[float, ...] = (1.0,)
    tokens: int = 0

    def squash(self, free: Tensor) -> Tensor:
        """Any numbers brought into the range, smoothly: low + (high − low) · sigmoid(u)."""
        view = (1, -1) + (1,) * (len(self.shape) - 1)
        low, high = (free.new_tensor(bound).view(view) for bound in (self.low, self.high))
        return low + (high - low) * free.sigmoid()

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """Inputs of uniform noise over the range, or tokens drawn at random."""
        if self.tokens:
            return torch.randint(self.tokens, (count, *self.shape), generator=generator)
        return self.squash(torch.rand(count, *self.shape, generator=generator).logit(1e-6))


@lru_cache(maxsize=16)
def own_form(spec: Spec) -> InputForm | None:
    """The form of a network's inputs as its options tell it; None where they do not.

    Example:
        >>> own_form(Spec("lenet", {"size": 32, "channels": 3})).shape, own_form(Spec("mlp")).shape
        ((3, 32, 32), (784,))
    """
    inner = spec.options.get("of")
    if not spec.can_run:  # a described network's factory is a word from a file
        return None
    if spec.prototype is not None:
        return _form_by_config(spec.prototype)
    if isinstance(inner, dict):
        return own_form(Spec.from_json(inner, spec.factories))
    try:
        parameters = inspect.signature(factory_of(spec.factory)).parameters.values()
    except (TypeError, ValueError):  # a callable that hides its signature
        return None
    options = {p.name: p.default for p in parameters} | dict(spec.options)
    sizes = {
        name: options[name]
        for name in ("channels", "size", "inputs", "tokens", "length")
        if type(options.get(name)) is int
    }
    if "channels" in sizes and "size" in sizes:
        return InputForm((sizes["channels"], sizes["size"], sizes["size"]))
    if "tokens" in sizes and "length" in sizes:
        return InputForm((sizes["length"],), tokens=sizes["tokens"])
    return InputForm((sizes["inputs"],)) if "inputs" in sizes else None


def _form_by_config(module: nn.Module) -> InputForm | None:
    """What a network of `transformers` reads, as its config tells: pictures, or tokens of a text that is not long."""
    config = getattr(module, "config", None)
    if not is_of_transformers(module) or config is None:
        return None
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if isinstance(size, int) and isinstance(channels, int):
        return InputForm((channels, size, size))
    tokens, most = getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None)
    if not isinstance(tokens, int):
        return None
    return InputForm((min(_TEXT, most) if isinstance(most, int) else _TEXT,), tokens=tokens)


def _own_shape(spec: Spec) -> tuple[int, ...] | None:
    """The shape a network of ours reads by its options, and a sequence by the linear layer that it begins with."""
    if spec.is_ours and (form := own_form(spec)) is not None:
        return form.shape
    first = spec.skeleton() if spec.prototype is not None else None
    while type(first) is nn.Sequential and len(first):
        first = first[0]
    return (first.in_features,) if isinstance(first, nn.Linear) else None


def shape_read(spec: Spec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which a network reads inputs of this one: its own, where that lays as many numbers out otherwise.

    Only networks we know enough of are asked; any other is taken to read what comes.

    Example:
        >>> shape_read(Spec("lenet"), (784,)), shape_read(Spec("lenet"), (1, 28, 28))
        ((1, 28, 28), (1, 28, 28))
    """
    own = _own_shape(spec)
    same = own is None or len(own) == len(shape) or math.prod(own) != math.prod(shape)
    return shape if same or own is None else own


def as_read(spec: Spec, x: Tensor) -> Tensor:
    """Inputs as a network reads them: pictures for one that convolves, though they came as rows of features."""
    shape = shape_read(spec, tuple(x.shape[1:]))
    return x if shape == tuple(x.shape[1:]) else x.reshape(len(x), *shape)


def convolves_images(spec: Spec, shape: tuple[int, ...]) -> bool:
    """Whether inputs of this shape are images, and the network has convolutions for them.

    Example:
        >>> convolves_images(Spec("lenet"), (1, 28, 28)), convolves_images(Spec("mlp"), (784,))
        (True, False)
    """
    return len(shape) == 3 and any(isinstance(part, nn.Conv2d) for part in spec.skeleton().modules())


def example_inputs(spec: Spec, shape: tuple[int, ...], count: int, dtype: torch.dtype | None = None) -> Tensor:
    """Inputs of this shape that are the same for everybody: uniform noise, or zeros and ones as whole numbers.

    Args:
        spec: the network that reads them.
        shape: of one input.
        count: how many.
        dtype: of real inputs, where it is known; else the network's own, or whole numbers if it reads only those.

    Example:
        >>> example_inputs(Spec("mlp", {"inputs": 4}), (4,), 2).shape
        torch.Size([2, 4])
    """
    x = torch.rand(count, *shape_read(spec, shape), generator=stream(0, "inputs"))
    if dtype is None:
        x = spec.cast(x)
        return x.round().long() if reads_tokens(spec, tuple(x.shape[1:])) else x
    return x.to(dtype) if dtype.is_floating_point else x.round().to(dtype)


def run_once(spec: Spec, shape: tuple[int, ...]) -> Tensor:
    """A network's logits for one input of this shape, in evaluation mode: for whoever watches what happens within.

    Raises:
        ConfigError: if it cannot read such an input, or gives no logits.

    Example:
        >>> run_once(Spec("mlp", {"inputs": 4, "classes": 3}), (4,)).shape
        torch.Size([1, 3])
    """
    x = example_inputs(spec, shape, 1)
    try:
        with torch.no_grad(), seeded(0, "reading"):
            out = spec.skeleton()(x)
    except FuseError:
        raise
    except Exception as why:  # the user's own forward may raise anything
        raise ConfigError(
            f"model {spec.factory!r} cannot read an input of shape {tuple(x.shape[1:])}: {error_text(why)}"
        ) from why
    return logits_in(out, spec.factory)


@lru_cache(maxsize=16)
def reads_tokens(spec: Spec, shape: tuple[int, ...]) -> bool:
    """Whether a network reads whole numbers and no others, found by asking it.

    Example:
        >>> reads_tokens(Spec("mlp", {"inputs": 4}), (4,))
        False
    """
    if spec.is_ours and spec.prototype is None:
        form = own_form(spec)
        return form is not None and form.tokens > 0
    zeros = torch.zeros(2, *shape)
    return not _runs(spec, spec.cast(zeros)) and _runs(spec, zeros.long())


def _runs(spec: Spec, x: Tensor) -> bool:
    try:
        with torch.no_grad(), seeded(0, "reading"):
            spec.skeleton()(x)
    except Exception:  # the user's own forward may raise anything
        return False
    return True
