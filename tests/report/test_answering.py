"""The cost of an answer against its accuracy."""

from __future__ import annotations

from typing import Any

from fedfuse.report.plots import answer_cost

INKS = {"all": 0, "few": 1, "mean": 2}


def rows(accuracy: float, **facts: object) -> list[dict[str, Any]]:
    return [
        {"seed": seed, "round": at, "accuracy": accuracy + 0.02 * seed, "facts": facts if at == 2 else {}}
        for at in (1, 2)
        for seed in (0, 1)
    ]


def test_methods_are_placed_by_cost_and_accuracy_of_the_last_round() -> None:
    figure = answer_cost({"all": rows(0.8, cost=1.0), "few": rows(0.7, cost=0.25), "mean": rows(0.3)}, INKS)
    assert figure is not None
    assert figure.legend == ("all", "few"), "who says nothing of cost is not shown"
    assert "all: 81.0 % for 100 % of the work" in figure.picture
    assert "few: 71.0 % for 25 % of the work" in figure.picture


def test_there_is_no_picture_without_a_choice() -> None:
    assert answer_cost({"all": rows(0.8, cost=1.0), "few": rows(0.7, cost=1.0)}, INKS) is None
    assert answer_cost({"mean": rows(0.3)}, INKS) is None
    assert answer_cost({"all": rows(0.8, cost="much"), "few": rows(0.8, cost=float("nan"))}, INKS) is None
    assert answer_cost({}, INKS) is None
