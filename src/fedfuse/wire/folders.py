"""Checkpoint folders as `transformers` writes them: safetensors in one file or in shards with an index, and a config.

A folder is read as one table of tensors, each fetched from its shard when it is asked for, and written under
another name first: it appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedfuse.core.files import regular
from fedfuse.core.messages import Form, Message
from fedfuse.core.params import Layout
from fedfuse.errors import ConfigError
from fedfuse.wire.codec import (
    DTYPES,
    Altered,
    LazyParams,
    Malformed,
    Packed,
    Packet,
    decode,
    forms_size,
    read,
    write_sealed,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EVIDENCE = "fedfuse_evidence.safetensors"  # what a folder brings in addition to its weights
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_WEIGHTS = (*_PICKLES, ".safetensors", ".h5", ".msgpack", ".onnx", ".gguf")
_TIED = ("lm_head.weight", "decoder.weight", "embed_out.weight", "embed_tokens.weight")  # a tied copy's usual names

Watch = Callable[[int], None]


def is_folder(source: object) -> bool:
    """Whether a source of weights is a checkpoint folder, named by itself or by its index."""
    return isinstance(source, str | Path) and (Path(source).is_dir() or Path(source).name == INDEX)


def folder_of(source: str | Path) -> Path:
    """The folder that is meant by its own name or by its index."""
    return Path(source).parent if Path(source).name == INDEX else Path(source)


def open_weights(source: Message | bytes | Path) -> Packet:
    """A message, a file or a folder of weights, each tensor to be read when it is asked for.

    Raises:
        Malformed: if a file is not what it claims to be.
        ConfigError: if a folder is incomplete or a file a pickle, naming the file and what to do.
    """
    if isinstance(source, bytes):
        return decode(source)
    if not isinstance(source, Path):
        return source if isinstance(source, Packet) else Packet.of(source.tensors, source.header)
    if source.suffix in _PICKLES and source.is_file():
        with source.open("rb") as file:
            is_pickle = file.read(4).startswith((b"PK\x03\x04", b"\x80"))  # an archive of `torch.save`, or a bare one
        if is_pickle:
            raise ConfigError(pickle_words(source, source.with_suffix(".safetensors").name))
    return read_folder(folder_of(source)) if is_folder(source) else read(source)


def pickle_words(path: Path, name: str = SINGLE) -> str:
    """Why a pickle is not read, and the command that makes a safetensors file of it without running what is in it."""
    command = (
        "from torch import load; from safetensors.torch import save_file; "
        f"w = load({str(path)!r}, map_location='cpu', weights_only=True); "
        "save_file({n: t.clone().contiguous() for n, t in w.items()}, "
        f"{str(path.with_name(name))!r}, {{'format': 'pt'}})"
    )
    return f'{path} is a pickle, which could run any code; convert it, without running any: python -c "{command}"'


def read_folder(folder: Path) -> Packet:
    """The tensors of a checkpoint folder.

    A copy of a tensor that the config says is tied is left out: what loads the folder ties it again.

    Raises:
        ConfigError: if a shard or a tensor is missing, or the weights are pickles or packed.
    """
    config = read_config(folder)
    if told := config.get("quantization_config"):
        how = told.get("quant_method") if isinstance(told, dict) else told
        raise ConfigError(
            f"{folder / 'config.json'}: quantization_config says that the weights are packed by {how!r:.80}; expected "
            f"{Packed.expected}, without that entry"
        )
    packet = read_files(folder, SINGLE, (INDEX,))
    tensors = packet.tensors
    copies = _tied_copies(tensors) if config.get("tie_word_embeddings") is True else frozenset()
    return Packet({}, tensors.part(lambda name: name not in copies), packet.size)


def read_files(folder: Path, single: str, indexes: Sequence[str]) -> Packet:
    """The tensors of one file of a folder, or of the shards that one of these indexes names.

    Raises:
        ConfigError: if a shard or a tensor is missing, or the weights are pickles or packed.
    """
    index = next((name for name in indexes if (folder / name).is_file()), None)
    files = _shards(folder, single, index)
    packets = {file: _read_shard(folder, file, index) for file in files}
    homes = {name: packet for packet in packets.values() for name in packet.tensors}
    if index is not None and single not in packets:
        for name, file in _weight_map(folder / index).items():
            if name not in packets[file].tensors:
                raise ConfigError(
                    f"{folder / index} says that {name!r} is in {file}, which has no such tensor; fetch both"
                )
    forms = {name: homes[name].tensors.forms[name] for name in sorted(homes)}
    try:
        check_unpacked(forms)
    except Packed as why:
        raise ConfigError(f"{folder}: {why}") from why
    offsets = next(iter(packets.values())).tensors.offsets if len(packets) == 1 else {}
    tensors = LazyParams(forms, lambda name, begin, end: homes[name].tensors.piece(name, begin, end), offsets)
    return Packet({}, tensors, sum(packet.size for packet in packets.values()))


def check_unpacked(forms: Mapping[str, Form], ours: bool = False) -> None:
    """Go on only if these tensors hold numbers of a network, and whole numbers only where buffers have them.

    Networks keep counts, positions and indices in 64 bits, masks in booleans or laid out to be spread over rows
    (1×1×n×n), and single flags as they like. Shorter whole numbers in a matrix are codes, and so is whatever has parts
    under its own name, such as `fc.weight` next to `fc.weight.absmax`, in any dtype.

    Args:
        forms: of a network's tensors.
        ours: whether a file of ours holds them, whose network had them as buffers; then only weights are looked at.

    Raises:
        Packed: naming the first that is codes.

    Example:
        >>> check_unpacked({"fc.weight": Form((8, 1), torch.uint8), "bn.num_batches_tracked": Form((), torch.int64)})
        Traceback (most recent call last):
        ...
        fedfuse.wire.codec.Packed: tensor 'fc.weight' is 8×1 uint8, packed numbers; expected plain weights: ...
    """
    for name, (shape, dtype) in forms.items():
        parent, _, leaf = name.rpartition(".")
        if parent in forms:
            raise Packed(name, f"a part of {parent[:80]!r}")
        if dtype.is_floating_point or dtype == torch.bool:
            continue
        is_code = dtype.itemsize < 8 and ("weight" in leaf or (len(shape) > 1 and shape[0] != 1))
        if leaf == "weight" or (is_code and not ours):
            raise Packed(name, f"{'×'.join(map(str, shape)) or 'a scalar'} {str(dtype).removeprefix('torch.')}")


def read_config(folder: Path) -> dict[str, Any]:
    """What a folder's config.json says; nothing if there is none."""
    return read_json(folder / "config.json") if (folder / "config.json").is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds a table.

    Raises:
        ConfigError: naming the file.
    """
    try:
        found = json.loads(regular(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as why:
        raise ConfigError(f"{path} cannot be read as JSON ({why}); fetch the folder again") from why
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}, expected a table; fetch the folder again")
    return found


def _shards(folder: Path, single: str, index: str | None) -> list[str]:
    """The safetensors files that make up a folder's model or adapter."""
    if (folder / single).is_file():
        return [single]
    if index is not None:
        return sorted({str(file) for file in _weight_map(folder / index).values()})
    found = sorted(path.name for path in folder.glob("*.safetensors") if path.name != EVIDENCE)
    if len(found) == 1 and single == SINGLE:
        return found
    if pickles := sorted(path for path in folder.iterdir() if path.suffix in _PICKLES):
        raise ConfigError(pickle_words(pickles[0], single))
    if found:
        raise ConfigError(f"{folder} has {len(found)} safetensors files and no {single}.index.json; fetch it too")
    raise ConfigError(f"{folder} has no {single}; expected a folder that `save_pretrained` wrote")


