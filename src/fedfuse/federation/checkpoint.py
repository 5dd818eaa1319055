"""At a site: evidence at a fine-tuned model of `transformers`, from its folder and rows that its tokenizer reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedfuse.api import Update, local_update
from fedfuse.api import recipe as recipe_of
from fedfuse.api.checkpoints import BASE, NAMES, WEIGHTS, digest_of
from fedfuse.core.inputs import PictureForm, hide_padding
from fedfuse.core.params import Layout
from fedfuse.core.rng import stream
from fedfuse.core.rows import Rows
from fedfuse.data.site import read_site
from fedfuse.errors import ConfigError, error_text
from fedfuse.experiment.config import assign
from fedfuse.models.adapted import INPUTS, adapt
from fedfuse.tasks import CLASSIFICATION, LANGUAGE_MODEL, TEXT_CLASSIFICATION, Task
from fedfuse.tasks.language import NO_TARGET
from fedfuse.wire.adapters import PREFIX, adapted_modules, is_adapter, merge_into, read_adapter, read_adapters
from fedfuse.wire.codec import LazyParams, Packet
from fedfuse.wire.folders import EVIDENCE, names_in_files, read_folder
from fedfuse.wire.messages import NOTE

LENGTH = 128


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """A folder as `save_pretrained` writes it, opened: the network, how it reads, and what it tells.

    Attributes:
        path: where it lies.
        module: the network, which answers with its logits.
        kind: the end of its class's name, such as "ForMaskedLM".
        tokenizer: of texts; None for pictures.
        labels: what its outputs are called, where they are classes.
    """

    path: Path
    module: nn.Module
    kind: str
    tokenizer: Any
    labels: tuple[str, ...]


KINDS: Mapping[str, tuple[str, Task]] = {
    "ForSequenceClassification": ("AutoModelForSequenceClassification", TEXT_CLASSIFICATION),
    "ForTokenClassification": ("AutoModelForTokenClassification", LANGUAGE_MODEL),
    "ForCausalLM": ("AutoModelForCausalLM", LANGUAGE_MODEL),
    "LMHeadModel": ("AutoModelForCausalLM", LANGUAGE_MODEL),
    "ForMaskedLM": ("AutoModelForMaskedLM", LANGUAGE_MODEL),
    "ForImageClassification": ("AutoModelForImageClassification", CLASSIFICATION),
}
"""What each kind of network is opened by, and its task: one target per text or picture, or one per token."""


def checkpoint_evidence(
    folder: Path,
    source: str,
    method: str,
    sets: Sequence[str] = (),
    *,
    client: str = "site",
    limit: int | None = None,
    length: int = LENGTH,
    base: Path | None = None,
) -> Update:
    """Bring what a method asks for at the weights of a folder, without training.

    The update says at which weights it was taken, so that its evidence can go with the folder instead of them.

    Args:
        folder: as `save_pretrained` writes it, with safetensors, a config, and a tokenizer for texts; or an adapter.
        source: a `.jsonl` whose lines have `text` and `label` (for tokens `tokens` and `labels`, for language models
            `text` alone), or pictures by class.
        method: whose evidence to bring.
        sets: `key=value` for an option of the method.
        client: the site's name.
        limit: use at most this many rows.
        length: tokens of a row.
        base: of an adapter, the folder that it was trained on.

    Raises:
        ConfigError: if the folder holds no network that is known, or the rows do not suit it.
    """
    options: dict[str, Any] = {}
    for text in sets:
        assign(options, text)
    recipe = recipe_of(method, **options)
    if not recipe.evidence:
        raise ConfigError(f"method {method!r} asks for no evidence; fuse the folder as it is")
    opened, names = _open_weights(folder, base)
    rows = _READERS[opened.kind](opened, source, length, limit)
    task = KINDS[opened.kind][1]
    classes = len(opened.labels) if opened.labels else int(opened.module.config.vocab_size)  # type: ignore[union-attr,arg-type]
    as_adapter = is_adapter(folder) and recipe.aggregate.knows_adapters
    module = adapt(opened.module, 1, targets=adapted_modules(folder)) if as_adapter else opened.module
    update = local_update(module, rows, recipe, client=client, classes=classes, task=task, epochs=0)
    told = _notes_of_adapter(update) if as_adapter else update.telling(**{NAMES: names or None})
    told = told.telling(**{WEIGHTS: digest_of(folder), BASE: None if base is None else digest_of(base)})
    return told.telling(start=None) if recipe.trains else told  # networks trained elsewhere share no start


def save_evidence(update: Update, folder: Path, output: Path | None = None) -> Path:
    """Write evidence taken at a folder into it, without its weights; or all of the update to a file of its own."""
    return (update.without_weights() if output is None else update).save(output or folder / EVIDENCE)


def _notes_of_adapter(update: Update) -> Update:
    """Evidence taken at a network with adapters, under the names that an adapter's file has."""
    packet, kind = update.packet, f"{NOTE}{INPUTS}/"
    notes = packet.tensors.part(lambda n: n.startswith(NOTE), lambda n: n.replace(kind, f"{kind}{PREFIX}", 1))
    header = {key: value for key, value in packet.header.items() if key not in ("spec", "layout")}
    return replace(update, packet=Packet.of(notes, header))


