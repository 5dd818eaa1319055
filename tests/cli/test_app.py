"""The command line, in process: what it prints, what it writes, and the code it ends with."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from rich.console import Console
from tests.builders import refused
from tests.conftest import Fedfuse, Said

from fedfuse import cli
from fedfuse.cli import console
from fedfuse.cli.options import typer
from fedfuse.core.messages import Brief
from fedfuse.core.registry import all_methods
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.data import source_names
from fedfuse.errors import QuorumLost
from fedfuse.models import model_names
from fedfuse.training.round import client_round

FILE = """
rounds = 1
seeds = [0, 1]
[data]
clients = 3
train_limit = 90
test_limit = 60
[model]
name = "mlp"
hidden = [4]
[[methods]]
name = "fedavg"
[[methods]]
name = "fednova"
"""

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, classes, width=4):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x):
        return self.body(x)
"""


@pytest.fixture
def fedfuse(fedfuse: Fedfuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fedfuse:
    """Types one command in a fresh folder that holds one experiment."""
    (tmp_path / "study.toml").write_text(FILE)
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    return fedfuse


def run(fedfuse: Fedfuse, *words: str) -> Said:
    return fedfuse("run", "study.toml", "--workers", "0", *words)


# run


def test_run_ends_with_a_table_and_says_where_the_files_are(fedfuse: Fedfuse, tmp_path: Path) -> None:
    said = run(fedfuse)
    assert said.code == 0
    assert "\r" not in said.err  # no bars where nobody looks on, only lines
    assert said.err.splitlines()[0] == "study: 4 runs of a method on a seed, into runs/study"
    for word in ("accuracy", "fedavg", "fednova", "±", "mean ± standard deviation over 2 seeds"):
        assert word in said.out
    assert said.out.splitlines()[-1] == "files: runs/study   page: runs/study/report.html"
    assert "<html" in (tmp_path / "runs" / "study" / "report.html").read_text()
    assert "runs/study-2" in run(fedfuse).out


def test_json_is_one_value_with_the_rows_of_the_results(fedfuse: Fedfuse, tmp_path: Path) -> None:
    said = run(fedfuse, "--json", "--no-page", "--out", "here")
    told = json.loads(said.out)
    rows = json.loads((tmp_path / "here" / "results.json").read_text())["rows"]
    assert told == {
        "name": "study",
        "folder": "here",
        "page": None,
        "rows": [{"experiment": "study", **row} for row in rows],
    }


def test_a_rerun_trains_nobody(fedfuse: Fedfuse) -> None:
    def trained(*words: str) -> list[tuple[int, int]]:
        out = json.loads(run(fedfuse, "--json", "--no-page", *words).out)["folder"]
        lines = [json.loads(line) for line in (Path(out) / "ledger.jsonl").read_text().splitlines()]
        return [(line["trained"], line["remembered"]) for line in lines]

    assert trained() == [(3, 0), (0, 3), (3, 0), (0, 3)]  # seed by seed: fedavg trains, fednova remembers
    assert trained() == [(0, 3)] * 4
    assert trained("--no-memo") == [(3, 0)] * 4


def test_resume_goes_on_and_more_may_be_asked(fedfuse: Fedfuse, tmp_path: Path) -> None:
    run(fedfuse, "--out", "here", "--no-page")
    said = run(fedfuse, "--out", "here", "--no-page", "--resume", "--set", "rounds=2", "--json")
    assert [row["round"] for row in json.loads(said.out)["rows"]] == [1, 2] * 4
    refused(run(fedfuse, "--resume"), "there is no run called 'study' in runs to resume; name its directory with --out")


def test_to_resume_without_a_directory_is_to_go_on_with_the_last_run(fedfuse: Fedfuse) -> None:
    for _ in range(2):
        run(fedfuse, "--no-page")
    said = run(fedfuse, "--no-page", "--resume", "--set", "rounds=2", "--json")
    assert json.loads(said.out)["folder"] == "runs/study-2"
    assert [row["round"] for row in json.loads(said.out)["rows"]] == [1, 2] * 4


def test_a_sweep_fills_one_folder_and_makes_one_page(fedfuse: Fedfuse, tmp_path: Path) -> None:
    words = ("--set", "sweep.local.epochs=[1, 2]", "--set", "seeds=[0]", "--out", "both")
    told = json.loads(run(fedfuse, *words, "--json").out)
    assert [row["experiment"] for row in told["rows"]] == ["study-1"] * 2 + ["study-2"] * 2
    assert sorted(p.name for p in (tmp_path / "both").iterdir()) == ["report.html", "study-1", "study-2"]
    (tmp_path / "both" / "study-2" / "config.toml").unlink()
    (tmp_path / "both" / "study-2" / "ledger.jsonl").unlink()
    assert run(fedfuse, *words, "--resume", "--no-page").code == 0


def test_check_trains_nothing(fedfuse: Fedfuse, tmp_path: Path) -> None:
    said = run(fedfuse, "--check")
    assert said.code == 0
    assert said.out.startswith("study.toml is sound: 1 experiment, 4 runs of a method on a seed\nstudy may take about ")
    told = json.loads(run(fedfuse, "--check", "--json").out)
    experiments = [{"name": "study", "methods": ["fedavg", "fednova"], "seeds": [0, 1]}]
    seconds = [experiment.pop("seconds") for experiment in told["experiments"]]
    assert [sorted(s) for s in seconds] == [["fedavg", "fednova"]]
    assert told == {"ok": True, "experiments": experiments, "data_missing": []}
    assert not (tmp_path / "runs").exists()


def test_check_needs_no_data_set_on_this_machine(fedfuse: Fedfuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDFUSE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "nowhere")
    words = ("--check", "--set", "data.source=cifar100", "--set", "model.name=lenet", "--set", "model.hidden=[8, 8]")
    said = run(fedfuse, *words)
    assert said.code == 0
    assert said.out.endswith(
        "cifar100 is not whole on this machine: its form was checked, not its rows, which a run needs\n"
    )
    assert json.loads(run(fedfuse, *words, "--json").out)["data_missing"] == ["cifar100"]
    refused(run(fedfuse, *words, "--set", "data.clients=60000"), "60000")


@pytest.mark.parametrize("check", [["--check"], []])
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("rouns=1", "there is no key 'rouns'; did you mean 'rounds'?"),
        ("methods.0.name=fedavgg", "there is no method 'fedavgg'; did you mean 'fedavg'?"),
        ("methods.0.unifrm=true", "method 'fedavg' has no option 'unifrm'; did you mean 'uniform'?"),
        ("model.name=mlpp", "model 'mlpp' is unknown"),
        ("model.hiden=[3]", "model 'mlp' has no option 'hiden'; did you mean 'hidden'?"),
        ("model.classes=3", "gives outputs of shape (2, 3) for two rows, expected (2, 10)"),
        ('model={name="mine:Net", widht=3}', "model 'mine:Net' has no option 'widht'; did you mean 'width'?"),
        ("data.source=digit", "the data source 'digit' is unknown"),
        ('data.partition={kind="dirichlet", alpha=0}', "it is 0, expected a number above 0"),
        ("data.clients=91", "91 clients are to share 90 rows"),
        ("data.source=broken.npz", "broken.npz"),
    ],
)
def test_bad_input_is_one_sentence_before_any_training(
    fedfuse: Fedfuse, tmp_path: Path, said: str, expected: str, check: list[str]
) -> None:
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 and then nothing")
    refused(run(fedfuse, "--out", "here", "--set", said, *check), expected)
    assert not (tmp_path / "here").exists()


