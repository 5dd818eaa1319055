"""Claims against numbers that were made up: every verdict, by hand."""

from __future__ import annotations

import math

import pytest

from fedfuse.report.claims import VERDICTS, Claim, StoredResult, judge_all, judge_claim


def result(**cells: dict[str, dict[int, float]]) -> StoredResult:
    """A stored result of accuracies: per cell and label, by seed."""
    return StoredResult(
        "x/t",
        "cpu",
        "now",
        {cell: {label: {"accuracy": values} for label, values in methods.items()} for cell, methods in cells.items()},
    )


def claim(**said: object) -> Claim:
    usual = {"file": "x/t", "first": ("a",), "second": ("b",)}
    return Claim(id="c", paper="X", place="Table 1", says="a is above b", **{**usual, **said})  # type: ignore[arg-type]


GOOD = {"a": {0: 0.80, 1: 0.82, 2: 0.81}, "b": {0: 0.50, 1: 0.51, 2: 0.52}}
NOISY = {"a": {0: 0.90, 1: 0.52, 2: 0.60}, "b": {0: 0.50, 1: 0.51, 2: 0.52}}
WORSE = {"a": {0: 0.40, 1: 0.41, 2: 0.42}, "b": {0: 0.50, 1: 0.52, 2: 0.51}}


def test_the_effect_is_the_paired_mean_in_points_with_students_interval() -> None:
    found = judge_claim(claim(), {"x/t": result(one=GOOD)})
    gaps = [30.0, 31.0, 29.0]
    assert found.effect is not None
    assert found.effect.mean == pytest.approx(30.0)
    half = 4.302653 * 1.0 / math.sqrt(3)  # Student's t with two degrees of freedom, sd of the gaps is 1
    assert (found.effect.low, found.effect.high) == pytest.approx((30.0 - half, 30.0 + half), abs=1e-5)
    assert (found.effect.n, found.cases, found.agreeing) == (len(gaps), 1, 1)
    assert found.verdict == "holds"


def test_a_claim_holds_only_beyond_its_margin() -> None:
    results = {"x/t": result(one=GOOD)}
    assert judge_claim(claim(margin=20.0), results).verdict == "holds"
    assert judge_claim(claim(margin=29.0), results).verdict == "holds in part"  # the interval reaches below it
    assert judge_claim(claim(margin=31.0), results).verdict == "does not hold"
    assert judge_claim(claim(direction="below"), results).verdict == "does not hold"


def test_what_chance_could_have_done_holds_in_part() -> None:
    assert judge_claim(claim(), {"x/t": result(one=NOISY)}).verdict == "holds in part"
    one_seed = {label: {0: values[0]} for label, values in GOOD.items()}
    found = judge_claim(claim(), {"x/t": result(one=one_seed)})
    assert found.verdict == "holds in part"  # one seed says nothing of chance
    assert found.effect is not None
    assert found.effect.low is None


def test_a_claim_about_several_cases_holds_in_all_of_them_or_in_part() -> None:
    both = judge_claim(claim(), {"x/t": result(one=GOOD, two=WORSE)})
    assert (both.verdict, both.agreeing, both.cases) == ("holds in part", 1, 2)
    assert both.effect is not None
    assert both.effect.mean == pytest.approx((30.0 - 10.0) / 2)
    assert judge_claim(claim(cells=("one",)), {"x/t": result(one=GOOD, two=WORSE)}).verdict == "holds"
    assert judge_claim(claim(cells=("t*",)), {"x/t": result(one=GOOD, two=WORSE)}).verdict == "does not hold"


def test_level_means_within_the_margin_on_both_sides() -> None:
    near = {"a": {0: 0.50, 1: 0.52, 2: 0.51}, "b": {0: 0.505, 1: 0.515, 2: 0.512}}
    assert judge_claim(claim(direction="level", margin=3.0), {"x/t": result(one=near)}).verdict == "holds"
    assert judge_claim(claim(direction="level", margin=3.0), {"x/t": result(one=WORSE)}).verdict == "does not hold"


def test_ratios_and_scores_by_themselves() -> None:
    costs = StoredResult("x/t", "cpu", "", {"t": {m: {"bytes_up": {0: v, 1: v}} for m, v in (("a", 2.5), ("b", 1.0))}})
    about = claim(score="bytes_up", effect="ratio", direction="below", margin=1.25)
    found = judge_claim(about, {"x/t": costs})
    assert found.verdict == "does not hold"
    assert found.effect is not None
    assert found.effect.mean == 2.5
    alone = claim(second=(), margin=79.0)
    assert judge_claim(alone, {"x/t": result(one=GOOD)}).verdict == "holds in part"
    assert judge_claim(claim(second=(), margin=20.0), {"x/t": result(one=GOOD)}).verdict == "holds"


def test_cells_can_be_compared_with_each_other() -> None:
    found = judge_claim(claim(second=("a",), cells=("one",), beside="two"), {"x/t": result(one=GOOD, two=WORSE)})
    assert found.effect is not None
    assert found.effect.mean == pytest.approx(40.0)


def test_nothing_measured_is_not_run_and_says_what_is_missing() -> None:
    assert judge_claim(claim(), {}).missing == ("x/t",)
    gone = judge_claim(claim(second=("c",)), {"x/t": result(one=GOOD)})
    assert (gone.verdict, gone.missing) == ("not run", ("a and c, one",))
    half = judge_claim(claim(second=("b", "c")), {"x/t": result(one=GOOD)})
    assert (half.verdict, half.missing) == ("holds in part", ("a and c, one",))
    assert judge_claim(claim(cells=("three",)), {"x/t": result(one=GOOD)}).verdict == "not run"


def test_an_experiment_that_was_not_finished_keeps_a_claim_from_holding_whole() -> None:
    part = StoredResult("x/t", "cpu", "", result(one=GOOD).cells, unfinished=("two",))
    found = judge_claim(claim(), {"x/t": part})
    assert (found.verdict, found.missing) == ("holds in part", ("two",))
    assert judge_claim(claim(cells=("one",)), {"x/t": part}).verdict == "holds"


def test_what_cannot_be_tested_is_said_so_and_older_results_are_marked() -> None:
    untestable = claim(file="", first=(), second=(), untestable="needs a GPU")
    findings = judge_all([untestable, claim()], {"x/t": result(one=GOOD)}, {"x/t": "then"})
    assert [found.verdict for found in findings] == ["not testable at this scale", "holds"]
    assert [found.older for found in findings] == [False, True]
    assert {found.verdict for found in findings} <= VERDICTS.keys()
