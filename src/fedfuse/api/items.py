"""What can be fused, each with a name of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from torch import Tensor, nn

from fedfuse.api.checkpoints import Folders
from fedfuse.api.update import Update
from fedfuse.errors import ConfigError
from fedfuse.server.door.opened import Item
from fedfuse.wire.codec import encode
from fedfuse.wire.folders import folder_of, is_folder

Source: TypeAlias = "Update | str | Path | Mapping[str, Tensor] | nn.Module"


def name_items(updates: Sequence[Source], num_examples: Sequence[float] | None, folders: Folders) -> list[Item]:
    """What is to be fused under distinct names.

    Raises:
        ConfigError: if there is nothing, or something that cannot be fused.
    """
    if not updates:
        raise ConfigError("there is nothing to fuse: pass at least one update, file or state dict")
    if num_examples is not None and len(num_examples) != len(updates):
        raise ConfigError(
            f"{len(num_examples)} numbers of examples were given for {len(updates)} updates; give one each"
        )
    given = list(num_examples) if num_examples is not None else [None] * len(updates)
    items = [
        _item(u, position, num_examples, folders)
        for position, (u, num_examples) in enumerate(zip(updates, given, strict=True), 1)
    ]
    names = Counter(item.client for item in items)
    items = [_by_path(item) if names[item.client] > 1 else item for item in items]
    names = Counter(item.client for item in items)
    return [
        replace(item, client=f"{item.client} ({position})") if names[item.client] > 1 else item
        for position, item in enumerate(items, 1)  # one file twice, or two updates of one name, are still two
    ]


def _by_path(item: Item) -> Item:
    """A file is called by its stem, and by its path where others have the same stem."""
    return replace(item, client=str(item.payload)) if isinstance(item.payload, Path) else item


def _item(source: Source, position: int, num_examples: float | None, folders: Folders) -> Item:
    match source:
        case Update():
            return Item(source.client, source.payload, num_examples, source.spec)
        case str() | Path():
            name = folder_of(source).name if is_folder(source) else Path(source).stem
            return Item(name, Path(source), num_examples, packet=folders.packets.get(folder_of(source)))
        case nn.Module():
            return Item(f"model-{position}", encode(source.state_dict(), {}), num_examples)
        case Mapping():
            return Item(f"model-{position}", encode(source, {}), num_examples)
    raise ConfigError(f"update {position} is a {type(source).__name__}; expected an update, a file or a state dict")
