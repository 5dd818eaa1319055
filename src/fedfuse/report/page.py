"""One self-contained page for one run directory or several.

First the page, from `write_page` to its template; then its sentences (`verdict`, `cautions`); then what methods noted.
"""

from __future__ import annotations

import base64
import hashlib
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape

from fedfuse.core.files import write_output
from fedfuse.report import costs, plots
from fedfuse.report.costs import privacy_figures
from fedfuse.report.plots import Figure, Groups, Inks, answer_cost, layer_lines
from fedfuse.report.read import Row, Run, find_runs, finite, items, number, part, read_run, sweep_panels
from fedfuse.report.scores import (
    EXPLAINED,
    HEADLINES,
    Column,
    MeanSd,
    SummaryRow,
    best_first,
    by_label,
    headline_of,
    last_rows,
    mean_sd,
    summary,
)
from fedfuse.report.stats import LEVEL, paired_difference
from fedfuse.report.svg import drawing, heat_map, legible, line, marker, short
from fedfuse.report.tables import Cell, Grid, grid

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
    runs = [read_run(path) for path in paths]
    names = [run.name for run in runs]
    runs = [
        run if names.count(run.name) == 1 else replace(run, name=f"{run.name} ({path.resolve().name})")
        for path, run in zip(paths, runs, strict=True)
    ]
    return write_output(Path(out), render(runs).encode("utf-8", "backslashreplace"))


def render(runs: Sequence[Run]) -> str:
    """The page as text."""
    labels = list(dict.fromkeys(row["label"] for run in runs for row in run.rows))
    inks = {label: at for at, label in enumerate(labels)}
    chapters = [_chapter(run, inks, f"run-{at}") for at, run in enumerate(runs, start=1)]
    leaders = {chapter.anchor: chapter.best for chapter in chapters if chapter.best is not None}
    swatches = {
        label: drawing(22, 12, "", line([(1, 6), (21, 6)], index), marker(index, 11, 6, 3.6))
        for label, index in inks.items()
    }
    script = _file("page.js")
    return _template().render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared",
        chapters=chapters,
        overview=_overview(chapters, labels) if len(runs) > 1 else None,
        overall=overall(leaders) if len(chapters) > 1 and leaders else chapters[0].verdict,
        other_code=code_caution(runs),
        sweep=_sweep_figures(runs, inks) if len(runs) > 1 else (),
        swatches=swatches,
        style=Markup(_file("page.css")),
        script=Markup(script),
        # the page's own policy lets no other script run: labels and clients' names come from elsewhere
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


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


def _chapter(run: Run, inks: Inks, anchor: str) -> Chapter:
    table = best_first(summary(run.rows))
    groups = by_label(run.rows)
    # models that give the probability of something, and not of the class they name, record an AUROC
    risks = any(number(row, "auroc") is not None for row in run.rows)
    ranked: Groups = {row.label: groups[row.label] for row in table}
    classes = [str(name) for name in items(run.partition, "classes")]
    best = table[0].label if headline_of(row.values for row in table).key in table[0].values else None
    seeds = part(run.partition, "seeds")
    spent = {key for row in table for key, value in row.values.items() if value.mean}
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
        calibration=_figures([plots.calibration_curve(ranked, inks)] if risks else []),
        reliability=_figures(
            plots.reliability(label, rows, inks[label]) for label, rows in ranked.items() if not risks
        ),
        fairness=_figures(
            [
                plots.fairness(ranked, inks, "own_", "The model on each client's own held-out rows"),
                plots.fairness(ranked, inks, "", "Each client's own network on the test rows, before fusion"),
            ]
        ),
        costs=_figures([costs.traffic(ranked, inks), costs.effort(ranked, inks), answer_cost(ranked, inks)]),
        cost_table=grid(table, [key for key in COSTS if not key.endswith("_flops") or key in spent]),
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


def _headline(run: Run, table: Sequence[SummaryRow]) -> str:
    """Methods, seeds, rounds, clients and size in one line."""
    seeds = {row["seed"] for row in run.rows}
    rounds = max(row.round for row in table)
    clients = max((len(part(entry, "clients")) for entry in _objects(part(run.partition, "seeds"))), default=0)
    sizes = _sizes(table)
    words = [_count_text(len(table), "method"), _count_text(len(seeds), "seed"), _count_text(rounds, "round")]
    words += [_count_text(clients, "client")] if clients else []
    words += [f"{sizes.pop():,.0f} parameters"] if len(sizes) == 1 else []
    return " · ".join(words)


