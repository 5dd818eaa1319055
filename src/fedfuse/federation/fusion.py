"""Fusing the files that came, by what the sites agreed on where they did; and the ledger of a site's privacy."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfuse.api import Fused, fuse
from fedfuse.api import recipe as recipe_of
from fedfuse.api.checkpoints import default_method
from fedfuse.api.update import prepared_start
from fedfuse.core.files import regular, write_atomically
from fedfuse.core.metadata import describe
from fedfuse.core.recipe import Recipe
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench
from fedfuse.errors import ConfigError
from fedfuse.experiment.config import assign
from fedfuse.linalg.privacy import Release
from fedfuse.server.admission.agreed import Agreed
from fedfuse.tasks import task_header
from fedfuse.wire.adapters import is_adapter
from fedfuse.wire.folders import build_network, folder_of, is_folder

if TYPE_CHECKING:
    from torch import nn

    from fedfuse.core.rows import Rows
    from fedfuse.federation.agreement import FederationFolder


def fuse_files(
    updates: Sequence[Path],
    method: str | None = None,
    sets: Sequence[str] = (),
    *,
    federation: FederationFolder | None = None,
    start: Path | None = None,
    num_examples: Sequence[float] | None = None,
    quorum: float | None = None,
    models: Sequence[str] = (),
    guard: str | None = None,
    bounds: str | None = None,
    align: str | None = None,
    server_data: str | None = None,
    unlabelled: str | None = None,
    seed: int = 0,
    into: Path | None = None,
    remove: Sequence[str] = (),
    keep_sites: bool = False,
    evidence: Sequence[Path] | None = None,
) -> Fused:
    """Fuse update files or folders by a method with its options.

    Args:
        updates: the files.
        method: the method's name; by default the federation's, or else the mean: fedavg, and flora for adapters alone.
        sets: `key=value` for an option of the method, `guard.key`, `align.key` and `bounds.key` for one of theirs.
        federation: what the sites agreed on: the method, the start, the network, the classes and the form of rows.
        start: the weights all started from, or the folder of adapters' base.
        num_examples: examples behind each file.
        quorum: the share that must be admitted; by default half of updates, and all of checkpoint folders.
        models: networks that may be run, as names of `fedfuse.models` or package.module:Class.
        guard: a robust filter's name.
        bounds: what is done to an update with far more influence than the others: "refuse", "clip" or "off".
        align: an alignment's name.
        server_data: a source whose training rows the server holds.
        unlabelled: a source whose training inputs the server holds, their labels unseen.
        seed: fixes every random draw of the server.
        into: a fused file whose sums the updates are added to.
        remove: sites taken out of it, by name or by update file.
        keep_sites: let the fused file keep each site's sums apart.
        evidence: of checkpoint folders, a file each in their order, where it is not in the folders.
    """
    limits = (options := read_options(sets)).pop("bounds", {}) | ({} if bounds is None else {"over": bounds})
    told: dict[str, Any] = {"bounds": limits, "quorum": quorum, "seed": seed}
    told |= {kind: _with_options(kind, name, options) for kind, name in (("guard", guard), ("align", align))}
    told |= {"into": into, "remove": remove, "keep_sites": keep_sites, "evidence": evidence}
    for path in (*updates, *([] if into is None else [into]), *(evidence or [])):
        if not path.exists():
            raise ConfigError(f"there is no file or folder {path}")
        regular(path)
    recipe = chosen_recipe(method or default_method(updates, start), options, federation)
    fused = fuse(
        updates,
        recipe,
        num_examples=num_examples or None,
        start=federation.start if start is None and federation is not None else start,
        model=[Spec(name) for name in models] or _network_in(updates, start, align),
        server_rows=None if server_data is None else _rows_of(server_data, federation),
        unlabelled=None if unlabelled is None else _rows_of(unlabelled, federation, labelled=False).x,
        agreed=None if federation is None else _fixed_by(federation, recipe, with_network=start is None),
        **told,
    )
    if federation is None:
        return fused
    if fused.task.name != federation.agreement.task:
        raise ConfigError(
            f"the updates' task is {fused.task.name}, expected {federation.agreement.task}; fuse updates made by this "
            "folder"
        )
    return replace(fused, about=fused.about.model_copy(update={"federation": federation.agreement.name}))


def read_options(sets: Sequence[str]) -> dict[str, Any]:
    """What `--set key=value` says of a method."""
    options: dict[str, Any] = {}
    for text in sets:
        assign(options, text)
    return options


def _with_options(kind: str, name: str | None, options: dict[str, Any]) -> dict[str, Any] | None:
    """A filter's name with the options given under its kind, which are taken out of the method's."""
    own = options.pop(kind, {})
    if name is None and own:
        raise ConfigError(f"--set {kind}.{next(iter(own))} is an option of a filter; name it with --{kind}")
    return None if name is None else {"name": name, **own}


def chosen_recipe(
    method: str | None, options: dict[str, Any], federation: FederationFolder | None, default: str = "fedavg"
) -> Recipe:
    """The method the user names, else the federation's, else the default, with the options given."""
    if federation is None or method is not None:
        return recipe_of(method or default, **options)
    agreed = federation.agreement.method
    return agreed.model_copy(update=options).recipe() if options else agreed.recipe()


