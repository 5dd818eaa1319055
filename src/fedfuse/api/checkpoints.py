"""Checkpoint and adapter folders in and out: what must agree before they are fused, and how the result is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedfuse.core.metadata import About
from fedfuse.core.model import Model
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError
from fedfuse.server.admission.admit import Admission
from fedfuse.server.round import PartedRound, fuse_admitted, refuse_adapters
from fedfuse.wire.adapters import CONFIG, is_adapter, merge_into, read_adapter, read_adapters, write_adapter
from fedfuse.wire.codec import Altered, LazyParams, Malformed, Packet, as_lazy, fingerprint, forms_of, forms_size, read
from fedfuse.wire.folders import (
    EVIDENCE,
    INDEX,
    SINGLE,
    carry_over,
    check_alike,
    folder_of,
    homes_of_network,
    is_folder,
    new_folder,
    read_folder,
    under_names,
    with_dtype,
    write_tensors,
)
from fedfuse.wire.messages import NOTE, VERSION, tell_memory

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


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of one fusion.

    Attributes:
        sources: those to be fused; none if something else is.
        packets: what is read instead of them: with evidence, adapters in common factors or merged into their base.
        carried: whose config and tokenizer the result gets.
        dtype: of the result, where that is not the dtype it is fused in.
        homes: what folders call the tensors that are fused, by the names of their network, if that is otherwise.
    """

    sources: tuple[Path, ...] = ()
    packets: Mapping[Path, Packet] = field(default_factory=dict)
    carried: Path | None = None
    dtype: torch.dtype | None = None
    homes: Mapping[str, str] | None = None

    def __bool__(self) -> bool:
        return bool(self.sources)

    @property
    def stand_at_base(self) -> bool:
        """Whether these are adapters, read as whole models."""
        return bool(self.sources) and self.carried not in self.sources

    def take_start(self, recipe: Recipe) -> bool:
        """Whether what they started from is read beside them: adapters at their base need it for rules around it."""
        return "start" in recipe.needs or not self.stand_at_base

    def output(self, params: Params, dtype: torch.dtype | None = None) -> LazyParams:
        """What is written of fused weights, in another dtype if one is named."""
        tensors = with_dtype(as_lazy(params), dtype or self.dtype)
        if self.homes is None:
            return tensors
        first = {home: name for name, home in reversed(list(self.homes.items()))}  # one name of those that are tied
        known = {name: home for home, name in first.items()}
        return tensors.part(known.__contains__, known.__getitem__)

    def as_fused(self, start: Params | None) -> Params | None:
        """What the folders started from, under the names that their tensors are fused by."""
        return start if start is None or self.homes is None else under_names(as_lazy(start), self.homes)


def check_folders(
    updates: Sequence[Any],
    start: object,
    recipe: Recipe,
    evidence: Sequence[str | Path] | None = None,
    model: object = None,
) -> Folders:
    """The folders among what is to be fused, if there are any: then all are, and they agree.

    Args:
        updates: what is to be fused.
        start: what they started from, if that is known.
        recipe: what will fuse them; where it reads evidence, each folder brings its own.
        evidence: files of it, in the order of folders, where it is not in them.
        model: the network that they are of, or a list of it, if it will be run.

    Raises:
        ConfigError: naming who is not, or the file in which they differ and what to do.
    """
    folders = _agreeing_folders(updates, start)
    if evidence is not None and not (folders and reads_evidence(recipe)):
        why = f"method {recipe.name!r} reads none" if folders else "these are no folders, whose updates bring their own"
        raise ConfigError(f"evidence files go with checkpoint folders, and {why}; leave them out")
    if not folders or not reads_evidence(recipe):
        return _name_as_network(folders, model[0] if isinstance(model, list) and len(model) == 1 else model)
    read = {folder: folders.packets.get(folder) or read_folder(folder) for folder in folders.sources}
    joined = with_evidence(read, recipe, None if evidence is None else [Path(file) for file in evidence])
    first = folders.sources[0]
    return replace(folders, packets=joined, homes=homes_in_folder(joined[first].header, read[first].tensors))


def _name_as_network(folders: Folders, network: object) -> Folders:
    """The folders with their tensors under the names of a network that will be run, where files call them otherwise."""
    if not folders or not isinstance(network, nn.Module):
        return folders
    read = {folder: folders.packets.get(folder) or read_folder(folder) for folder in folders.sources}
    homes = homes_of_network(network, read[folders.sources[0]].tensors)
    if all(name == home for name, home in homes.items()):
        return folders
    packets = {path: replace(packet, tensors=under_names(packet.tensors, homes)) for path, packet in read.items()}
    return replace(folders, packets=packets, homes=homes)


