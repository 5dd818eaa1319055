"""What accuracy costs: bytes, work, targets, privacy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedfuse.errors import ConfigError
from fedfuse.report import write_page
from fedfuse.report.costs import (
    TargetCost,
    effort,
    kept_channels,
    model_size,
    privacy_curves,
    privacy_figures,
    target_costs,
    target_in,
    target_table,
    traffic,
)
from fedfuse.report.figures import Plot, save_figure
from fedfuse.report.page import render
from fedfuse.report.read import Run


def row(seed: int, at: int, **more: Any) -> dict[str, Any]:
    return {"label": "wb", "seed": seed, "round": at, **more}


def test_bytes_add_up_over_rounds() -> None:
    rows = [row(seed, at, accuracy=0.5, bytes_up=1000, bytes_down=500) for at in (1, 2) for seed in (0, 1)]
    figure = traffic({"wb": rows}, {"wb": 0})
    assert figure is not None
    assert "wb: 50.0 % for 3 kB" in figure.picture
    assert traffic({"wb": [row(0, 1, accuracy=0.5)]}, {"wb": 0}) is None


def test_flops_add_up_and_methods_without_any_are_left_out() -> None:
    rows = [row(0, at, accuracy=0.5, flops=4e11) for at in (1, 2, 3)]
    figure = effort({"wb": rows, "old": [row(0, 1, accuracy=0.4)]}, {"wb": 0, "old": 1})
    assert figure is not None
    assert "wb: 50.0 % for 1.2 TFLOP" in figure.picture
    assert figure.legend == ("wb",)


def test_a_size_is_drawn_where_it_changes() -> None:
    steady = [row(0, at, weights=100) for at in (1, 2)]
    assert model_size({"wb": steady}, {"wb": 0}) is None
    shrinks = [row(0, at, weights=100 / at) for at in (1, 2)]
    assert model_size({"wb": steady, "fedap": shrinks}, {"wb": 0, "fedap": 1}) is not None


def test_sizes_that_differ_between_methods_and_never_change_are_no_curve() -> None:
    groups = {"wb": [row(0, at, weights=200) for at in (1, 2)], "fedavg": [row(0, at, weights=100) for at in (1, 2)]}
    assert model_size(groups, {"wb": 0, "fedavg": 1}) is None
    whole = [row(0, 2, channels={"conv1": [6, 6]})]
    assert kept_channels({"fedap": whole}) is None


def test_costs_that_are_the_same_but_for_headers_are_not_drawn() -> None:
    groups = {"a": [row(0, 1, accuracy=0.5, bytes_up=10_000)], "b": [row(0, 1, accuracy=0.6, bytes_up=10_002)]}
    assert traffic(groups, {"a": 0, "b": 1}) is None
    groups["c"] = [row(0, 1, accuracy=0.6, bytes_up=10_200)]
    drawn = traffic(groups, {"a": 0, "b": 1, "c": 2})
    assert drawn is not None
    at = [float(x) for x in re.findall(r'd="M([\d.]+) [\d.]+V[\d.]+" class="bar', drawn.picture)]
    assert 0 < max(at) - min(at) < 100  # 2 % of the bytes do not fill the 340 pixels of the axis


def test_channels_are_shares_over_seeds() -> None:
    rows = [row(seed, 2, channels={"conv1": [3 + seed, 6], "conv2": [8, 16]}) for seed in (0, 1)]
    figure = kept_channels({"fedap": rows, "wb": [row(0, 2)]})
    assert figure is not None
    assert "fedap, conv1: 58" in figure.picture
    assert kept_channels({"wb": [row(0, 2)]}) is None


def climbing(seed: int, slope: float, rounds: int = 10) -> list[dict[str, Any]]:
    return [row(seed, at, accuracy=slope * at, flops=10.0, bytes_up=1, bytes_down=2) for at in range(1, rounds + 1)]


def test_the_target_is_reached_by_the_mean_over_five_rounds() -> None:
    """0.05, 0.10, …: the mean of rounds 4 to 8 is 0.30, so a target of 0.3 takes eight rounds and not six."""
    (found,) = target_costs({"wb": climbing(0, 0.05)}, 0.3)
    assert (found.rounds, found.flops, found.sent, found.seeds) == (8, 80, 24, (1, 1))


def test_the_servers_work_and_seconds_stand_beside_the_clients() -> None:
    rows = [{**r, "server_flops": 4.0, "train_seconds": 2.0, "server_seconds": 0.5} for r in climbing(0, 0.05)]
    rows[0]["first_flops"] = 100.0
    (found,) = target_costs({"wb": rows}, 0.3)
    assert (found.server_flops, found.seconds) == (132.0, 20.0)
    rows[3]["remembered"] = 2
    (found,) = target_costs({"wb": rows}, 0.3)
    assert found.seconds is None, "who remembers what another method trained is not faster"


def test_evidence_and_curvature_have_columns_where_somebody_sent_any() -> None:
    rows = [{**r, "evidence_flops": 3.0, "curvature_flops": 2.0} for r in climbing(0, 0.05)]
    found = target_costs({"wb": rows, "plain": climbing(0, 0.05)}, 0.3)
    assert [(cost.flops, cost.evidence, cost.curvature) for cost in found] == [(80, 24, 16), (80, None, None)]
    heads, ((_, spectrum), (_, plain)) = target_table(found)
    assert heads[2:5] == ("clients' work, FLOP", "of it evidence, FLOP", "of it curvature, FLOP")
    assert (spectrum[2:5], plain[2:5]) == (("80.00", "24.00", "16.00"), ("80.00", "–", "–"))


def test_seeds_that_never_got_there_are_told() -> None:
    rows = [*climbing(0, 0.05), *climbing(1, 0.001)]
    (found,) = target_costs({"wb": rows}, 0.3)
    assert found.seeds == (1, 2)
    (never,) = target_costs({"wb": climbing(0, 0.001)}, 0.3)
    assert target_table([never])[1] == (("wb", ("0 of 1", "–", "–", "–", "–", "–")),)


def test_what_the_target_cost_has_one_unit_per_column() -> None:
    found = [TargetCost("a", (1, 1), 3.0, 9e9, 1_500_000), TargetCost("b", (1, 1), 3.0, 4e6, 2_000)]
    heads, rows = target_table(found)
    assert heads == ("seeds", "rounds", "clients' work, GFLOP", "server's work, GFLOP", "sent, MB", "seconds")
    assert [cells[2:] for _, cells in rows] == [("9.00", "–", "1.50", "–"), ("0.00", "–", "0.00", "–")]


def test_the_target_is_the_files_or_what_half_of_the_methods_reach() -> None:
    groups = {name: climbing(0, slope) for name, slope in (("a", 0.05), ("b", 0.04), ("c", 0.01))}
    assert target_in("[judge]\ntarget = 0.77\n", groups) == 0.77
    assert target_in("", groups) == pytest.approx(0.3)  # 0.4, 0.32 and 0.08 at best
    assert target_in("", {"a": [row(0, 1)]}) is None
    assert target_in("not = [toml", groups) == pytest.approx(0.3)


def test_the_page_has_a_table_of_what_the_target_costs(make_run: Callable[..., Path], tmp_path: Path) -> None:
    page = write_page([make_run(tmp_path / "run", rounds=8)], tmp_path / "page.html").read_text()
    assert "% accuracy costs" in page
    single = write_page([make_run(tmp_path / "one", rounds=1)], tmp_path / "one.html").read_text()
    assert "% accuracy costs" not in single


def private_row(label: str, seed: int, accuracy: float, epsilon: float | None, round_: int = 1) -> dict[str, Any]:
    facts = {} if epsilon is None else {"privacy": {"of": "a row", "epsilon": epsilon, "delta": 1e-5}}
    return {"label": label, "method": "ridge", "seed": seed, "round": round_, "accuracy": accuracy, "facts": facts}


def private_run(epsilons: tuple[float | None, ...] = (None, 100.0, 1.0)) -> Run:
    rows = [
        private_row(f"e {e}", seed, 0.9 - 0.1 * at + 0.01 * seed, e) for at, e in enumerate(epsilons) for seed in (0, 1)
    ]
    return Run("study", "", {}, {}, tuple(rows))


def test_points_are_in_rising_order_and_noise_free_scores_apart() -> None:
    curve = privacy_curves([private_run()])["ridge"]
    assert list(curve.by_epsilon) == [1.0, 100.0]
    assert curve.by_epsilon[1.0].mean == pytest.approx(0.705)
    assert curve.plain is not None
    assert (curve.plain.mean, curve.label, curve.plain_label) == (pytest.approx(0.905), "e 100.0", "e None")


def test_epsilon_is_that_of_all_exchanges_and_of_the_configuration_where_no_ledger_tells() -> None:
    rows = [private_row("a", 0, 0.5, 1.0, 1), private_row("a", 0, 0.6, 1.5, 2), private_row("b", 0, 0.7, 3.0, 1)]
    assert list(privacy_curves([Run("", "", {}, {}, tuple(rows))])["ridge"].by_epsilon) == [1.5, 3.0]
    config = "[[methods]]\nname = 'ridge'\nlabel = 'a'\nepsilon = 2.0\n[[methods]]\nlabel = 'b'\nepsilon = 4.0"
    plain = tuple(private_row(label, 0, 0.5, None) for label in ("a", "b"))
    assert list(privacy_curves([Run("", config, {}, {}, plain)])["ridge"].by_epsilon) == [2.0, 4.0]


def test_runs_of_a_sweep_are_one_curve() -> None:
    runs = [Run("", "", {}, {}, (private_row("ridge", 0, a, e),)) for e, a in ((None, 0.9), (1.0, 0.5), (10.0, 0.8))]
    assert list(privacy_curves(runs)["ridge"].by_epsilon) == [1.0, 10.0]
    assert len(privacy_figures(runs, {})) == 1


def test_the_page_and_the_paper_draw_it(tmp_path: Path) -> None:
    assert "Accuracy against ε: ridge" in render([private_run()])
    drawn = save_figure("privacy", Plot([private_run()]), tmp_path / "p.svg").read_text()
    assert "ridge, no noise" in drawn
    assert "mathdefault" not in drawn
    with pytest.raises(ConfigError, match="no method has accuracy at two values of epsilon"):
        save_figure("privacy", Plot([private_run((None, 1.0))]), tmp_path / "q.svg")
    assert "against ε" not in render([private_run((None, 1.0))])
