"""Where a run happened."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from fedfuse.data import load
from fedfuse.experiment.results import plain
from fedfuse.experiment.rundir import commit, environment, versions


def test_versions_are_those_installed() -> None:
    assert torch.__version__.startswith(versions()["torch"].partition("+")[0])
    assert "fedfuse" in versions()


def test_the_environment_is_json_and_tells_how_many_rows_were_seen() -> None:
    facts = json.loads(json.dumps(plain(environment(load("digits", train_limit=70), workers=3))))
    assert facts["workers"] == 3
    assert facts["threads"] == torch.get_num_threads()
    assert facts["data"]["name"] == "digits"
    assert 70 in facts["data"].values()


@pytest.mark.parametrize("error", [OSError("no git"), subprocess.CalledProcessError(128, "git")])
def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", fails)
    assert commit() is None


def test_somebody_elses_tree_is_not_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("fedfuse.experiment.rundir.__file__", str(tmp_path / "a" / "b" / "c" / "environment.py"))
    assert commit() is None