def test_a_network_from_the_current_folder(fedfuse: Fedfuse, tmp_path: Path) -> None:
    said = run(fedfuse, "--out", "here", "--no-page", "--set", 'model={name="mine:Net", width=3}')
    assert said.code == 0
    model = str(tmp_path / "here" / "models" / "fedavg-0.safetensors")
    refused(fedfuse("evaluate", model, "--data", "digits"), "'mine:Net' is not one of fedfuse's and was not named here")
    assert fedfuse("evaluate", model, "--data", "digits", "--model", "mine:Net").code == 0


def test_run_directories_that_cannot_be_used(fedfuse: Fedfuse, tmp_path: Path) -> None:
    run(fedfuse, "--out", "here", "--no-page")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "here").rglob("*")}
    refused(
        run(fedfuse, "--out", "here"), "here holds a run already; continue it with --resume or choose another --out"
    )
    refused(
        run(fedfuse, "--out", "here", "--resume", "--set", "local.epochs=9"),
        "here holds another run: local.epochs was 1 and is now 9",
    )
    refused(run(fedfuse, "--out", "cache", "--resume"), "cache is not a run directory")
    refused(run(fedfuse, "--out", "study.toml/run"), "cannot write study.toml/run: Not a directory")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "here").rglob("*")} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere: a read-only folder was not tried")
