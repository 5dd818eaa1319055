"""One small exchange before training: counts and sums per column, so that no single site's scale decides.

A site writes a `MomentsFile`, `add_moments` adds those of all sites, and `scale_by_moments` writes the common scale
into the federation folder. `TableAgreement` is what a user says of tables where there is no folder yet.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from fedfuse.core.files import regular, write_output
from fedfuse.core.inputs import NumericColumn, TableForm, TargetColumn, parse_columns, split_heading
from fedfuse.core.messages import client_order
from fedfuse.core.settings import Settings, validate_settings
from fedfuse.data.rows import SiteRows
from fedfuse.data.site import read_site
from fedfuse.data.sources import local_path
from fedfuse.data.table_sources import (
    FEW,
    TableChoice,
    check_common,
    check_present,
    kinds_of,
    moments_of_choice,
    rows_with,
)
from fedfuse.data.tables import ColumnMoments, RawTable, TableMoments, looks_like_another_unit, read_table
from fedfuse.errors import ConfigError
from fedfuse.federation.agreement import FederationFolder, scale_federation
from fedfuse.tasks import CLASSIFICATION, Binary, Classification, Regression, Task, task_named
from fedfuse.wire.codec import Altered

LEAST_ROWS = 10
_LARGEST = 1 << 26  # bytes of a file that names columns and categories


class MomentsFile(Settings):
    """What a site's file of moments holds: nothing but counts and sums.

    Attributes:
        format: of this file; from 2 on it carries a checksum.
        sha256: of all other entries, as JSON with sorted keys and no blanks.
        site: whose it is.
        rows: how many rows were counted.
        task: what the targets are.
        targets: the columns to be predicted.
        columns: per column counts, Σx and Σx², or how many rows each category has.
        classes: how many rows each class has, where the classes are not agreed on.
    """

    format: Literal[1, 2] = 2
    sha256: Annotated[str, Field(max_length=64)] = ""
    site: Annotated[str, Field(min_length=1, max_length=1000)]
    rows: PositiveInt
    task: Literal["classification", "binary", "multilabel", "regression"]
    targets: Annotated[tuple[str, ...], Field(min_length=1)]
    columns: dict[str, ColumnMoments] = Field(min_length=1)
    classes: tuple[str, ...] = ()

    @property
    def moments(self) -> TableMoments:
        """The sums, ready to be added."""
        return TableMoments(self.columns)

    @property
    def reveals(self) -> tuple[str, ...]:
        """What the receiver of the file learns."""
        numbers = [name for name, m in self.columns.items() if m.kind == "numeric"]
        words = [name for name, m in self.columns.items() if m.kind == "categorical"]
        said = [f"that there are {self.rows:,} rows, and in how many each column is missing"]
        said += [f"mean and variance of {', '.join(numbers)}"] if numbers else []
        said += [f"how many rows each category has of {', '.join(words)}"] if words else []
        return (*said, *([f"which classes there are: {', '.join(self.classes)}"] if self.classes else []))

    def warnings(self) -> list[str]:
        """Categories of so few rows that their count points at persons."""
        few = [
            f"{name} = {level} ({count} {'row' if count == 1 else 'rows'})"
            for name, column in self.columns.items()
            for level, count in column.levels.items()
            if 0 < count < FEW
        ]
        return [f"a category of few rows points at persons: {'; '.join(few)}"] if few else []

    def save(self, path: Path) -> Path:
        """Write it as readable JSON, one line per column."""
        plain = self.model_dump(mode="json", exclude={"sha256"})
        plain["columns"] = {name: _short(column) for name, column in plain["columns"].items()}
        plain["sha256"] = _checksum(plain)
        columns = ",\n".join(f"  {json.dumps(n)}: {json.dumps(m)}" for n, m in plain.pop("columns").items())
        head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in plain.items())
        return write_output(path, f'{{\n{head} "columns": {{\n{columns}\n }}\n}}\n'.encode())


def _short(column: Mapping[str, Any]) -> dict[str, Any]:
    numbers = ("total", "square", "unit") if column["kind"] == "numeric" else ("levels",)
    return {key: column[key] for key in ("kind", "count", "missing", *numbers) if column[key] != ""}


def _checksum(entries: Mapping[str, Any]) -> str:
    """SHA-256 of what a file says, however its lines are broken."""
    rest = {key: value for key, value in entries.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def moments_by_federation(federation: FederationFolder, source: str, site: str) -> MomentsFile:
    """The moments of the columns that a federation agreed on.

    Raises:
        ConfigError: naming file, column and row of what does not fit, or if there are too few rows.
    """
    agreed = federation.agreement
    if not isinstance(agreed.inputs, TableForm):
        raise ConfigError(f"the federation {agreed.name!r} has no tables ({agreed.inputs}); moments are of columns")
    form, table = agreed.inputs, read_table(local_path(source)).with_units()
    if all(name in table.columns for name in form.target_names):
        table = table.take(rows_with(table, form.target_names))
    _check_rows(table, agreed.least_rows)
    numbers = form.target_names if isinstance(agreed.learns, Regression) else ()
    for target in form.targets if numbers else ():
        table.check_unit(target.name, target.unit)
    kinds = kinds_of(table, form.columns, numbers)
    found = TableMoments.of(table, list(kinds), kinds)
    check_present(table, found, min(FEW, agreed.least_rows))
    columns = {name: m.model_copy(update={"unit": ""}) for name, m in found.columns.items()}
    values = {"site": site, "rows": len(table), "task": agreed.task, "targets": form.target_names, "columns": columns}
    return validate_settings(MomentsFile, values)


def moments_by_words(source: str, site: str, task: str, said: TableAgreement, least_rows: int) -> MomentsFile:
    """The moments of a table where nothing is agreed on: all columns but the targets, or those named.

    Raises:
        ConfigError: as above.
    """
    learns, choice = task_named(task), TableChoice(said.targets, parse_columns(said.columns))
    if not choice.targets:
        raise ConfigError(f"{source}: say which column is to be predicted: --target …, or give --federation")
    table = read_table(local_path(source)).with_units()
    table = table.take(rows_with(table, choice.targets))
    _check_rows(table, least_rows)
    found, classes = moments_of_choice(table, choice, learns, min(FEW, least_rows)), Counter[str]()
    if isinstance(learns, Classification | Binary):
        (target,) = choice.targets
        classes.update(map(str, table.words(target)))
        remedy = "agree on the classes first (`fedfuse init --classes`) and give that folder (--federation)"
        check_common(f"{table.where}: column {target!r}", classes, remedy)
    values = {
        "site": site,
        "rows": len(table),
        "task": learns.name,
        "targets": choice.targets,
        "columns": dict(found.columns),
        "classes": sorted(classes, key=client_order),
    }
    return validate_settings(MomentsFile, values)


def _check_rows(table: RawTable, least: int) -> None:
    if len(table) < least:
        raise ConfigError(
            f"{table.where} has {len(table)} rows with a target, expected at least {least}: sums of so few say more "
            "about single rows than they may"
        )


def read_moments(path: Path) -> MomentsFile:
    """Read a file that a site sent.

    Raises:
        ConfigError: if it is none, tells what cannot be, or is not as it was written.
    """
    try:
        if regular(path).stat().st_size > _LARGEST:
            raise ConfigError(f"{path} has {path.stat().st_size:,} bytes, more than moments can have")
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as why:
        if isinstance(why, ConfigError):
            raise
        raise ConfigError(f"{path} is no file of moments: {why}; make it with `fedfuse moments`") from why
    if not isinstance(given, dict):
        raise ConfigError(f"{path} is no file of moments; make it with `fedfuse moments`")
    if "sha256" in given and given["sha256"] != _checksum(given):
        raise Altered(path, "its checksum is not the one it was written with")
    if given.get("format") == 2 and "sha256" not in given:
        raise Altered(path, "it has no checksum, and files of its format have one")
    found = validate_settings(MomentsFile, {str(key): value for key, value in given.items()}, str(path))
    for name, column in found.columns.items():
        if column.count + column.missing != found.rows:
            raise ConfigError(
                f"{path}: column {name!r} counts {column.count + column.missing} rows, expected {found.rows}; make it "
                "anew with `fedfuse moments`"
            )
    return found


@dataclass(frozen=True, slots=True)
class AddedMoments:
    """The moments of several sites as one.

    Attributes:
        total: their sum, which does not depend on the order of files.
        sites: whose they are.
        rows: how many rows there are in all.
        task: what the targets are.
        targets: what is to be predicted.
        classes: all classes that any site has.
        warnings: columns of a site that lie far from the others'.
    """

    total: TableMoments
    sites: tuple[str, ...]
    rows: int
    task: Task
    targets: tuple[str, ...]
    classes: tuple[str, ...]
    warnings: tuple[str, ...]

    def form(self) -> TableForm:
        """The form that follows where no columns were agreed on."""
        return self.total.form_for([TargetColumn(name=name) for name in self.targets])


def add_moments(paths: Sequence[Path]) -> AddedMoments:
    """Read and add sites' moments.

    Raises:
        ConfigError: if a site stands there twice, or sites speak of different tasks, targets or columns.
    """
    if not paths:
        raise ConfigError("no files of moments were given; let every site make one with `fedfuse moments`")
    found = sorted(((read_moments(path), path) for path in paths), key=lambda pair: client_order(pair[0].site))
    (first, where), *others = found
    for one, path in others:
        if (one.task, one.targets) != (first.task, first.targets):
            raise ConfigError(
                f"{path} is for {one.task} of {', '.join(one.targets)}, and {where} for {first.task} of "
                f"{', '.join(first.targets)}; make them for the same task"
            )
    sites = [one.site for one, _ in found]
    if twice := sorted({site for site in sites if sites.count(site) > 1}):
        raise ConfigError(f"the site {twice[0]!r} stands there twice, and its rows would count twice; name each once")
    total = sum((one.moments for one, _ in others), first.moments)
    classes = sorted({name for one, _ in found for name in one.classes}, key=client_order)
    warnings = tuple(_far_sites([one for one, _ in found]))
    rows = sum(one.rows for one, _ in found)
    return AddedMoments(total, tuple(sites), rows, task_named(first.task), first.targets, tuple(classes), warnings)


def _far_sites(files: Sequence[MomentsFile]) -> list[str]:
    """Columns whose mean at one site lies far from all others', as that of another unit does."""
    said = []
    for mine in files if len(files) > 1 else ():
        rest = [other.moments for other in files if other is not mine]
        others = sum(rest[1:], rest[0]).columns
        for name, own in mine.columns.items():
            theirs = others[name]
            if own.kind != "numeric" or not own.count or not theirs.count:
                continue
            if looks_like_another_unit(own.mean, own.std, theirs.mean, theirs.std):
                said.append(
                    f"column {name!r} has mean {own.mean:g} at {mine.site} and {theirs.mean:g} elsewhere; ask whether "
                    "it is in another unit"
                )
    return said


