"""A file as jobs: where each goes, and what they come to together."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fedfuse
from fedfuse.errors import ConfigError
from fedfuse.experiment.jobs import jobs_of, memo_folder

TinyFile = Callable[..., Path]


def test_one_experiment_goes_to_a_folder_of_its_name(
    tiny_file: TinyFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = jobs_of(tiny_file(name="a study"))
    assert (jobs.name, jobs.folder) == ("a study", Path("runs/a_study"))
    assert [(job.folder, job.resume) for job in jobs.each] == [(Path("runs/a_study"), False)]
    with pytest.raises(ConfigError, match="there is no run called 'tiny' in runs to resume"):
        jobs_of(tiny_file(), resume=True)
    Path("runs/tiny").mkdir(parents=True)
    assert jobs_of(tiny_file(), resume=True).folder == Path("runs/tiny")


def test_a_sweep_goes_side_by_side_and_only_what_was_begun_goes_on(tiny_file: TinyFile, tmp_path: Path) -> None:
    file = tiny_file(more='\n[sweep]\n"data.source" = ["digits", "a/b.npz"]\n')
    (tmp_path / "out" / "tiny-digits").mkdir(parents=True)
    (tmp_path / "out" / "tiny-digits" / "config.toml").touch()
    jobs = jobs_of(file, out=tmp_path / "out", resume=True)
    assert [(job.folder.name, job.resume) for job in jobs.each] == [("tiny-digits", True), ("tiny-a_b.npz", False)]
    assert jobs.name == "tiny"


def test_run_from_python(tiny_file: TinyFile, tmp_path: Path) -> None:
    file, out = tiny_file("fedavg", "fednova"), tmp_path / "out"
    results = fedfuse.run(str(file), out=str(out), sets=["rounds=1"], workers=0)
    assert [(row["label"], row["seed"], row["round"]) for row in results.rows] == [("fedavg", 0, 1), ("fednova", 0, 1)]
    assert [row["remembered"] for row in results.rows] == [0, 3]
    assert results.folder == out
    assert [line.split("|")[1].strip() for line in results.table().splitlines()[2:]] == ["fedavg", "fednova"]
    assert memo_folder().is_dir()
    again = fedfuse.run(file, out=out, sets=["rounds=2"], resume=True, workers=0, memo=False)
    assert len(again.rows) == 4
    with pytest.raises(fedfuse.ConfigError, match="holds a run already"):
        fedfuse.run(file, out=out, workers=0)


def test_a_sweep_from_python_has_one_table_per_experiment(tiny_file: TinyFile, tmp_path: Path) -> None:
    file = tiny_file(rounds=1, more="\n[sweep]\nlocal.epochs = [1, 2]\n")
    results = fedfuse.run(file, out=tmp_path / "out", workers=0, memo=False)
    assert [row["experiment"] for row in results.rows] == ["tiny-1", "tiny-2"]
    assert [line for line in results.table().splitlines() if line.startswith("#")] == ["### tiny-1", "### tiny-2"]


def test_importing_fedfuse_does_not_pay_for_pictures_and_pages() -> None:
    heavy = "{'matplotlib', 'jinja2', 'sklearn', 'typer', 'fedfuse.data', 'fedfuse.experiment'}"
    code = f"import sys, fedfuse; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
