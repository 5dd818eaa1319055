"""One self-contained page for one run directory or several."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from fedfuse.core.files import write_output
from fedfuse.report import calibration, costs, plots
from fedfuse.report.answering import answer_cost
from fedfuse.report.facts import MethodFacts, fact_name, fact_text, flatten, method_facts, remarks
from fedfuse.report.marks import EXPLAINED
from fedfuse.report.plots import Figure, Groups, Inks
from fedfuse.report.privacy import privacy_figures
from fedfuse.report.read import Row, Run, find_runs, items, number, part, read_run
from fedfuse.report.scores import HEADLINES, SummaryRow, best_first, by_label, headline_of, summary
from fedfuse.report.svg import drawing, legible, line, marker
from fedfuse.report.sweeps import sweep_panels
from fedfuse.report.tables import Cell, Grid, grid
from fedfuse.report.verdict import cautions, code_caution, overall, verdict

if TYPE_CHECKING:
    from jinja2 import Template

CURVES = (
    ("accuracy", "Accuracy"),
    ("perplexity", "Perplexity"),
    ("rmse", "Root mean squared error"),
    ("mae", "Mean absolute error"),
    ("r2", "R²"),
    ("auroc", "Area under the ROC curve"),
    ("nll", "Negative log-likelihood"),
    ("ece", "Calibration error"),
)
PROBABILITIES = (*CURVES, ("brier", "Brier score"))
"""Of risk models, whose probabilities are what is used of them."""

FIRST = (
    *("perplexity", "accuracy", "rmse", "mae", "r2", "auroc"),
    "nll",
    "ece",
    "ood_auroc",
    "mutual_information",
    "own_accuracy_worst10",
    "own_rmse_worst10",
    "own_perplexity_worst10",
    "selected_accuracy",
    "bytes_up",
    "flops",
    "train_seconds",
    "server_seconds",
    "own_accuracy_mean",
    "own_rmse_mean",
    "client_accuracy_mean",
    "client_rmse_mean",
    "bytes_down",
)
"""The summary's columns by how much they tell."""

MOST = 8
"""Columns of the summary that are shown at once; a reader may choose others."""

COSTS = (
    "bytes_up",
    "bytes_down",
    "flops",
    "evidence_flops",
    "curvature_flops",
    "server_flops",
    "first_flops",
    "train_seconds",
    "server_seconds",
    "diagnostic_seconds",
    "trained",
    "remembered",
)

SHOWN = 200
"""Refused and dropped clients listed per run; the ledger has them all."""


@dataclass(frozen=True, slots=True)
class Chapter:
    """Everything the page says of one run, ready for the template."""

    anchor: str
    name: str
    headline: str
    verdict: str
    cautions: tuple[str, ...]
    table: Grid
    scores: tuple[Figure, ...]
    partitions: tuple[tuple[str, Markup], ...]
    partition_words: str
    calibration: tuple[Figure, ...]
    reliability: tuple[Figure, ...]
    fairness: tuple[Figure, ...]
    costs: tuple[Figure, ...]
    cost_table: Grid
    target: float | None
    reached: tuple[tuple[str, ...], tuple[tuple[str, tuple[str, ...]], ...]] | None
    sizes: tuple[Figure, ...]
    reveals: tuple[tuple[str, tuple[str, ...] | None], ...]
    refused: tuple[Mapping[str, Any], ...]
    clipped: tuple[Mapping[str, Any], ...]
    dropped: tuple[Mapping[str, Any], ...]
    noted: tuple[MethodFacts, ...]
    best: str | None
    classes: tuple[Figure, ...]
    config: str
    environment: tuple[tuple[str, str], ...]


def write_page(dirs: Sequence[Path], out: Path) -> Path:
    """Write one HTML page about the run directories and return its path.

    The page needs no network and no other file, and lets no script run but its own.

    Args:
        dirs: run directories, or those of sweeps; one given twice is shown once.
        out: where the page goes; folders on the way are made.

    Example:
        >>> import tempfile
        >>> run = Path(tempfile.mkdtemp())
        >>> _ = (run / "ledger.jsonl").write_text('{"method": "wb", "seed": 0, "round": 1, "accuracy": 0.8}')
        >>> write_page([run], run / "report.html").name
        'report.html'
    """
    paths = find_runs(dirs)
    runs = _distinguish_names(paths, [read_run(path) for path in paths])
    return _write(Path(out), render(runs))


