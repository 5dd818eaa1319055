"""Score models and updates on rows of any place, their classes matched by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedfuse.core.inputs import ArrayForm, RowForm, TableForm, TextForm
from fedfuse.core.metadata import About, names_text
from fedfuse.core.model import Model, outputs
from fedfuse.core.rows import Rows
from fedfuse.data import load
from fedfuse.data import standardize as standardizer
from fedfuse.data.rows import SiteRows
from fedfuse.data.site import read_site
from fedfuse.errors import ConfigError, error_text
from fedfuse.federation.moments import TableAgreement, chosen_table
from fedfuse.server.judge import Judge
from fedfuse.tasks import CLASSIFICATION, Classification, Task, task_named
from fedfuse.wire.files import load_answering


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows are read for models: how many, what to leave out, how to scale, and what files may not tell."""

    limit: int | None = None
    image_size: int | None = None
    skip_broken: bool = False
    standardize: bool = False
    train_limit: int | None = None
    task: str | None = None
    table: TableAgreement = field(default_factory=TableAgreement)

    def rows_for(self, source: str, about: About, model: Model, name: str, labelled: bool = True) -> SiteRows:
        """A source's rows as this model reads them: in the form its file tells, its classes in the file's order.

        Raises:
            ConfigError: if the source has classes that the model does not tell apart, or rows of another form.
        """
        classes, task = about.class_names or None, self.task_of(about, name)
        form, choice = chosen_table(self.table, task)
        site = read_site(
            source,
            half="test",
            form=self._form_of(about, form),
            classes=classes,
            limit=self.limit,
            image_size=self.image_size,
            skip_broken=self.skip_broken,
            labelled=labelled,
            keep_order=classes is None,
            task=task,
            table=choice,
        )
        if labelled and not site.labelled:
            raise ConfigError(f"{source} does not tell the classes of its rows, so nothing can be scored; add labels")
        if labelled and classes is None and isinstance(task, Classification):
            _check_outputs(name, model, site)
        if not self.standardize:
            return site
        scale = standardizer(load(source, train_limit=self.train_limit, task=task).train.x)
        return replace(site, rows=Rows(scale(site.rows.x), site.rows.y))

    def task_of(self, about: About, name: str) -> Task:
        """What a file says it was made for, else what the user says, else classification."""
        told = about.task or (CLASSIFICATION.name if about.class_names and not self.task else "")
        if told and self.task not in (None, told):
            raise ConfigError(f"{name} is for {told}, and --task is {self.task}; leave it out")
        return task_named(told or self.task or CLASSIFICATION.name)

    def _form_of(self, about: About, said: TableForm | None) -> RowForm | None:
        """The form a file tells, unless that is a bare shape and the user says which columns fill it."""
        bare = isinstance(about.inputs, ArrayForm) and not about.inputs.is_normalized
        return said if self.table and (about.inputs is None or bare) else about.inputs


def _check_outputs(name: str, model: Model, site: SiteRows) -> None:
    """Without names, as many classes as outputs are all that can be checked; open-set networks have one more."""
    classes = len(site.class_names)
    for member in model.members:
        if (count := outputs(member)) is not None and count not in (classes, classes + 1):
            raise ConfigError(
                f"{name} does not name its classes and has {count} outputs, and {site.source} has {classes} classes "
                f"({names_text(site.class_names)}); use a file made with names, or rows of all its classes"
            )


def evaluate_files(
    models: Sequence[Path], source: str, reading: Reading | None = None, bins: int = 15, trusted: Collection[str] = ()
) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """Every score of every model or update on a source's rows, by file; and what a reader should know.

    A source that has a test half is scored on that; any other on all its rows.

    Raises:
        ConfigError: if a file holds no network, or does not fit the rows.
    """
    reading, read = reading or Reading(), dict[str, SiteRows]()
    scores, remarks = dict[str, dict[str, Any]](), list[str]()
    for path in models:
        model, about = load_answering(path, trusted)
        key = about.model_dump_json(include={"class_names", "inputs", "task"})
        if key not in read or not about.class_names:
            read[key] = reading.rows_for(source, about, model, str(path))
        site = read[key]
        if not about.class_names and isinstance(site.task, Classification):
            remarks.append(
                f"{path} does not name its classes: they are taken in the order {names_text(site.class_names)}"
            )
        scores[str(path)] = _score(model, site, bins, str(path))
    left_out = {name: why for site in read.values() for name, why in site.broken.items()}
    remarks += [f"{len(left_out)} broken pictures were left out: {', '.join(left_out)}"] if left_out else []
    remarks += dict.fromkeys(remark for site in read.values() for remark in site.remarks)
    return scores, tuple(remarks)


def _score(model: Model, site: SiteRows, bins: int, name: str) -> dict[str, Any]:
    try:
        scores = Judge(site.rows, len(site.class_names), bins, task=site.task_in_units).score(model)
    except (RuntimeError, IndexError) as why:
        raise ConfigError(
            f"{name} cannot score {site.source}, whose rows are {site.form} in {len(site.class_names)} classes: "
            f"{error_text(why)}"
        ) from why
    half = {"half": site.half} if site.half else {}
    task = {} if site.task is CLASSIFICATION else {"task": site.task.name}
    confidence = {}
    if isinstance(site.task, Classification):  # the mean probability of the class that was named
        sure = scores["reliability"]
        total = sum(c * n for c, n in zip(sure["confidence"], sure["count"], strict=True))
        confidence = {"confidence": total / sum(sure["count"])}
    return {"rows": len(site), **half, **task, **_names_of(site), **confidence, **scores}


def _names_of(site: SiteRows) -> dict[str, Any]:
    """The names of classes with their rows, or of numbers with their units; of texts how many tokens there are."""
    if site.counts:
        return {"classes": list(site.class_names), "class_rows": list(site.counts.values())}
    if isinstance(site.form, TextForm):
        return {"tokens": len(site.class_names)}
    units = [t.unit for t in site.form.targets] if isinstance(site.form, TableForm) else []
    return {"targets": list(site.class_names), **({"units": units} if any(units) else {})}
