from __future__ import annotations

from typing import Any

from fedfuse.report.page import cautions, overall, verdict
from fedfuse.report.scores import summary


def rows(rounds: int = 1, **accuracies: list[float | None]) -> list[dict[str, object]]:
    return [
        {"method": label, "seed": seed, "round": rounds, "accuracy": a}
        for label, scores in accuracies.items()
        for seed, a in enumerate(scores)
    ]


def said(found: list[dict[str, object]]) -> str:
    return verdict(summary(found))


def test_pairs_that_tell_the_best_apart() -> None:
    """Seed 1 is easier by 20 points, so the spreads overlap; the pairs do not care."""
    assert said(rows(20, fedavg=[0.60, 0.80, 0.70], wb=[0.65, 0.85, 0.76])) == (
        "wb is best: 75.3 ± 10.0 % accuracy after round 20 over 3 seeds, 5.3 points ahead of fedavg (70.0 ± 10.0 %). "
        "More than chance: over 3 shared seeds the difference is 3.9 to 6.8 points (95 % interval, p = 0.0039 by a "
        "paired t-test); it is ahead on 3 of them."
    )


def test_pairs_that_do_not() -> None:
    text = said(rows(fedavg=[0.6, 0.9], wb=[0.5, 0.95], x=[0.8, 0.78]))
    assert text.startswith("x is best: 79.0 ± 1.4 % accuracy over 2 seeds, 4.0 points ahead of fedavg (75.0 ± 21.2 %).")
    assert "This may be chance: over 2 shared seeds" in text
    assert text.endswith("it is ahead on 1 of them.")


def test_methods_without_a_common_seed_are_not_tested() -> None:
    found = [*rows(a=[0.5]), {"method": "b", "seed": 7, "round": 1, "accuracy": 0.6}]
    assert said(found).endswith("They share no seed, so the difference is not tested.")


def test_what_prints_alike_is_level() -> None:
    assert said(rows(a=[0.80001], b=[0.8], c=[0.5])) == "a and b are level at 80.0 % accuracy."


def test_one_method_and_none() -> None:
    assert said(rows(a=[0.7, 0.9])) == "a reaches 80.0 ± 14.1 % accuracy over 2 seeds."
    assert said(rows(a=[None])) == "No accuracy was recorded."


def test_an_exchange_without_training_is_no_further_round() -> None:
    def row(method: str, at: int, steps: int) -> dict[str, Any]:
        return {"method": method, "seed": 0, "round": at, "accuracy": 0.5, "clients": {"a": {"steps": steps}}}

    refitted = summary([row("fedavg", 1, 4), row("refit", 1, 4), row("refit", 2, 0), row("ridge", 1, 0)])
    assert [found.ending for found in refitted] == [0, 1, 0]
    assert cautions(refitted) == []
    assert len(cautions(summary([row("fedavg", 1, 4), row("longer", 1, 4), row("longer", 2, 4)]))) == 1


def test_cautions_name_what_does_not_compare() -> None:
    assert cautions(summary(rows(a=[0.5, 0.6], b=[0.5, 0.6]))) == []
    found = [*rows(a=[0.5, 0.6], b=[0.5, None]), {"method": "c", "seed": 0, "round": 3, "accuracy": 0.1}]
    assert cautions(summary(found)) == [
        "The methods stand at different rounds (1 to 3): compare with care.",
        "The methods were not run on the same seeds: compare with care.",
        "b has an accuracy on 1 of 2 seeds only.",
    ]


def test_overall_counts_wins() -> None:
    assert overall({"1": "a", "2": "b", "3": "b"}) == "b is best in 2 of 3 runs, a in 1."
