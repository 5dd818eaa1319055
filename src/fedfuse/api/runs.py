"""Methods by name, and whole experiments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import all_methods, find_method

if TYPE_CHECKING:
    from fedfuse.experiment.execute import Results


def list_methods() -> tuple[str, ...]:
    """The names of all methods.

    Example:
        >>> "fedavg" in list_methods()
        True
    """
    return tuple(all_methods())


def recipe(name: str, **options: object) -> Recipe:
    """A method's recipe with these options.

    Example:
        >>> recipe("fedprox", mu=0.1).label
        'fedprox(mu=0.1)'
    """
    return find_method(name).recipe(**options)


def run(
    file: str | Path,
    *,
    sets: Sequence[str] = (),
    out: str | Path | None = None,
    resume: bool = False,
    workers: int | None = None,
    memo: bool = True,
) -> Results:
    """Run an experiment file: every method, every seed, every round, recorded as it happens.

    Args:
        file: the experiment, a TOML file.
        sets: changes to it, as `key.key=value`.
        out: the run directory; by default a new one in `runs`.
        resume: go on with what is in the run directory.
        workers: worker processes; 0 trains in this one, by default there is one per core.
        memo: reuse updates trained before under the same conditions.

    Returns:
        The results: `rows`, one for each method, seed and round, and `table()`, a summary in Markdown.

    Raises:
        ConfigError: before any training, if the experiment or the directory cannot be used.
        QuorumLost: if too few clients could be admitted in a round.

    Example:
        >>> import tempfile
        >>> home = Path(tempfile.mkdtemp())
        >>> _ = (home / "tiny.toml").write_text('methods = [{ name = "fedavg" }, { name = "fednova" }]')
        >>> less = ["data.train_limit=60", "data.clients=2"]
        >>> results = run(home / "tiny.toml", sets=less, out=home / "run", workers=0, memo=False)
        >>> [(row["label"], row["round"]) for row in results.rows]
        [('fedavg', 1), ('fednova', 1)]
        >>> "| fedavg |" in results.table()
        True
    """
    from fedfuse.experiment.jobs import run_file  # late: it brings the data sources and the report with it

    place = None if out is None else Path(out)
    return run_file(Path(file), sets=sets, out=place, resume=resume, workers=workers, memo=memo)


def load(run: str | Path) -> Results:
    """The results of a run that was made before, read from its directory.

    Args:
        run: the run directory, or that of a sweep.

    Raises:
        ConfigError: if there are no results.
    """
    from fedfuse.experiment.jobs import load_results  # late, as above

    return load_results(Path(run))