def scale_by_moments(federation: FederationFolder, paths: Sequence[Path]) -> tuple[FederationFolder, AddedMoments]:
    """Write the common scale that sites' moments give into their federation folder.

    Raises:
        ConfigError: if they are of another task or of other columns, or it does not wait for a scale.
    """
    agreed, added = federation.agreement, add_moments(paths)
    if not isinstance(agreed.inputs, TableForm):
        raise ConfigError(f"the federation {agreed.name!r} has no tables ({agreed.inputs}); moments are of columns")
    if (added.task.name, added.targets) != (agreed.task, agreed.inputs.target_names):
        raise ConfigError(
            f"the moments are for {added.task.name} of {', '.join(added.targets)}, expected {agreed.task} of "
            f"{', '.join(agreed.inputs.target_names)}; make them by this federation folder"
        )
    return scale_federation(federation, added.total.rescale(agreed.inputs)), added


@dataclass(frozen=True, slots=True)
class TableAgreement:
    """What a user says of tables: targets, columns, whose sums give the scale, or that there is to be none."""

    targets: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    moments: tuple[Path, ...] = ()
    unscaled: bool = False

    def __bool__(self) -> bool:
        return bool(self.targets or self.columns or self.moments)


def agree_on_table(
    table: TableAgreement, data: str | None, task: str | None, classes: Sequence[str], normalize: bool
) -> dict[str, Any]:
    """Task, classes and columns of tables: by sums of all sites, by a first site, or as they were said."""
    if table.moments:
        added = add_moments(table.moments)
        if task not in (None, added.task.name) or (table.targets and table.targets != added.targets):
            raise ConfigError(
                f"the moments are for {added.task.name} of {', '.join(added.targets)}; leave out --task and --target, "
                "or let the sites make them anew"
            )
        columns = parse_columns(table.columns)
        targets = tuple(TargetColumn(name=name) for name in added.targets)
        form = added.total.rescale(TableForm(columns=columns, targets=targets)) if columns else added.form()
        learns, names = added.task, list(classes) or list(added.classes)
    else:
        learns = task_named(task or CLASSIFICATION.name)
        form, names = _first_columns(table, data, learns, classes)
        form = form.model_copy(update={"scale": "site" if normalize else "none" if table.unscaled else "awaited"})
        form = form if normalize else _without_scale(form)
    named = names if isinstance(learns, Classification | Binary) else []
    return {"task": learns.name, "classes": named, "inputs": form.model_dump()}


