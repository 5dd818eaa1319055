"""Four tasks and one backbone, with rows that were made up and hardly any training."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from fedfuse.core.rows import Rows
from fedfuse.data import Dataset
from fedfuse.experiment.reproduce import experiments_folder, load_figures
from fedfuse.report.claims import StoredResult, read_result
from fedfuse.report.reproduction import stored_table


def made_up(source: str) -> Dataset:
    draw = torch.Generator().manual_seed(len(source))
    side, colours = (28, 1) if "mnist" in source else (32, 3)

    def rows(count: int) -> Rows:
        y = torch.arange(count) % 10
        x = 0.3 * torch.rand(count, colours, side, side, generator=draw)
        x[torch.arange(count), :, 2 * y, :] += 0.7
        return Rows(x, y)

    return Dataset(source, rows(120), rows(20), tuple("0123456789"), {})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_figures(experiments_folder() / "figures" / "tasks.py")
    for name, value in {"OWN": 40, "COMMON": 30, "HELD": 20, "LOOKED_AT": 20, "SEEDS": range(1)}.items():
        monkeypatch.setattr(module, name, value)
    for name in ("BEFORE", "AFTER"):
        monkeypatch.setattr(module, name, {**getattr(module, name), "epochs": 1})
    monkeypatch.setattr(module, "SCALED", {"task_arithmetic": (0.25, 0.5), "ties": (1.0, 1.5)})
    monkeypatch.setattr(module, "_load_rows", made_up)
    return module


def test_rows_have_one_form_and_serve_one_purpose_each(small: ModuleType) -> None:
    grey, colour = small.rows_of("mnist", 0), small.rows_of("svhn", 0)
    assert grey.own.x.shape == (40, 3, 16, 16) == colour.own.x.shape
    assert len({tuple(x.flatten().tolist()) for part in (grey.common, grey.own, grey.held) for x in part.x}) == 90
    assert not torch.equal(small.rows_of("mnist", 1).own.x, grey.own.x)


def test_a_scale_is_chosen_and_a_quarter_is_the_mean(small: ModuleType) -> None:
    tasks = [small.rows_of(source, 0) for source in small.SOURCES]
    starts = small.common_start(tasks, 0)
    assert all(torch.equal(start["conv1.weight"], starts[0]["conv1.weight"]) for start in starts)
    assert not torch.equal(starts[0]["classifier.weight"], starts[1]["classifier.weight"])
    own = [{name: t + 0.01 * k for name, t in start.items()} for k, start in enumerate(starts)]
    held = [task.held for task in tasks]
    mean, _ = small.merge("fedavg", own, starts[0], own, held)
    moved, scale = small.merge("task_arithmetic", own, starts[0], own, held)
    assert scale in (0.25, 0.5)
    torch.testing.assert_close(moved["conv2.weight"], starts[0]["conv2.weight"] + 0.06 * scale)
    torch.testing.assert_close(mean["conv2.weight"], starts[0]["conv2.weight"] + 0.06 * 0.25)


@pytest.mark.slow
def test_a_run_is_stored_seed_by_seed_and_goes_on(
    small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = small.merge_tasks(tmp_path)
    result = read_result(path)
    assert list(result.cells) == [*small.SOURCES, "mean"]
    assert {small.BASE, small.ALONE, "fisher", "regmean", "fedlpa"} <= result.cells["mean"].keys()
    tasks = [result.cells[source]["ties"]["accuracy"][0] for source in small.SOURCES]
    assert result.cells["mean"]["ties"]["accuracy"][0] == pytest.approx(sum(tasks) / 4, abs=1e-4)
    assert result.cells["mean"]["ties"]["scale"][0] in (1.0, 1.5)
    monkeypatch.setattr(small, "score_rules", lambda seed: pytest.fail(f"seed {seed} was done already"))
    assert small.merge_tasks(tmp_path) == [path]


def test_a_bound_in_parentheses_is_never_the_best() -> None:
    cell = {"(own network)": {"accuracy": {0: 0.9}}, "ties": {"accuracy": {0: 0.5}}, "fisher": {"accuracy": {0: 0.4}}}
    lines = stored_table(StoredResult("merging/tasks", "cpu", "", {"mnist": cell})).splitlines()
    assert lines[2] == "| (own network) | 90.0 |"
    assert lines[3] == "| ties | **50.0** |"
