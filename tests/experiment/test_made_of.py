"""What a run is made of: edits between two runs are trained, not remembered, and end a run that goes on.

Everything is typed, in a process of its own: edits must meet modules that are not loaded yet.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedfuse.core.rows import Rows
from fedfuse.data import load
from fedfuse.engines.code import PACKAGE
from fedfuse.errors import ConfigError
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.prepare import GivenObjects
from fedfuse.experiment.run import execute
from fedfuse.experiment.rundir import RECORD as MADE_OF

FILE = """
rounds = 1
[data]
source = "mine_rows:rows"
clients = 2
[model]
name = "mine_net:Net"
[local]
epochs = 2
optimizer = { lr = 0.5 }
[[methods]]
name = "mine_method.py:mine"
"""

FILES = {
    "mine_method.py": """
from dataclasses import dataclass
from fedfuse.core.recipe import Recipe
from fedfuse.server.aggregate.mean import Mean
from mine_losses import loss

@dataclass(frozen=True)
class Mine:
    def __call__(self, local, batch):
        return loss(local.predict(batch[0]), batch[1])

def mine() -> Recipe:
    return Recipe(aggregate=Mean(), objective=Mine())
""",
    "mine_losses.py": """
from torch.nn import functional as F

def loss(logits, y):
    from mine_numbers import constants
    return constants.SCALE * F.cross_entropy(logits, y)
""",
    "mine_numbers/__init__.py": "",
    "mine_numbers/constants.py": "SCALE = 1.0\n",
    "mine_net/__init__.py": "from .net import Net\n",
    "mine_net/net.py": """
from torch import nn
from . import blocks

class Net(nn.Module):
    def __init__(self, inputs, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 8), blocks.activation(), nn.Linear(8, classes))

    def forward(self, x):
        return self.body(x)
""",
    "mine_net/blocks.py": "from torch.nn import ReLU as activation\n",
    "mine_rows.py": """
import numpy as np

def rows():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(80, 6)).astype("float32")
    shift = 0
    y = (x[:, :3].argmax(1) + shift) % 3
    return x[:60], y[:60], x[60:], y[60:]
""",
}

EDITS = {  # a helper's helper, a package's module, a function that gives rows
    "mine_numbers/constants.py": ("1.0", "0.01"),
    "mine_net/blocks.py": ("ReLU", "Tanh"),
    "mine_rows.py": ("shift = 0", "shift = 1"),
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "x.toml").write_text(FILE)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def fedfuse(home: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedfuse", *words]
    known = {**os.environ, "XDG_CACHE_HOME": str(home / "cache"), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=home, env=known, capture_output=True, text=True, check=False)


def run(home: Path, out: str, *words: str, **environment: str) -> dict[str, Any]:
    """The last line of a run's ledger."""
    done = fedfuse(home, "run", "x.toml", "--out", out, "--workers", "0", "--no-page", *words, **environment)
    assert done.returncode == 0, done.stderr
    line: dict[str, Any] = json.loads((home / out / "ledger.jsonl").read_text().splitlines()[-1])
    return line


def counts(line: dict[str, Any]) -> tuple[int, int]:
    return line["trained"], line["remembered"]


def test_what_was_edited_is_trained_and_not_remembered(home: Path) -> None:
    assert counts(run(home, "one")) == (2, 0)
    assert counts(run(home, "same")) == (0, 2)
    for number, (file, change) in enumerate(EDITS.items()):
        edit(home / file, *change)
        after, plain = run(home, f"after-{number}"), run(home, f"plain-{number}", "--no-memo")
        assert counts(after) == (2, 0), file
        assert after["nll"] == plain["nll"]


def test_a_line_of_ours_that_was_edited_is_trained_and_not_remembered(home: Path) -> None:
    copied = shutil.copytree(PACKAGE, home / "ours" / "fedfuse", ignore=shutil.ignore_patterns("__pycache__"))
    ours = {"PYTHONPATH": str(copied.parent)}
    assert counts(run(home, "one", **ours)) == (2, 0)
    assert counts(run(home, "same", **ours)) == (0, 2)
    with (copied / "tasks" / "classification.py").open("a") as file:
        file.write("\n# another thought\n")
    assert counts(run(home, "after", **ours)) == (2, 0)