def _network_in(updates: Sequence[Path], start: Path | None, align: str | None) -> list[nn.Module] | None:
    """The network that checkpoint folders hold, where units are to be aligned and none was named; None elsewhere."""
    if align is None or not updates or not all(map(is_folder, updates)):
        return None
    first = folder_of(updates[0])
    home = first if not is_adapter(first) else start
    if home is None:
        return None
    try:
        network = build_network(folder_of(home))
    except ImportError as why:
        raise ConfigError(
            f"to align units of {home} its network is run; pip install 'fedfuse[transformers]', or name it (--model)"
        ) from why
    return None if network is None else [network]


def _rows_of(source: str, federation: FederationFolder | None, labelled: bool = True) -> Rows:
    """The server's rows: in the form that the sites agreed on, where they did."""
    if federation is None:
        from fedfuse.data import load

        return load(source).train
    from fedfuse.data.site import read_site

    agreed = federation.agreement
    return read_site(
        source, form=agreed.inputs, classes=agreed.output_names, labelled=labelled, task=agreed.learns
    ).rows


def _fixed_by(federation: FederationFolder, recipe: Recipe, with_network: bool) -> Agreed:
    """What the folder fixes: of the network only where its start is begun with, as sites train it by either method."""
    agreement = federation.agreement
    task, classes, plain = agreement.learns, len(agreement.output_names), agreement.spec
    header = {"task": task_header(task).get("task"), "classes": classes}
    bench = Bench(classes=classes, seed=agreement.seed, task=task)
    begin = plain.skeleton().state_dict()
    made = [prepared_start(one, plain, begin, bench).spec for one in (agreement.method.recipe(), recipe)]
    specs = [plain, *made] if with_network else []
    networks = tuple({"spec": spec.to_json(), "layout": describe(spec.layout)} for spec in specs)
    return Agreed(agreement.output_names, agreement.inputs, header, networks)


def charge(release: Release, path: Path, what: str, budget: float | None = None) -> Release:
    """Write a release into a site's ledger, before it leaves, and give the total so far.

    All entries of one ledger count as told of the same rows. Signals add in squares, exactly.

    Args:
        release: what is about to leave.
        path: the ledger; it is made where there is none.
        what: what the entry says of it: file and method.
        budget: the most ε, at the release's own δ, that all of them may have together.

    Raises:
        ConfigError: if the budget would be exceeded, and then nothing is written; or if the ledger cannot be read.
    """
    entries = _read_ledger(path)
    past = [Release.from_json(entry if entry.get("signal") is not None else None) for entry in entries]
    total = release.after(past)
    if budget is not None and total.epsilon > budget:
        bounded = math.isfinite(total.epsilon)
        words = f"{total.epsilon:.4g}" if bounded else "without bound, since something has no noise"
        raise ConfigError(
            f"the budget of {path} is ε = {budget:g} and with {what} it would be {words} (δ = {release.delta:g}, "
            f"{len(entries)} releases before); nothing was written"
        )
    told: dict[str, Any] = {"what": what, "when": datetime.now(UTC).isoformat(timespec="seconds"), "signal": None}
    if math.isfinite(release.signal):  # JSON has no infinity: without noise, the signal is null
        told |= {"signal": release.signal, "epsilon": release.epsilon, "delta": release.delta}
    with write_atomically(path) as file:
        file.write(json.dumps({"releases": [*entries, told]}, indent=1).encode() + b"\n")
    return total


def _read_ledger(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        entries = json.loads(regular(path).read_text(encoding="utf-8"))["releases"]
    except (OSError, ValueError, KeyError, TypeError) as why:
        raise ConfigError(f"{path} is no privacy ledger: {why}; name the file that `--privacy-ledger` wrote") from why
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path} is no privacy ledger: it has no list of releases")
    return entries
