"""What a run is made of: edits between two runs are trained, not remembered, and end a run that goes on.

Everything is typed, in a process of its own: edits must meet modules that are not loaded yet.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedfuse.engines.code import PACKAGE

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
    x, shift = draw.normal(size=(80, 6)).astype("float32"), 0
    y = (x[:, :3].argmax(1) + shift) % 3
    return x[:60], y[:60], x[60:], y[60:]
""",
}

EDITS = {
    "a helper's helper": ("mine_numbers/constants.py", "1.0", "0.01"),
    "a package's module": ("mine_net/blocks.py", "ReLU", "Tanh"),
    "rows": (
        "mine_rows.py",
        'shift = draw.normal(size=(80, 6)).astype("float32"), 0',
        'shift = draw.normal(size=(80, 6)).astype("float32"), 1',
    ),
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


@pytest.mark.parametrize("what", EDITS)
def test_what_was_edited_is_trained_and_not_remembered(what: str, home: Path) -> None:
    file, old, new = EDITS[what]
    assert counts(run(home, "one")) == (2, 0)
    assert counts(run(home, "same")) == (0, 2)
    edit(home / file, old, new)
    after, plain = run(home, "after"), run(home, "plain", "--no-memo")
    assert counts(after) == (2, 0)
    assert after["nll"] == plain["nll"]


def test_a_line_of_ours_that_was_edited_is_trained_and_not_remembered(home: Path) -> None:
    copied = shutil.copytree(PACKAGE, home / "ours" / "fedfuse", ignore=shutil.ignore_patterns("__pycache__"))
    ours = {"PYTHONPATH": str(copied.parent)}
    assert counts(run(home, "one", **ours)) == (2, 0)
    assert counts(run(home, "same", **ours)) == (0, 2)
    with (copied / "tasks" / "classification.py").open("a") as file:
        file.write("\n# another thought\n")
    assert counts(run(home, "after", **ours)) == (2, 0)