def _sizes(table: Sequence[SummaryRow]) -> set[float]:
    return {row.values["parameters"].mean for row in table if "parameters" in row.values}


def _count_text(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _objects(values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [value for value in values.values() if isinstance(value, Mapping)]


def _summary_grid(table: Sequence[SummaryRow]) -> Grid:
    """The summary's grid without a last column that says the same of every method."""
    layout = grid(table)
    if len(_sizes(table)) > 1:
        return layout
    return grid(table, [h.column.key for h in layout.headings if h.column.key != "parameters"])


def _first_columns(layout: Grid) -> set[str]:
    """The columns of a summary that are shown before a reader chooses."""
    recorded = [heading.column.key for heading in layout.headings]
    return set([key for key in FIRST if key in recorded][:MOST])


def _scores(groups: Groups, inks: Inks, risks: bool) -> tuple[Figure, ...]:
    """Curves where there are rounds, and every seed's dot where there is one."""
    wanted = (
        (*CURVES, ("brier", "Brier score")) if risks else CURVES
    )  # the probabilities of risk models are what is used
    curves = _figures(plots.learning_curve(groups, inks, key, title) for key, title in wanted)
    return curves or _figures([plots.seed_dots(groups, inks)])


def _figures(figures: Iterable[Figure | None]) -> tuple[Figure, ...]:
    return tuple(figure for figure in figures if figure is not None)


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


def _sweep_figures(runs: Sequence[Run], inks: Inks) -> tuple[Figure, ...]:
    """Scores against a key with numbers that the runs differ in, one figure per value of the others."""
    panels = sweep_panels(runs)
    if not panels or panels[0].swept.title == "epsilon":
        return privacy_figures(runs, inks)
    return _figures(f for key, title in CURVES for f in plots.sweep_curves(panels, inks, key, title))


def _overview(chapters: Sequence[Chapter], labels: Sequence[str]) -> list[tuple[Chapter, list[Cell | None]]]:
    """Per run, the first score of each label or None where the run has no such method."""
    found = []
    for chapter in chapters:
        at = next((i for i, h in enumerate(chapter.table.headings) if h.column.key in HEADLINES), None)
        cells = {} if at is None else {row.label: cells[at] for row, cells in chapter.table.lines}
        found.append((chapter, [cells.get(label) for label in labels]))
    return found


def _file(name: str) -> str:
    return resources.files("fedfuse.report").joinpath(name).read_text(encoding="utf-8")


def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, finalize=_spell_out, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {"SHOWN": SHOWN, "EXPLAINED": EXPLAINED, "first_columns": _first_columns}
    # at most five pictures side by side, in rows of nearly equal length
    environment.globals["columns_for"] = lambda count: math.ceil(count / math.ceil(count / 5))
    # numbers stay with their deviation and their unit
    environment.filters["unbroken"] = lambda words: words.replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0")
    environment.filters["breakable"] = _breakable
    return environment.from_string(_file("page.html"))


def _breakable(label: str) -> Markup:
    """A label that may be broken before its options and between them."""
    return escape(legible(label)).replace("(", Markup("<wbr>(")).replace(", ", Markup(", <wbr>"))


def _spell_out(value: object) -> object:
    return legible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def verdict(table: Sequence[SummaryRow]) -> str:
    """Which method is best at the last round, by how much, and whether the seeds tell it from the second.

    Example:
        >>> from fedfuse.report.scores import summary
        >>> scores = {"fedavg": 0.7, "wb": 0.8}
        >>> rows = [{"method": m, "seed": 0, "round": 1, "accuracy": a} for m, a in scores.items()]
        >>> verdict(summary(rows))
        'wb is best: 80.0 % accuracy, 10.0 points ahead of fedavg (70.0 %). One seed says nothing of chance.'
    """
    column = headline_of(row.values for row in table)
    scored = [row for row in best_first(table) if column.key in row.values]
    if not scored:
        return "No accuracy was recorded."
    if len(scored) == 1:
        return f"{scored[0].label} reaches {_score(scored[0], column)}{_scope_text(scored[0], column)}."
    first, second = scored[0], scored[1]
    one, two = (row.values[column.key].mean for row in (first, second))
    ahead, visible = abs(one - two), 0.0005 if column.kind == "share" else 0.0005 * max(abs(one), abs(two))
    if ahead < visible:  # not visible in the table, so not claimed
        level = [row.label for row in scored if abs(one - row.values[column.key].mean) < visible]
        return (
            f"{', '.join(level[:-1])} and {level[-1]} are level at {_score(first, column)}{_scope_text(first, column)}."
        )
    lead = (
        f"{first.label} is best: {_score(first, column)}{_scope_text(first, column)}, "
        f"{_points(ahead, column)} ahead of {second.label} ({_number(second.values[column.key], column)})."
    )
    return f"{lead} {_difference_text(first, second, column)}"


def _difference_text(first: SummaryRow, second: SummaryRow, column: Column) -> str:
    """What the seeds they share say of their difference."""
    better = (first, second) if column.better == "high" else (second, first)
    found = paired_difference(*(row.by_seed.get(column.key, {}) for row in better))
    if found is None:
        return "They share no seed, so the difference is not tested."
    if found.low is None or found.high is None or found.p is None:
        return "One seed says nothing of chance."
    words = "More than chance" if found.p < LEVEL else "This may be chance"
    ends = f"{_plain(found.low, column)} to {_points(found.high, column)}"
    return (
        f"{words}: over {found.n} shared seeds the difference is {ends} (95 % interval, {p_text(found.p)} by a paired "
        f"t-test); it is ahead on {found.ahead} of them."
    )


def p_text(p: float) -> str:
    """A p-value as it is printed.

    Example:
        >>> p_text(0.0432), p_text(1e-9)
        ('p = 0.043', 'p < 0.001')
    """
    return f"p = {p:.2g}" if p >= 0.001 else "p < 0.001"


def _score(row: SummaryRow, column: Column) -> str:
    """The score with its name, as a sentence has it: 80.0 % accuracy, RMSE 0.31."""
    shown = _number(row.values[column.key], column)
    return f"{shown} {column.title}" if column.kind == "share" else f"{column.title} {shown}"


def _number(value: MeanSd, column: Column) -> str:
    deviation = "" if value.sd is None else f" ± {_plain(value.sd, column)}"
    return f"{_plain(value.mean, column)}{deviation}" + (" %" if column.kind == "share" else "")


def _points(value: float, column: Column) -> str:
    return f"{_plain(value, column)} points" if column.kind == "share" else _plain(value, column)


def _plain(value: float, column: Column) -> str:
    return f"{100 * value:.1f}" if column.kind == "share" else f"{value:.4g}"


def _scope_text(row: SummaryRow, column: Column) -> str:
    """The words that say after which round and over how many seeds, where there is a choice."""
    after = f" after round {row.round}" if row.round > 1 else ""
    n = row.values[column.key].n
    return f"{after} over {n} seeds" if n > 1 else after


def cautions(table: Sequence[SummaryRow]) -> list[str]:
    """What a reader must know before comparing: seeds behind, unequal rounds, missing scores.

    Example:
        >>> cautions([SummaryRow("fedavg", "fedavg", 5, (0,), {1: 3}, {"accuracy": MeanSd(0.7, None, 1)})])
        ['fedavg: seed 1 has only reached round 3 of 5 and is not counted.']
    """
    found = [
        f"{row.label}: seed {seed} has only reached round {at} of {row.round} and is not counted."
        for row in table
        for seed, at in row.behind.items()
    ]
    rounds = sorted({row.round - row.ending for row in table})
    if len(rounds) > 1:
        found.append(f"The methods stand at different rounds ({rounds[0]} to {rounds[-1]}): compare with care.")
    if len({row.seeds for row in table if not row.behind}) > 1:
        found.append("The methods were not run on the same seeds: compare with care.")
    column = headline_of(row.values for row in table)
    for row in table:
        scored = row.values[column.key].n if column.key in row.values else 0
        if scored < len(row.seeds):
            found.append(f"{row.label} has an {column.title} on {scored} of {len(row.seeds)} seeds only.")
    return found


def code_caution(runs: Sequence[Run]) -> str:
    """What a reader must know of runs that were not made by the same code; nothing where they were, or none says.

    Example:
        >>> old, new = ({"fedfuse": {"version": "1.0", "code": c}, "network": {"net.py": "e"}} for c in "ab")
        >>> code_caution([Run("one", "", {}, {}, (), old), Run("two", "", {}, {}, (), new)])
        'These runs were not made by the same code, ...: fedfuse 1.0 (code a) made one, fedfuse 1.0 (code b) two.'
    """

    def some(names: Sequence[str]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    made: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        ours, network, methods = (part(run.made_of, key) for key in ("fedfuse", "network", "methods"))
        files = {**network, **{file: code for label in methods for file, code in part(methods, label).items()}}
        texts = {file: f"{file} (code {str(code)[:8]})" for file, code in files.items()}
        if "code" in ours:
            texts["fedfuse"] = f"fedfuse {ours.get('version')} (code {str(ours['code'])[:8]})"
        for name, text in texts.items():
            made.setdefault(name, {}).setdefault(text, []).append(run.name)
    words = [
        ", ".join(f"{text} {'made ' if at == 0 else ''}{some(names)}" for at, (text, names) in enumerate(by.items()))
        for by in made.values()
        if len(by) > 1
    ]
    begin = "These runs were not made by the same code, and their scores may differ for that reason alone"
    return f"{begin}: {'; '.join(words[:5])}." if words else ""


def overall(leaders: Mapping[str, str]) -> str:
    """Who leads in how many runs, for a page of several.

    Example:
        >>> overall({"alpha 0.1": "wb", "alpha 1": "wb", "alpha 10": "fedavg"})
        'wb is best in 2 of 3 runs, fedavg in 1.'
    """
    wins: dict[str, int] = {}
    for label in leaders.values():
        wins[label] = wins.get(label, 0) + 1
    (top, count), *rest = sorted(wins.items(), key=lambda win: -win[1])
    return f"{top} is best in {count} of {len(leaders)} runs" + "".join(f", {who} in {n}" for who, n in rest) + "."


LIMIT = 40
"""Lines per method; the ledger has them all."""

BY_ROUND = {"gaussianity": "Distance from Gaussian of each layer"}
"""Tables by layer and client that are shown round by round, with their titles."""


@dataclass(frozen=True, slots=True)
class MethodFacts:
    """What one method noted in its last round.

    Attributes:
        label: the method.
        lines: name and value, over all seeds.
        more: how many lines were left out.
        maps: tables of numbers, those of the first seed.
    """

    label: str
    lines: tuple[tuple[str, str], ...]
    more: int
    maps: tuple[Figure, ...]


def method_facts(groups: Groups) -> list[MethodFacts]:
    """What each method noted in its last round, without those that noted nothing.

    Example:
        >>> method_facts({"wb": [{"seed": 0, "round": 1, "facts": {"steps": 3}}]})[0].lines
        (('steps', '3'),)
    """
    found = [_facts_of(label, rows) for label, rows in groups.items()]
    return [note for note in found if note.lines or note.maps]


def _facts_of(label: str, rows: Sequence[Row]) -> MethodFacts:
    last = last_rows(rows)
    flats = [flatten(part(row, "facts")) for row in last]
    names = list(dict.fromkeys(name for flat in flats for name in flat))
    lines = [(fact_name(name), _over_seeds([flat[name] for flat in flats if name in flat])) for name in names]
    maps = tuple(
        # over the rounds where that is wanted and there are some, else as it was in the last one
        (layer_lines(rows, name, BY_ROUND[name]) if name in BY_ROUND else None) or _map(name, table, last[0])
        for name, table in tables(part(last[0], "facts")).items()
    )
    return MethodFacts(label, tuple(lines[:LIMIT]), max(0, len(lines) - LIMIT), maps)


def remarks(groups: Groups) -> list[str]:
    """What parts of a method wanted a reader to know before comparing (the fact `remark`), once per method.

    Example:
        >>> remarks({"feddu": [{"seed": 0, "round": r, "facts": {"remark": "it is FedAvg"}} for r in (1, 2)]})
        ['feddu: it is FedAvg.']
    """
    said = {label: {part(row, "facts").get("remark") for row in rows} for label, rows in groups.items()}
    texts = {
        label: sorted(words for words in found if isinstance(words, str) and words) for label, found in said.items()
    }
    return [f"{label}: {words.rstrip('.')}." for label, found in texts.items() for words in found]


def flatten(facts: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested facts as one level with dotted names; tables of numbers are left to the heat maps.

    Example:
        >>> flatten({"rounds": 3, "damping": {"fc1": 0.1}})
        {'rounds': 3, 'damping.fc1': 0.1}
    """
    flat: dict[str, object] = {}
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if not isinstance(value, Mapping) or (value and _only_numbers(value) and len(value) > 8):
            flat[name] = value
        elif not _is_table(value):
            flat |= flatten(value, f"{name}.")
    return flat


def tables(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Mapping[str, Mapping[str, Any]]]:
    """The parts of nested facts that are tables: names → names → numbers.

    Example:
        >>> tables({"solver": "cg", "weights": {"fc1": {"site-1": 0.5}}})
        {'weights': {'fc1': {'site-1': 0.5}}}
    """
    found: dict[str, Mapping[str, Mapping[str, Any]]] = {}
    for key, value in facts.items():
        if isinstance(value, Mapping):
            name = f"{prefix}{key}"
            found |= {name: value} if _is_table(value) else tables(value, f"{name}.")
    return found


def _is_table(value: Mapping[str, Any]) -> bool:
    return bool(value) and all(isinstance(row, Mapping) and row and _only_numbers(row) for row in value.values())


def _only_numbers(value: Mapping[str, Any]) -> bool:
    return all(entry is None or finite(entry) is not None for entry in value.values())


def fact_name(key: str) -> str:
    """A fact's key as words.

    Example:
        >>> fact_name("damping.conv1_weight")
        'damping · conv1 weight'
    """
    return key.replace("_", " ").replace(".", " · ")


def fact_text(value: object) -> str:
    """A fact as text: long lists of numbers by their range.

    Example:
        >>> fact_text(0.123456), fact_text(True), fact_text([1, 2]), fact_text(list(range(100)))
        ('0.1235', 'yes', '1, 2', '100 numbers: least 0, median 49.5, most 99')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return fact_text(list(value.values()))
    if isinstance(value, list):
        numbers = [given for entry in value if (given := finite(entry)) is not None]
        if len(value) > 8 and len(numbers) == len(value):
            least, middle, most = map(fact_text, (min(numbers), statistics.median(numbers), max(numbers)))
            return f"{len(numbers)} numbers: least {least}, median {middle}, most {most}"
        shown = ", ".join(fact_text(entry) for entry in value[:8])
        return shown + (f", … ({len(value)} in all)" if len(value) > 8 else "")
    given = finite(value)
    if given is not None:
        return f"{given:,.0f}" if given.is_integer() and abs(given) < 1e15 else f"{given:.4g}"
    return "–" if value is None else short(str(value), 200)


def _over_seeds(values: Sequence[object]) -> str:
    """Numbers as mean ± sd, anything else as its different values."""
    numbers = [finite(value) for value in values]
    whole = mean_sd(numbers)
    if whole is None or None in numbers:
        return "; ".join(dict.fromkeys(map(fact_text, values)))
    return fact_text(whole.mean) + (f" ± {whole.sd:.2g}" if whole.sd else "")


def _map(name: str, table: Mapping[str, Mapping[str, Any]], row: Row) -> Figure:
    columns = list(dict.fromkeys(str(key) for row in table.values() for key in row))
    values = np.full((len(table), len(columns)), np.nan)
    for i, cells in enumerate(table.values()):
        for key, value in cells.items():
            given = finite(value)
            values[i, columns.index(str(key))] = np.nan if given is None else given
    picture = heat_map(name, [str(key) for key in table], columns, np.abs(values), "number")
    signed = " Shaded by size, without the sign." if np.nanmin(values, initial=0.0) < 0 else ""
    return Figure(name.replace("_", " "), picture, f"Seed {row['seed']}, round {row['round']}.{signed}")
