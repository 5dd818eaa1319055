from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedfuse.errors import ConfigError
from fedfuse.report.read import find_runs, finite, read_run

Make = Callable[..., Path]


def ledger(folder: Path, *lines: object, tail: str = "") -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / "ledger.jsonl").write_text(text + tail, encoding="utf-8")
    return folder


def line(seed: int = 0, at: int = 1, accuracy: float = 0.5, **more: object) -> dict[str, object]:
    return {"method": "fedavg", "seed": seed, "round": at, "accuracy": accuracy, **more}


def test_reads_everything(tmp_path: Path, make_run: Make) -> None:
    run = read_run(make_run(tmp_path / "run", rounds=2, seeds=2))
    assert run.name == "one-shot-fashion"
    assert len(run.rows) == 5 * 2 * 2
    assert run.environment["torch"] == "2.13.0"
    assert list(run.partition["seeds"]) == ["0", "1"]
    assert 'source = "fashion-mnist"' in run.config_text


def test_a_ledger_is_enough(tmp_path: Path) -> None:
    run = read_run(ledger(tmp_path, line()))
    assert (run.name, run.config_text, run.environment, run.partition) == (tmp_path.name, "", {}, {})


def test_a_line_cut_by_a_crash_is_ignored(tmp_path: Path) -> None:
    whole = json.dumps(line(seed=1))
    for cut in range(1, len(whole) - 1):
        run = read_run(ledger(tmp_path, line(), tail=whole[:cut]))
        assert [row["seed"] for row in run.rows] == [0]
        run = read_run(ledger(tmp_path, line(), whole[:cut], line(seed=2)))  # resumed on a line of its own
        assert [row["seed"] for row in run.rows] == [0, 2]
    assert len(read_run(ledger(tmp_path, line(), tail=whole)).rows) == 2  # whole, only its line end is missing


def test_the_last_of_repeated_lines_wins(tmp_path: Path) -> None:
    run = read_run(ledger(tmp_path, line(accuracy=0.1), line(seed=1), line(accuracy=0.9)))
    assert [(row["seed"], row["accuracy"]) for row in run.rows] == [(0, 0.9), (1, 0.5)]


def test_labels_tell_two_uses_of_a_method_apart(tmp_path: Path) -> None:
    run = read_run(ledger(tmp_path, line(label="fedavg(a=1)"), line(label="fedavg(a=2)")))
    assert [row["label"] for row in run.rows] == ["fedavg(a=1)", "fedavg(a=2)"]


@pytest.mark.parametrize(
    "bad", ['{"a"{}', "[1]", '{"method": "wb"}', '{"method": "wb", "seed": "0", "round": 1}', "\0"]
)
def test_a_damaged_ledger_names_its_line(tmp_path: Path, bad: str) -> None:
    with pytest.raises(ConfigError, match=r"line 2 is no ledger line.*remove that line"):
        read_run(ledger(tmp_path, line(), bad, line(seed=1)))


def test_what_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a directory"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no ledger\.jsonl"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="no finished round"):
        read_run(ledger(tmp_path, tail='{"method": "fe'))
    ledger(tmp_path, line())
    (tmp_path / "partition.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        read_run(tmp_path)
    (tmp_path / "partition.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        read_run(tmp_path)


def test_an_unreadable_configuration_costs_only_the_name(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("name = ")
    assert read_run(ledger(tmp_path, line())).name == tmp_path.name


def test_only_finite_numbers_are_numbers() -> None:
    assert [finite(v) for v in (0.5, 3, None, True, "1", float("inf"), 10**400)] == [0.5, 3.0, *[None] * 5]


def test_a_sweeps_folder_stands_for_its_runs(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    sweep = tmp_path / "runs" / "sweep"
    for alpha in ("0.5", "10", "2"):
        make_run(sweep / alpha)
    alone = make_run(tmp_path / "runs" / "alone")
    (sweep / "report.html").write_text("a page")
    in_order = [sweep / "0.5", sweep / "2", sweep / "10"]
    assert find_runs([sweep]) == in_order
    assert find_runs(sorted(sweep.iterdir())) == [sweep / "0.5", sweep / "10", sweep / "2"]  # as the shell orders them
    assert find_runs([alone, sweep, sweep / "2"]) == [alone, *in_order]
    with pytest.raises(ConfigError, match="no run directory was given"):
        find_runs([])
