"""Folders of low-rank adapters as `peft` writes them: adapter_config.json and adapter_model.safetensors.

Adapters of different ranks and scales are read alike: the scale s = α/r (α/√r for rsLoRA) is multiplied into B, and
factors are padded with zeros to the largest rank of their module, which leaves every product s B A as it is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfuse.core.messages import Form
from fedfuse.errors import ConfigError
from fedfuse.wire.codec import LazyParams, Packet, write_sealed
from fedfuse.wire.folders import INDEX as MODEL_INDEX
from fedfuse.wire.folders import names_by_config, read_files, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INDEX = "adapter_model.safetensors.index.json"
PREFIX = "base_model.model."
_A, _B = ("lora_A", "lora_embedding_A"), ("lora_B", "lora_embedding_B")

# What changes what an adapter means, or its base, and is not understood here.
_VARIANTS = ("use_dora", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config")
_PLACES = ("layer_replication", "target_parameters", "trainable_token_indices", "megatron_config")
_REFUSED = (*_VARIANTS, *_PLACES, "lora_bias", "alora_invocation_tokens")
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
_SHARED = ("base_model_name_or_path", "fan_in_fan_out", "task_type")


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (folder / CONFIG).is_file()


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter folder."""

    folder: Path
    config: Mapping[str, Any]
    tensors: LazyParams

    def rank(self, module: str) -> int | None:
        """The rank that the config says a module's factors have, if it says one."""
        told = self._own("rank_pattern", module, self.config.get("r"))
        return told if isinstance(told, int) else None

    def _own(self, patterns: str, module: str, usual: Any) -> Any:
        """What the config says of a module by a pattern of its name, else of all."""
        found = (self.config.get(patterns) or {}).items()
        return next((value for key, value in found if re.fullmatch(rf"(.*\.)?({key})", module)), usual)

    def scale(self, module: str, rank: int) -> float:
        """The factor s of a module's product: α/r, or α/√r for rsLoRA."""
        alpha = float(self._own("alpha_pattern", module, self.config.get("lora_alpha", 8)))
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def read_adapter(folder: Path) -> Adapter:
    """An adapter folder, if it is one that is understood here.

    Raises:
        ConfigError: naming the file and the entry or tensor.
    """
    config = read_json(folder / CONFIG)
    if config.get("peft_type") != "LORA":
        raise _refusal(folder, "peft_type", config.get("peft_type"), "LORA; merge it into its base by `peft` first")
    for key in _REFUSED:
        if config.get(key):
            raise _refusal(folder, key, config[key], "a plain LoRA; merge it into its base by `peft` first")
    if config.get("bias", "none") != "none":
        raise _refusal(folder, "bias", config["bias"], "'none'; merge it into its base by `peft` first")
    began = config.get("init_lora_weights")
    if isinstance(began, str) and began.startswith(_CHANGES_BASE):
        raise _refusal(folder, "init_lora_weights", began, "one that leaves the base as it was; see peft's conversion")
    adapter = Adapter(folder, config, read_files(folder, WEIGHTS, (INDEX, MODEL_INDEX)).tensors)
    _check_factors(adapter)
    return adapter


def _refusal(folder: Path, key: str, got: object, expected: str) -> ConfigError:
    return ConfigError(f"{folder / CONFIG}: {key} is {got!r:.80}, expected {expected}")


def _check_factors(adapter: Adapter) -> None:
    """Every factor has its partner, of the same rank."""
    forms = adapter.tensors.forms
    for name in forms:
        side = _side(name)
        if "lora_" in name and side is None:
            raise ConfigError(f"{adapter.folder / WEIGHTS}: {name!r} is no factor of a plain LoRA; merge it by `peft`")
        if side is None:
            continue
        partner = _partner(name)
        ranks = [
            forms[n].shape[_rank_axis(n)] if n in forms and len(forms[n].shape) > 1 else -1 for n in (name, partner)
        ]
        if ranks[0] != ranks[1] or ranks[0] < 1:
            raise ConfigError(
                f"{adapter.folder / WEIGHTS}: {name!r} and {partner!r} are no two factors of one rank; fetch it again"
            )
        if (told := adapter.rank(module_of(name))) not in (None, ranks[0]):
            raise ConfigError(
                f"{adapter.folder / WEIGHTS}: {name!r} has rank {ranks[0]} and {CONFIG} says {told}, which its "
                "scale is counted by; fetch both again"
            )