def _open_weights(folder: Path, base: Path | None) -> tuple[OpenedCheckpoint, dict[str, str]]:
    """A folder's network, or its base's with the adapter merged into it, and the names of what files call otherwise.

    Raises:
        ConfigError: if an adapter's base is missing, or the folder has other tensors than the network.
    """
    if not is_adapter(folder):
        if base is not None:
            raise ConfigError(f"{folder} is a whole model and --base is for adapters; leave it out")
        tensors = read_folder(folder).tensors  # first, for packed weights need a library only to be refused
        opened = open_folder(folder)
    elif base is None:
        raise ConfigError(f"{folder} is an adapter, which runs within its base; name the base's folder (--base)")
    else:
        opened, (packet,) = open_folder(base), read_adapters([folder])
        tensors = merge_into(packet.tensors, read_adapter(folder).config, read_folder(base).tensors, base)
    names = _names_in_folder(base or folder, opened.module, tensors)
    if is_adapter(folder):
        opened.module.load_state_dict({name: tensors[home] for name, home in names.items()}, strict=False)
    return opened, {name: home for name, home in names.items() if name != home}


def _names_in_folder(folder: Path, module: nn.Module, tensors: LazyParams) -> dict[str, str]:
    """The name in a folder of each tensor of the network that is opened from it; tied ones may have fewer there.

    Raises:
        ConfigError: naming a tensor that one has and the other has not.
    """
    names = {name: home for name, home in names_in_files(module).items() if home in tensors}
    layout = Layout.of(module)
    further = {n for tied in layout.tied if any(n in names for n in tied) for n in tied}
    odd = [n for n in layout.roles if n not in names and n not in further]
    odd += [n for n in tensors if n not in names.values()]
    if odd:
        where = "is not in the folder" if odd[0] in layout.roles else "is not in the network that was opened"
        raise ConfigError(f"{folder}: {odd[0]!r} {where}; save the network anew by save_pretrained of this version")
    return names


