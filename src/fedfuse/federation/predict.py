"""A model's answers for every row of a source: class, probabilities, uncertainty, and which members answered."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedfuse.core.escape import spreadsheet_cell
from fedfuse.core.files import write_output
from fedfuse.core.inputs import TableForm
from fedfuse.core.metadata import About
from fedfuse.core.model import Model, outputs
from fedfuse.data.rows import SiteRows
from fedfuse.errors import ConfigError, error_text
from fedfuse.federation.evaluate import Reading
from fedfuse.nets.mixture import Mixture
from fedfuse.server.judge import predict
from fedfuse.tasks import CLASSIFICATION, Binary, Classification, LanguageModel, Multilabel, Regression, Task
from fedfuse.tasks.language import NO_TARGET
from fedfuse.wire.files import load_answering


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """Answers for the rows of one source.

    Attributes:
        names: what each row is called.
        classes: the name of each class, label or number.
        values: rows × classes: probabilities, or the expected numbers in their own units.
        entropy: per row, in nats: 0 where the model is sure; None for numbers.
        information: per row, what its label would tell about the weights, for a model that draws networks.
        answered: per row, the members of a mixture whose answers count; none for one network.
        broken: pictures that were left out.
        task: what the values are.
        units: of numbers, where they are told.
        remarks: what a reader should know.
    """

    names: tuple[str, ...]
    classes: tuple[str, ...]
    values: Tensor
    entropy: Tensor | None
    information: Tensor | None = None
    answered: tuple[str, ...] = ()
    broken: Collection[str] = ()
    task: Task = CLASSIFICATION
    units: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def places(self) -> list[list[int]]:
        """Per row, the places of what it was taken for: one class, of equals the first; or every label that is on."""
        if isinstance(self.task, Regression):
            return [[] for _ in self.names]
        if isinstance(self.task, Multilabel):
            return [[place for place, p in enumerate(row) if p > 0.5] for row in self.values.tolist()]
        return [[row.index(max(row))] for row in self.values.tolist()]

    @property
    def counts(self) -> dict[str, int]:
        """How many rows were taken for each class."""
        taken = Counter(place for places in self.places for place in places)
        named = () if isinstance(self.task, Regression) else enumerate(self.classes)
        return {name: taken[place] for place, name in named}

    def table(self) -> Iterator[list[str]]:
        """The rows of a CSV file, its head first."""
        numbers = isinstance(self.task, Regression)
        heads = self._headings() if numbers else ["predicted", *(f"p({name})" for name in self.classes)]
        further = {"entropy": self.entropy, "information": self.information}
        told = {name: values for name, values in further.items() if values is not None}
        yield ["row", *heads, *told, *(["answered"] if self.answered else [])]
        for i, (name, places, values) in enumerate(zip(self.names, self.places, self.values.tolist(), strict=True)):
            words = [] if numbers else ["; ".join(spreadsheet_cell(self.classes[place]) for place in places)]
            each = [f"{value:.8g}" if numbers else f"{value:.6f}" for value in values]
            more = [f"{float(v[i]):.6f}" for v in told.values()]
            yield [spreadsheet_cell(name), *words, *each, *more, *self.answered[i : i + 1]]

    def _headings(self) -> list[str]:
        """Of numbers: the targets' names with their units, as a table that is read back has them."""
        units = self.units or ("",) * len(self.classes)
        told = zip(map(spreadsheet_cell, self.classes), units, strict=True)
        return [f"{name} [{unit}]" if unit else name for name, unit in told]

    def save(self, path: Path) -> Path:
        """Write the table as CSV."""
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(self.table())
        return write_output(path, text.getvalue().encode())


def predict_file(path: Path, source: str, reading: Reading | None = None, trusted: Collection[str] = ()) -> Predictions:
    """A file's answers for all rows of a source, which need no labels.

    Raises:
        ConfigError: if the file holds no network that answers, or rows do not fit it.
    """
    model, about = load_answering(path, trusted)
    reading = reading or Reading()
    task = reading.task_of(about, str(path))
    site = reading.rows_for(source, about, model, str(path), labelled=False)
    classes = about.class_names or _names_of(model, site, task, path)
    try:
        found = predict(model, site.rows.x, len(classes), task=task)
    except (RuntimeError, IndexError) as why:
        raise ConfigError(f"{path} cannot answer for {source}, whose rows are {site.form}: {error_text(why)}") from why
    if isinstance(task, LanguageModel):  # of the answers at every character, only those at the ends of texts are asked
        asked = site.rows.y != NO_TARGET
        about_weights = None if found.information is None else found.information[asked]
        found = replace(found, outputs=found.outputs[asked], information=about_weights)
    if not about.class_names and isinstance(task, Classification):
        classes = classes[: found.outputs.shape[-1]]  # an open-set network's last output is no class
    if found.outputs.shape[-1] != task.outputs(len(classes)):
        raise ConfigError(
            f"{path} names {len(classes)} classes and has {found.outputs.shape[-1]} outputs; fuse it anew"
        )
    return Predictions(
        site.names,
        classes,
        answers_of(found.outputs, site.task_in_units),
        found.entropy,
        found.information,
        _who_answered(model, about, site),
        broken=tuple(site.broken),
        task=task,
        units=tuple(t.unit for t in site.form.targets) if isinstance(site.form, TableForm) else (),
        remarks=site.remarks,
    )


def _names_of(model: Model, site: SiteRows, task: Task, path: Path) -> tuple[str, ...]:
    """Names for the outputs of a file that gives none: a table's targets, or numbers from 0 on."""
    if isinstance(site.form, TableForm) and not isinstance(task, Classification | Binary):
        return site.form.target_names
    return tuple(map(str, range(2 if isinstance(task, Binary) else _count_outputs(model, path))))


def _count_outputs(model: Model, path: Path) -> int:
    count = outputs(model.members[0])
    if count is None:
        raise ConfigError(f"{path} names no classes, and its network does not tell how many outputs it has")
    return count


def answers_of(outputs: Tensor, task: Task) -> Tensor:
    """Probabilities of each class or label, or numbers in their own units, of a task that knows them."""
    if isinstance(task, Regression):
        return task.in_units(outputs, outputs.shape[0])  # of `len` an exporter makes a constant
    if isinstance(task, Binary):
        yes = task.predict(outputs).reshape(-1)
        return torch.stack([1 - yes, yes], 1)
    return task.predict(outputs)


def _who_answered(model: Model, about: About, site: SiteRows) -> tuple[str, ...]:
    """For each row the members of a mixture whose answers count, by the names of their sites."""
    if not isinstance(model, Mixture):
        return ()
    named = [one.client for one in about.sites]
    names = named if len(named) == len(model.members) else [f"member {k}" for k in range(len(model.members))]
    with torch.no_grad():
        chosen = model.who_answers(site.rows.x).T.tolist()
    return tuple(
        "; ".join(spreadsheet_cell(n) for n, counts in zip(names, row, strict=True) if counts) for row in chosen
    )