def _first_columns(
    table: TableAgreement, data: str | None, task: Task, classes: Sequence[str]
) -> tuple[TableForm, list[str]]:
    """Columns as they were said, or as a first site's table has them, with its classes where they were not said."""
    columns = parse_columns(table.columns)
    if data is not None:
        choice = TableChoice(table.targets, columns)
        site = read_site(data, classes=classes or None, task=task, table=choice)
        if not isinstance(site.form, TableForm):
            raise ConfigError(f"{data} is no table; give a .csv or .parquet file, or leave out --target and --columns")
        check_told_by_cells(site, classes)
        return site.form, list(classes) or list(site.class_names)
    if not columns:
        raise ConfigError("nobody says which columns there are; give --columns, --moments or --data with a first table")
    targets = tuple(split_heading(name) for name in table.targets)
    named = tuple(TargetColumn(name=name, unit=unit) for name, unit in targets)
    return validate_settings(TableForm, {"columns": columns, "targets": named}), list(classes)


def _without_scale(form: TableForm) -> TableForm:
    """The same columns, nothing of a first site's numbers left in them."""
    plain = {"mean": 0.0, "std": 1.0}
    columns = tuple(
        c.model_copy(update={"indicator": False, **(plain if isinstance(c, NumericColumn) else {"mode": ""})})
        for c in form.columns
    )
    return form.model_copy(
        update={"columns": columns, "targets": tuple(t.model_copy(update=plain) for t in form.targets)}
    )


def chosen_table(table: TableAgreement, task: Task) -> tuple[TableForm | None, TableChoice]:
    """Without a federation: the form that moments give, if there are any, and the columns that were named."""
    choice = TableChoice(table.targets, parse_columns(table.columns))
    if not table.moments:
        return None, choice
    found = agree_on_table(table, None, task.name, ("of", "moments"), normalize=False)
    return validate_settings(TableForm, found["inputs"]), choice


def check_told_by_cells(site: SiteRows, classes: Sequence[str]) -> None:
    """Refuse a table's rows, before anything of them is written, if their own scale or names of classes tell of a few.

    Args:
        site: the rows.
        classes: the names of all classes, where they come from elsewhere.
    """
    if not isinstance(site.form, TableForm):
        return
    if site.form.scale == "site" and len(site) < FEW:
        raise ConfigError(
            f"{site.source} has {len(site)} rows, expected at least {FEW}, for they are scaled by their own mean and "
            "deviation, which of so few tell the numbers themselves; agree on a scale (`fedfuse init`, or --moments)"
        )
    if not classes and isinstance(site.task, Classification | Binary):
        where = f"{site.source}: column {site.form.target_names[0]!r}"
        check_common(where, site.counts, "name all classes (--classes), so that they are not those of these rows")
