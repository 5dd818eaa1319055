"""What a run came to: per method the mean and the standard deviation over seeds, and which of them are best."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from fedfuse.report.read import Row, number, part
from fedfuse.report.stats import LEVEL, holm, paired_difference

Kind = Literal["share", "number", "bytes", "flops", "seconds", "count"]


@dataclass(frozen=True, slots=True)
class Column:
    """One thing a summary says of a method.

    Attributes:
        key: its name in the ledger.
        title: its name for readers.
        kind: what sort of quantity it is, hence how it is printed.
        better: which end is the better one, or "" where none is (a method that remembers
            what another trained is not faster).
        says: what it means, in one sentence.
    """

    key: str
    title: str
    kind: Kind
    better: Literal["high", "low", ""]
    says: str

    @property
    def total(self) -> bool:
        """Costs add up over rounds; scores are those of the last round."""
        return self.kind in ("bytes", "flops", "seconds") or self.key in ("trained", "remembered")


COLUMNS = (
    Column("accuracy", "accuracy", "share", "high", "Share of the test rows that are classified rightly."),
    Column("perplexity", "perplexity", "number", "low", "exp(NLL) of a token: between how many it hesitates."),
    Column("rmse", "RMSE", "number", "low", "Root mean squared error of the predicted numbers, in their unit."),
    Column("mae", "MAE", "number", "low", "Mean absolute error of the predicted numbers, in their unit."),
    Column("r2", "R²", "number", "high", "Share of the targets' variance that the model explains."),
    Column("exact", "all labels right", "share", "high", "Share of the test rows that are right in every label."),
    Column("auroc", "AUROC", "number", "high", "How well the model ranks rows where it is so above those where not."),
    Column("nll", "NLL", "number", "low", "Mean negative log-likelihood of the right class."),
    Column("ece", "ECE", "share", "low", "Expected calibration error: mean gap of confidence and accuracy."),
    Column("brier", "Brier", "number", "low", "Squared distance of the predicted probabilities from the truth."),
    Column("mutual_information", "information", "number", "", "What a label would tell about the weights, in nats."),
    Column("ood_auroc", "OOD AUROC", "share", "high", "How well entropy tells inputs from elsewhere from test rows."),
    Column("own_accuracy_mean", "own rows", "share", "high", "Mean accuracy on each client's own held-out rows."),
    Column("own_perplexity_mean", "own texts", "number", "low", "Mean perplexity on each client's own held-out rows."),
    Column(
        "own_perplexity_worst10", "worst own texts", "number", "low", "The same over the worst tenth of the clients."
    ),
    Column(
        "client_perplexity_mean",
        "client nets",
        "number",
        "low",
        "Mean perplexity of the clients' own networks, before fusion, on the test rows.",
    ),
    Column("own_accuracy_worst10", "worst own rows", "share", "high", "The same over the worst tenth of the clients."),
    Column("own_rmse_mean", "own rows", "number", "low", "Mean RMSE on each client's own held-out rows."),
    Column("own_rmse_worst10", "worst own rows", "number", "low", "The same over the worst tenth of the clients."),
    Column(
        "client_rmse_mean", "client nets", "number", "low", "Mean RMSE of the clients' own networks on the test rows."
    ),
    Column("client_rmse_worst10", "worst nets", "number", "low", "The same over the worst tenth of the clients."),
    Column(
        "client_accuracy_mean",
        "client nets",
        "share",
        "high",
        "Mean accuracy of the clients' own networks, before fusion, on the test rows.",
    ),
    Column("client_accuracy_weighted", "client nets by rows", "share", "high", "The same, weighted by rows."),
    Column("client_accuracy_worst10", "worst nets", "share", "high", "The same over the worst tenth of the clients."),
    Column(
        "selected_accuracy",
        "chosen round",
        "share",
        "high",
        "Accuracy at the round whose model was best on the server's own rows; the test rows had no say.",
    ),
    Column("bytes_up", "sent up", "bytes", "low", "Bytes from clients to server, over all rounds."),
    Column("bytes_down", "sent down", "bytes", "low", "Bytes from server to clients, over all rounds."),
    Column("flops", "clients' work", "flops", "low", "FLOPs of local training and evidence, over all rounds."),
    Column("evidence_flops", "of it evidence", "flops", "", "FLOPs of what clients send beside their weights."),
    Column("curvature_flops", "of that curvature", "flops", "", "FLOPs of the evidence about the curvature of losses."),
    Column("server_flops", "server's work", "flops", "low", "FLOPs of the server's own training and looking."),
    Column("first_flops", "first stage", "flops", "low", "FLOPs of the server before the first round."),
    Column("train_seconds", "clients", "seconds", "", "Seconds until all clients had answered, over all rounds."),
    Column("server_seconds", "server", "seconds", "", "Seconds of fusing and of the server's steps, over all rounds."),
    Column("diagnostic_seconds", "diagnostics", "seconds", "", "Seconds at the server of what is only noted."),
    Column("trained", "trained", "count", "", "Client trainings done for this method, over all rounds."),
    Column("remembered", "remembered", "count", "", "Client trainings taken from memory, over all rounds."),
    Column("parameters", "size", "count", "", "Parameters of the fused model after the last round."),
)

HEADLINES = ("perplexity", "rmse", "accuracy")
"""What a task is judged by first: texts and numbers by their errors, everything else by its accuracy."""


def headline_of(recorded: Iterable[Mapping[str, object]]) -> Column:
    """The score that rows or summaries are judged by first; accuracy where none is recorded.

    Example:
        >>> headline_of([{"rmse": 0.2}]).title, headline_of([{}]).title
        ('RMSE', 'accuracy')
    """
    given = list(recorded)
    key = next((key for key in HEADLINES if any(one.get(key) is not None for one in given)), "accuracy")
    return next(column for column in COLUMNS if column.key == key)


@dataclass(frozen=True, slots=True)
class MeanSd:
    """A mean over seeds; `sd` divides by n - 1 and is None for a single seed."""

    mean: float
    sd: float | None
    n: int


def mean_sd(values: Iterable[float | None]) -> MeanSd | None:
    """Mean and sample standard deviation of the values that are there.

    Example:
        >>> mean_sd([1.0, None, 3.0])
        MeanSd(mean=2.0, sd=1.4142135623730951, n=2)
    """
    given = [value for value in values if value is not None]
    if not given:
        return None
    return MeanSd(statistics.fmean(given), statistics.stdev(given) if len(given) > 1 else None, len(given))


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """What one method came to, at the last round that one of its seeds reached.

    Attributes:
        label: the method and the options that tell it apart.
        method: the method's name.
        round: the last round.
        seeds: those that reached it, and are counted.
        behind: the last round of each seed that has not reached it, and is not counted.
        values: per column the mean and standard deviation over seeds, without columns the run did not record.
        by_seed: per column the value of each seed that has one.
        ending: how many of the last rounds were exchanges without training, after others with it.
    """

    label: str
    method: str
    round: int
    seeds: tuple[int, ...]
    behind: Mapping[int, int]
    values: Mapping[str, MeanSd]
    by_seed: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    ending: int = 0


def summary(rows: Sequence[Row]) -> list[SummaryRow]:
    """One row per label: scores at the last round, costs over all rounds, as mean and standard deviation over seeds.

    Seeds that have not reached the label's last round are left out and named in `behind`:
    a mean over unequal rounds would mislead.

    Example:
        >>> rows = [{"method": "wb", "seed": s, "round": 1, "accuracy": 0.7 + 0.2 * s} for s in (0, 1)]
        >>> round(summary(rows)[0].values["accuracy"].mean, 3)
        0.8
    """
    return [_summarize_label(label, group) for label, group in by_label(rows).items()]


def by_label(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each label, by round and seed; labels in order of first appearance.

    Example:
        >>> list(by_label([{"method": "wb", "seed": 0, "round": 1}]))
        ['wb']
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.get("label") or row["method"], []).append(row)
    return {label: sorted(group, key=lambda row: (row["round"], row["seed"])) for label, group in groups.items()}


def last_rows(group: Sequence[Row]) -> list[Row]:
    """The rows of one label's last round, one per seed that reached it.

    Example:
        >>> last_rows([{"seed": 0, "round": 1}, {"seed": 0, "round": 2}])
        [{'seed': 0, 'round': 2}]
    """
    last = max(row["round"] for row in group)
    return [row for row in group if row["round"] == last]


def _summarize_label(label: str, group: list[Row]) -> SummaryRow:
    last = last_rows(group)
    seeds = tuple(row["seed"] for row in last)
    reached = {row["seed"]: row["round"] for row in group}  # rounds rise, so the last one stays
    by_seed = {column.key: found for column in COLUMNS if (found := _per_seed(column, group, seeds))}
    return SummaryRow(
        label=label,
        method=last[0].get("method") or label,
        round=last[0]["round"],
        seeds=seeds,
        behind={seed: at for seed, at in sorted(reached.items()) if seed not in seeds},
        values={key: value for key, found in by_seed.items() if (value := mean_sd(found.values())) is not None},
        by_seed=by_seed,
        ending=_count_endings([row for row in group if row["seed"] == seeds[0]]),
    )


def _per_seed(column: Column, group: list[Row], seeds: tuple[int, ...]) -> dict[int, float]:
    """Costs over all rounds, scores of the last; of each seed that has them."""
    found: dict[int, float | None] = {}
    for seed in seeds:
        rows = [row for row in group if row["seed"] == seed]
        if column.total:
            given = [value for row in rows if (value := number(row, column.key)) is not None]
            found[seed] = sum(given) if given else None
        elif column.key == "selected_accuracy":
            chosen = [row for row in rows if row.get("selected") is True]
            found[seed] = number(chosen[-1], "accuracy") if chosen else None
        else:
            found[seed] = number(rows[-1], column.key)
    return {seed: value for seed, value in found.items() if value is not None}


def _count_endings(rows: Sequence[Row]) -> int:
    """The last rows of a seed in which no client took a step, if there are others."""
    each = [part(row, "clients") for row in rows]
    steps = [sum(number(part(clients, client), "steps") or 0.0 for client in clients) for clients in each]
    trained = [at for at, taken in enumerate(steps) if taken]
    return len(rows) - 1 - trained[-1] if trained else 0


def best_first(table: Sequence[SummaryRow]) -> list[SummaryRow]:
    """The rows by the score their task is judged by, the best first; those without one last."""
    column = headline_of(row.values for row in table)
    sign = -1.0 if column.better == "high" else 1.0
    return sorted(table, key=lambda row: sign * row.values[column.key].mean if column.key in row.values else math.inf)


Mark: TypeAlias = Literal["best", "tie", ""]

EXPLAINED = "not told apart from it (paired t-test over shared seeds, Holm, 5 %)"
"""What a tie is, in words for a table's foot."""