def test_a_run_does_not_go_on_with_other_code_or_rows(home: Path) -> None:
    run(home, "one")
    before = (home / "one" / "ledger.jsonl").read_bytes()
    more = ("run", "x.toml", "--out", "one", "--workers", "0", "--no-page", "--resume", "--set", "rounds=2")
    for file, (old, new) in EDITS.items():
        edit(home / file, old, new)
        refused = fedfuse(home, *more)
        named = "data.source = 'mine_rows:rows'" if file == "mine_rows.py" else file
        assert refused.returncode == 2
        assert f"{named} changed; set it back" in refused.stderr
        assert refused.stderr.count("\n") == 1
        assert (home / "one" / "ledger.jsonl").read_bytes() == before
        edit(home / file, new, old)
    assert fedfuse(home, *more).returncode == 0


def test_a_method_that_is_asked_for_in_another_way_may_have_other_code(home: Path) -> None:
    """It is run again, alone."""
    run(home, "one")
    edit(home / "mine_losses.py", "constants.SCALE", "0.5 * constants.SCALE")
    assert counts(run(home, "one", "--resume", "--set", "methods.0.label=halved")) == (2, 0)


def test_code_of_ours_is_refused_by_version_and_digest(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    execute(tiny(), tmp_path, workers=0)
    path = tmp_path / MADE_OF
    told = json.loads(path.read_text())
    now, told["fedfuse"]["code"] = told["fedfuse"]["code"], "0123456789abcdef"
    path.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=rf"fedfuse was \S+ \(code 01234567\) and is now \S+ \(code {now[:8]}\)"):
        execute(tiny(rounds=3), tmp_path, workers=0, resume=True)
    path.write_text("{}!")
    with pytest.raises(ConfigError, match=rf"{MADE_OF} is damaged"):
        execute(tiny(rounds=3), tmp_path, workers=0, resume=True)
    path.unlink()  # as a directory from before there was such a record
    execute(tiny(rounds=3), tmp_path, workers=0, resume=True)
    assert json.loads(path.read_text())["fedfuse"]["code"] == now


def test_rows_given_as_an_object_are_told_apart_whatever_it_says_of_itself(
    tiny: Callable[..., Experiment], tmp_path: Path
) -> None:
    rows = load("digits", train_limit=60, test_limit=30)
    other = replace(rows, train=Rows(rows.train.x, rows.train.y.flip(0)))  # its facts have the sum of the first
    what = tiny(rounds=1, data={"source": rows.name, "clients": 2})
    for given, refused in ((rows, False), (rows, False), (other, True)):
        with pytest.raises(ConfigError, match="rows of data.source") if refused else nullcontext():
            objects = GivenObjects.of(data=given)
            execute(what, tmp_path / "run", workers=0, resume=(tmp_path / "run").exists(), given=objects)


def test_typed_code_counts_by_its_source_and_that_of_what_it_names(tmp_path: Path) -> None:
    """A script that is run again with more rounds is not another script; its network may be."""
    program = """
import sys, torch, fedfuse
SLOPE = 0.1

def activation(x):
    return torch.nn.functional.leaky_relu(x, SLOPE)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(64, 10)

    def forward(self, x):
        return activation(self.last(x.flatten(1)))

torch.manual_seed(0)
what = {"rounds": 1, "data": {"train_limit": 60, "test_limit": 30, "clients": 2}, "methods": [{"name": "fedavg"}]}
fedfuse.run(what, model=Net(), out="here", resume=len(sys.argv) > 1, workers=0, memo=False, progress=False)
"""

    def typed(text: str, *words: str) -> str:
        (tmp_path / "script.py").write_text(text)
        known = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        command = [sys.executable, "script.py", *words]
        return subprocess.run(command, cwd=tmp_path, env=known, capture_output=True, text=True, check=False).stderr

    assert typed(program) == ""
    assert typed(program.replace('"rounds": 1', '"rounds": 2'), "on") == ""
    for edited in (program.replace("0.1", "0.3"), program.replace("leaky_relu(x, SLOPE)", "relu(x)")):
        assert "Net changed" in typed(edited.replace('"rounds": 1', '"rounds": 3'), "on")