def test_a_read_only_directory(fedfuse: Fedfuse, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    refused(run(fedfuse, "--out", "locked/run"), "Permission denied")


def test_a_directory_where_nobody_may_write(fedfuse: Fedfuse) -> None:
    refused(run(fedfuse, "--out", "/proc/run"), "cannot write /proc/run")


def test_a_full_disk_stops_the_run_and_loses_nothing(fedfuse: Fedfuse, tmp_path: Path) -> None:
    """Files may not outgrow a limit: the ledger soon does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3500, before[1]))
    try:
        said = run(fedfuse, "--out", "here", "--no-page", "--no-memo", "--set", "rounds=5")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said.code == 2
    assert "error: cannot write here" in said.err
    assert "File too large; free some space" in said.err.splitlines()[-1]
    told = json.loads(run(fedfuse, "--out", "here", "--no-page", "--resume", "--set", "rounds=5", "--json").out)
    whole = json.loads(run(fedfuse, "--out", "whole", "--no-page", "--set", "rounds=5", "--json").out)
    seconds = {"train_seconds", "server_seconds", "diagnostic_seconds"}
    assert [{k: v for k, v in row.items() if k not in seconds} for row in told["rows"]] == [
        {k: v for k, v in row.items() if k not in seconds} for row in whole["rows"]
    ]


def test_any_other_trouble_with_a_file_is_one_sentence_too(fedfuse: Fedfuse, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise PermissionError(13, "Permission denied", "/somewhere")

    monkeypatch.setattr("fedfuse.experiment.doctor.examine", broken)
    refused(fedfuse("doctor"), "/somewhere cannot be used: Permission denied")


def test_a_lost_quorum_is_code_3(fedfuse: Fedfuse) -> None:
    said = run(fedfuse, "--out", "here", "--set", "local.optimizer.lr=1e30", "--set", "local.epochs=3")
    assert said.code == QuorumLost.exit_code == 3
    assert "0 of 3 clients were admitted and the quorum is 50%" in said.err
    assert "not finite" in said.err


def test_ctrl_c_says_how_to_go_on(fedfuse: Fedfuse, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedfuse.experiment.run.execute", interrupted)
    said = run(fedfuse, "--out", "my runs", "--set", 'name="x y"')
    assert said.code == 1
    how = """fedfuse run study.toml --set 'name="x y"' --out 'my runs' --resume"""
    assert said.err == f"error: stopped; continue with: {how}\n"


def test_bars_where_a_person_looks_on(fedfuse: Fedfuse, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=seen, force_terminal=True, width=120))
    said = run(fedfuse, "--no-page", "--json")
    for word in ("study: methods × seeds", "fednova, seed 1", "rounds", "clients", "client-0", "accuracy"):
        assert word in seen.getvalue(), word
    assert json.loads(said.out)["name"] == "study"


# demo


def test_the_demo_runs_offline_and_ends_with_a_page(fedfuse: Fedfuse, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedfuse.experiment import config

    load = config.load_experiments
    small = ["rounds=1", "seeds=[0]", "local.epochs=1", "data.train_limit=300", "data.test_limit=50"]
    monkeypatch.setattr("fedfuse.experiment.jobs.load_experiments", lambda path, sets: load(path, [*sets, *small]))
    said = fedfuse("demo", "--workers", "0")
    assert said.code == 0
    assert said.out.splitlines()[-1] == "files: runs/demo   page: runs/demo/report.html"
    for name in ("fedavg", "swa", "feddu", "rklb", "fedlpa", "ensemble", "ams", "head refitted", "ridge"):
        assert name in said.out
    assert Path("runs/demo/report.html").exists()


# report


def test_report_makes_one_page_of_several_runs(fedfuse: Fedfuse, tmp_path: Path) -> None:
    for name in ("one", "two"):
        run(fedfuse, "--out", name, "--no-page")
    said = fedfuse("report", "one", "two", "-o", "both.html")
    assert (said.code, said.out) == (0, "page: both.html\n")
    refused(fedfuse("report", "nowhere"), "nowhere is not a directory")
    refused(fedfuse("report", "one", "-o", "study.toml/page.html"), "study.toml")


# methods


def test_methods_lists_all_and_tells_of_one(fedfuse: Fedfuse) -> None:
    listed = fedfuse("methods").out
    for name, method in all_methods().items():
        assert name in listed
        told = fedfuse("methods", name)
        assert told.code == 0
        assert name in told.out
        for option in method.options:
            assert option.name in told.out
        assert "clients reveal:" in told.out


def test_methods_as_json(fedfuse: Fedfuse) -> None:
    told = {entry["name"]: entry for entry in json.loads(fedfuse("methods", "--json").out)}
    assert told.keys() == all_methods().keys()
    assert told["scaffold"]["reveals"] == ["mean gradient of the client's rows"]
    [prox] = json.loads(fedfuse("methods", "fedprox", "--json").out)
    assert prox["options"][0]["default"] == 0.01
    refused(fedfuse("methods", "fedprx"), "there is no method 'fedprx'; did you mean 'fedprox'?")


# evaluate


def test_evaluate_scores_what_the_run_scored(fedfuse: Fedfuse) -> None:
    rows = json.loads(run(fedfuse, "--out", "here", "--no-page", "--json").out)["rows"]
    model = "here/models/fedavg-0.safetensors"
    told = json.loads(fedfuse("evaluate", model, "--data", "digits", "--test-limit", "60", "--json").out)
    assert told[model]["accuracy"] == rows[0]["accuracy"]
    assert told[model]["ece"] == rows[0]["ece"]
    shown = fedfuse("evaluate", model, "here/models/fednova-1.safetensors", "--data", "digits", "--bins", "3").out
    assert shown.count(".safetensors") == 2
    assert "Brier" in shown
    assert "digits, its test rows: 359 rows" in shown


def test_evaluate_refuses_what_does_not_fit(fedfuse: Fedfuse, tmp_path: Path) -> None:
    run(fedfuse, "--out", "here", "--no-page")
    rows = np.zeros((4, 5), np.float32)
    np.savez(tmp_path / "five.npz", x_train=rows, y_train=np.arange(4), x_test=rows, y_test=np.arange(4))
    model = "here/models/fedavg-0.safetensors"
    refused(fedfuse("evaluate", model, "--data", "five.npz"), "cannot score five.npz, whose rows are 5 in 10 classes")
    refused(
        fedfuse("evaluate", "study.toml", "--data", "digits"), "study.toml is neither a model nor an update of fedfuse"
    )
    refused(fedfuse("evaluate", "nowhere.safetensors", "--data", "digits"), "nowhere.safetensors")
    refused(fedfuse("evaluate", model, "--data", "digitz"), "did you mean 'digits'?")


# partition


def test_partition_shows_who_holds_what(fedfuse: Fedfuse, tmp_path: Path) -> None:
    said = fedfuse("partition", "study.toml", "--set", 'data.partition={kind="shards"}')
    assert said.code == 0
    assert "client-02" in said.out
    assert said.out.splitlines()[-1] == "picture: partition.png"
    assert (tmp_path / "partition.png").read_bytes().startswith(b"\x89PNG")
    told = json.loads(fedfuse("partition", "study.toml", "--seed", "7", "-o", "other.png", "--json").out)
    assert sum(map(sum, told["clients"].values())) == 90
    assert told["picture"] == "other.png"
    refused(fedfuse("partition", "study.toml", "-o", "study.toml/x.png"), "study.toml/x.png")
    refused(fedfuse("partition", "study.toml", "--set", "sweep.rounds=[1, 2]"), "sweeps over 2 experiments")


# reproduce


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shelf" / "paper").mkdir(parents=True)
    (tmp_path / "shelf" / "paper" / "table1.cpu.toml").write_text("# Table 1 in small.\n" + FILE)
    (tmp_path / "shelf" / "notes.toml").write_text("")
    monkeypatch.setenv("FEDFUSE_EXPERIMENTS", str(tmp_path / "shelf"))


@pytest.mark.usefixtures("shelf")
def test_reproduce_lists_and_runs(fedfuse: Fedfuse, tmp_path: Path) -> None:
    listed = {entry["name"]: entry for entry in json.loads(fedfuse("reproduce", "--json").out)}
    assert listed["paper/table1"] == {
        "name": "paper/table1",
        "scales": ["cpu"],
        "result": "",
        "summary": "Table 1 in small.",
    }
    assert "notes" not in listed
    assert "Table 1 in small." in fedfuse("reproduce").out
    said = fedfuse("reproduce", "paper/table1", "--workers", "0", "--set", "seeds=[0]")
    assert said.code == 0
    assert (tmp_path / "runs" / "paper" / "table1" / "report.html").exists()
    assert fedfuse("reproduce", "paper/table1", "--workers", "0", "--set", "seeds=[0]", "--resume").code == 0


@pytest.mark.usefixtures("shelf")
def test_reproduce_explains_what_it_cannot_find(fedfuse: Fedfuse, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(fedfuse("reproduce", "paper/table1", "--scale", "paper"), "exists at the scales cpu, not paper")
    refused(fedfuse("reproduce", "paper/table2"), "nothing to reproduce is called 'paper/table2'; did you mean 'paper/")
    refused(fedfuse("reproduce", "paper/table1", "--scale", "moon"), "--scale is 'moon', expected cpu or paper")
    monkeypatch.setenv("FEDFUSE_EXPERIMENTS", "nowhere")
    refused(fedfuse("reproduce"), "there is no folder of experiments at nowhere")


CLAIMS = """[[claims]]
id = "a"
paper = "X"
place = "Table 1"
says = "fedavg is level with itself"
file = "paper/table1"
first = ["fedavg"]
second = ["fedavg"]
direction = "level"
margin = 1.0
"""


@pytest.mark.usefixtures("shelf")
def test_reproduce_runs_all_stores_and_judges(fedfuse: Fedfuse, tmp_path: Path) -> None:
    (tmp_path / "shelf" / "claims.toml").write_text(CLAIMS)
    (tmp_path / "shelf" / "README.md").write_text("<!-- stored paper/table1 -->\n\n<!-- /stored -->\n")
    (first,) = json.loads(fedfuse("reproduce", "--all", "--workers", "0", "--json").out)
    assert (first["name"], first["outcome"]) == ("paper/table1", "stored")
    assert "nothing is missing" in fedfuse("reproduce", "--all").out
    assert "README.md" in fedfuse("reproduce", "--store").out
    assert "| fedavg |" in (tmp_path / "shelf" / "README.md").read_text()
    told = json.loads(fedfuse("reproduce", "--verdicts", "--out", "judged", "--json").out)
    assert [claim["id"] for claim in told["claims"]] == ["a"]
    assert told["claims"][0]["verdict"] != "not run"
    assert "fedavg is level with itself" in (tmp_path / "judged" / "reproduction.md").read_text()
    assert "fedavg is level with itself" in (tmp_path / "judged" / "reproduction.html").read_text()


@pytest.mark.usefixtures("shelf")
def test_reproduce_refuses_flags_that_exclude_each_other(fedfuse: Fedfuse) -> None:
    refused(fedfuse("reproduce", "--all", "--verdicts"), "--all and --verdicts were given together")
    refused(fedfuse("reproduce", "paper/table1", "--all"), "'paper/table1' was given with --all")
    refused(fedfuse("reproduce", "--hours", "2"), "--hours says when --all stops")
    refused(fedfuse("reproduce", "--verdicts"), "claims.toml cannot be read")
    refused(fedfuse("reproduce", "paper/table1", "--store"), "paper/table1 is not finished in runs/paper/table1")


# doctor, help


def test_doctor_tells_of_software_machine_and_data(fedfuse: Fedfuse) -> None:
    told = json.loads(fedfuse("doctor", "--json").out)
    assert told.keys() == {"software", "machine", "data"}
    assert told["data"].keys() == set(source_names())
    assert told["data"]["digits"] == "scikit-learn"
    assert told["machine"]["this folder"] == "can be written"
    shown = fedfuse("doctor").out
    for word in ("torch", "free disk here", "scikit-learn", "mnist"):
        assert word in shown


def commands() -> dict[str, click.Command]:
    group = typer.main.get_command(cli.app)
    assert isinstance(group, click.Group)
    return group.commands


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_and_every_option_is_explained(fedfuse: Fedfuse, name: str) -> None:
    said = fedfuse(name, "--help")
    assert said.code == 0
    command = commands()[name]
    assert command.help
    assert command.help.splitlines()[0] in " ".join(said.out.split())
    arguments = [p for p in command.params if isinstance(p, click.Argument)]
    options = [p for p in command.params if isinstance(p, click.Option)]
    for argument in arguments:
        assert f"{str(argument.name).upper()} " in command.help, f"{name}: {argument.name} is not explained"
    for option in options:
        assert option.help, f"{name}: {option.name} is not explained"
        assert all(word in said.out for word in option.opts)
    assert "--json" in [word for option in options for word in option.opts]


def test_help_lists_the_commands_and_a_wrong_one_is_refused(fedfuse: Fedfuse) -> None:
    said = fedfuse("--help")
    assert all(name in said.out for name in commands())
    assert fedfuse("runn").code == 2
    assert fedfuse("run").code == 2
    assert fedfuse("run", "study.toml", "--workers", "-1").code == 2
    assert fedfuse("--version").out.startswith("fedfuse 0.")


def test_models_are_listed_with_their_options(fedfuse: Fedfuse) -> None:
    told = {entry["name"]: entry for entry in json.loads(fedfuse("models", "--json").out)}
    assert told.keys() == set(model_names())
    options = {option["name"]: option for option in told["mlp"]["options"]}
    assert (options["hidden"]["default"], options["inputs"]["default"]) == ([100], "from the data")
    assert all(option["text"] for entry in told.values() for option in entry["options"])
    assert "units of each hidden layer" in " ".join(fedfuse("models", "mlp").out.split())
    refused(fedfuse("models", "mpl"), "did you mean mlp?")


OWN_METHOD = """
from dataclasses import dataclass
from fedfuse.extend import Mean, Recipe, TaskLoss

@dataclass(frozen=True)
class Doubled:
    base: TaskLoss = TaskLoss()

    def __call__(self, local, batch):
        return 2 * self.base(local, batch)

def mine(uniform: bool = False) -> Recipe:
    '''Twice the loss.'''
    return Recipe(objective=Doubled(), aggregate=Mean(uniform))
"""


def test_a_method_of_ones_own_runs_from_a_file_and_fuses(fedfuse: Fedfuse, tmp_path: Path) -> None:
    (tmp_path / "my_method.py").write_text(OWN_METHOD)
    (tmp_path / "own.toml").write_text(FILE.replace('name = "fednova"', 'name = "my_method.py:mine"\nuniform = true'))
    said = fedfuse("run", "own.toml", "--json", "--workers", "2", "--no-page")
    assert said.code == 0, said.err
    assert {row["label"] for row in json.loads(said.out)["rows"]} == {"fedavg", "mine(uniform=True)"}
    assert "Twice the loss." in fedfuse("methods", "my_method:mine").out
    refused(
        fedfuse("run", "own.toml", "--set", "methods.1.unifrom=1"), "has no option 'unifrom'; did you mean 'uniform'"
    )
    words = ("--data", "digits", "--train-limit", "60", "--method", "my_method:mine")
    for site in "ab":
        assert fedfuse("update", *words, "-o", f"{site}.safetensors").code == 0
    fused = fedfuse("fuse", "a.safetensors", "b.safetensors", "--method", "my_method:mine", "-o", "g.safetensors")
    assert fused.code == 0, fused.err


def test_a_check_says_how_long_it_may_take(fedfuse: Fedfuse) -> None:
    assert "study may take about " in fedfuse("run", "study.toml", "--check").out
    told = json.loads(fedfuse("run", "study.toml", "--check", "--json").out)
    assert told["experiments"][0]["seconds"].keys() == {"fedavg", "fednova"}


def test_a_check_says_where_feddu_is_fedavg(fedfuse: Fedfuse) -> None:
    """Everybody takes part, so the cohort's divergence from everybody is zero."""
    some = ("--set", "data.server_fraction=0.2", "--set", 'methods=[{name="feddu"}]', "--set", "seeds=[0]")
    assert "feddu: everybody takes part" in fedfuse("run", "study.toml", "--check", *some).out
    fewer = ("--set", "clients_per_round=1")
    assert "everybody" not in fedfuse("run", "study.toml", "--check", *some, *fewer).out


def test_a_long_run_is_announced(fedfuse: Fedfuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedfuse.experiment.run.estimate_seconds", lambda *_: {"fedavg": 900.0, "dense": 9000.0})
    said = run(fedfuse, "--no-page", "--set", "seeds=[0]")
    assert "this may take about 2 h 45 min (dense 2 h 30 min, fedavg 15 min); Ctrl-C stops it" in said.err
    monkeypatch.setattr("fedfuse.experiment.run.estimate_seconds", lambda *_: {"fedavg": 30.0})
    assert "may take" not in run(fedfuse, "--no-page", "--set", "seeds=[0]").err


WITHOUT_TORCH = {
    "--version": 0,
    "--help": 0,
    "run --help": 0,
    "methods": 0,
    "methods fedlpa": 0,
    "methods fedlpaa": 2,
    "run nowhere.toml": 2,
    "run study.toml --bogus": 2,
    "run study.toml --set rouns=3": 2,
    "run study.toml --set data.partition.kind=dirichle": 2,
    "run study.toml --set local.optimizer.name=sdg": 2,
    "run study.toml --set methods.0.name=fedavgg": 2,
    "run study.toml --set methods.0.unifrom=true": 2,
    "run study.toml --check --set seeds=[]": 2,
    "partition study.toml --set dta.clients=3": 2,
    "flower study.toml --set dta.clients=3": 2,
    "update --data digits -o a.safetensors --method fedavgg": 2,
    "fuse a.safetensors -o g.safetensors --method fedavgg": 2,
}


def test_help_and_errors_of_the_command_line_do_not_wait_for_torch(tmp_path: Path) -> None:
    """Torch takes seconds to import; whoever misspelt a word should not wait for it."""
    (tmp_path / "study.toml").write_text(FILE)
    program = f"""
import sys
from fedfuse import cli
for line, expected in {WITHOUT_TORCH!r}.items():
    sys.argv = ["fedfuse", *line.split()]
    try:
        cli.main()
    except SystemExit as end:
        assert end.code == expected, (line, end.code)
    assert "torch" not in sys.modules, line
print("all of them")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("all of them\n"), done.stderr


def test_a_run_that_lost_a_client_to_a_crash_is_a_success_only_if_its_file_allows_it(
    fedfuse: Fedfuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(work: Work, brief: Brief, client: str, rows: Rows, **more: Any) -> Any:
        if client == "client-01" and brief.round == 0:
            raise MemoryError("no room")
        return client_round(work, brief, client, rows, **more)

    monkeypatch.setattr("fedfuse.engines.local.client_round", crash)
    said = run(fedfuse, "--no-memo", "--set", "seeds=[0]")
    assert said.code == 4
    assert "client-01 in round 1 of fedavg, seed 0 (MemoryError: no room)" in said.err
    assert "set server.allow_dropped = true to allow it" in said.err
    assert (tmp_path / "runs" / "study" / "results.json").exists()
    said = run(fedfuse, "--no-memo", "--set", "seeds=[0]", "--set", "server.allow_dropped=true", "--resume")
    assert said.code == 0
    assert said.err.splitlines()[-1].startswith("warning: rounds went on without clients that crashed: client-01")


def test_a_run_tells_whom_the_door_weakened(fedfuse: Fedfuse, tmp_path: Path) -> None:
    strict = ("data.clients=5", "server.bounds.ratio=1.001", "server.bounds.spread=0", "seeds=[0]", "model.hidden=[8]")
    said = run(fedfuse, "--no-memo", *(word for change in strict for word in ("--set", change)))
    assert said.code == 0
    folder = tmp_path / "runs" / "study"
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert all(row["clipped"] for row in rows)
    assert "clipped in round 1 of fedavg, seed 0 (move of" in said.err
    assert "Clipped: let in" in (folder / "report.html").read_text(encoding="utf-8")
