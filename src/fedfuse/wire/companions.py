"""What stands beside the weights in checkpoint folders: config and vocabulary must agree, and are carried over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedfuse.errors import ConfigError
from fedfuse.wire.folders import is_companion, read_config, read_json

# What a network computes with its tensors: where these differ, equal shapes mean different things.
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "n_embd", "n_layer", "n_inner")
_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim", "n_head")
_PLACES = ("max_position_embeddings", "n_positions", "position_embedding_type", "image_size", "patch_size")
_ROTATIONS = ("rope_theta", "rope_scaling", "rope_parameters")
_FUNCTIONS = ("hidden_act", "activation_function", "layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps")
_STRUCTURE = ("model_type", "tie_word_embeddings", *_SIZES, *_HEADS, *_PLACES, *_ROTATIONS, *_FUNCTIONS)
_VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


def check_alike(folders: Sequence[Path]) -> None:
    """Go on only if the folders' networks and vocabularies are those of the first.

    Raises:
        ConfigError: naming both files, the entry, and what to do.
    """
    for folder in folders[1:]:
        _check_configs(folders[0], folder)
        _check_vocabularies(folders[0], folder)


def _check_configs(first: Path, other: Path) -> None:
    ours, theirs = read_config(first), read_config(other)
    for key in _STRUCTURE:
        if key in ours and key in theirs and ours[key] != theirs[key]:
            what = "vocabulary" if key == "vocab_size" else "architecture"
            raise ConfigError(
                f"{other / 'config.json'} has another {what} than {first / 'config.json'}: {key} is {theirs[key]!r} "
                f"and there {ours[key]!r}; fuse models that were fine-tuned from one base"
            )


def _check_vocabularies(first: Path, other: Path) -> None:
    for name in _VOCABULARIES:
        ours, theirs = first / name, other / name
        if ours.is_file() and theirs.is_file() and ours.read_bytes() != theirs.read_bytes():
            raise _other_vocabulary(ours, theirs, "their contents differ")
    ours, theirs = first / "tokenizer.json", other / "tokenizer.json"
    if ours.is_file() and theirs.is_file():
        a, b = _tokens(read_json(ours)), _tokens(read_json(theirs))
        if odd := next((token for token in sorted(a.keys() | b.keys()) if a.get(token) != b.get(token)), None):
            raise _other_vocabulary(ours, theirs, f"{odd!r:.60} has number {b.get(odd)}, there {a.get(odd)}")


def _other_vocabulary(ours: Path, theirs: Path, how: str) -> ConfigError:
    return ConfigError(
        f"{theirs} is another vocabulary than {ours}: {how}, so rows of the embeddings stand for different tokens; "
        "fuse models that share one tokenizer"
    )


def _tokens(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """The number of every token that a tokenizer.json knows; lists are numbered in their order."""
    model = tokenizer.get("model")
    known = model.get("vocab", {}) if isinstance(model, dict) else {}
    if isinstance(known, list):
        known = {str(entry[0]) if isinstance(entry, list) and entry else str(entry): i for i, entry in enumerate(known)}
    added = tokenizer.get("added_tokens")
    own = {str(t.get("content")): t.get("id") for t in added if isinstance(t, dict)} if isinstance(added, list) else {}
    return {**known, **own} if isinstance(known, dict) else own


def carry_over(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Copy config, tokenizer and the like; the config is told in which dtype the weights are now, if in one."""
    for path in sorted(source.iterdir()):
        if is_companion(path):
            shutil.copyfile(path, target / path.name)
    config = read_config(source)
    if config and dtype is not None:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(dtype).removeprefix("torch.")
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
