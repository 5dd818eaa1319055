"""The command `fedfuse flower`: what it writes, what it says, and the code it ends with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedfuse import cli
from fedfuse.errors import ConfigError
from fedfuse.flower import version as flower_version

FILE = 'name = "small"\n[data]\nclients = 3\n[[methods]]\nname = "fedavg"\n'


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(FILE)
    return path


def test_it_writes_an_app(file: Path) -> None:
    said = CliRunner().invoke(cli.app, ["flower", str(file), "--set", "rounds=4", "--json"])
    assert said.exit_code == 0, said.output
    told = json.loads(said.output)
    assert told["app"] == "small-app"
    assert "rounds = 4" in Path("small-app/federation/experiment.toml").read_text()
    again = CliRunner().invoke(cli.app, ["flower", str(file)])
    assert isinstance(again.exception, ConfigError)
    assert "small-app is not empty" in str(again.exception)


def test_it_says_how_to_go_on(file: Path) -> None:
    said = CliRunner().invoke(cli.app, ["flower", str(file), "--app", "mine"])
    assert "run it with: flwr run mine SUPERLINK --stream" in said.output


def test_to_resume_it_must_be_told_where(file: Path) -> None:
    said = CliRunner().invoke(cli.app, ["flower", str(file), "--run", "--resume"])
    assert "there is no run called 'small' in runs to resume" in str(said.exception)


def test_without_the_right_flower_it_is_one_sentence(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_version, "version", lambda _: "1.30.0")
    said = CliRunner().invoke(cli.app, ["flower", str(file)])
    assert isinstance(said.exception, ConfigError)
    assert "Flower 1.30.0 is installed and fedfuse was tested with 1.41" in str(said.exception)
