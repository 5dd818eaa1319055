"""Data: where they come from, how they are shared out, what happens to pixels before the network.

`load` brings a data set into memory, `partition` says which row belongs to whom, `heat_map` shows it.
"""

from fedfuse.data.partition import Partition, client_ids, partition
from fedfuse.data.rows import Dataset, Rows
from fedfuse.data.schemes import (
    Classes,
    Dirichlet,
    Iid,
    Labels,
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
    standardize,
)

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
