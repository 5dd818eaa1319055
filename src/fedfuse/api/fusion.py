"""Anywhere: fuse what sites brought, with files or without."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from fedfuse.api.checkpoints import (
    Folders,
    check_folders,
    folder_remarks,
    fuse_at_once,
    fuse_in_parts,
    write_checkpoint,
)
from fedfuse.api.runs import recipe as make_recipe
from fedfuse.api.update import Update, check_supported, prepared_start, start_of
from fedfuse.core.messages import Brief, ClientUpdate, Cohort
from fedfuse.core.metadata import About, Contribution, versions
from fedfuse.core.model import Answering, Model, Single
from fedfuse.core.params import Params
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import AsChosen, Recipe
from fedfuse.core.rows import RowSource, as_rows
from fedfuse.core.settings import Bounds, validate_settings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.nets.head import logit_variance
from fedfuse.server.admission.admit import Admission, Rules
from fedfuse.server.admission.agreed import Agreed, CommonNames
from fedfuse.server.admission.opened import Item, OpenedItem, find_typical, open_all, site_of
from fedfuse.server.admission.updates import Gathered, built_start, check_enough, gather
from fedfuse.server.aggregate.mean import largest, sums_of
from fedfuse.server.filters import AlignChoice, GuardChoice, with_filters
from fedfuse.tasks import CLASSIFICATION, Task, task_header, task_named
from fedfuse.wire.codec import Altered, Malformed, Packet, forms_of, forms_size, read
from fedfuse.wire.files import save_model
from fedfuse.wire.folders import folder_of, is_folder, open_weights, parse_dtype, parse_size
from fedfuse.wire.messages import NOTE, mark_notes
from fedfuse.wire.sums import SUM, SUM_NAME, Summed

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
            return _by_header(Item(name, source.packet, num_examples, source.spec, place=place))
        case str() | Path() if is_folder(source):
            packet, path = folders.packets.get(folder_of(source)), Path(source)
            return Item(folder_of(source).name, path, num_examples, packet=packet, place=str(source))
        case str() | Path():
            return _by_header(Item(Path(source).stem, Path(source), num_examples, place=str(source)))
        case nn.Module():
            return Item(f"model-{position}", Packet.of(source.state_dict(), {}), num_examples, place=place)
        case Mapping():
            return Item(f"model-{position}", Packet.of(source, {}), num_examples, place=place)
    raise ConfigError(f"update {position} is a {type(source).__name__}; expected an update, a file or a state dict")


SUMS = "sums"  # the kind of notes under which a fused file keeps them, and the fact that describes them


def check_sums(recipe: Recipe, what: str) -> None:
    """Go on only if the method reads sums of evidence and nothing else.

    Raises:
        RecipeError: naming what was asked for.
    """
    if recipe.sums_by != "evidence":
        raise RecipeError(
            f"{what} needs a method that reads sums of evidence and nothing else, such as ridge or refit, and "
            f"{recipe.label or recipe.name!r} reads more of each client; fuse all updates at once"
        )


def add_updates(updates: Sequence[ClientUpdate], header: Mapping[str, Any], client: str) -> Update:
    """The sum of admitted updates, an update again.

    Args:
        updates: what is added, in its order.
        header: what one of them says of network, start and classes.
        client: what the sum is called.
    """
    total: dict[str, Tensor] = {}
    for update in updates:
        for name, tensor in update.notes.items():
            total[name] = total[name] + tensor if name in total else tensor.clone()
    count = math.fsum(u.num_examples for u in updates)
    told = {**header, "client": client, "num_examples": count, "steps": 0, "facts": {}}
    if (sites := sum(u.sites for u in updates)) > 1:
        told["sums"] = Summed(sites, "evidence", count).to_json()
    return Update(client, Packet.of(mark_notes(total), told), spec=updates[0].spec)


def add_weights(cohort: Cohort, by: str, header: Mapping[str, Any], client: str) -> Update:
    """The sum of admitted weights, an update again: their mean, and beside it the float64 sum it was rounded from.

    Args:
        cohort: what is added, in its order.
        by: by what clients weigh: "examples", or alike as "clients".
        header: what all of them say.
        client: what the sum is called.
    """
    given = cohort.num_examples if by == "examples" else torch.tensor([float(u.sites) for u in cohort])
    weight, totals = math.fsum(given.tolist()), sums_of(cohort, given)
    sources = [u.posterior.mean for u in cohort]
    forms = forms_of(sources[0])
    mean = {n: (totals[n] / weight).to(f.dtype) if n in totals else largest(sources, n) for n, f in forms.items()}
    sums = Summed(cohort.sites, by, weight).to_json()
    examples, steps = math.fsum(cohort.num_examples.tolist()), max(u.steps for u in cohort)
    told = {**header, "client": client, "num_examples": examples, "steps": steps, "facts": {}, "sums": sums}
    notes = mark_notes({SUM + name: tensor for name, tensor in totals.items()})
    return Update(client, Packet.of({**mean, **notes}, told), spec=cohort.updates[0].spec)


def sum_header(shared: Mapping[str, Any], about: About) -> dict[str, Any]:
    """What a sum says of itself: all that its updates agree on, but none of their names."""
    return {**about.model_copy(update={"sites": (), "refused": ()}).to_json(), **shared}


def evidence_sums(
    recipe: Recipe, admission: Admission, header: Mapping[str, Any], keep_sites: bool
) -> tuple[Update, ...]:
    """What a later fusion can go on from: the total, or everybody's own."""
    if recipe.sums_by != "evidence" or admission.clipped:
        return ()  # what was weakened is no sum of rows
    if keep_sites:
        return tuple(add_updates([u], header, u.client) for u in admission.cohort)
    return (add_updates(admission.cohort.updates, header, SUM_NAME),)


