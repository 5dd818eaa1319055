"""Which numbers of a column are the best, and which are not told apart from the best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from fedfuse.report.scores import Column, SummaryRow
from fedfuse.report.stats import LEVEL, holm, paired_difference

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
    if column.total and not means[top]:
        return [""] * len(table)
    best = _same_costs(means, top) if column.total else _same_print(means, top, decimals, factor)
    ties = set() if column.total else _ties(column.key, table, top, [at for at in means if at not in best])
    if len(best | ties) == len(means):
        return [""] * len(table)
    return ["best" if at in best else "tie" if at in ties else "" for at in range(len(table))]


def _same_costs(means: dict[int, float], top: int) -> set[int]:
    return {at for at, mean in means.items() if mean <= means[top] * (1 + SAME_COST)}


def _same_print(means: dict[int, float], top: int, decimals: int, factor: float) -> set[int]:
    shown = {at: round(mean / factor, decimals) for at, mean in means.items()}
    return {at for at, figure in shown.items() if figure == shown[top]}


def _ties(key: str, table: Sequence[SummaryRow], top: int, others: Sequence[int]) -> set[int]:
    """Those of the others that a paired test does not tell apart from the top; without two shared seeds, nobody."""
    found = {at: paired_difference(table[top].by_seed[key], table[at].by_seed[key]) for at in others}
    tested = {at: difference.p for at, difference in found.items() if difference and difference.p is not None}
    adjusted = holm(list(tested.values()))
    return {at for at, p in zip(tested, adjusted, strict=True) if p >= LEVEL}
