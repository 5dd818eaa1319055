"""The form of public sets that are not at hand."""

from __future__ import annotations

import torch

from fedfuse.data.official import OFFICIAL, Official
from fedfuse.data.rows import Dataset, Rows
from fedfuse.data.text_source import reads_texts
from fedfuse.tasks import CLASSIFICATION, LanguageModel, Task


def outline(
    source: str, *, train_limit: int | None = None, test_limit: int | None = None, task: Task = CLASSIFICATION
) -> Dataset:
    """A public set's form without its contents: as many rows, of the same shape, blank, with the labels in turn.

    It shows whether an experiment is sound where the set itself is not at hand, and trains nothing.

    Example:
        >>> form = outline("cifar100", train_limit=500)
        >>> form.train.x.shape, len(form.test), len(form.classes)
        (torch.Size([500, 3, 32, 32]), 10000, 100)
    """
    known = OFFICIAL[source]
    train, test = (
        _blank_rows(known, rows, task)
        for rows in (min(known.rows[0], train_limit or known.rows[0]), min(known.rows[1], test_limit or known.rows[1]))
    )
    names = tuple(map(str, range(known.labels)))
    facts = {"source": source, "outline": True}
    owners = tuple(f"owner-{row % known.owners}" for row in range(len(train))) if known.owners else ()
    tokens = names if reads_texts(task) else ()
    return Dataset(source, train, test, names, facts, task, owners=owners, vocabulary=tokens)


def _blank_rows(known: Official, rows: int, task: Task) -> Rows:
    x = torch.zeros((1,) * (1 + len(known.shape))).expand(rows, *known.shape)
    y = torch.arange(rows) % known.labels
    return Rows(x.long(), y[:, None].expand(rows, *known.shape)) if isinstance(task, LanguageModel) else Rows(x, y)