def open_folder(path: Path) -> OpenedCheckpoint:
    """A folder's network and tokenizer; nothing is downloaded and no code of the folder runs.

    Raises:
        ConfigError: naming what is missing or unknown.
    """
    transformers = _library()
    named = _read_config(path).get("architectures") or [""]
    kind = next((end for end in KINDS if str(named[0]).endswith(end)), None)
    if kind is None:
        raise ConfigError(
            f"{path / 'config.json'} names the network {str(named[0])!r:.80}, expected one that ends in "
            f"{', '.join(KINDS)}"
        )
    safe = {"local_files_only": True, "trust_remote_code": False}
    make = getattr(transformers, KINDS[kind][0])
    module = _open(path, lambda: make.from_pretrained(path, use_safetensors=True, attn_implementation="eager", **safe))
    tokenizer = None
    if kind != "ForImageClassification":
        tokenizer = _open(path, lambda: transformers.AutoTokenizer.from_pretrained(path, **safe))
        if tokenizer.pad_token_id is not None:
            hide_padding(module, tokenizer.pad_token_id)
    tells_classes = kind in ("ForSequenceClassification", "ForTokenClassification", "ForImageClassification")
    labels = tuple(str(module.config.id2label[i]) for i in range(module.config.num_labels)) if tells_classes else ()
    return OpenedCheckpoint(path, module.eval(), kind, tokenizer, labels)


