"""Accuracy against ε: which points there are, and that they are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedfuse.errors import ConfigError
from fedfuse.report.costs import privacy_curves, privacy_figures
from fedfuse.report.figures import Plot, save_figure
from fedfuse.report.page import render
from fedfuse.report.read import Run


def row(label: str, seed: int, accuracy: float, epsilon: float | None, round_: int = 1) -> dict[str, Any]:
    facts = {} if epsilon is None else {"privacy": {"of": "a row", "epsilon": epsilon, "delta": 1e-5}}
    return {"label": label, "method": "ridge", "seed": seed, "round": round_, "accuracy": accuracy, "facts": facts}


def run(epsilons: tuple[float | None, ...] = (None, 100.0, 1.0)) -> Run:
    rows = [row(f"e {e}", seed, 0.9 - 0.1 * at + 0.01 * seed, e) for at, e in enumerate(epsilons) for seed in (0, 1)]
    return Run("study", "", {}, {}, tuple(rows))


def test_points_are_in_rising_order_and_noise_free_scores_apart() -> None:
    curve = privacy_curves([run()])["ridge"]
    assert list(curve.by_epsilon) == [1.0, 100.0]
    assert curve.by_epsilon[1.0].mean == pytest.approx(0.705)
    assert curve.plain is not None
    assert (curve.plain.mean, curve.label, curve.plain_label) == (pytest.approx(0.905), "e 100.0", "e None")


def test_epsilon_is_that_of_all_exchanges_and_of_the_configuration_where_no_ledger_tells() -> None:
    rows = [row("a", 0, 0.5, 1.0, 1), row("a", 0, 0.6, 1.5, 2), row("b", 0, 0.7, 3.0, 1)]
    assert list(privacy_curves([Run("", "", {}, {}, tuple(rows))])["ridge"].by_epsilon) == [1.5, 3.0]
    config = "[[methods]]\nname = 'ridge'\nlabel = 'a'\nepsilon = 2.0\n[[methods]]\nlabel = 'b'\nepsilon = 4.0"
    plain = tuple(row(label, 0, 0.5, None) for label in ("a", "b"))
    assert list(privacy_curves([Run("", config, {}, {}, plain)])["ridge"].by_epsilon) == [2.0, 4.0]


def test_runs_of_a_sweep_are_one_curve() -> None:
    runs = [Run("", "", {}, {}, (row("ridge", 0, a, e),)) for e, a in ((None, 0.9), (1.0, 0.5), (10.0, 0.8))]
    assert list(privacy_curves(runs)["ridge"].by_epsilon) == [1.0, 10.0]
    assert len(privacy_figures(runs, {})) == 1


def test_the_page_and_the_paper_draw_it(tmp_path: Path) -> None:
    assert "Accuracy against ε: ridge" in render([run()])
    drawn = save_figure("privacy", Plot([run()]), tmp_path / "p.svg").read_text()
    assert "ridge, no noise" in drawn
    assert "mathdefault" not in drawn
    with pytest.raises(ConfigError, match="no method has accuracy at two values of epsilon"):
        save_figure("privacy", Plot([run((None, 1.0))]), tmp_path / "q.svg")
    assert "against ε" not in render([run((None, 1.0))])
