"""When a run may go on in its directory, and what the directory records."""

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
import torch

from fedfuse.core.messages import Start
from fedfuse.core.model import Apart, Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.core.state import ServerState
from fedfuse.data import load
from fedfuse.engines.code import PACKAGE
from fedfuse.errors import ConfigError
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.prepare import GivenObjects
from fedfuse.experiment.results import plain
from fedfuse.experiment.run import execute
from fedfuse.experiment.rundir import RECORD as MADE_OF
from fedfuse.experiment.rundir import Checkpoints, commit, conflicts, environment, versions

SPEC = Spec("mlp", {"inputs": 3, "hidden": [2], "classes": 2})
WIDE = Spec("mlp", {"inputs": 3, "hidden": [4], "classes": 2})


def weights(spec: Spec, seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=draw) for n, t in spec.build().state_dict().items()}


def state(round_: int) -> ServerState:
    memory = {"control/w": torch.full((2,), float(round_)), "count": torch.tensor(round_)}
    starts = {"": Start(SPEC, weights(SPEC, 7)), "site/a": Start(WIDE, weights(WIDE, round_))}
    return ServerState(round_, Single(SPEC, Posterior(weights(SPEC, round_))), memory, starts)


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


BEGIN = ServerState(0, Single(SPEC, Posterior(weights(SPEC, 0))))


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    """Three rounds on disk; client b keeps its memory after the first."""
    checkpoints, memories = Checkpoints(tmp_path / "fedavg-0"), {"b": {"last/w": torch.ones(3)}, "empty": {}}
    for round_ in (1, 2, 3):
        memories |= {"a/1": {"control/w": torch.full((2,), round_ / 3), "n": torch.tensor([round_])}}
        checkpoints.save(state(round_), memories)
    return checkpoints


def test_a_state_comes_back_bit_by_bit(saved: Checkpoints) -> None:
    found = saved.restore(3, BEGIN)
    assert found is not None
    back, memories = found
    assert back.round == 3
    assert same(back.single.posterior.mean, state(3).single.posterior.mean)
    assert same(back.memory, state(3).memory)
    assert {c: s.spec for c, s in back.starts.items()} == {"": SPEC, "site/a": WIDE}
    assert all(same(back.starts[c].params, s.params) for c, s in state(3).starts.items())
    assert memories.keys() == {"a/1", "b"}
    assert same(memories["a/1"], {"control/w": torch.ones(2), "n": torch.tensor([3])})


def test_only_the_last_two_rounds_and_their_parts_are_kept(saved: Checkpoints) -> None:
    assert sorted(p.name for p in saved.folder.glob("round-*")) == ["round-000002", "round-000003"]
    assert len(list((saved.folder / "parts").iterdir())) == 1 + 1 + 2 + 2  # "" and b stay; site/a and a/1 in two rounds


def test_only_what_changed_is_written(saved: Checkpoints) -> None:
    starts, memories = state(3).starts, {"b": {"last/w": torch.ones(3)}}
    times = []
    for round_ in (4, 5):
        saved.save(replace(state(round_), starts=starts), memories)
        times.append({path: path.stat().st_mtime_ns for path in (saved.folder / "parts").iterdir()})
    assert times[1].items() <= times[0].items()
    assert len(times[1]) == 3


@pytest.mark.parametrize("name", ["model.safetensors", "memory.safetensors", "seal.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "gone"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(saved: Checkpoints, name: str, damage: str) -> None:
    path = saved.folder / "round-000003" / name
    data = path.read_bytes()
    middle = len(data) // 2
    bad = {
        "cut": data[:middle],
        "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "empty": b"",
    }
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(bad[damage])
    found = saved.restore(3, BEGIN)
    assert found is not None
    assert found[0].round == 2
    assert same(found[0].single.posterior.mean, state(2).single.posterior.mean)


def test_a_damaged_part_falls_back_too_and_without_any_there_is_nothing(saved: Checkpoints) -> None:
    for path in (saved.folder / "parts").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert saved.restore(3, BEGIN) is None
    assert Checkpoints(saved.folder / "nowhere").restore(3, BEGIN) is None


def test_rounds_beyond_the_ledger_are_not_used(saved: Checkpoints) -> None:
    found = saved.restore(2, BEGIN)
    assert found is not None
    assert found[0].round == 2
    assert saved.restore(1, BEGIN) is None


def test_strange_folders_are_passed_over(saved: Checkpoints) -> None:
    (saved.folder / "round-abc").mkdir()
    (saved.folder / "round-abc" / "seal.json").write_text("{}")
    (saved.folder / "round-000009").mkdir()  # no seal: a crash left it
    found = saved.restore(99, BEGIN)
    assert found is not None
    assert found[0].round == 3


def test_what_a_crash_left_is_tidied_away(saved: Checkpoints) -> None:
    (saved.folder / "round-000001").mkdir()
    (saved.folder / "parts" / "torn.safetensors").write_bytes(b"")
    (saved.folder / "round-000003" / "seal.json").write_text("{")
    saved.save(state(4), {})
    assert sorted(p.name for p in saved.folder.glob("round-*")) == ["round-000003", "round-000004"]
    assert not (saved.folder / "parts" / "torn.safetensors").exists()


def test_networks_apart_and_foreign_ones(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    members = tuple(Single(spec, Posterior(weights(spec, 1))) for spec in (SPEC, WIDE))
    checkpoints.save(replace(state(1), model=Apart(members)), {})
    found = checkpoints.restore(1, BEGIN)
    assert found is not None
    assert isinstance(found[0].model, Apart)
    own = Spec("torch.nn:Linear", {"in_features": 2, "out_features": 2})
    checkpoints.save(ServerState(2, Single(own, Posterior(weights(own, 1)))), {})
    trusting, wary = checkpoints.restore(2, BEGIN, {"torch.nn:Linear"}), checkpoints.restore(2, BEGIN)
    assert trusting is not None
    assert trusting[0].single.spec == own
    assert wary is not None
    assert wary[0].round == 1


def test_a_part_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "parts").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot write .*parts"):
        Checkpoints(tmp_path).save(state(1), {})


OLD = {"rounds": 2, "seeds": [0, 1], "methods": [{"name": "fedavg"}], "name": "x", "data": {"clients": 3}}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rounds": 5},
        {"seeds": [2, 1, 0]},
        {"methods": [{"name": "local"}, {"name": "fedavg"}]},
        {"name": "another"},
        {"methods": [{"name": "fedavg", "uniform": True}]},
    ],
)
def test_more_may_be_asked_of_a_run(change: dict[str, Any]) -> None:
    assert not conflicts(OLD, OLD | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rounds": 1}, ["rounds was 2 and is now 1"]),
        ({"seeds": [0]}, ["seeds no longer has 1"]),
        ({"data": {"clients": 4}}, ["data.clients was 3 and is now 4"]),
        ({"clients_per_round": 2}, ["clients_per_round was not set and is now 2"]),
        (
            {"data": {"clients": 3, "source": "mnist"}, "models": [{"name": "mlp"}]},
            ['data.source was not set and is now "mnist"', 'models.0.name was not set and is now "mlp"'],
        ),
    ],
)
def test_nothing_else_may_change(change: dict[str, Any], words: list[str]) -> None:
    assert conflicts(OLD, OLD | change) == words


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
