"""Methods by name, and whole experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import all_methods, load_method
from fedfuse.models import model_names

if TYPE_CHECKING:
    from torch import nn

    from fedfuse.experiment.callbacks import Watcher
    from fedfuse.experiment.results import Results


def list_methods() -> tuple[str, ...]:
    """The names of all methods.

    Example:
        >>> "fedavg" in list_methods()
        True
    """
    return tuple(all_methods())


def list_models() -> tuple[str, ...]:
    """The names of all networks; `fedfuse models NAME` tells the options of one.

    Example:
        >>> "lenet" in list_models()
        True
    """
    return model_names()


def recipe(name: str, **options: object) -> Recipe:
    """A method's recipe with these options; a method of yours is named module:function or file.py:function.

    Example:
        >>> recipe("fedprox", mu=0.1).label
        'fedprox(mu=0.1)'
    """
    return load_method(name).recipe(**options)


def run(
    experiment: str | Path | Mapping[str, Any],
    *,
    model: nn.Module | None = None,
    data: Any = None,
    sets: Sequence[str] = (),
    out: str | Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    memo: bool = True,
    progress: bool = True,
    callbacks: Sequence[Watcher] = (),
) -> Results:
    """Run an experiment: every method, every seed, every round, recorded as it happens.

    Args:
        experiment: a TOML file, or what it would say as a dictionary.
        model: a network, in the place of the one the experiment names; every seed begins with its weights.
        data: rows, in the place of the experiment's source: a `fedfuse.data.Dataset`, or x_train, y_train, x_test and
            y_test as tensors or arrays.
        sets: changes to the experiment, as `key.key=value`.
        out: the run directory; by default a new one in `runs`.
        resume: go on with what is in the run directory, by default the last of its name.
        workers: worker processes; 0 trains in this one, by default there is one per core.
        memo: reuse updates trained before under the same conditions.
        progress: show how far it is: bars in a terminal, a line in a notebook, now and then a line elsewhere.
        callbacks: called as the run makes progress; `fedfuse.loggers` has some, and `Callback` to make your own.

    Returns:
        The results: `rows`, one for each method, seed and round, `table()`, a summary in Markdown, `frame()`, the rows
        for pandas.

    Raises:
        ConfigError: before any training, if the experiment or the directory cannot be used.
        QuorumLost: if too few clients could be admitted in a round.

    Example:
        >>> import tempfile
        >>> home = Path(tempfile.mkdtemp())
        >>> tiny = {"methods": [{"name": "fedavg"}, {"name": "fednova"}], "data": {"train_limit": 60, "clients": 2}}
        >>> results = run(tiny, out=home / "run", workers=0, memo=False, progress=False)
        >>> [(row["label"], row["round"]) for row in results.rows]
        [('fedavg', 1), ('fednova', 1)]
    """
    from fedfuse.experiment.jobs import run_jobs  # late: it brings the data sources and the report with it

    return run_jobs(
        experiment if isinstance(experiment, Mapping) else Path(experiment),
        model=model,
        data=data,
        sets=sets,
        out=None if out is None else Path(out),
        resume=resume,
        workers=workers,
        memo=memo,
        progress=progress,
        callbacks=callbacks,
    )


def load(run: str | Path) -> Results:
    """The results of a run that was made before, read from its directory.

    Args:
        run: the run directory, or that of a sweep.

    Raises:
        ConfigError: if there are no results.
    """
    from fedfuse.experiment.jobs import load_results  # late, as above

    return load_results(Path(run))
