"""Evidence beside checkpoint folders: a file that repeats no weights and says at which it was taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedfuse.core.recipe import Recipe
from fedfuse.errors import ConfigError
from fedfuse.wire.adapters import is_adapter, read_adapter
from fedfuse.wire.codec import LazyParams, Malformed, Packet, read
from fedfuse.wire.digest import fingerprint
from fedfuse.wire.folders import EVIDENCE, read_folder
from fedfuse.wire.messages import NOTE
from fedfuse.wire.table import Altered

WEIGHTS, BASE, NAMES = "weights", "base", "names"
"""Entries of an evidence file's header: digests of the weights it was taken at and, for an adapter, of its base's; what
their folder calls those tensors that the network calls otherwise."""


def digest_of(folder: Path) -> str:
    """A short name for the weights of a checkpoint or adapter folder, equal for equal weights."""
    return fingerprint(read_adapter(folder).tensors if is_adapter(folder) else read_folder(folder).tensors)


def reads_evidence(recipe: Recipe) -> bool:
    """Whether a method cannot fuse without evidence."""
    return any(kind.name in recipe.needs for kind in recipe.evidence)


def with_evidence(
    weights: Mapping[Path, Packet], recipe: Recipe, files: Sequence[Path] | None = None
) -> dict[Path, Packet]:
    """Folders as updates: each one's weights beside the evidence that it brings.

    Args:
        weights: what is read of each folder.
        recipe: what will fuse them.
        files: where their evidence is, in the folders' order; by default each has its own in it.

    Raises:
        ConfigError: naming the file that is missing, or was made of other weights or for another method.
    """
    if files is not None and len(files) != len(weights):
        raise ConfigError(f"{len(files)} evidence files were given for {len(weights)} folders; give one each, in order")
    where = [folder / EVIDENCE for folder in weights] if files is None else files
    found = [_open_evidence(folder, file, recipe) for folder, file in zip(weights, where, strict=True)]
    bases = [evidence.header.get(BASE) for evidence in found]
    if odd := [file for file, base in zip(where, bases, strict=True) if base != bases[0]]:
        raise ConfigError(f"{odd[0]} was taken at another base than {where[0]}; pass the same --base for both")
    return {folder: _join(packet, own) for (folder, packet), own in zip(weights.items(), found, strict=True)}


def _open_evidence(folder: Path, file: Path, recipe: Recipe) -> Packet:
    how = f"write it by: fedfuse evidence {folder}{' --base …' * is_adapter(folder)} --data … --method {recipe.name}"
    how += " and the --set that `fuse` has" if recipe.label not in ("", recipe.name) else ""
    if not file.is_file():
        raise ConfigError(f"method {recipe.name!r} reads evidence and {folder} brings none ({file} is missing); {how}")
    try:
        packet = read(file)
    except Altered:
        raise
    except Malformed as why:
        raise ConfigError(f"{file} is damaged: {why}; {how}") from why
    if packet.header.get("kind") != "reply" or WEIGHTS not in packet.header:
        raise ConfigError(f"{file} is no evidence at the weights of a folder; {how}")
    if packet.header[WEIGHTS] != digest_of(folder):
        raise ConfigError(f"{file} was taken at other weights than {folder} has; {how}")
    kinds = {name.removeprefix(NOTE).partition("/")[0] for name in packet.tensors if name.startswith(NOTE)}
    wanted = [kind.name for kind in recipe.evidence if kind.name in recipe.needs]
    if lacking := [name for name in wanted if name not in kinds]:
        made_for = str(packet.header.get("method", ""))[:80]
        raise ConfigError(
            f"{file} is evidence for method {made_for!r} and has no {lacking[0]!r}, which {recipe.name!r} reads; {how}"
        )
    return packet


def _join(weights: Packet, evidence: Packet) -> Packet:
    """An update of both: the network's tensors, those that are tied under all their names, and the notes."""
    homes = homes_in_folder(evidence.header, weights.tensors)
    notes = evidence.tensors.part(lambda name: name.startswith(NOTE))
    forms = {name: weights.tensors.forms[home] for name, home in homes.items()} | dict(notes.forms)

    def fetch(name: str, begin: int, end: int) -> Tensor:
        home = homes.get(name)
        return notes.piece(name, begin, end) if home is None else weights.tensors.piece(home, begin, end)

    return Packet(evidence.header, LazyParams(forms, fetch), weights.size + evidence.size)


def homes_in_folder(header: Mapping[str, Any], weights: LazyParams) -> dict[str, str]:
    """Every name of the network's tensors, with the one under which the folder has it; further names of tied ones last.

    Args:
        header: of the evidence, which nobody has checked yet.
        weights: what the folder has.
    """
    renamed, layout = header.get(NAMES), header.get("layout")
    own = {home: name for name, home in renamed.items()} if isinstance(renamed, dict) else {}
    homes = {own.get(home, home): home for home in weights}
    for names in layout.get("tied", []) if isinstance(layout, dict) else []:
        known = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        first = next((homes[name] for name in known if name in homes), None)
        homes |= {name: first for name in known if first is not None and name not in homes}
    return homes
