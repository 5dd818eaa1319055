from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from fedfuse.errors import ConfigError
from fedfuse.experiment.config import Experiment, load_experiment
from fedfuse.flower.app import write_app

Tiny = Callable[..., Experiment]


def test_the_app_has_the_experiment_and_both_sides(tiny: Tiny, tmp_path: Path) -> None:
    experiment = tiny("fedavg", "scaffold", name="One shot (α=0.1)")
    made = [str(path.relative_to(tmp_path / "app")) for path in write_app(experiment, tmp_path / "app", tmp_path)]
    package = [f"federation/{name}" for name in ("__init__.py", "client_app.py", "experiment.toml", "server_app.py")]
    assert made == ["README.md", *package, "pyproject.toml"]
    assert load_experiment(tmp_path / "app" / "federation" / "experiment.toml") == experiment
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert project["project"]["name"] == "one-shot-0-1"
    components = project["tool"]["flwr"]["app"]["components"]
    assert components == {"serverapp": "federation.server_app:app", "clientapp": "federation.client_app:app"}


def test_flower_accepts_the_app(tiny: Tiny, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from flwr.cli.config_utils import load_and_validate

    write_app(tiny(), tmp_path / "app", tmp_path)
    config, warnings = load_and_validate(tmp_path / "app" / "pyproject.toml")
    assert config["tool"]["flwr"]["app"]["config"] == {
        "out": "",
        "resume": False,
        "deadline": 0.0,
        "wait": 0.0,
    }
    assert not warnings


def test_modules_of_the_users_own_come_along(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "my_net.py").write_text(
        "from torch import nn\n\n\ndef net(classes):\n    return nn.Linear(64, classes)\n"
    )
    (tmp_path / "my_data").mkdir()
    (tmp_path / "my_data" / "__init__.py").write_text("")
    experiment = tiny(model={"name": "my_net:net"}, data={"source": "my_data.clinic:load"})
    made = {path.name for path in write_app(experiment, tmp_path / "app", tmp_path)}
    assert "my_net.py" in made
    assert (tmp_path / "app" / "my_data" / "__init__.py").exists()


def test_a_module_that_is_nowhere_is_said(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'nowhere_to_be_found'"):
        write_app(tiny(model={"name": "nowhere_to_be_found:Net"}), tmp_path / "app", tmp_path)
    assert not (tmp_path / "app").exists()


def test_nothing_is_overwritten(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="--app"):
        write_app(tiny(), tmp_path / "app", tmp_path)
