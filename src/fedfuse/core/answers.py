"""What a network answers: logits, or several things of which one is the logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from fedfuse.errors import ConfigError

Output: TypeAlias = int | str


@dataclass(frozen=True, slots=True)
class ChooseOutput:
    """A forward hook that takes one of a network's outputs: a position in a tuple or list, a key, or an attribute.

    Example:
        >>> import torch
        >>> ChooseOutput("logits")(nn.Identity(), (), {"loss": None, "logits": torch.ones(1)})
        tensor([1.])
    """

    output: Output

    def __call__(self, module: nn.Module, args: tuple[Any, ...], out: object) -> Tensor:  # noqa: ARG002
        """The chosen output.

        Raises:
            ConfigError: naming what came instead.
        """
        found = _part(out, self.output)
        if not isinstance(found, Tensor):
            what = "is no tensor" if found is not None else "is not there"
            raise ConfigError(
                f"output = {self.output!r} {what}: the network gives {_kind(out)}; {_remedy(out, 'choose another one')}"
            )
        return found


def choose_output(module: nn.Module, output: Output) -> nn.Module:
    """The module, giving that output alone; its tensors keep their names, and a choice made before gives way."""
    for key in [k for k, hook in module._forward_hooks.items() if isinstance(hook, ChooseOutput)]:
        del module._forward_hooks[key]
    module.register_forward_hook(ChooseOutput(output))
    return module


def understood_output(module: nn.Module) -> Output | None:
    """The output that is meant where nobody says which: networks of `transformers` give their logits among others."""
    return "logits" if is_of_transformers(module) and output_of(module) is None else None


def is_of_transformers(module: nn.Module) -> bool:
    """Whether a network is of the library `transformers`, or inherits from one that is."""
    return any(base.__module__.partition(".")[0] == "transformers" for base in type(module).__mro__)


def output_of(module: nn.Module) -> Output | None:
    """The output a module was set to give; None if it was not."""
    return next((hook.output for hook in module._forward_hooks.values() if isinstance(hook, ChooseOutput)), None)


def validate_output(output: object) -> Output | None:
    """An output as a file or a header names it.

    Raises:
        ConfigError: if it is neither a position nor a name.
    """
    named = isinstance(output, str) and 0 < len(output) <= 200
    counted = isinstance(output, int) and not isinstance(output, bool) and -1000 < output < 1000
    if output is not None and not named and not counted:
        raise ConfigError(f"output is {str(output)!r:.80}, expected a place such as 0 or a name such as 'logits'")
    return output  # type: ignore[return-value]


def logits_in(out: object, model: str) -> Tensor:
    """A network's answer, if it is a tensor.

    Raises:
        ConfigError: naming what came and how to say which part is meant.

    Example:
        >>> logits_in((1, 2), "own:Net")
        Traceback (most recent call last):
        ...
        fedfuse.errors.ConfigError: model 'own:Net' gives a tuple of (int, int), expected logits; it gives no tensor
    """
    if isinstance(out, Tensor):
        return out
    raise ConfigError(f"model {model!r} gives {_kind(out)}, expected logits; {_remedy(out, 'say which')}")


def _part(out: object, output: Output) -> object:
    """One of several outputs, or None."""
    if isinstance(out, Mapping):
        return out.get(output)
    if isinstance(output, str):
        return None if isinstance(out, Tensor) else getattr(out, output, None)
    inside = isinstance(out, tuple | list) and -len(out) <= output < len(out)
    return out[output] if inside else None  # type: ignore[index]


def _tensors(out: object) -> dict[Output, Tensor]:
    """The tensors among several outputs, by what chooses them."""
    if isinstance(out, Mapping):
        parts: list[tuple[Any, Any]] = list(out.items())
    elif isinstance(out, tuple | list):
        parts = list(enumerate(out))
    else:
        parts = list(getattr(out, "__dict__", {}).items())
    return {key: part for key, part in parts if isinstance(part, Tensor) and isinstance(key, int | str)}


def _kind(out: object) -> str:
    """What came, in words."""
    name = type(out).__name__
    if isinstance(out, Mapping):
        return f"a {name} with {', '.join(repr(key) for key in list(out)[:6])}"
    if isinstance(out, tuple | list):
        return f"a {name} of ({', '.join(type(part).__name__ for part in out[:6])})"
    return f"a {name}"


def _remedy(out: object, lead: str) -> str:
    if isinstance(out, Tensor):
        return "leave `output` out"
    found = _tensors(out)
    if not found:
        return "it gives no tensor"
    choices = " or ".join(f"output = {key!r}" for key in list(found)[:4])
    return f"{lead}: {choices} (model.output in a file, `output` in Python)"
