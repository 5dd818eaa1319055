"""Spec: how to build a model, as data, so that shapes can travel and change between rounds."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedfuse.core.params import Layout, Params
from fedfuse.core.rng import seeded
from fedfuse.core.torch_utils import as_floats_of
from fedfuse.errors import ConfigError, error_text

Output: TypeAlias = int | str

_MOST_VALUES = 1000  # a spec that came from outside names no more layers and sizes than this


@dataclass(frozen=True)  # without slots: what is derived is kept in the object
class Spec:
    """The recipe of a network: a factory, its options, and the surgery done since.

    Attributes:
        factory: a name of `fedfuse.models`, or "package.module:callable".
        options: keyword arguments of the factory, plain JSON.
        surgery: the shape of every tensor that was pruned or grown since the factory built it.
        kept: per pruned or grown layer, which of its original output channels remain.
        prototype: a module the user built, copied instead of calling the factory; it does not travel.
        description: what updates say of a network whose code is not here: it can be fused, not run.
        output: which of several outputs are the logits: an index of a tuple, a key or an attribute; None for a network
            that gives its logits and nothing else.

    Example:
        >>> spec = Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2})
        >>> sum(p.numel() for p in spec.build().parameters())
        23
        >>> Spec.from_json(spec.to_json()) == spec
        True
    """

    factory: str
    options: Mapping[str, Any] = field(default_factory=dict)
    surgery: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    kept: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    prototype: nn.Module | None = field(default=None, repr=False)
    description: Layout | None = field(default=None, repr=False)
    output: Output | None = None

    def __post_init__(self) -> None:
        try:
            plain = json.loads(json.dumps(dict(self.options)))
        except (TypeError, ValueError) as why:
            raise ConfigError(f"model {self.factory!r}: options must be plain data ({why})") from why
        object.__setattr__(self, "options", plain)
        validate_output(self.output)

    @classmethod
    def of(cls, module: nn.Module, output: Output | None = None) -> Spec:
        """The spec of a module the user built: here it is copied, elsewhere its class is called without arguments.

        Args:
            module: the network.
            output: which of its outputs are the logits, where it gives several.
        """
        name = f"{type(module).__module__}:{type(module).__qualname__}"
        own = output_of(module) if output is None else output
        return cls(name, prototype=copy.deepcopy(module), output=own)

    @classmethod
    def of_tensors(cls, params: Params) -> Spec:
        """The spec of plain tensors without a network, their roles guessed from names and shapes."""
        return cls("state-dict", description=Layout.guess(params))

    @classmethod
    def from_json(cls, data: object, trusted: Collection[str] = ()) -> Spec:
        """Read a spec that came from outside; a factory that is not ours must have been named by the user here.

        Otherwise a file could make us call any importable function.
        """
        if not isinstance(data, dict) or not isinstance(data.get("factory"), str):
            raise ConfigError(f"a model's spec must be a table with a factory, got {type(data).__name__}")
        if unknown := data.keys() - {"factory", "options", "surgery", "kept", "output"}:
            raise ConfigError(f"a model's spec has the unknown entries {sorted(unknown)}")
        options = data.get("options", {})
        if not isinstance(options, dict):
            raise ConfigError("a spec's options must be a table")
        if _count_values(options) > _MOST_VALUES:
            raise ConfigError(f"a spec's options have more than {_MOST_VALUES} values, which no network here asks for")
        shapes = _shapes(data.get("surgery", {})), _shapes(data.get("kept", {}))
        spec = cls(data["factory"], options, *shapes, output=data.get("output"))
        if untrusted := sorted(spec.foreign.difference(trusted)):
            raise ConfigError(
                f"the model {untrusted[0]!r} is not one of fedfuse's and was not named here; "
                "name it yourself (--model or --trust, model= in Python, [model] in a file) if you trust its code"
            )
        return spec

    @classmethod
    def from_description(cls, data: object, layout: Layout) -> Spec:
        """Read a spec that came from outside and is not to be built here: its names are kept, nothing is imported.

        Raises:
            ConfigError: if it is no spec at all.

        Example:
            >>> Spec.from_description({"factory": "site:Net"}, Layout({}, ())).can_run
            False
        """
        return replace(cls.from_json(data, cls.factories_in(data)), description=layout)

    def with_prototype_of(self, other: Spec | None) -> Spec:
        """The same network, built of the module that another spec of its class has: no file holds such an object."""
        if other is None or other.factory != self.factory:
            return self
        return replace(self, prototype=other.prototype)

    def with_shapes_of(self, params: Params, kept: Mapping[str, tuple[int, ...]] | None = None) -> Spec:
        """The spec of the same network with the shapes these weights have."""
        built = {n: tuple(t.shape) for n, t in replace(self, surgery={}, kept={}).skeleton().state_dict().items()}
        changed = {n: tuple(t.shape) for n, t in params.items() if tuple(t.shape) != built[n]}
        return replace(self, surgery=changed, kept={**self.kept, **(kept or {})})

    # Specs are the keys of many tables, some of them asked for every tensor: what those need is derived once.

    def __hash__(self) -> int:
        return hash(self._text)

    @cached_property
    def _text(self) -> str:
        return json.dumps(self._plain, sort_keys=True)

    @cached_property
    def _plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"factory": self.factory, "options": self.options}
        plain |= {} if self.output is None else {"output": self.output}
        changes = {"surgery": self.surgery, "kept": self.kept}
        return plain | {key: {n: list(v) for n, v in part.items()} for key, part in changes.items() if part}

    def to_text(self) -> str:
        """Canonical text, equal for equal specs."""
        return self._text

    def to_json(self) -> dict[str, Any]:
        """Plain data for a header."""
        return dict(self._plain)

    @cached_property
    def factories(self) -> frozenset[str]:
        """Every factory it names: its own, and those of the networks its options wrap."""
        return frozenset({self.factory, *_factories(self.options)})

    @staticmethod
    def factories_in(data: object) -> frozenset[str]:
        """Every factory that plain data name, without building anything."""
        return frozenset(_factories(data))

    @cached_property
    def foreign(self) -> frozenset[str]:
        """The factories that are not of `fedfuse.models`: none of them may be built from a file unasked."""
        return frozenset(name for name in self.factories if ":" in name)

    @property
    def is_ours(self) -> bool:
        """Whether nothing but factories of `fedfuse.models` builds it."""
        return not self.foreign

    @property
    def can_run(self) -> bool:
        """Whether the network's code is here."""
        return self.description is None

    def build(self) -> nn.Module:
        """A new module with fresh random weights."""
        if self.description is not None and not self.foreign:
            raise ConfigError(
                "plain tensors say nothing of their network and this must run it; pass the network (model=, --model)"
            )
        if self.description is not None:
            raise ConfigError(
                f"the network {self.factory!r} is known here by its description only and this must run it; "
                f"pass it (model=, --model {sorted(self.foreign)[0]}) if you trust its code"
            )
        module = copy.deepcopy(self.prototype) if self.prototype is not None else self._call_factory()
        output = understood_output(module) if self.output is None else self.output
        module = module if output is None else choose_output(module, output)
        return _resize(module, self.surgery) if self.surgery else module

    def _call_factory(self) -> nn.Module:
        make = factory_of(self.factory)
        try:
            module = make(**self.options)
        except TypeError as why:
            raise ConfigError(f"model {self.factory!r} cannot be built with {self.options}: {why}") from why
        if not isinstance(module, nn.Module):
            raise ConfigError(f"model {self.factory!r} gave a {type(module).__name__}, expected a torch.nn.Module")
        return module

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor; for a network of ours nothing is allocated, whatever its options say.

        Raises:
            ConfigError: if the options describe no network that could be.
        """
        place = torch.device("meta") if self.is_ours and self.prototype is None else nullcontext()
        try:
            with place:
                tensors = self.build().state_dict()
        except (RuntimeError, OverflowError, MemoryError, ValueError) as why:
            raise ConfigError(f"model {self.factory!r} cannot be built: {error_text(why)}") from why
        return {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}

    def skeleton(self) -> nn.Module:
        """One module per spec and process, to run with borrowed weights; callers must not change it."""
        return _build_once(self).module

    @cached_property
    def layout(self) -> Layout:
        """The role of every tensor."""
        return _build_once(self).layout if self.description is None else self.description

    def forward(self, params: Params, x: Tensor) -> Tensor:
        """The network's logits with these weights, in evaluation mode."""
        weights = drop_tied_names(self, params)
        return logits_in(functional_call(self.skeleton(), weights, (self.cast(x),)), self.factory)

    def cast(self, x: Tensor) -> Tensor:
        """Inputs in the network's own floating dtype; whole numbers stay as they are."""
        return as_floats_of(self.skeleton().parameters(), x)