def _side(name: str) -> str | None:
    parts = name.split(".")
    return "A" if any(p in _A for p in parts) else "B" if any(p in _B for p in parts) else None


def _partner(name: str) -> str:
    swap = dict(zip((*_A, *_B), (*_B, *_A), strict=True))
    return ".".join(swap.get(part, part) for part in name.split("."))


def _rank_axis(name: str) -> int:
    return 0 if _side(name) == "A" else 1


def module_of(name: str) -> str:
    """The path of the module that a factor belongs to, as the base network calls it.

    Example:
        >>> module_of("base_model.model.fc.lora_A.weight")
        'fc'
    """
    parts = name.removeprefix(PREFIX).split(".")
    places = [i for i, part in enumerate(parts) if part in (*_A, *_B)]
    return ".".join(parts[: places[0]]) if places else name.removeprefix(PREFIX)


def adapted_modules(folder: Path) -> list[str]:
    """The paths of an adapter's linear layers and convolutions, as the base network calls them."""
    return [module_of(name) for name in read_adapter(folder).tensors if _A[0] in name.split(".")]


def read_adapters(folders: Sequence[Path]) -> list[Packet]:
    """Adapters of one base and one set of modules, in factors of common ranks, each with its scale in B.

    Raises:
        ConfigError: naming the file and the entry or tensor in which they differ.
    """
    adapters = [read_adapter(folder) for folder in folders]
    for other in adapters[1:]:
        _check_same_kind(adapters[0], other)
    ranks: dict[str, int] = {}
    for adapter in adapters:
        for name, form in adapter.tensors.forms.items():
            if _side(name) is not None:
                ranks[name] = max(ranks.get(name, 0), form.shape[_rank_axis(name)])
    return [Packet({}, _pad(adapter, ranks), 0) for adapter in adapters]


def _check_same_kind(first: Adapter, other: Adapter) -> None:
    for key in _SHARED:
        ours, theirs = first.config.get(key), other.config.get(key)
        if ours != theirs:
            raise _refusal(other.folder, key, theirs, f"{ours!r} as in {first.folder / CONFIG}: adapters of one base")
    if odd := sorted(first.tensors.forms.keys() ^ other.tensors.forms.keys()):
        has, lacks = (other, first) if odd[0] in other.tensors else (first, other)
        raise ConfigError(
            f"{has.folder / WEIGHTS} adapts {module_of(odd[0])!r} ({odd[0]}) and {lacks.folder / WEIGHTS} does not; "
            "fuse adapters of the same modules, or merge each into its base first"
        )


def _pad(adapter: Adapter, ranks: Mapping[str, int]) -> LazyParams:
    """The adapter's tensors, factors in float32 at least, scaled and padded."""
    forms = {}
    for name, form in adapter.tensors.forms.items():
        shape, dtype = list(form.shape), form.dtype
        if name in ranks:
            shape[_rank_axis(name)] = ranks[name]
            dtype = torch.promote_types(dtype, torch.float32)
        forms[name] = Form(tuple(shape), dtype)

    @cache  # adapters are small, and a piece may be asked for often
    def whole(name: str) -> Tensor:
        tensor = adapter.tensors[name]
        if name not in ranks:
            return tensor
        axis, rank = _rank_axis(name), tensor.shape[_rank_axis(name)]
        scale = adapter.scale(module_of(name), rank) if axis else 1.0
        out = torch.zeros(forms[name].shape, dtype=forms[name].dtype)
        out.narrow(axis, 0, rank).copy_(tensor.double() * scale)
        return out

    return LazyParams(forms, lambda name, begin, end: whole(name).view(-1)[begin:end])


