"""Summaries over seeds, and which of them are best."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfuse.report.scores import COLUMNS, best_first, marks_of, mean_sd, summary


def row(label: str, seed: int, at: int, **values: object) -> dict[str, object]:
    return {"method": label.split("(")[0], "label": label, "seed": seed, "round": at, **values}


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=9))
def test_spread_is_mean_and_sample_deviation(values: list[float]) -> None:
    found = mean_sd(values)
    assert found is not None
    assert found.sd is not None
    assert found.mean == pytest.approx(np.mean(values), abs=1e-6)
    assert found.sd == pytest.approx(np.std(values, ddof=1), abs=1e-6)


def test_a_single_seed_has_no_deviation() -> None:
    found = mean_sd([0.5])
    assert found is not None
    assert (found.mean, found.sd, found.n) == (0.5, None, 1)
    assert mean_sd([None]) is None


def test_scores_are_of_the_last_round_and_costs_of_all() -> None:
    rows = [
        row("wb", seed, at, accuracy=0.1 * at + 0.2 * seed, bytes_up=100 * at, train_seconds=1.5, parameters=7)
        for seed in (0, 1)
        for at in (1, 2, 3)
    ]
    (found,) = summary(rows)
    assert (found.round, found.seeds, dict(found.behind)) == (3, (0, 1), {})
    accuracy = found.values["accuracy"]
    assert accuracy.mean == pytest.approx((0.3 + 0.5) / 2)
    assert accuracy.sd == pytest.approx(np.std([0.3, 0.5], ddof=1))
    assert found.values["bytes_up"].mean == 600
    assert found.values["train_seconds"].mean == 4.5
    assert found.values["parameters"].mean == 7
    assert "nll" not in found.values


def test_a_seed_behind_is_not_counted() -> None:
    rows = [row("wb", 0, 1, accuracy=0.1), row("wb", 0, 2, accuracy=0.8), row("wb", 1, 1, accuracy=0.2)]
    (found,) = summary(rows)
    assert (found.seeds, dict(found.behind)) == ((0,), {1: 1})
    assert found.values["accuracy"].mean == 0.8
    assert found.values["accuracy"].sd is None


def test_a_score_that_is_no_number_is_left_out() -> None:
    (found,) = summary([row("wb", 0, 1, nll=None), row("wb", 1, 1, nll=float("nan")), row("wb", 2, 1, nll=0.4)])
    assert (found.values["nll"].mean, found.values["nll"].n, len(found.seeds)) == (0.4, 1, 3)


def test_the_selected_round_is_told_beside_the_last() -> None:
    rows = [row("wb", 0, 1, accuracy=0.9, selected=True), row("wb", 0, 2, accuracy=0.7, selected=False)]
    (found,) = summary(rows)
    assert found.values["accuracy"].mean == 0.7
    assert found.values["selected_accuracy"].mean == 0.9


def test_best_first_puts_the_unscored_last() -> None:
    table = summary([row("a", 0, 1), row("b", 0, 1, accuracy=0.1), row("c", 0, 1, accuracy=0.2)])
    assert [found.label for found in best_first(table)] == ["c", "b", "a"]


ACCURACY, BYTES, NLL = (next(c for c in COLUMNS if c.key == key) for key in ("accuracy", "bytes_up", "nll"))


def rows(key: str, **values: list[float]) -> list[dict[str, object]]:
    return [
        {"method": label, "seed": seed, "round": 1, key: value}
        for label, given in values.items()
        for seed, value in enumerate(given)
    ]


def test_a_tie_is_what_the_pairs_do_not_tell_apart() -> None:
    table = summary(
        rows("accuracy", top=[0.80, 0.82, 0.81, 0.83], near=[0.81, 0.79, 0.82, 0.80], far=[0.70, 0.72, 0.71, 0.73])
    )
    assert marks_of(ACCURACY, table, decimals=1, factor=0.01) == ["best", "tie", ""]


def test_pairs_see_what_spreads_hide() -> None:
    """Seeds differ by 20 points, the methods on each seed by one: intervals overlap, the pairs do not."""
    table = summary(rows("accuracy", top=[0.61, 0.71, 0.811], less=[0.60, 0.70, 0.80], none=[0.1, 0.1, 0.1]))
    assert marks_of(ACCURACY, table, decimals=1, factor=0.01) == ["best", "", ""]


def test_low_is_better_where_it_is() -> None:
    table = summary(rows("nll", a=[0.5, 0.51, 0.52], b=[0.9, 0.91, 0.92]))
    assert marks_of(NLL, table, decimals=3, factor=1.0) == ["best", ""]


def test_header_bytes_are_no_difference() -> None:
    table = summary(rows("bytes_up", a=[154_340], b=[154_350], c=[403_940]))
    assert marks_of(BYTES, table, decimals=2, factor=1e3) == ["best", "best", ""]
    assert marks_of(BYTES, table[:2], decimals=2, factor=1e3) == ["", ""]


def test_where_nobody_is_told_apart_nobody_is_best() -> None:
    table = summary(rows("accuracy", a=[0.5, 0.9], b=[0.6, 0.7]))
    assert marks_of(ACCURACY, table, decimals=1, factor=0.01) == ["", ""]


def test_one_seed_marks_the_best_and_claims_no_tie() -> None:
    table = summary(rows("accuracy", a=[0.50], b=[0.49]))
    assert marks_of(ACCURACY, table, decimals=1, factor=0.01) == ["best", ""]


def test_who_spends_nothing_is_not_praised() -> None:
    table = summary(rows("bytes_up", a=[0.0, 0.0], b=[0.0, 0.0], c=[5.0, 5.0]))
    assert marks_of(BYTES, table, decimals=0, factor=1.0) == ["", "", ""]
