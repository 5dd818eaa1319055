"""Say in plain words what a summary shows, and what it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedfuse.report.read import Run, part
from fedfuse.report.scores import Column, MeanSd, SummaryRow, best_first, headline_of
from fedfuse.report.stats import LEVEL, paired_difference


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
        return f"{_join_words(level)} are level at {_score(first, column)}{_scope_text(first, column)}."
    lead = (
        f"{first.label} is best: {_score(first, column)}{_scope_text(first, column)}, "
        f"{_points(ahead, column)} ahead of {second.label} ({_number(second.values[column.key], column)})."
    )
    return f"{lead} {_difference_text(first, second, column)}"


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
        ", ".join(f"{text} {'made ' if at == 0 else ''}{_some(names)}" for at, (text, names) in enumerate(by.items()))
        for by in made.values()
        if len(by) > 1
    ]
    begin = "These runs were not made by the same code, and their scores may differ for that reason alone"
    return f"{begin}: {'; '.join(words[:5])}." if words else ""


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


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


def _plain(value: float, column: Column) -> str:
    return f"{100 * value:.1f}" if column.kind == "share" else f"{value:.4g}"


def _points(value: float, column: Column) -> str:
    return f"{_plain(value, column)} points" if column.kind == "share" else _plain(value, column)


def _number(value: MeanSd, column: Column) -> str:
    deviation = "" if value.sd is None else f" ± {_plain(value.sd, column)}"
    return f"{_plain(value.mean, column)}{deviation}" + (" %" if column.kind == "share" else "")


def _score(row: SummaryRow, column: Column) -> str:
    """The score with its name, as a sentence has it: 80.0 % accuracy, RMSE 0.31."""
    shown = _number(row.values[column.key], column)
    return f"{shown} {column.title}" if column.kind == "share" else f"{column.title} {shown}"


def _scope_text(row: SummaryRow, column: Column) -> str:
    """The words that say after which round and over how many seeds, where there is a choice."""
    after = f" after round {row.round}" if row.round > 1 else ""
    n = row.values[column.key].n
    return f"{after} over {n} seeds" if n > 1 else after


def _join_words(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"
