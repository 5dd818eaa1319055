"""The scoreboard's plot, from numbers that were made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedfuse.errors import ConfigError
from fedfuse.experiment.reproduce import experiments_folder, load_figures
from fedfuse.report.claims import StoredResult, write_result

CELL = {
    "fedavg": {"accuracy": {0: 0.5, 1: 0.7}, "bytes_up": {0: 2e6, 1: 2e6}},
    "ridge": {"accuracy": {0: 0.9}, "bytes_up": {0: 9e6}},
    "unscored": {"bytes_up": {0: 1e6}},
}


def test_a_method_stands_at_its_bytes_and_its_accuracy(tmp_path: Path) -> None:
    module = load_figures(experiments_folder() / "figures" / "scoreboard.py")
    result = StoredResult("scoreboard/oneshot", "cpu", "", {"mnist-classes-2": CELL, "mnist-dirichlet-0.1": CELL})
    assert module.positions(result, "mnist-classes-2") == {"fedavg": (2.0, pytest.approx(60.0)), "ridge": (9.0, 90.0)}
    drawn = module.draw_result(result, tmp_path / "scoreboard.svg").read_text()
    assert all(words in drawn for words in ("mnist classes 2", "ridge", "accuracy"))
    assert "unscored" not in drawn
    assert module.draw_result(result, tmp_path / "again.svg").read_text() == drawn


def test_without_a_stored_result_it_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_figures(experiments_folder() / "figures" / "scoreboard.py")
    (tmp_path / "shelf").mkdir()
    monkeypatch.setenv("FEDFUSE_EXPERIMENTS", str(tmp_path / "shelf"))
    with pytest.raises(ConfigError, match="has no stored result; run it: fedfuse reproduce scoreboard/oneshot"):
        module.draw_scoreboard(tmp_path)
    write_result(StoredResult("scoreboard/oneshot", "cpu", "", {"a": CELL}), tmp_path / "shelf" / "results")
    assert module.draw_scoreboard(tmp_path) == [tmp_path / "scoreboard.svg"]
