"""What a user says of tables, on the way to what all sites agree on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfuse.core.columns import NumericColumn, TableForm, TargetColumn, parse_columns, split_heading
from fedfuse.core.settings import validate_settings
from fedfuse.data.site import SiteRows, read_site
from fedfuse.data.table_site import FEW, TableChoice, check_common
from fedfuse.errors import ConfigError
from fedfuse.federation.moments import MomentsFile, add_moments, moments_of_table
from fedfuse.tasks import CLASSIFICATION, Binary, Classification, Task, task_named


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


def check_told_by_cells(site: SiteRows, classes: Sequence[str]) -> None:
    """Refuse a table's rows, before anything of them is written, if their own scale or names of classes tell of a few.

    Args:
        site: the rows.
        classes: the names of all classes, where somebody else tells them.
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


def chosen_table(table: TableAgreement, task: Task) -> tuple[TableForm | None, TableChoice]:
    """Without a federation: the form that moments give, if there are any; and what was said beside."""
    choice = TableChoice(table.targets, parse_columns(table.columns))
    if not table.moments:
        return None, choice
    found = agree_on_table(table, None, task.name, ("of", "moments"), normalize=False)
    return validate_settings(TableForm, found["inputs"]), choice


def moments_by_words(source: str, site: str, task: str, said: TableAgreement, least_rows: int) -> MomentsFile:
    """The moments of a table of which a user says the targets and columns."""
    choice = TableChoice(said.targets, parse_columns(said.columns))
    return moments_of_table(source, site, task_named(task), choice, least_rows)
