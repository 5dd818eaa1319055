"""Runs of other tasks are judged, drawn and compared by what their task is judged by first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.conftest import Fedfuse

from fedfuse.report import read_run, write_page
from fedfuse.report.page import cautions, verdict
from fedfuse.report.scores import best_first, headline_of, summary

SCORES = {"fedavg": (12.0, 9.0, 0.5), "newton": (8.0, 6.0, 0.8)}


def ledger(folder: Path, rows: list[dict[str, object]]) -> Path:
    folder.mkdir()
    (folder / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """Two methods, two seeds, two rounds of a regression, clients beside them."""
    rows: list[dict[str, object]] = []
    for method, (rmse, mae, r2) in SCORES.items():
        for seed in (0, 1):
            for at in (1, 2):
                scores = {"rmse": rmse / at + 0.1 * seed, "mae": mae / at, "r2": r2 * at / 2}
                clients = {
                    "a": {"rmse": rmse, "own_rmse": rmse / at},
                    "b": {"rmse": rmse + 1, "own_rmse": rmse / at + 1},
                }
                rows.append({"method": method, "seed": seed, "round": at, **scores, "clients": clients})
    return ledger(tmp_path / "numbers", rows)


@pytest.fixture
def risks(tmp_path: Path) -> Path:
    bins = {"confidence": [0.1, 0.5, 0.9], "accuracy": [0.2, 0.4, 0.8], "count": [10, 5, 20]}
    scores = {"accuracy": 0.8, "auroc": 0.9, "nll": 0.4, "ece": 0.1, "brier": 0.15, "reliability": bins}
    rows = [{"method": m, "seed": s, "round": 1, **scores} for m in ("fedavg", "newton") for s in (0, 1)]
    return ledger(tmp_path / "risks", rows)


def test_the_lowest_error_is_best(numbers: Path) -> None:
    table = best_first(summary(read_run(numbers).rows))
    assert [row.label for row in table] == ["newton", "fedavg"]
    assert headline_of(row.values for row in table).key == "rmse"
    words = verdict(table)
    assert words.startswith("newton is best: RMSE 4.05 ± 0.07071 after round 2 over 2 seeds, 2 ahead of fedavg (6.05")
    assert "ahead on 2 of them" in words
    assert cautions(table) == []


def test_tables_plots_and_comparisons_choose_the_tasks_score(fedfuse: Fedfuse, numbers: Path, risks: Path) -> None:
    said = fedfuse("table", numbers)
    assert said.out.splitlines()[0] == "| method | RMSE | MAE | R² |"
    assert fedfuse("table", risks).out.splitlines()[0] == "| method | accuracy, % | AUROC | NLL | ECE, % |"
    assert fedfuse("compare", numbers).out.startswith("RMSE: newton less …")
    assert json.loads(fedfuse("compare", risks, "--json").out)["score"] == "accuracy"
    assert fedfuse("plot", numbers, "-o", "curve.svg").code == 0
    assert "RMSE" in Path("curve.svg").read_text()


def test_the_page_draws_errors_and_calibration(numbers: Path, risks: Path, tmp_path: Path) -> None:
    page = write_page([numbers], tmp_path / "numbers.html").read_text()
    for title in ("Root mean squared error", "Mean absolute error", "R² by round", "own held-out rows"):
        assert title in page
    assert "a, seed 0: 6" in page
    assert "Calibration curve" not in page
    page = write_page([risks], tmp_path / "risks.html").read_text()
    assert "Calibration curve" in page
    assert "fedavg: said 90 %, was so 80 % of 40" in page
    both = write_page([numbers, risks], tmp_path / "both.html").read_text()
    assert "newton is best in" in both or "fedavg is best in" in both
