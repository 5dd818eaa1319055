from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfuse.report.scores import best_first, mean_sd, summary


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