def render(runs: Sequence[Run]) -> str:
    """The page as text."""
    labels = list(dict.fromkeys(row["label"] for run in runs for row in run.rows))
    inks = {label: at for at, label in enumerate(labels)}
    chapters = [_chapter(run, inks, f"run-{at}") for at, run in enumerate(runs, start=1)]
    style, script = _file("page.css"), _file("page.js")
    return _template().render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared",
        chapters=chapters,
        overview=_overview(chapters, labels) if len(runs) > 1 else None,
        overall=_overall(chapters),
        other_code=code_caution(runs),
        sweep=_sweep_figures(runs, inks),
        first_columns=_first_columns,
        swatches={label: _swatch(at) for label, at in inks.items()},
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _chapter(run: Run, inks: Inks, anchor: str) -> Chapter:
    table = best_first(summary(run.rows))
    groups, risks = by_label(run.rows), _gives_risks(run.rows)
    ranked: Groups = {row.label: groups[row.label] for row in table}
    classes = [str(name) for name in items(run.partition, "classes")]
    best = table[0].label if headline_of(row.values for row in table).key in table[0].values else None
    seeds = part(run.partition, "seeds")
    target = costs.target_in(run.config_text, ranked) if table[0].round > 1 else None
    maps = ((str(seed), plots.partition(classes, part(seeds, seed))) for seed in seeds)
    return Chapter(
        anchor=anchor,
        name=run.name,
        headline=_headline(run, table),
        verdict=verdict(table),
        cautions=(*cautions(table), *remarks(ranked)),
        table=_summary_grid(table),
        scores=(*_scores(ranked, inks, risks), *privacy_figures([run], inks)),
        partitions=tuple((seed, picture) for seed, picture in maps if picture),
        partition_words=_partition_words(seeds),
        calibration=_figures([calibration.calibration_curve(ranked, inks)] if risks else []),
        reliability=()
        if risks
        else _figures(calibration.reliability(label, rows, inks[label]) for label, rows in ranked.items()),
        fairness=_fairness(ranked, inks),
        costs=_figures([costs.traffic(ranked, inks), costs.effort(ranked, inks), answer_cost(ranked, inks)]),
        cost_table=grid(table, _cost_columns(table)),
        target=target,
        reached=None if target is None else costs.target_table(costs.target_costs(ranked, target)),
        sizes=_figures([costs.model_size(ranked, inks), costs.kept_channels(ranked)]),
        reveals=tuple((label, _declared_reveals(rows)) for label, rows in ranked.items()),
        refused=_incidents(run.rows, "refused"),
        clipped=_incidents(run.rows, "clipped"),
        dropped=_incidents(run.rows, "dropped"),
        noted=tuple(method_facts(ranked)),
        best=best,
        classes=_figures([plots.per_class(ranked, classes), plots.confusion(groups[best], classes) if best else None]),
        config=run.config_text,
        environment=tuple((fact_name(name), fact_text(value)) for name, value in flatten(run.environment).items()),
    )


def _first_columns(layout: Grid) -> set[str]:
    """The columns of a summary that are shown before a reader chooses."""
    recorded = [heading.column.key for heading in layout.headings]
    return set([key for key in FIRST if key in recorded][:MOST])


def _cost_columns(table: Sequence[SummaryRow]) -> list[str]:
    """The costs, without the parts of the work that are nothing for everybody."""
    spent = {key for row in table for key, value in row.values.items() if value.mean}
    return [key for key in COSTS if not key.endswith("_flops") or key in spent]


def _sweep_figures(runs: Sequence[Run], inks: Inks) -> tuple[Figure, ...]:
    """Scores against a key with numbers that the runs differ in, one figure per value of the others."""
    panels = sweep_panels(runs) if len(runs) > 1 else ()
    if not panels or panels[0].swept.title == "epsilon":
        return privacy_figures(runs, inks) if len(runs) > 1 else ()
    each = [plots.sweep_curves(panels, inks, key, title) for key, title in CURVES]
    return _figures(figure for figures in each for figure in figures)


def _figures(figures: Iterable[Figure | None]) -> tuple[Figure, ...]:
    return tuple(figure for figure in figures if figure is not None)


def _scores(groups: Groups, inks: Inks, risks: bool) -> tuple[Figure, ...]:
    """Curves where there are rounds, and every seed's dot where there is one."""
    wanted = PROBABILITIES if risks else CURVES
    curves = _figures(plots.learning_curve(groups, inks, key, title) for key, title in wanted)
    return curves or _figures([plots.seed_dots(groups, inks)])


def _gives_risks(rows: Sequence[Row]) -> bool:
    """Whether models give the probability of something, and not of the class they name: such runs record an AUROC."""
    return any(number(row, "auroc") is not None for row in rows)


