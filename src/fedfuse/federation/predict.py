"""A model's answers for every row of a source: class, probabilities, uncertainty, and of a mixture who answered."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedfuse.core.about import About
from fedfuse.core.files import write_atomically
from fedfuse.core.model import Model, outputs
from fedfuse.data.site import SiteRows
from fedfuse.errors import ConfigError, error_text
from fedfuse.federation.evaluate import Reading
from fedfuse.nets.mixture import Mixture
from fedfuse.server.uncertainty import predict
from fedfuse.tasks import CLASSIFICATION
from fedfuse.wire.files import load_answering


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """Answers for the rows of one source.

    Attributes:
        names: what each row is called.
        classes: the name of each class.
        probabilities: rows × classes.
        entropy: per row, in nats: 0 where the model is sure.
        information: per row, what its label would tell about the weights, for a model that draws networks.
        answered: per row, the members of a mixture whose answers count; none for one network.
        broken: pictures that were left out.
    """

    names: tuple[str, ...]
    classes: tuple[str, ...]
    probabilities: Tensor
    entropy: Tensor
    information: Tensor | None = None
    answered: tuple[str, ...] = ()
    broken: Collection[str] = ()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def best(self) -> list[int]:
        """Per row, the place of the likeliest class; of equals the first."""
        return [row.index(max(row)) for row in self.probabilities.tolist()]

    @property
    def counts(self) -> dict[str, int]:
        """How many rows were taken for each class."""
        best = self.best
        return {name: best.count(place) for place, name in enumerate(self.classes)}

    def table(self) -> Iterator[list[str]]:
        """The rows of a CSV file, its head first."""
        extra = ["information"] if self.information is not None else []
        extra += ["answered"] if self.answered else []
        yield ["row", "predicted", *(f"p({name})" for name in self.classes), "entropy", *extra]
        for i, (name, best) in enumerate(zip(self.names, self.best, strict=True)):
            probabilities = self.probabilities[i].tolist()
            more = [f"{float(self.information[i]):.6f}"] if self.information is not None else []
            more += self.answered[i : i + 1]
            yield [
                name,
                self.classes[best],
                *(f"{p:.6f}" for p in probabilities),
                f"{float(self.entropy[i]):.6f}",
                *more,
            ]

    def save(self, path: Path) -> Path:
        """Write the table as CSV."""
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(self.table())
        with write_atomically(path) as file:
            file.write(text.getvalue().encode())
        return path


def predict_file(path: Path, source: str, reading: Reading | None = None, trusted: Collection[str] = ()) -> Predictions:
    """A file's answers for all rows of a source, which need no labels.

    Raises:
        ConfigError: if the file holds no network that answers, or rows do not fit it.
    """
    model, about = load_answering(path, trusted)
    if about.task not in ("", CLASSIFICATION.name):
        raise ConfigError(
            f"{path} is a model for {about.task}, and predictions are of classes; use its outputs in Python"
        )
    site = (reading or Reading()).rows_for(source, about, model, str(path), labelled=False)
    classes = about.class_names or tuple(map(str, range(_count_outputs(model, path))))
    try:
        found = predict(model, site.rows.x, len(classes))
    except (RuntimeError, IndexError) as why:
        raise ConfigError(f"{path} cannot answer for {source}, whose rows are {site.form}: {error_text(why)}") from why
    probabilities = found.outputs.softmax(-1)
    if about.class_names and probabilities.shape[-1] != len(classes):
        raise ConfigError(
            f"{path} names {len(classes)} classes and has {probabilities.shape[-1]} outputs; fuse it anew"
        )
    return Predictions(
        site.names,
        classes[: probabilities.shape[-1]],
        probabilities,
        torch.special.entr(probabilities).sum(-1),
        found.information,
        _who_answered(model, about, site),
        broken=tuple(site.broken),
    )


def _count_outputs(model: Model, path: Path) -> int:
    count = outputs(model.members[0])
    if count is None:
        raise ConfigError(f"{path} names no classes, and its network does not tell how many outputs it has")
    return count


def _who_answered(model: Model, about: About, site: SiteRows) -> tuple[str, ...]:
    """For each row the members of a mixture whose answers count, by the names of their sites."""
    if not isinstance(model, Mixture):
        return ()
    named = [one.client for one in about.sites]
    names = named if len(named) == len(model.members) else [f"member {k}" for k in range(len(model.members))]
    with torch.no_grad():
        chosen = model.who_answers(site.rows.x).T.tolist()
    return tuple("; ".join(name for name, counts in zip(names, row, strict=True) if counts) for row in chosen)
