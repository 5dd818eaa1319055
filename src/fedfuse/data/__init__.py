"""Data: where they come from, how they are shared out, what happens to pixels before the network.

`load` brings a data set into memory, `partition` says which row belongs to whom, `heat_map` shows it. What is named
here is imported when it is first used: to read an experiment file takes the partitions' schemes and not torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedfuse.core.lazy import lazy_names

if TYPE_CHECKING:
    from fedfuse.data.partitions import Partition, client_ids, partition
    from fedfuse.data.rows import Dataset, Rows
    from fedfuse.data.schemes import (
        Classes,
        Dirichlet,
        Iid,
        Labels,
        Natural,
        Quantity,
        Scheme,
        ServerRowsConfig,
        Shards,
        Shares,
    )
    from fedfuse.data.show import heat_map, save_heat_map
    from fedfuse.data.sources import SourceLocation, cache_folder, find, load, load_or_outline, outline, source_names
    from fedfuse.data.transforms import (
        Augment,
        Compose,
        CropFlip,
        Grayscale,
        Rotate,
        Standardize,
        augmentation,
        before_standardizing,
        standardize,
    )

_HOMES = {
    "fedfuse.data.partitions": ("Partition", "client_ids", "partition"),
    "fedfuse.data.rows": ("Dataset", "Rows"),
    "fedfuse.data.schemes": (
        "Classes",
        "Dirichlet",
        "Iid",
        "Labels",
        "Natural",
        "Quantity",
        "Scheme",
        "ServerRowsConfig",
        "Shards",
        "Shares",
    ),
    "fedfuse.data.show": ("heat_map", "save_heat_map"),
    "fedfuse.data.sources": (
        "SourceLocation",
        "cache_folder",
        "find",
        "load",
        "load_or_outline",
        "outline",
        "source_names",
    ),
    "fedfuse.data.transforms": (
        "Augment",
        "Compose",
        "CropFlip",
        "Grayscale",
        "Rotate",
        "Standardize",
        "augmentation",
        "before_standardizing",
        "standardize",
    ),
}

__all__ = [
    "Augment",
    "Classes",
    "Compose",
    "CropFlip",
    "Dataset",
    "Dirichlet",
    "Grayscale",
    "Iid",
    "Labels",
    "Natural",
    "Partition",
    "Quantity",
    "Rotate",
    "Rows",
    "Scheme",
    "ServerRowsConfig",
    "Shards",
    "Shares",
    "SourceLocation",
    "Standardize",
    "augmentation",
    "before_standardizing",
    "cache_folder",
    "client_ids",
    "find",
    "heat_map",
    "load",
    "load_or_outline",
    "outline",
    "partition",
    "save_heat_map",
    "source_names",
    "standardize",
]


__getattr__ = lazy_names(globals(), _HOMES)


def __dir__() -> list[str]:
    return __all__
