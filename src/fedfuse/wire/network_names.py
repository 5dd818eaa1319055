"""What files call the tensors of a network of `transformers`: it renames layers now and then, and files stay."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedfuse.core.params import Layout
from fedfuse.wire.codec import LazyParams
from fedfuse.wire.folders import read_config


def names_in_files(module: nn.Module) -> Mapping[str, str]:
    """What the library would write each tensor as, where that is one tensor again."""
    state = module.state_dict()
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # a version that renames nothing
        return {name: name for name in state}
    found = {name: list(revert_weight_conversion(module, {name: tensor})) for name, tensor in state.items()}
    return {name: homes[0] for name, homes in found.items() if len(homes) == 1}


def homes_of_network(module: nn.Module, tensors: LazyParams) -> dict[str, str]:
    """Every name of a network's tensors with the one that a folder has it under; further names of tied ones last."""
    homes = {name: home for name, home in names_in_files(module).items() if home in tensors}
    for names in Layout.of(module).tied:
        first = next((homes[name] for name in names if name in homes), None)
        homes |= {name: first for name in names if first is not None and name not in homes}
    return homes


def under_names(tensors: LazyParams, homes: Mapping[str, str]) -> LazyParams:
    """The tensors under the network's names."""
    forms = {name: tensors.forms[home] for name, home in homes.items() if home in tensors}
    return LazyParams(forms, lambda name, begin, end: tensors.piece(homes[name], begin, end))


def build_network(folder: Path) -> nn.Module | None:
    """The network that a folder's config names, without its weights; None where `transformers` does not know it.

    No code of the folder runs.
    """
    import transformers

    named = read_config(folder).get("architectures")
    made: Any = getattr(transformers, str(named[0]), None) if isinstance(named, list) and named else None
    if not (isinstance(made, type) and issubclass(made, transformers.PreTrainedModel)):
        return None
    make: Any = made
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        network: nn.Module = make._from_config(config, attn_implementation="eager")
    except Exception:  # the library raises whatever it meets in a config
        return None
    return network.eval()


@lru_cache(maxsize=4)
def names_by_config(folder: Path) -> Mapping[str, str]:
    """What a folder's file calls the tensors of its network; nothing where the library is not there to tell."""
    try:
        with torch.device("meta"):  # names need no numbers
            network = build_network(folder)
    except ImportError:
        return {}
    return {} if network is None else names_in_files(network)