def region_of(recipe: Recipe, admission: Admission, header: Mapping[str, Any], whole: bool) -> Callable[[], Update]:
    """What adds up the weights that were fused, when it is asked, or says why it cannot be done."""
    by, name = recipe.sums_by, recipe.label or recipe.name
    if by is None:
        return partial(no_sum, f"{name!r} reads more of its clients than one sum; use ridge, refit or fedavg")
    if admission.clipped:
        weak = admission.clipped[0]["client"]
        return partial(no_sum, f"the say of {weak} was weakened at the door; leave it out, or widen bounds")
    if whole:
        return partial(no_sum, "checkpoint folders are fused whole; fuse all of them at once")
    return no_sum if by == "evidence" else partial(add_weights, admission.cohort, by, header, SUM_NAME)


def no_sum(why: str = "sites were kept apart; fuse without keep_sites") -> Update:
    """Say why there is no one sum of what was fused.

    Raises:
        RecipeError: always.
    """
    raise RecipeError(f"there is no one sum of what was fused, for {why}")


def kept_updates(path: Path) -> list[Update]:
    """The sums a fused file was made of: one for all sites, or one for each.

    Raises:
        ConfigError: if it keeps none.
    """
    try:
        packet = read(path)
    except Altered:
        raise
    except Malformed as why:
        raise ConfigError(f"{path} is no model file: {why}") from why
    headers = packet.header.get("facts", {}).get(SUMS)
    if not isinstance(headers, list) or not all(isinstance(h, dict) for h in headers) or not headers:
        raise ConfigError(f"{path} does not keep the sums it was made of; fuse it by ridge or refit, from updates")
    found = []
    for place, header in enumerate(headers):
        prefix = f"{NOTE}{SUMS}/{place}/"
        notes = {n.removeprefix(prefix): t for n, t in packet.tensors.items() if n.startswith(prefix)}
        found.append(Update(str(header.get("client", place)), Packet.of(mark_notes(notes), header)))
    return found