def _fairness(groups: Groups, inks: Inks) -> tuple[Figure, ...]:
    return _figures(
        plots.fairness(groups, inks, key, title)
        for key, title in (
            ("own_", "The model on each client's own held-out rows"),
            ("", "Each client's own network on the test rows, before fusion"),
        )
    )


def _summary_grid(table: Sequence[SummaryRow]) -> Grid:
    """The summary's grid without a last column that says the same of every method."""
    layout = grid(table)
    sizes = {row.values["parameters"].mean for row in table if "parameters" in row.values}
    return (
        layout
        if len(sizes) > 1
        else grid(table, [h.column.key for h in layout.headings if h.column.key != "parameters"])
    )


def _headline(run: Run, table: Sequence[SummaryRow]) -> str:
    """Methods, seeds, rounds, clients and size in one line."""
    seeds = {row["seed"] for row in run.rows}
    rounds = max(row.round for row in table)
    clients = max((len(part(entry, "clients")) for entry in _objects(part(run.partition, "seeds"))), default=0)
    sizes = {row.values["parameters"].mean for row in table if "parameters" in row.values}
    words = [_count_text(len(table), "method"), _count_text(len(seeds), "seed"), _count_text(rounds, "round")]
    words += [_count_text(clients, "client")] if clients else []
    words += [f"{sizes.pop():,.0f} parameters"] if len(sizes) == 1 else []
    return " · ".join(words)


def _count_text(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _objects(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [value for value in values.values() if isinstance(value, Mapping)]


def _partition_words(seeds: Mapping[str, Any]) -> str:
    """How the rows were dealt, as far as the partition itself says."""
    first = next(iter(_objects(seeds)), {})
    parts = (first.get("kind"), f"alpha {fact_text(first['alpha'])}" if "alpha" in first else None)
    return ", ".join(str(word) for word in parts if word)


def _declared_reveals(rows: Sequence[Row]) -> tuple[str, ...] | None:
    """All a method's rows declare to leave the clients; None where the ledger does not say."""
    declared = [row["reveals"] for row in rows if isinstance(row.get("reveals"), list)]
    return tuple(dict.fromkeys(str(word) for words in declared for word in words)) if declared else None


def _incidents(rows: Sequence[Row], key: str) -> tuple[Mapping[str, Any], ...]:
    return tuple(
        {**incident, "label": row["label"], "seed": row["seed"], "round": row["round"]}
        for row in rows
        for incident in items(row, key)
        if isinstance(incident, Mapping)
    )


def _overview(chapters: Sequence[Chapter], labels: Sequence[str]) -> list[tuple[Chapter, list[Cell | None]]]:
    """Per run, the first score of each label or None where the run has no such method."""
    found = []
    for chapter in chapters:
        at = next((i for i, h in enumerate(chapter.table.headings) if h.column.key in HEADLINES), None)
        cells = {} if at is None else {row.label: cells[at] for row, cells in chapter.table.lines}
        found.append((chapter, [cells.get(label) for label in labels]))
    return found


def _overall(chapters: Sequence[Chapter]) -> str:
    leaders = {chapter.anchor: chapter.best for chapter in chapters if chapter.best is not None}
    if len(chapters) == 1 or not leaders:
        return chapters[0].verdict
    return overall(leaders)


def _swatch(index: int) -> Markup:
    return drawing(22, 12, "", line([(1, 6), (21, 6)], index), marker(index, 11, 6, 3.6))


def _distinguish_names(paths: Sequence[Path], runs: Sequence[Run]) -> list[Run]:
    """Add the directory's name to runs that have the same name."""
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else replace(run, name=f"{run.name} ({path.resolve().name})")
        for path, run in zip(paths, runs, strict=True)
    ]


def _file(name: str) -> str:
    return resources.files("fedfuse.report").joinpath(name).read_text(encoding="utf-8")


def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, finalize=_spell_out, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {"SHOWN": SHOWN, "EXPLAINED": EXPLAINED}
    environment.globals["columns_for"] = _columns_for
    environment.filters |= {"breakable": _breakable, "unbroken": _keep_units_together}
    return environment.from_string(_file("page.html"))


def _columns_for(count: int) -> int:
    """At most five pictures side by side, in rows of nearly equal length."""
    return math.ceil(count / math.ceil(count / 5))


def _breakable(label: str) -> Markup:
    """A label that may be broken before its options and between them."""
    return escape(legible(label)).replace("(", Markup("<wbr>(")).replace(", ", Markup(", <wbr>"))


def _keep_units_together(words: str) -> str:
    """A sentence whose numbers stay with their deviation and their unit."""
    return words.replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0")


def _spell_out(value: object) -> object:
    return legible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _write(out: Path, text: str) -> Path:
    return write_output(out, text.encode("utf-8", "backslashreplace"))
