"""What one layer of a network reads or gives, without running the rest."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from fedfuse.core.hooks import forward_hooks
from fedfuse.core.inputs import as_read
from fedfuse.core.params import Layer, Params
from fedfuse.core.spec import Spec, drop_tied_names
from fedfuse.core.words import suggest
from fedfuse.errors import ConfigError
from fedfuse.nets.routes import LayerChoice


class _Seen(Exception):
    """Carries what was looked for out of a forward pass that need not go on."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


def find_layer(spec: Spec, which: LayerChoice) -> Layer:
    """A layer with weights: the "first", the one of this number, counting from 1, or of this name.

    Example:
        >>> find_layer(Spec("lenet"), 2).name, find_layer(Spec("lenet"), "fc1").name
        ('conv2', 'fc1')
    """
    layers = spec.layout.layers
    if not layers:
        raise ConfigError(f"model {spec.factory!r} has no layer with weights, so none can be chosen by its layers")
    if isinstance(which, int) or which == "first":
        number = 1 if which == "first" else int(which)
        if number > len(layers):
            raise ConfigError(
                f"model {spec.factory!r} has {len(layers)} layers with weights, and members were to be chosen at layer "
                f"{number}; choose a smaller number"
            )
        return layers[number - 1]
    named = {layer.name: layer for layer in layers}
    if which not in named:
        raise ConfigError(
            f"model {spec.factory!r} has no layer {which!r}{suggest(which, named)} it has {', '.join(named)}"
        )
    return named[which]


def layer_output(spec: Spec, params: Params, x: Tensor, which: LayerChoice = "first") -> Tensor:
    """What a layer gives, before any activation.

    Example:
        >>> import torch
        >>> spec = Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2})
        >>> tuple(layer_output(spec, spec.build().state_dict(), torch.ones(5, 4)).shape)
        (5, 3)
    """
    layer = find_layer(spec, which)

    def stop(_: nn.Module, __: object, out: Any) -> None:
        raise _Seen(out[0] if isinstance(out, tuple) else out)

    return _run_until(spec, params, x, layer, [(_module_of(spec, layer), stop)])


def layer_input(spec: Spec, params: Params, x: Tensor, layer: Layer) -> Tensor:
    """What a layer reads, one vector per row.

    Example:
        >>> import torch
        >>> spec = Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2})
        >>> tuple(layer_input(spec, spec.build().state_dict(), torch.ones(5, 4), spec.layout.layers[-1]).shape)
        (5, 3)
    """

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Seen(args[0] if args else kwargs["input"])

    return _run_until(spec, params, x, layer, [(_module_of(spec, layer), stop)], before=True).flatten(1)


def _module_of(spec: Spec, layer: Layer) -> nn.Module:
    return spec.skeleton().get_submodule(layer.weight.rpartition(".")[0])


def _run_until(spec: Spec, params: Params, x: Tensor, layer: Layer, hooks: list[Any], before: bool = False) -> Tensor:
    """Run the network until a hook has what it looked for."""
    try:
        with forward_hooks(hooks, before=before, with_kwargs=before):
            functional_call(spec.skeleton(), drop_tied_names(spec, params), (spec.cast(as_read(spec, x)),))
    except _Seen as seen:
        return seen.value
    raise ConfigError(
        f"model {spec.factory!r} never runs its layer {layer.name!r} as a module, so members cannot be chosen by it"
    )