def sums_to_keep(kept: Sequence[Update]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The notes and the headers that a fused file keeps of updates."""
    packets = [update.packet for update in kept]
    notes = {
        f"{SUMS}/{place}/{name.removeprefix(NOTE)}": tensor
        for place, packet in enumerate(packets)
        for name, tensor in packet.tensors.items()
    }
    return notes, [dict(packet.header) for packet in packets]


def take_out(kept: Sequence[Update], what: Sequence[str], whose: Path) -> list[Update]:
    """The kept sums without some sites: by name where they are kept apart, by its update file where they are not.

    Raises:
        ConfigError: if a site is neither.
    """
    left = list(kept)
    for site in what:
        if any(update.client == site for update in left):
            left = [update for update in left if update.client != site]
        elif Path(site).is_file() and len(left) == 1:
            left = [_subtract(left[0], Path(site))]
        else:
            names = ", ".join(update.client for update in left)
            raise ConfigError(
                f"{whose} does not keep the sums of {site!r} apart (it has {names}); pass that site's own update file, "
                "or fuse with --keep-sites next time"
            )
    return left


def _subtract(total: Update, path: Path) -> Update:
    whole, part = total.packet, read(path)
    same = ("spec", "start", "classes")
    if odd := [key for key in same if whole.header.get(key) != part.header.get(key)]:
        raise ConfigError(f"{path} is no part of these sums: its {odd[0]} is another one")
    if whole.tensors.forms != {n: f for n, f in part.tensors.forms.items() if n.startswith(NOTE)}:
        raise ConfigError(f"{path} is no part of these sums: it brings other evidence")
    notes = {name: tensor - part.tensors[name] for name, tensor in whole.tensors.items()}
    left = float(whole.header["num_examples"]) - float(part.header["num_examples"])
    if left <= 0 or not all(bool(torch.isfinite(t).all()) for t in notes.values()):
        raise ConfigError(f"{path} is no part of these sums, or all of them: {left:g} examples would be left")
    return Update(total.client, Packet.of(notes, {**whole.header, "num_examples": left}))


def check_kept(clients: Sequence[str], admission: Admission, into: str | Path | None) -> None:
    """Go on only if all that a fused file keeps was fused again: otherwise sites would be lost unasked."""
    for refusal in admission.refused:
        if refusal["client"] in clients:
            raise ConfigError(
                f"what {into} keeps of {refusal['client']} does not suit the updates: {refusal['field']} is "
                f"{refusal['got']}, expected {refusal['expected']}; add updates made for the same model"
            )


@dataclass(frozen=True, slots=True)
class Fused:
    """The result of a fusion: the model, who was refused and why, and what the aggregator noted.

    `about` is what its file says of itself (classes, inputs, method, sites); `remarks` are sentences for a reader;
    `sums` is what it was made of, where the method reads nothing but sums of evidence, and `region` adds up weights
    when it is asked; `clipped` tells whose say was weakened.
    What was made of checkpoint folders is saved as one, with config and tokenizer; its tensors are fused when they are
    asked for. Adapters make an adapter.
    """

    model: Model
    refused: tuple[Mapping[str, str], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    about: About = field(default_factory=About)
    remarks: tuple[str, ...] = ()
    sums: tuple[Update, ...] = field(default=(), repr=False)
    region: Callable[[], Update] = field(default=no_sum, repr=False)
    clipped: tuple[Mapping[str, str], ...] = ()
    folders: Folders = field(default_factory=Folders, repr=False)

    @property
    def task(self) -> Task:
        """What the model was made for."""
        return task_named(self.about.task or CLASSIFICATION.name)

    def state(self) -> Params:
        """The fused weights under their plain names, to be asked for one by one."""
        return _one(self.model).posterior.mean

    def num_bytes(self, dtype: str | None = None) -> int:
        """How many bytes the fused weights take, in another dtype if one is named."""
        return forms_size(self.folders.output(self.state(), None if dtype is None else parse_dtype(dtype)).forms)

    def state_dict(self) -> dict[str, Tensor]:
        """The fused weights under their plain names."""
        return dict(self.state())

    def module(self, like: nn.Module | None = None) -> nn.Module:
        """A network with the fused weights: a new one, or the given one filled in."""
        module = _runnable(_one(self.model)).spec.build() if like is None else like
        module.load_state_dict(self.state_dict())
        return module.eval()

    def logits(self, x: Tensor) -> Tensor:
        """The fused model's answer."""
        if not isinstance(self.model, Answering):
            raise RecipeError("models that stay apart have no common answer; ask each of model.members")
        for member in self.model.members:
            _runnable(member)
        return self.model.logits(x)

    def variance(self, x: Tensor) -> Tensor:
        """How uncertain the last layer leaves each logit, rows × outputs, where a method knows its posterior.

        Raises:
            RecipeError: for a model without one.
        """
        return logit_variance(_runnable(_one(self.model)), x)

    def partial(self) -> Update:
        """The sum of what was fused, an update again: fusing regions' sums is fusing all their sites.

        Raises:
            RecipeError: if the method reads more of its clients than sums.
        """
        return self.sums[0] if len(self.sums) == 1 else self.region()

    def save(
        self,
        path: str | Path,
        *,
        shard_size: str = "5GB",
        dtype: str | None = None,
        watch: Callable[[int], None] | None = None,
    ) -> Path:
        """Write one file, or one folder if folders were fused; it appears whole or not at all.

        A single network's file loads with plain safetensors into your own model, a folder by `from_pretrained`.

        Args:
            path: the file or folder.
            shard_size: of a folder's files, at most.
            dtype: of a folder's weights; by default the widest that came.
            watch: called with the bytes of each of a folder's tensors as it is fused.
        """
        if self.folders:
            given = None if dtype is None else parse_dtype(dtype)
            size = parse_size(shard_size)
            write_checkpoint(self.state(), self.folders, self.about, Path(path), size, given, watch)
            return Path(path)
        if dtype is not None:
            raise ConfigError("dtype is for checkpoint folders; the file of a model keeps the dtype of its updates")
        notes, headers = sums_to_keep(self.sums)
        published = {"published": told} if (told := self.facts.get("published")) else {}
        save_model(self.model, Path(path), published | ({SUMS: headers} if headers else {}), self.about, notes)
        return Path(path)


def fuse(
    updates: Sequence[Source],
    recipe: Recipe | str = "fedavg",
    *,
    num_examples: Sequence[float] | None = None,
    start: str | Path | Mapping[str, Tensor] | None = None,
    model: nn.Module | Spec | Sequence[nn.Module | Spec] | None = None,
    server_rows: RowSource | None = None,
    unlabelled: Tensor | None = None,
    guard: GuardChoice = None,
    align: AlignChoice = None,
    bounds: Bounds | Mapping[str, Any] | None = None,
    quorum: float | None = None,
    seed: int = 0,
    into: str | Path | None = None,
    remove: Sequence[str | Path] = (),
    keep_sites: bool = False,
    evidence: Sequence[str | Path] | None = None,
    agreed: Agreed | None = None,
) -> Fused:
    """Fuse what sites brought, by the layout most of them share; the odd ones are refused by name.

    An update is of the site that its header names, wherever it lies; of one site there may be one update.

    Args:
        updates: what to fuse: updates, files, checkpoint folders, modules or plain state dicts.
        recipe: the method, or its name.
        num_examples: behind each one; needed for state dicts unless all weigh alike, else read from the update.
        start: the common weights they started from, for methods that need them; adapters are merged into theirs.
        model: the network or networks, where one that is not fedfuse's own must be run: nothing files name is run.
        server_rows: labelled rows the server holds, for methods that need them, in any form that `local_update` takes.
        unlabelled: inputs without labels the server holds, for distillation.
        guard: a filter: "clip", "krum", "median", "trimmed", "private", or a table, {"name": "krum", "byzantine": 2}.
        align: how hidden units are aligned before that: "weights", "activations", "transport", "graph", or a table.
        bounds: how far above the others one source's say may be, as `server.bounds` of a file says: {"ratio": 1.5}.
        quorum: the share of sources that must be admitted: by default half of updates, and all of checkpoint folders.
        seed: fixes every random draw of the server.
        into: a fused file that keeps its sums (of `ridge` or `refit`): the updates are added to them.
        remove: sites to take out of those sums, by name where they were kept apart, else by their update files.
        keep_sites: let the result's file keep each site's sums apart, not only their total.
        evidence: of checkpoint folders, a file each in their order, where it is not in the folders.
        agreed: what a federation folder fixes; an update that differs is refused, even if most do.

    Raises:
        QuorumLost: if too few were admitted, or no layout is shared by more than half of them.
        ConfigError: if there is nothing to fuse, or it does not fit the network or the start that was named.

    Example:
        >>> fuse([{"w": Tensor([0.0])}, {"w": Tensor([1.0])}], "fedavg", num_examples=[1, 3]).state_dict()
        {'w': tensor([0.7500])}
    """
    recipe = _recipe_behind_filters(recipe, align, guard)
    folders, kept = check_folders(updates, start, recipe, evidence, model), _read_kept(recipe, into, remove)
    quorum = (1.0 if folders else 0.5) if quorum is None else quorum
    items = _vouch_for(kept, name_items([*kept, *updates], num_examples, folders))
    fitting = items if agreed is None else _keeping_to(agreed, items, recipe)
    begin = folders.as_fused(_begin(recipe, start if folders.take_start(recipe) else None, fitting))
    own = None if server_rows is None else as_rows(server_rows)
    bench = Bench(rows=own, unlabelled=unlabelled, population=len(items), seed=seed)
    recipe.check(1, bench)
    came = gather(items, recipe, begin, _networks(recipe, model, seed), _rules(quorum, bounds), agreed)
    admission, brief, names, *_ = came
    check_kept([item.client for item in items[: len(kept)]], admission, into)
    fused = _fuse(recipe, admission, *_ready(recipe, bench, brief, names), folders)
    check_enough(admission, len(items), quorum)
    return _with_sums(_with_origin(fused, recipe, came), recipe, came, keep_sites)


def _with_origin(fused: Fused, recipe: Recipe, came: Gathered) -> Fused:
    """The result with who was fused, refused and weakened."""
    refused, clipped = tuple(came.admission.refused), tuple(came.admission.clipped)
    about = _about(recipe, came)
    return replace(fused, refused=refused, clipped=clipped, about=about, remarks=came.remarks + fused.remarks)


def _with_sums(fused: Fused, recipe: Recipe, came: Gathered, keep_sites: bool) -> Fused:
    """The result with what a later fusion can go on from."""
    header = sum_header(came.shared, fused.about)
    region = region_of(recipe, came.admission, header, bool(fused.folders))
    return replace(fused, sums=evidence_sums(recipe, came.admission, header, keep_sites), region=region)


def _rules(quorum: float, bounds: Bounds | Mapping[str, Any] | None) -> Rules:
    found = bounds if isinstance(bounds, Bounds) else validate_settings(Bounds, bounds or {}, "bounds")
    return Rules(quorum=quorum, bounds=found)


def _fuse(recipe: Recipe, admission: Admission, state: ServerState, bench: Bench, folders: Folders) -> Fused:
    """The model, its facts and remarks: of folders tensor by tensor where the method allows it."""
    in_parts = bool(folders) and recipe.layerwise
    model, facts = (fuse_in_parts if in_parts else fuse_at_once)(recipe, admission, state, bench)
    told = folder_remarks(recipe, admission, in_parts) if folders else ()
    return Fused(model, facts=facts, remarks=(*told, *facts.get("remarks", ())), folders=folders)


def _recipe_behind_filters(recipe: Recipe | str, align: AlignChoice, guard: GuardChoice) -> Recipe:
    """The recipe behind its filters, if files can be fused by it."""
    made = with_filters(make_recipe(recipe) if isinstance(recipe, str) else recipe, align=align, guard=guard)
    check_supported(made, "fusing files")
    return made


def _ready(recipe: Recipe, bench: Bench, brief: Brief, names: CommonNames) -> tuple[ServerState, Bench]:
    """What the round begins with, checked to suit the recipe."""
    state = ServerState(brief.round, Single(brief.spec, Posterior(brief.params)), brief.memory)
    inputs = None if names.inputs is None else names.inputs.bounds()
    bench = replace(bench, classes=brief.classes, inputs=inputs, task=brief.task)
    recipe.check(1, bench, state if brief.spec.can_run else None)
    return state, bench


def _read_kept(recipe: Recipe, into: str | Path | None, remove: Sequence[str | Path]) -> list[Update]:
    """The sums that a fused file keeps, without those of the sites to remove."""
    if into is None:
        if remove:
            raise ConfigError("there is nothing to remove sites from; name the fused file (into=, --into)")
        return []
    check_sums(recipe, "adding to a fused file")
    return take_out(kept_updates(Path(into)), [str(site) for site in remove], Path(into))


def _vouch_for(kept: Sequence[Update], items: Sequence[Item]) -> list[Item]:
    """The items, with the sums that come first because a fused file kept them: those were believed when it was made."""
    own = [
        replace(item, num_examples=item.num_examples or update.num_examples, place=f"what was fused of {item.client}")
        for item, update in zip(items, kept, strict=False)
    ]
    return [*own, *items[len(kept) :]]


def _begin(recipe: Recipe, start: str | Path | Mapping[str, Tensor] | None, items: Sequence[Item]) -> Params | None:
    """The weights sites started from, where they were passed, or where they follow from the network of the updates."""
    begin: Params | None = None if start is None else start_of(start)[1]
    if begin is None and not recipe.trains:
        begin = built_start(items)
    if begin is None and "start" in recipe.needs:
        raise RecipeError(f"method {recipe.name!r} needs the weights the sites started from; pass `start` (--base)")
    return begin if begin is None else _prepared_weights(recipe, begin, items)


def _prepared_weights(recipe: Recipe, begin: Params, items: Sequence[Item]) -> Params:
    """The start as sites trained from it, where the method prepares the network and the plain weights were passed."""
    prepare = recipe.prepare_model
    if not isinstance(prepare, PreparesWeights):
        return begin
    if (typical := find_typical(items)) is None:
        return begin
    trained = typical.packet.tensors
    return begin if begin.keys() <= trained.keys() else prepare.weights_from(begin, trained)


@runtime_checkable
class PreparesWeights(Protocol):
    """A preparation of networks that knows what becomes of their weights without running them."""

    def weights_from(self, plain: Params, trained: Params) -> Params:
        """The prepared weights that sites began with, given the plain ones and what one of them trained."""
        ...


def _keeping_to(agreed: Agreed, items: Sequence[Item], recipe: Recipe) -> list[Item]:
    """Those of the items that keep to what a federation folder fixes, as far as their headers tell."""
    opened, _ = open_all(items, None)
    return [o.item for o in opened if agreed.find_difference(o, recipe.mixes_networks) is None]


def _about(recipe: Recipe, came: Gathered) -> About:
    """What the fused model's file will say of itself."""
    admission, names = came.admission, came.names
    return About(
        method=recipe.label or recipe.name,
        class_names=names.class_names,
        inputs=names.inputs,
        task=task_header(came.brief.task).get("task", ""),
        reveals=recipe.reveals,
        sites=tuple(_contribution(u, came.opened[u.client]) for u in admission.cohort),
        refused=tuple(admission.refused),
        versions=versions(),
    )


def _contribution(update: ClientUpdate, opened: OpenedItem) -> Contribution:
    """What a site sent, and for what it counted."""
    told, counted = opened.packet.header.get("num_examples"), update.num_examples
    sent = float(told) if isinstance(told, int | float) and 0 < told < math.inf else counted
    file, weighs = opened.item.file, None if sent == counted else counted
    return Contribution(client=update.client, num_examples=sent, counted=weighs, file=file)


def _networks(recipe: Recipe, model: nn.Module | Spec | Sequence[nn.Module | Spec] | None, seed: int) -> list[Spec]:
    """The networks the user named, as the method trains them."""
    if model is None:
        return []
    given = [model] if isinstance(model, nn.Module | Spec) else model
    return [_prepared_spec(recipe, one, seed) for one in given]


def _prepared_spec(recipe: Recipe, given: nn.Module | Spec, seed: int) -> Spec:
    """The network the method trains, made of one the user named; options may come with the updates, if it has none."""
    spec = given if isinstance(given, Spec) else Spec.of(given)
    if isinstance(recipe.prepare_model, AsChosen):
        return spec
    return prepared_start(recipe, spec, spec.skeleton().state_dict(), Bench(seed=seed)).spec


def _one(model: Model) -> Single:
    if not isinstance(model, Single):
        kind = type(model).__name__.lower()
        raise RecipeError(f"the result is a {kind} of networks, not one; save it, ask its logits, or distil it")
    return model


def _runnable(model: Single) -> Single:
    if not model.spec.can_run:
        raise RecipeError(
            f"only the description of {model.spec.factory!r} is here; pass model= to `fuse` to run what was fused, or "
            "fill a network of yours: fused.module(like=network)"
        )
    return model
