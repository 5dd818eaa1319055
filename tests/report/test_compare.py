"""Comparisons by pairs."""

from __future__ import annotations

import json

import pytest
from scipy import stats

from fedfuse.errors import ConfigError
from fedfuse.report import Run
from fedfuse.report.compare import column_of, compare_all, compare_methods, compare_over


def run_of(name: str, config: str = "", first_seed: int = 0, **scores: list[float]) -> Run:
    rows = tuple(
        {"method": label, "label": label, "seed": first_seed + at, "round": 1, "accuracy": a, "nll": 1 - a}
        for label, given in scores.items()
        for at, a in enumerate(given)
    )
    return Run(name, config, {}, {}, rows)


A, B, C = [0.8, 0.82, 0.81, 0.9], [0.7, 0.75, 0.72, 0.8], [0.79, 0.83, 0.8, 0.89]


def test_the_best_is_compared_with_every_other() -> None:
    found = compare_all([run_of("study", b=B, a=A, c=C)], "accuracy")
    assert [name for name, _ in found.made] == ["b", "c"]
    assert found.title == "accuracy, points: a less …"
    (_, one), (_, two) = found.made
    assert one.difference.p == pytest.approx(stats.ttest_rel(A, B).pvalue)
    assert one.p_holm == pytest.approx(2 * one.difference.p)
    assert two.p_holm == pytest.approx(stats.ttest_rel(A, C).pvalue)
    assert found.lines[0][1:3] == ("4", "+9.0")
    assert "With 4 pairs no p of Wilcoxon's test is below 0.125." in found.note
    json.dumps(found.as_json())


def test_low_is_best_where_it_is_and_one_may_be_named() -> None:
    run = run_of("study", b=B, a=A)
    assert [c.first for c in compare_methods(run, column_of("nll"))] == ["a"]
    assert [(c.first, c.second) for c in compare_methods(run, column_of("nll"), "b")] == [("b", "a")]


def test_two_runs_are_compared_method_by_method() -> None:
    one = run_of("one", "data.clients = 5", a=A, b=B)
    two = run_of("two", "data.clients = 9", first_seed=1, a=B, c=C)
    found = compare_all([one, two], "accuracy")
    assert found.title == "accuracy, points: clients = 5 less clients = 9"
    [(name, made)] = found.made
    assert (name, made.difference.n) == ("a", 3)  # seeds 1 to 3 are in both
    assert made.difference.mean == pytest.approx(sum(A[1:]) / 3 - sum(B[:3]) / 3)


def test_several_runs_are_data_sets() -> None:
    sets = [run_of(f"d{k}", f'data.source = "d{k}"', a=[0.9 - 0.1 * k], b=[0.8 - 0.1 * k], c=[0.35]) for k in range(4)]
    found = compare_all(sets, "accuracy")
    assert found.ranking is not None
    assert list(found.ranking.ranks) == ["a", "b", "c"]
    assert found.pairs == "runs"
    assert found.made[0][1].difference.mean == pytest.approx(0.1)
    worst, _ = compare_over(sets, column_of("nll"))  # 1 − accuracy: the same order
    assert list(worst.ranks) == ["a", "b", "c"]


def test_one_seed_says_nothing() -> None:
    found = compare_all([run_of("study", a=[0.5], b=[0.4])], "accuracy")
    assert found.lines == [("b", "1", "+10.0", "–", "–", "–", "–", "1 of 1")]
    assert found.note.endswith("One pair says nothing of chance.")


@pytest.mark.parametrize(
    ("runs", "options", "words"),
    [
        (1, {"score": "trained"}, "no score 'trained' to compare"),
        (1, {"score": "accuracy", "against": "x"}, "no method 'x' in r0; it has a, b"),
        (2, {"score": "accuracy", "against": "a"}, "--against chooses a method of one run and 2"),
        (1, {"score": "bytes_up"}, "r0 has bytes_up of 0 method"),
    ],
)
def test_what_cannot_be_compared_is_named(runs: int, options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compare_all([run_of(f"r{k}", a=A, b=B) for k in range(runs)], **options)


def test_runs_without_a_common_method() -> None:
    with pytest.raises(ConfigError, match="one and two have no method in common"):
        compare_all([run_of("one", a=A), run_of("two", b=B)], "accuracy")
    with pytest.raises(ConfigError, match="1 method is in all 3 runs"):
        compare_all([run_of("one", a=A, b=B), run_of("two", a=B), run_of("three", a=C)], "accuracy")