SAME_COST = 0.01
"""Costs nearer than this part of the least one are the same: headers and names differ by bytes."""


def marks_of(column: Column, table: Sequence[SummaryRow], *, decimals: int, factor: float) -> list[Mark]:
    """The mark of each row in a column.

    Of scores, the best mean and all that print alike are "best", and a row is a "tie" if a paired t-test over the seeds
    it shares with the best does not tell it apart, by Holm's correction for all rows. Of costs, all within 1 % of the
    least are best, unless that is nothing. Where every row would be marked, no row is.

    Args:
        column: the column.
        table: the rows.
        decimals: with how many decimals its numbers are printed.
        factor: by what they are divided before.
    """
    means = {at: row.values[column.key].mean for at, row in enumerate(table) if column.key in row.values}
    if not column.better or len(means) < 2:
        return [""] * len(table)
    top = (max if column.better == "high" else min)(means, key=lambda at: means[at])
    if column.total:
        if not means[top]:
            return [""] * len(table)
        best, ties = {at for at, mean in means.items() if mean <= means[top] * (1 + SAME_COST)}, set[int]()
    else:
        shown = {at: round(mean / factor, decimals) for at, mean in means.items()}
        best = {at for at, figure in shown.items() if figure == shown[top]}
        ties = _ties(column.key, table, top, [at for at in means if at not in best])
    if len(best | ties) == len(means):
        return [""] * len(table)
    return ["best" if at in best else "tie" if at in ties else "" for at in range(len(table))]


def _ties(key: str, table: Sequence[SummaryRow], top: int, others: Sequence[int]) -> set[int]:
    """Those of the others that a paired test does not tell apart from the top; none without two shared seeds."""
    found = {at: paired_difference(table[top].by_seed[key], table[at].by_seed[key]) for at in others}
    tested = {at: difference.p for at, difference in found.items() if difference and difference.p is not None}
    adjusted = holm(list(tested.values()))
    return {at for at, p in zip(tested, adjusted, strict=True) if p >= LEVEL}