def _agreeing_folders(updates: Sequence[Any], start: object) -> Folders:
    folders = [folder_of(source) for source in updates if is_folder(source)]
    if folders and len(folders) < len(updates):
        other = next(source for source in updates if not is_folder(source))
        words = str(other) if isinstance(other, str | Path) else f"a {type(other).__name__}"
        raise ConfigError(f"{folders[0]} is a checkpoint folder and {words} is none; fuse folders with folders")
    base = folder_of(start) if isinstance(start, str | Path) and is_folder(start) else None
    adapters = [folder for folder in folders if is_adapter(folder)]
    if not folders or not adapters:
        check_alike([*folders, *([] if base is None else [base])])
        return Folders(tuple(folders), carried=folders[0] if folders else None)
    if len(adapters) < len(folders):
        other = next(folder for folder in folders if folder not in adapters)
        raise ConfigError(f"{adapters[0]} is an adapter and {other} a whole model; fuse adapters with adapters")
    packets = dict(zip(adapters, read_adapters(adapters), strict=True))
    if start is None:
        return Folders(tuple(folders), packets, adapters[0])
    if base is None:
        raise ConfigError(f"adapters are merged into the folder of their base, and {start} is none; pass such a folder")
    return _merge_into_base(packets, base)


def default_method(updates: Sequence[Path], start: Path | None) -> str | None:
    """The method that is the mean of adapters without their base; None for everything else."""
    return "flora" if updates and start is None and all(map(is_adapter, updates)) else None


def _merge_into_base(packets: Mapping[Path, Packet], base: Path) -> Folders:
    """Adapters as whole models: their base with each of them merged into it, tensor by tensor as they are read."""
    tensors = read_folder(base).tensors
    for path in packets:
        _check_base(path, base)
    dtypes = {form.dtype for form in tensors.forms.values() if form.dtype.is_floating_point}
    whole = {
        path: Packet({}, merge_into(packet.tensors, read_adapter(path).config, tensors, base), packet.size)
        for path, packet in packets.items()
    }
    return Folders(tuple(packets), whole, base, dtypes.pop() if len(dtypes) == 1 else None)


def _check_base(adapter: Path, base: Path) -> None:
    """Refuse another base than the adapter names, where that one lies here too: shapes alone would not tell."""
    named = read_adapter(adapter).config.get("base_model_name_or_path")
    known = Path(named) if isinstance(named, str) and named else base
    if not (known / SINGLE).is_file() and not (known / INDEX).is_file():
        return  # a name of elsewhere
    if not known.samefile(base) and digest_of(known) != digest_of(base):
        raise ConfigError(
            f"{adapter / CONFIG}: base_model_name_or_path is {named!r}, whose weights are not those of {base}; merge "
            "the adapter into the base that it was trained on"
        )


def fuse_at_once(
    recipe: Recipe, admission: Admission, state: ServerState, bench: Bench
) -> tuple[Model, Mapping[str, Any]]:
    """The fused model and what was noted of it."""
    after = fuse_admitted(recipe, admission, state, bench)
    published = tell_memory(after.brief(recipe.publishes).memory) if recipe.publishes else {}
    return after.model, {**after.facts, **({"published": published} if published else {})}


def fuse_in_parts(
    recipe: Recipe, admission: Admission, state: ServerState, bench: Bench
) -> tuple[Model, Mapping[str, Any]]:
    """A model whose tensors are fused when they are asked for; what is noted of them is known afterwards."""
    refuse_adapters(admission.cohort.names, recipe.name)
    parts = PartedRound(recipe, admission.cohort, state, bench)
    return parts.result(), parts.facts


def folder_remarks(recipe: Recipe, admission: Admission, in_parts: bool) -> Iterator[str]:
    """What a person who merges should know: that a method holds the whole network."""
    if not in_parts and not recipe.aggregate.knows_adapters:
        size = forms_size(forms_of(admission.cohort.updates[0].posterior.mean))
        yield (
            f"method {recipe.label or recipe.name!r} looks at the whole network at once, so the fused one "
            f"({size / 1e9:.2g} GB) is held in memory"
        )


def write_checkpoint(
    params: Params,
    folders: Folders,
    about: About,
    output: Path,
    shard_size: int,
    dtype: torch.dtype | None,
    watch: Callable[[int], None] | None,
) -> None:
    """Write a fused model as a folder beside its name, and rename it when it is complete."""
    if folders.carried is None:
        raise ConfigError("there is no folder whose config could be carried over; fuse checkpoint folders")
    tensors = folders.output(params, dtype)
    header: Mapping[str, Any] = {"kind": "checkpoint", "version": VERSION, **about.to_json()}
    with new_folder(output) as half:
        if is_adapter(folders.carried):
            carry_over(folders.carried, half, None)
            write_adapter(half, folders.carried, tensors, header)
            return
        write_tensors(half, tensors, header, shard_size, watch)
        carry_over(folders.carried, half, _only_dtype(tensors))


def _only_dtype(tensors: LazyParams) -> torch.dtype | None:
    floats = {form.dtype for form in tensors.forms.values() if form.dtype.is_floating_point}
    return floats.pop() if len(floats) == 1 else None
