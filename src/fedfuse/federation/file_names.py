"""What files call the tensors of a network of `transformers`: it renames layers now and then, and files stay."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from fedfuse.core.params import Layout
from fedfuse.errors import ConfigError
from fedfuse.wire.codec import LazyParams
from fedfuse.wire.network_names import names_in_files


def names_in_folder(folder: Path, module: nn.Module, tensors: LazyParams) -> dict[str, str]:
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
