"""Score model files."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from fedfuse.core.rows import Rows
from fedfuse.data import load
from fedfuse.data import standardize as standardizer
from fedfuse.errors import ConfigError
from fedfuse.server.judge import Judge
from fedfuse.wire.files import load_model


def evaluate_files(
    models: Sequence[Path],
    source: str,
    test_limit: int | None = None,
    train_limit: int | None = None,
    standardize: bool = False,
    bins: int = 15,
    trusted: Collection[str] = (),
) -> dict[str, dict[str, Any]]:
    """Every score of every model on the source's test rows, by file.

    Raises:
        ConfigError: if a file is no model, or a model does not fit the rows.
    """
    loaded = {str(path): load_model(path, trusted)[0] for path in models}
    dataset = load(source, test_limit=test_limit, train_limit=train_limit)
    test = dataset.test
    if standardize:
        test = Rows(standardizer(dataset.train.x)(test.x), test.y)
    judge = Judge(test, len(dataset.classes), bins)
    scores = {}
    for name, model in loaded.items():
        try:
            scores[name] = judge.score(model)
        except (RuntimeError, IndexError) as why:
            shape = "×".join(map(str, test.x.shape[1:]))
            raise ConfigError(
                f"{name} cannot score {source}, whose rows are {shape} in {len(dataset.classes)} classes: "
                f"{str(why).splitlines()[0]}"
            ) from why
    return scores
