"""Networks whose own weights rest, moved by low-rank adapters: those alone are trained, and those alone are sent.

What rests is no part of a network's state dict, so no brief, reply or file carries it: every site builds it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch.nn.functional as F
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn

from fedfuse.core.messages import Form
from fedfuse.core.model import Single
from fedfuse.core.params import Layout
from fedfuse.core.posterior import Posterior
from fedfuse.core.rng import seeded
from fedfuse.core.settings import Settings, validate_settings
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.tasks import CLASSIFICATION, Task
from fedfuse.wire.codec import LazyParams, Malformed, fingerprint
from fedfuse.wire.folders import open_weights

_FITTING = "name the checkpoint of this network, with its options and its classes"
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class AdaptedLayer(nn.Module):
    """A layer at rest and what moves it: y = layer(x) + s B A x, B being zero at first (arXiv:2106.09685).

    Where rounds are merged, what earlier ones have learned is kept in further factors that are not trained,
    y = layer(x) + s (B A + B₀ A₀) x, of a rank that grows from round to round and is zero at first.

    Example:
        >>> layer = AdaptedLayer(nn.Linear(3, 2), rank=1, scale=2.0)
        >>> sorted(name for name, _ in layer.named_parameters() if "lora" in name)
        ['lora_A.weight', 'lora_B.weight']
    """

    def __init__(self, layer: nn.Module, rank: int, scale: float, merges: bool = False) -> None:
        super().__init__()
        self.base_layer, self.scale = layer, scale
        self.lora_A, self.lora_B = _factors(layer, rank)
        nn.init.zeros_(self.lora_B.weight)  # type: ignore[arg-type]
        self.merges = merges
        if merges:
            self.register_buffer("merged_A", self.lora_A.get_parameter("weight").detach()[:0].clone())
            self.register_buffer("merged_B", self.lora_B.get_parameter("weight").detach()[:, :0].clone())

    def forward(self, x: Tensor) -> Tensor:
        """The layer's answer and the adapter's."""
        moved: Tensor = self.lora_B(self.lora_A(x))
        if self.merges and len(self.get_buffer("merged_A")):
            inner = _answer(self.lora_A, self.get_buffer("merged_A"), x)
            moved = moved + _answer(self.lora_B, self.get_buffer("merged_B"), inner)
        answer: Tensor = self.base_layer(x) + self.scale * moved
        return answer

    def extra_repr(self) -> str:
        """The scale."""
        return f"scale={self.scale:g}"


def _answer(layer: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    """What a factor would answer with another weight."""
    answer: Tensor = layer._conv_forward(x, weight, None) if isinstance(layer, _CONVS) else F.linear(x, weight)
    return answer


def _is_turned(layer: nn.Module) -> bool:
    """Whether this is the linear layer of GPT-2, whose weight is in × out."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def _factors(layer: nn.Module, rank: int) -> tuple[nn.Module, nn.Module]:
    weight: Any = layer.weight
    place = {"bias": False, "device": weight.device, "dtype": weight.dtype}
    if isinstance(layer, _CONVS):
        how = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        first = type(layer)(layer.in_channels, rank, *how, padding_mode=layer.padding_mode, **place)  # type: ignore[arg-type]
        return first, type(layer)(rank, layer.out_channels, 1, **place)
    out, inputs = weight.shape if not _is_turned(layer) else reversed(weight.shape)
    return nn.Linear(inputs, rank, **place), nn.Linear(rank, out, **place)


def adapt(
    module: nn.Module, rank: int = 4, alpha: float | None = None, targets: Sequence[str] = (), merges: bool = False
) -> nn.Module:
    """Let a network rest and give some of its layers low-rank adapters, in place.

    Its parameters and buffers keep their values and leave its state dict; norms keep to their running statistics.

    Args:
        module: any network.
        rank: of every adapter.
        alpha: an adapter counts α / rank; by default once.
        targets: the layers, by their names or the ends of those: linear layers and convolutions; by default all linear
            ones.
        merges: keep room at every adapter for what earlier rounds have learned.

    Raises:
        ConfigError: if a name is no such layer, or there is nothing to adapt.

    Example:
        >>> net = adapt(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), rank=1, targets=["2"])
        >>> {name: tuple(t.shape) for name, t in net.state_dict().items()}
        {'2.lora_A.weight': (1, 5), '2.lora_B.weight': (2, 1)}
    """
    chosen = dict(_chosen_layers(module, tuple(targets)))
    lay_to_rest(module)
    scale = 1.0 if alpha is None else alpha / rank
    for path, layer in chosen.items():
        made = AdaptedLayer(layer, rank, scale, merges).train(layer.training)
        if not path:
            return made
        module.set_submodule(path, made)
    return module