def merge_into(adapter: LazyParams, config: Mapping[str, Any], base: LazyParams, folder: Path) -> LazyParams:
    """The base's tensors with W + s B A where the adapter has one, and what it saved whole in place of the base's.

    Adapted tensors are float32 at least, so that nothing is rounded before it is fused.

    Raises:
        ConfigError: naming the tensor that the base does not have, or has in another shape.
    """
    updates, whole = dict[str, tuple[Tensor, Tensor]](), dict[str, str]()
    for name in adapter:
        if _side(name) == "A":
            target = _home(f"{module_of(name)}.weight", base, folder)
            updates[target] = _factors_as_laid(name, adapter, bool(config.get("fan_in_fan_out")))
            _check_target(name, target, updates[target], base, folder)
        elif _side(name) is None:
            whole[_home(name.removeprefix(PREFIX), base, folder)] = name
    forms = dict(base.forms) | {target: adapter.forms[name] for target, name in whole.items()}
    forms |= {n: Form(base.forms[n].shape, torch.promote_types(base.forms[n].dtype, torch.float32)) for n in updates}

    def fetch(name: str, begin: int, end: int) -> Tensor:
        if name in whole:
            return adapter.piece(whole[name], begin, end)
        piece = base.piece(name, begin, end)
        return (
            piece if name not in updates else (piece.double() + _run(*updates[name], begin, end)).to(forms[name].dtype)
        )

    return LazyParams(forms, fetch)


def _home(name: str, base: LazyParams, folder: Path) -> str:
    """What a base's file calls a tensor of its network, where that is otherwise."""
    return name if name in base else names_by_config(folder).get(name, name)  # which may load `transformers`


def _factors_as_laid(name: str, adapter: LazyParams, transposed: bool) -> tuple[Tensor, Tensor]:
    """Two factors whose product lies as the base's weight does: inputs first where the module says so."""
    a, b = adapter[name].flatten(1).double(), adapter[_partner(name)].flatten(1).double()
    return (a.mT, b.mT) if transposed or "lora_embedding_A" in name else (b, a)


def _check_target(name: str, target: str, update: tuple[Tensor, Tensor], base: LazyParams, folder: Path) -> None:
    shape = base.forms[target].shape if target in base else None
    if shape is None or (shape[0], math.prod(shape[1:])) != (update[0].shape[0], update[1].shape[1]):
        there = "missing" if shape is None else "×".join(map(str, shape))
        raise ConfigError(
            f"{name!r} adapts a weight of {update[0].shape[0]}×{update[1].shape[1]} and in {folder} {target!r} is "
            f"{there}; name the base that the adapter was trained on"
        )


def _run(left: Tensor, right: Tensor, begin: int, end: int) -> Tensor:
    """Elements [begin, end) of a product laid flat, without its other rows."""
    width = right.shape[1]
    first, last = begin // width, -(-end // width)
    return (left[first:last] @ right).view(-1)[begin - first * width : end - first * width]


def write_adapter(folder: Path, source: Path, tensors: LazyParams, header: Mapping[str, Any]) -> None:
    """Write a fused adapter: its scales are in B already, so that α = r for every module."""
    config = read_json(source / CONFIG)
    ranks = {module_of(n): form.shape[0] for n, form in tensors.forms.items() if _side(n) == "A"}
    usual = max(ranks.values(), key=list(ranks.values()).count, default=1)
    odd = {module: rank for module, rank in ranks.items() if rank != usual}
    config |= {"r": usual, "lora_alpha": usual, "use_rslora": False, "rank_pattern": odd, "alpha_pattern": odd}
    config |= {"init_lora_weights": True, "inference_mode": True}
    write_sealed(folder / WEIGHTS, tensors, header, marks={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
