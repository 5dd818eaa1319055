"""A Flower app folder for an experiment: what `flwr run` sends to a SuperLink and its SuperNodes."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.experiment.config import Experiment, file_name, to_toml
from fedfuse.flower.version import TESTED

PACKAGE = "federation"
SERVER = '''"""The server: the experiment beside this file, on whatever grid Flower hands over."""

from pathlib import Path

from fedfuse.flower import server_app

app = server_app(Path(__file__).with_name("experiment.toml"))
'''
CLIENT = '''"""A site: it makes its work from the experiment beside this file, and trains on rows of its own."""

from pathlib import Path

from fedfuse.flower import site_app

app = site_app(Path(__file__).with_name("experiment.toml"))
'''
README = """# {name}

A fedfuse experiment as a Flower {flower} app. The experiment is `federation/experiment.toml`.

    flwr run . SUPERLINK --stream
    flwr run . SUPERLINK --stream --run-config "out='/data/runs/{name}' resume=true deadline=600.0"

`out` is the run directory on the SuperLink's machine, `resume` goes on with what is in it, `deadline` is how many
seconds a round waits for its clients, and `wait` how many the beginning waits for all sites; 0 takes what the
experiment's `server.deadline` and `server.wait` say.

Each SuperNode points to its own rows, by
`--node-config 'data="/data/mine.npz" name="north"'` or by `FEDFUSE_SITE_DATA`. fedfuse must be installed on every
machine; set `FLWR_TELEMETRY_ENABLED=0`, `FLWR_DISABLE_UPDATE_CHECK=1` and
`FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1` so that nothing is sent, looked up or installed while it runs.
"""


def write_app(experiment: Experiment, folder: Path, here: Path | None = None) -> list[Path]:
    """Write an app folder; modules of the user's own that the experiment names are copied into it.

    Args:
        experiment: what the app runs.
        folder: where; it must not hold anything yet.
        here: where the user's own modules lie, by default the current folder.

    Returns:
        The files.

    Raises:
        ConfigError: if the folder is not empty or cannot be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; choose another --app folder")
    modules = list(_modules(experiment, here or Path.cwd()))
    texts = {
        "pyproject.toml": _project(experiment),
        "README.md": README.format(name=experiment.name, flower=TESTED),
        f"{PACKAGE}/__init__.py": f'"""{experiment.name} as a Flower app."""\n',
        f"{PACKAGE}/server_app.py": SERVER,
        f"{PACKAGE}/client_app.py": CLIENT,
        f"{PACKAGE}/experiment.toml": experiment.to_toml(),
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for path in modules:
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, folder / path.name)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _project(experiment: Experiment) -> str:
    apps = {f"{side}app": f"{PACKAGE}.{side}_app:app" for side in ("server", "client")}
    name = file_name(experiment.name).lower().replace("_", "-").replace("+", "-").replace(".", "-").strip("-")
    return to_toml(
        {
            "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
            "project": {
                "name": name or "experiment",
                "version": "1.0.0",
                "description": f"The fedfuse experiment {experiment.name}",
                "license": "Apache-2.0",
                "dependencies": ["fedfuse[flower]"],
            },
            "tool": {
                "hatch": {"build": {"targets": {"wheel": {"packages": ["."]}}}},
                "flwr": {
                    "app": {
                        "publisher": "fedfuse",
                        "components": apps,
                        "config": {"out": "", "resume": False, "deadline": 0.0, "wait": 0.0},
                    }
                },
            },
        }
    )


def _modules(experiment: Experiment, here: Path) -> Iterator[Path]:
    """The user's own modules that the experiment names and that lie here, each once."""
    named = {name for m in (experiment.model, *experiment.models) for name in Spec(m.name, m.options).foreign}
    named |= {source for source in (experiment.data.source, experiment.data.unlabelled) if source and ":" in source}
    for top in sorted({name.partition(":")[0].partition(".")[0] for name in named}):
        found = [path for path in (here / f"{top}.py", here / top) if path.exists()]
        if not found and importlib.util.find_spec(top) is None:
            raise ConfigError(f"the experiment names {top!r}, which is neither in {here} nor installed")
        yield from found[:1]