def _chosen_layers(module: nn.Module, targets: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    within = {id(part.out_proj) for part in module.modules() if isinstance(part, nn.MultiheadAttention)}
    layers = {path: part for path, part in module.named_modules() if _can_be_adapted(part) and id(part) not in within}
    for target in targets:
        if not any(_is_meant(path, target) for path in layers):
            raise ConfigError(
                f"adapters: {target!r} is no linear layer or plain convolution of {type(module).__name__}; it has "
                f"{', '.join(list(layers)[:12]) or 'none'}"
            )
    for path, layer in layers.items():
        if any(_is_meant(path, t) for t in targets) if targets else not isinstance(layer, _CONVS):
            yield path, layer
    if not targets and all(isinstance(layer, _CONVS) for layer in layers.values()):
        raise ConfigError(f"adapters: {type(module).__name__} has no linear layer; name its convolutions as targets")


def _can_be_adapted(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or _is_turned(part) or (isinstance(part, _CONVS) and part.groups == 1)


def _is_meant(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")


def lay_to_rest(module: nn.Module) -> None:
    """Turn every parameter of a network into a buffer that its state dict leaves out, and so every buffer."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                delattr(part, name)
                part.register_buffer(name, parameter.detach(), persistent=False)
        part._non_persistent_buffers_set.update(part._buffers)
        if isinstance(part, nn.RNNBase):
            part._init_flat_weights()  # it keeps a list of its tensors
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
            part.eval()
            part.track_running_stats = False  # or it looks for their count in every state dict
            part.train = _Resting(part)  # type: ignore[method-assign,assignment]


class _Resting:
    """In the place of `train`: a norm whose statistics are not sent keeps to them, whatever its network does."""

    def __init__(self, part: nn.Module) -> None:
        self.part = part

    def __call__(self, mode: bool = True) -> nn.Module:  # noqa: ARG002 - the signature of `train`
        return self.part


def build_adapted(
    of: Mapping[str, Any],
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str] = (),
    seed: int = 0,
    merges: bool = False,
    base: str = "",
    digest: str = "",
) -> nn.Module:
    """The model factory "adapted": a network built from the spec in `of`, at rest, with adapters.

    Its weights are drawn by the seed, or read from the file or folder `base`, if they are those of that digest.

    Example:
        >>> of = {"factory": "mlp", "options": {"inputs": 4, "hidden": [3]}}
        >>> sorted(build_adapted(of, rank=2).state_dict())[:2]
        ['classifier.lora_A.weight', 'classifier.lora_B.weight']
    """
    spec = Spec.from_json(of, trusted=Spec("adapted", {"of": of}).factories)  # trust was checked with the whole spec
    with seeded(seed, "base"):
        network = spec.build()
    if base and not any(t.is_meta for t in network.state_dict().values()):
        fill_base(network, Path(base), digest)
    return adapt(network, rank, alpha, targets, merges)


def fill_base(network: nn.Module, base: Path, digest: str = "") -> None:
    """Give a network the weights of a file or checkpoint folder; a tensor tied to another may be left out there.

    Raises:
        ConfigError: if it cannot be read, is not the one of that digest, or does not fit, naming the tensor.
    """
    if (found := digest_of_base(base)) != digest and digest:
        raise ConfigError(
            f"the base weights {base} are other ones ({found}) than the experiment began with ({digest}); "
            "put the same file or folder at that place everywhere"
        )
    tensors, own = _open_base(base), network.state_dict()
    tied = {t.data_ptr() for name, t in own.items() if name in tensors}
    lacking = [name for name, t in own.items() if name not in tensors and t.data_ptr() not in tied]
    if odd := [*lacking, *(name for name in tensors if name not in own)]:
        where = "has no" if odd[0] in lacking else "has a tensor that the network has not,"
        raise ConfigError(f"the base weights {base} do not fit the network: the file {where} {odd[0]!r}; {_FITTING}")
    for name, form in tensors.forms.items():
        if form.shape != tuple(own[name].shape):
            there, here = ("×".join(map(str, shape)) or "a scalar" for shape in (form.shape, own[name].shape))
            raise ConfigError(
                f"the base weights {base} do not fit the network: {name!r} is {there} and in the network {here}; "
                f"{_FITTING}"
            )
        own[name].copy_(tensors[name])


def digest_of_base(base: Path) -> str:
    """A short name for base weights, equal for equal weights.

    Raises:
        ConfigError: if there is no such file or folder; a pipe or a device is none.
    """
    if not (base.is_file() or base.is_dir()):
        raise ConfigError(f"the base weights {base} are not here; put the same file or folder at that place everywhere")
    files = sorted(base.glob("*.safetensors")) if base.is_dir() else [base]
    return _digest(base, tuple((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


@lru_cache(maxsize=4)
def _digest(base: Path, stamp: tuple[tuple[str, int, int], ...]) -> str:  # noqa: ARG001 - read again if that changes
    return fingerprint(_open_base(base))


def _open_base(base: Path) -> LazyParams:
    try:
        return open_weights(base).tensors
    except Malformed as why:
        raise ConfigError(f"the base weights {base} cannot be read: {why}; name a safetensors file or folder") from why


class AdapterSettings(Settings):
    """Adapters of a network, as `[model] adapters = {…}` has them.

    Attributes:
        rank: of each.
        alpha: an adapter counts α / rank; by default once.
        targets: the layers, by name or its end; by default all linear ones.
        seed: what the network that rests is drawn by, where its factory draws: the same at every site.
        base: a safetensors file or checkpoint folder with the weights that rest, at the same place at every site.
    """

    rank: PositiveInt = 4
    alpha: PositiveFloat | None = None
    targets: tuple[str, ...] = ()
    seed: int = 0
    base: str = ""


def adapted_spec(of: Spec, given: object) -> Spec:
    """The spec of a network with adapters, by a table of their settings.

    Raises:
        ConfigError: naming what is wrong with the table.

    Example:
        >>> adapted_spec(Spec("mlp"), {"rank": 2}).options["of"]["factory"]
        'mlp'
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"model.adapters is {given!r:.60}, expected a table such as {{ rank = 4 }}")
    chosen = validate_settings(AdapterSettings, given, "model.adapters")
    if not chosen.base:
        return Spec("adapted", {"of": of.to_json(), **chosen.model_dump(mode="json", exclude={"base"})})
    if not Path(chosen.base).exists():
        raise ConfigError(f"model.adapters.base: there is no file or folder {chosen.base}")
    digest = digest_of_base(Path(chosen.base))
    return Spec("adapted", {"of": of.to_json(), **chosen.model_dump(mode="json"), "digest": digest})


@dataclass(frozen=True, slots=True)
class MergesRounds:
    """Prepares a network with adapters for rounds that are merged; any other stays as it is."""

    def __call__(self, start: Single, classes: int, seed: int, task: Task = CLASSIFICATION) -> Single:  # noqa: ARG002
        """The start with room at every adapter for what earlier rounds have learned."""
        module = start.spec.skeleton()
        if not any(isinstance(part, AdaptedLayer) and not part.merges for part in module.modules()):
            return start
        own = _with_room(start.spec)
        options = start.spec.options if own is not None else {**start.spec.options, "merges": True}
        spec = replace(start.spec, options=options, prototype=own)
        first = spec.skeleton().state_dict()
        return Single(spec, Posterior({n: start.posterior.mean.get(n, t.clone()) for n, t in first.items()}))

    def missing(self, layout: Layout, forms: Mapping[str, Form], classes: int) -> str | None:  # noqa: ARG002
        """Nothing: adapters without that room are stacked."""
        return None


def _with_room(spec: Spec) -> nn.Module | None:
    """The user's own module with room for merged rounds; None for a network that its spec builds."""
    if spec.prototype is None:
        return None
    module = copy.deepcopy(spec.prototype)
    for path, part in list(module.named_modules()):
        if isinstance(part, AdaptedLayer):
            made = AdaptedLayer(part.base_layer, len(part.lora_A.weight), part.scale, merges=True)  # type: ignore[arg-type]
            if not path:
                return made
            module.set_submodule(path, made)
    return module


_SIDES = (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B"))
PARTS = frozenset({side for pair in _SIDES for side in pair} | {"lora_magnitude_vector"})
"""What a part of a tensor's name is, if it belongs to an adapter."""

INPUTS = "inputs"
"""The kind of evidence that has the moments of what adapted modules read."""

MERGED = ("merged_A", "merged_B")
"""What a layer with an adapter calls the factors of earlier rounds, where those are merged."""


class Pair(NamedTuple):
    """The two factors of one module, by name; the update of its weight is B A."""

    module: str
    a: str
    b: str


def pairs_in(names: Collection[str]) -> Iterator[Pair]:
    """Every low-rank pair among a model's tensors.

    Example:
        >>> list(pairs_in(["fc.lora_A.weight", "fc.lora_B.weight"]))
        [Pair(module='fc', a='fc.lora_A.weight', b='fc.lora_B.weight')]
    """
    for name in names:
        parts = name.split(".")
        for side, other in _SIDES:
            if side in parts:
                place = parts.index(side)
                partner = ".".join([*parts[:place], other, *parts[place + 1 :]])
                if partner in names:
                    yield Pair(".".join(parts[:place]), name, partner)