def _count_values(data: object) -> int:
    """How many values plain data hold at all depths: counted first, since a network of 10⁵ layers is slow to refuse."""
    if isinstance(data, Mapping):
        return sum(1 + _count_values(value) for value in data.values())
    return sum(1 + _count_values(value) for value in data) if isinstance(data, list | tuple) else 0


def _factories(data: object) -> Iterator[str]:
    """Every factory that plain data name, at any depth."""
    if isinstance(data, Mapping):
        if isinstance(named := data.get("factory"), str):
            yield named
        for value in data.values():
            yield from _factories(value)
    elif isinstance(data, list):
        for value in data:
            yield from _factories(value)


def _shapes(data: object) -> dict[str, tuple[int, ...]]:
    good = isinstance(data, dict) and all(
        isinstance(name, str)
        and isinstance(shape, list)
        and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**31 for n in shape)
        for name, shape in data.items()
    )
    if not good or not isinstance(data, dict):
        raise ConfigError("a spec's surgery must be a table of shapes")
    return {name: tuple(shape) for name, shape in data.items()}


def factory_of(factory: str) -> Callable[..., object]:
    """The callable a factory names: one of `fedfuse.models`, or one the user wrote."""
    if ":" not in factory:
        models = importlib.import_module("fedfuse.models")
        return models.model_factory(factory)  # type: ignore[no-any-return]
    module_name, _, attribute = factory.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as why:
        raise ConfigError(f"model {factory!r} cannot be imported ({why}); expected package.module:Class") from why
    return found  # type: ignore[no-any-return]


