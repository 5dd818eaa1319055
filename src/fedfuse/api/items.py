"""What can be fused, each with a name of its own."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import TypeAlias

from torch import Tensor, nn

from fedfuse.api.checkpoints import Folders
from fedfuse.api.update import Update
from fedfuse.errors import ConfigError
from fedfuse.server.door.opened import Item, site_of
from fedfuse.wire.codec import Malformed, encode
from fedfuse.wire.folders import folder_of, is_folder, open_weights

Source: TypeAlias = "Update | str | Path | Mapping[str, Tensor] | nn.Module"


def name_items(updates: Sequence[Source], num_examples: Sequence[float] | None, folders: Folders) -> list[Item]:
    """What is to be fused, each under its site's name; what names no site has a name that no other has.

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
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # files are read once for their checksums, which cores do apart
        items = list(pool.map(_item, updates, range(1, len(updates) + 1), given, repeat(folders)))
    names = Counter(item.client for item in items)
    items = [_by_path(item) if names[item.client] > 1 else item for item in items]
    names = Counter(item.client for item in items)
    return [
        replace(item, client=f"{item.client} ({position})") if names[item.client] > 1 and not item.named else item
        for position, item in enumerate(items, 1)  # plain weights may be fused twice
    ]


def _by_path(item: Item) -> Item:
    """A file that names no site is called by its stem, and by its path where others have the same stem."""
    return replace(item, client=str(item.payload)) if isinstance(item.payload, Path) and not item.named else item


def _by_header(item: Item) -> Item:
    """The item opened, and from the site that its header names; what cannot be read is left to the door."""
    try:
        packet = open_weights(item.payload)
    except Malformed:
        return item
    site = site_of(packet.header)
    return replace(item, client=site or item.client, packet=packet, called=item.client, named=site is not None)


def _item(source: Source, position: int, num_examples: float | None, folders: Folders) -> Item:
    place = f"update {position}"
    match source:
        case Update():
            name = source.client or f"site-{position}"
            return _by_header(Item(name, source.payload, num_examples, source.spec, place=place))
        case str() | Path() if is_folder(source):
            packet, path = folders.packets.get(folder_of(source)), Path(source)
            return Item(folder_of(source).name, path, num_examples, packet=packet, place=str(source))
        case str() | Path():
            return _by_header(Item(Path(source).stem, Path(source), num_examples, place=str(source)))
        case nn.Module():
            return Item(f"model-{position}", encode(source.state_dict(), {}), num_examples, place=place)
        case Mapping():
            return Item(f"model-{position}", encode(source, {}), num_examples, place=place)
    raise ConfigError(f"update {position} is a {type(source).__name__}; expected an update, a file or a state dict")