def _library() -> Any:
    try:
        import transformers
    except ImportError as why:
        raise ConfigError(
            "a folder of transformers needs that library to run its network; pip install 'fedfuse[transformers]'"
        ) from why
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _open(path: Path, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as why:  # the library raises whatever it meets in a folder
        raise ConfigError(f"{path} cannot be opened: {error_text(why)}") from why


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as why:
        raise ConfigError(f"{path} has no readable config.json ({why}); give a folder of save_pretrained") from why
    return config if isinstance(config, dict) else {}


def _texts_with_classes(opened: OpenedCheckpoint, source: str, length: int, limit: int | None) -> Rows:
    rows = list(_read_lines(source, limit))
    y = [_label(where, row.get("label"), opened.labels) for where, row in rows]
    tokens = _encode(opened, [_text(where, row) for where, row in rows], length)
    return Rows(_pad_rows(tokens, _padding(opened)), torch.tensor(y))


def _words_with_labels(opened: OpenedCheckpoint, source: str, length: int, limit: int | None) -> Rows:
    """Words with a label each; the first token of a word carries it."""
    xs, ys = [], []
    for where, row in _read_lines(source, limit):
        words, labels = row.get("tokens"), row.get("labels")
        if not isinstance(words, list) or not isinstance(labels, list) or len(words) != len(labels):
            raise ConfigError(f"{where}: expected as many 'labels' as 'tokens', two lists")
        read = opened.tokenizer([str(w) for w in words], is_split_into_words=True, truncation=True, max_length=length)
        places, before = read.word_ids(), [None, *read.word_ids()]
        xs.append(read["input_ids"])
        ys.append(
            [
                NO_TARGET if place is None or place == last else _label(where, labels[place], opened.labels)
                for place, last in zip(places, before, strict=False)
            ]
        )
    return Rows(_pad_rows(xs, _padding(opened)), _pad_rows(ys, NO_TARGET))


def _texts_to_go_on(opened: OpenedCheckpoint, source: str, length: int, limit: int | None) -> Rows:
    """Every token's target is the next one."""
    tokens = [row for row in _all_tokens(opened, source, length + 1, limit) if len(row) > 1]
    if not tokens:
        raise ConfigError(f"{source} has no text of two tokens, so nothing is to be told; give longer texts")
    fill = opened.tokenizer.pad_token_id
    if fill is None:  # without padding, rows must be of one length
        width = min(len(row) for row in tokens)
        tokens = [row[:width] for row in tokens]
    x = _pad_rows([row[:-1] for row in tokens], fill or 0)
    return Rows(x, _pad_rows([row[1:] for row in tokens], NO_TARGET))


def _texts_with_gaps(opened: OpenedCheckpoint, source: str, length: int, limit: int | None) -> Rows:
    """Some tokens are hidden, always the same ones, and are the targets."""
    mask, special = opened.tokenizer.mask_token_id, set(opened.tokenizer.all_special_ids)
    if mask is None:
        raise ConfigError(f"the tokenizer of {opened.path} has no mask token; set its mask_token")
    x = _pad_rows(_all_tokens(opened, source, length, limit), _padding(opened))
    plain = ~torch.isin(x, torch.tensor(sorted(special)))
    hidden = plain & (torch.rand(x.shape, generator=stream(0, "masking")) < 0.15)  # BERT's share
    return Rows(x.masked_fill(hidden, mask), x.masked_fill(~hidden, NO_TARGET))


def _pictures(opened: OpenedCheckpoint, source: str, _length: int, limit: int | None) -> Rows:
    """Pictures in the size that the config says, scaled as the folder's preprocessor says."""
    config, scale = opened.module.config, _read_scale(opened.path)
    channels = int(getattr(config, "num_channels", 3))
    form = PictureForm(height=config.image_size, width=config.image_size, channels=channels, **scale)  # type: ignore[union-attr,arg-type]
    return read_site(source, form=form, classes=opened.labels, limit=limit).rows


_READERS: Mapping[str, Callable[[OpenedCheckpoint, str, int, int | None], Rows]] = {
    "ForSequenceClassification": _texts_with_classes,
    "ForTokenClassification": _words_with_labels,
    "ForCausalLM": _texts_to_go_on,
    "LMHeadModel": _texts_to_go_on,
    "ForMaskedLM": _texts_with_gaps,
    "ForImageClassification": _pictures,
}


def _all_tokens(opened: OpenedCheckpoint, source: str, length: int, limit: int | None) -> list[list[int]]:
    return _encode(opened, [_text(where, row) for where, row in _read_lines(source, limit)], length)


def _read_lines(source: str, limit: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a file as objects, each with words for where it is."""
    path = Path(source)
    if path.suffix != ".jsonl" or not path.is_file():
        raise ConfigError(f"{source} is no .jsonl file; give one with an object per line")
    found = 0
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip() or (limit is not None and found >= limit):
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as why:
                raise ConfigError(f"{source}, line {number} is no JSON ({why})") from why
            if not isinstance(row, dict):
                raise ConfigError(f"{source}, line {number} is a {type(row).__name__}, expected an object")
            found += 1
            yield f"{source}, line {number}", row
    if not found:
        raise ConfigError(f"{source} has no lines; add some")


def _text(where: str, row: Mapping[str, Any]) -> str:
    if not isinstance(row.get("text"), str):
        raise ConfigError(f"{where}: 'text' is no text; the line has {', '.join(map(repr, list(row)[:6]))}")
    return str(row["text"])


def _label(where: str, label: object, labels: Sequence[str]) -> int:
    """A label's number: by its name, or as it stands."""
    if isinstance(label, str) and label in labels:
        return labels.index(label)
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(labels):
        return label
    raise ConfigError(f"{where}: the label is {label!r:.40}, expected one of {', '.join(labels[:12])} or its number")


def _encode(opened: OpenedCheckpoint, texts: Sequence[str], length: int) -> list[list[int]]:
    read: list[list[int]] = opened.tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]
    return read


def _pad_rows(tokens: Sequence[Sequence[int]], fill: int) -> Tensor:
    """Rows of equal length."""
    width = max(len(row) for row in tokens)
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in tokens], dtype=torch.int64)


def _padding(opened: OpenedCheckpoint) -> int:
    if opened.tokenizer.pad_token_id is None:
        raise ConfigError(f"the tokenizer of {opened.path} has no token for padding; set its pad_token")
    return int(opened.tokenizer.pad_token_id)


def _read_scale(path: Path) -> dict[str, tuple[float, ...]]:
    file = path / "preprocessor_config.json"
    if not file.is_file():
        return {}
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        return {"mean": tuple(said["image_mean"]), "std": tuple(said["image_std"])}
    except (OSError, ValueError, KeyError, TypeError) as why:
        raise ConfigError(f"{file} cannot be read: {why!r}; it should say image_mean and image_std") from why