def _resize(module: nn.Module, surgery: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Give the named tensors their new shapes and tell their modules."""
    if unknown := sorted(surgery.keys() - module.state_dict().keys()):
        raise ConfigError(f"a spec's surgery names {unknown[0]!r:.80}, which the network does not have")
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one, so that its id is not given to another
    for name, shape in surgery.items():
        path, _, leaf = name.rpartition(".")
        part = module.get_submodule(path)
        old = getattr(part, leaf)
        if (known := made.get(id(old))) is not None and known[0].shape == shape:  # a tied weight stays one tensor
            setattr(part, leaf, known[0])
            continue
        new = torch.zeros(shape, dtype=old.dtype, device=old.device)
        new = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        made[id(old)] = new, old
        setattr(part, leaf, new)
        if leaf in ("weight", "running_mean"):
            _update_sizes(part, shape)
        elif isinstance(part, nn.RNNBase):
            _update_recurrent_sizes(part, leaf, shape)
    return module


def _update_sizes(part: nn.Module, shape: tuple[int, ...]) -> None:
    """Update the sizes that a layer keeps as plain numbers."""
    if isinstance(part, nn.Linear):
        part.out_features, part.in_features = shape
    elif isinstance(part, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        if part.groups == part.in_channels and part.groups > 1:  # depthwise: one group per channel
            part.groups = shape[0] // (part.out_channels // part.in_channels)
        part.out_channels, part.in_channels = shape[0], shape[1] * part.groups
    elif isinstance(part, nn.modules.batchnorm._BatchNorm):
        part.num_features = shape[0]
    elif isinstance(part, nn.GroupNorm):
        if part.num_groups == part.num_channels:  # every channel by itself
            part.num_groups = shape[0]
        part.num_channels = shape[0]
    elif isinstance(part, nn.LayerNorm):
        part.normalized_shape = shape


def _update_recurrent_sizes(part: nn.RNNBase, leaf: str, shape: tuple[int, ...]) -> None:
    """The same for a recurrent layer, which also keeps a list of its tensors."""
    if leaf == "weight_ih_l0":
        part.input_size = shape[1]
    elif leaf == "weight_hh_l0":
        part.hidden_size = shape[1]
    part._init_flat_weights()


class _BuiltNetwork(NamedTuple):
    """A network built once, and its layout: the module itself forgets which parameters its author froze."""

    module: nn.Module
    layout: Layout


@lru_cache(maxsize=16)
def _build_once(spec: Spec) -> _BuiltNetwork:
    with seeded(0, "skeleton"):  # whether it is built here for the first time must not move the global generator
        module = spec.build().eval()
        layout = Layout.of(module)
    return _BuiltNetwork(module.requires_grad_(False), layout)


def drop_tied_names(spec: Spec, params: Params) -> dict[str, Tensor]:
    """The weights without the further names of tied ones, as a network can be called with them."""
    further = {name for same in spec.layout.tied for name in same[1:]}
    return {name: t for name, t in params.items() if name not in further}


def tie(spec: Spec, params: Params) -> Params:
    """The weights, those that are one tensor made equal: as the first of their names has it."""
    first = {name: same[0] for same in spec.layout.tied for name in same[1:]}
    return {n: params[same if (same := first.get(n, n)) in params else n] for n in params} if first else params


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
    """The output that is meant where none is chosen: networks of `transformers` give their logits among others."""
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