def _weight_map(index: Path) -> dict[str, str]:
    """Which file each tensor is in, as the index says; only files of its own folder are looked at."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{index} has no weight_map; fetch the folder again")
    for name, file in found.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise ConfigError(f"{index} says that {name!r} is in {file!r:.80}; expected a file of the folder")
    return found


def _read_shard(folder: Path, file: str, index: str | None) -> Packet:
    if index is not None and not (folder / file).is_file():
        names = sorted(name for name, home in _weight_map(folder / index).items() if home == file)
        raise ConfigError(
            f"{folder / file} is missing, which {index} names for {names[0]!r} and {len(names) - 1} other tensors; "
            "fetch the folder again"
        )
    try:
        return read(folder / file)
    except Packed as why:
        raise ConfigError(f"{folder / file}: {why}") from why
    except Altered:
        raise
    except Malformed as why:
        raise ConfigError(f"{folder / file} is damaged: {why}; fetch the folder again") from why


def _tied_copies(tensors: LazyParams) -> frozenset[str]:
    """Names of output layers that hold, bit for bit, what an embedding holds under another name."""
    # an encoder's or decoder's embed_tokens may be a copy of one shared embedding; any other is the embedding itself
    copies = [name for name in tensors if name.endswith(_TIED) and ("embed_tokens" not in name or "coder" in name)]
    others = [name for name in tensors if name not in copies]
    return frozenset(copy for copy in copies if any(_are_equal(tensors, copy, other) for other in others))


def _are_equal(tensors: LazyParams, a: str, b: str) -> bool:
    if tensors.forms[a] != tensors.forms[b]:
        return False
    pairs = zip(tensors.pieces((a,)), tensors.pieces((b,)), strict=True)
    return all(x.equal(y) for x, y in pairs)


def parse_size(text: str) -> int:
    """Bytes in words: "5GB", "500 MB".

    Example:
        >>> parse_size("5GB"), parse_size("500 mb")
        (5000000000, 500000000)
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]?)B?", text.strip().upper())
    size = int(float(found[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[found[2]]) if found else 0
    if size < 1:
        raise ConfigError(f"a size of {text!r} is none; write it as in 5GB or 500MB")
    return size


def parse_dtype(text: str) -> torch.dtype:
    """A floating dtype by its name.

    Example:
        >>> parse_dtype("bfloat16")
        torch.bfloat16
    """
    known = {str(d).removeprefix("torch."): d for d in DTYPES.values() if d.is_floating_point}
    if text not in known:
        raise ConfigError(f"there is no dtype {text!r} for weights; expected one of {', '.join(sorted(known))}")
    return known[text]


@contextlib.contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder to fill that gets its name when all is in it; if anything goes wrong, it disappears.

    Raises:
        ConfigError: if there is something under that name already, or it cannot be written.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"{output} is there already; remove it or choose another name")
    half = output.with_name(f".{output.name}.{secrets.token_hex(8)}")
    try:
        half.mkdir(parents=True)
        yield half
        if output.exists():
            output.rmdir()  # an empty one
        half.rename(output)
    except OSError as why:
        raise ConfigError(
            f"cannot write {output}: {why.strerror or why}; free some space or choose another folder"
        ) from why
    finally:
        shutil.rmtree(half, ignore_errors=True)


def write_tensors(
    folder: Path, tensors: LazyParams, header: Mapping[str, Any], shard_size: int, watch: Watch | None = None
) -> None:
    """Write a model's tensors into a folder, one at a time: one file, or shards of at most so many bytes and an index.

    Args:
        folder: where to.
        tensors: asked for once each.
        header: what the first file says of the model.
        shard_size: in bytes; a tensor that is larger has a file of its own.
        watch: told of every tensor's bytes when it was fetched.
    """

    def fetch(name: str, begin: int, end: int) -> Tensor:
        piece = tensors.piece(name, begin, end)
        if watch is not None:
            watch(piece.numel() * piece.itemsize)
        return piece

    shards = _deal(tensors.forms, shard_size)
    files = [f"model-{k:05d}-of-{len(shards):05d}.safetensors" for k in range(1, len(shards) + 1)]
    files = files if len(files) > 1 else [SINGLE]
    for place, (file, names) in enumerate(zip(files, shards, strict=True)):
        part = LazyParams({name: tensors.forms[name] for name in names}, fetch)
        write_sealed(folder / file, part, header if not place else {}, marks={"format": "pt"})
    if len(files) > 1:
        homes = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": forms_size(tensors.forms)}, "weight_map": homes}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _deal(forms: Mapping[str, Form], size: int) -> list[list[str]]:
    """Names in their order, dealt to shards of at most so many bytes."""
    shards, filled = [list[str]()], 0
    for name, form in forms.items():
        own = forms_size({name: form})
        if shards[-1] and filled + own > size:
            shards, filled = [*shards, []], 0
        shards[-1].append(name)
        filled += own
    return shards


def with_dtype(tensors: LazyParams, dtype: torch.dtype | None) -> LazyParams:
    """The tensors with floats in another dtype as they are fetched; None leaves them as they are."""
    if dtype is None:
        return tensors
    forms = {n: Form(f.shape, dtype if f.dtype.is_floating_point else f.dtype) for n, f in tensors.forms.items()}
    return LazyParams(forms, lambda name, begin, end: tensors.piece(name, begin, end).to(forms[name].dtype))


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
    """Copy config, tokenizer and the like; the config gets the dtype that the weights have now, if all have one."""
    for path in sorted(source.iterdir()):  # config, tokenizer, code: no weights, and no card, which is of the old ones
        weights = path.suffix in _WEIGHTS or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.suffix.lower() != ".md" and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)
    config = read_config(source)
    if config and dtype is not None:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(dtype).removeprefix("torch.")
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
