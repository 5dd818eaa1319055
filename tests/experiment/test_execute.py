"""A whole run: its directory, its numbers, and how it goes on after a crash at any write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from builders import as_bytes
from fedfuse.core.files import hold_folder
from fedfuse.core.messages import Cohort
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import all_methods, forget_method, method
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines.local import InProcess
from fedfuse.errors import ConfigError, QuorumLost
from fedfuse.experiment import prepare as preparation
from fedfuse.experiment.callbacks import Callback
from fedfuse.experiment.config import Experiment, MethodConfig
from fedfuse.experiment.jobs import run_folder, run_jobs
from fedfuse.experiment.prepare import prepare
from fedfuse.experiment.results import FLAT, Ledger, Results
from fedfuse.experiment.run import execute
from fedfuse.server.aggregate.mean import mean_of
from fedfuse.server.loop import one_round
from fedfuse.server.steps.prune import Prune
from fedfuse.wire.files import load_model
from fedfuse.wire.messages import encode_brief

Tiny = Callable[..., Experiment]


def run(experiment: Experiment, out: Path, **options: Any) -> Results:
    return execute(experiment, out, workers=0, **options)


def outcome(out: Path) -> dict[str, Any]:
    """All that must not depend on how a run came to its end: results but for seconds, and the models' bytes."""
    results = json.loads((out / "results.json").read_text())
    for row in results["rows"]:
        assert row.pop("train_seconds") >= 0
        assert row.pop("server_seconds") >= 0
    models = {path.name: path.read_bytes() for path in sorted((out / "models").iterdir())}
    return {"results": results, "models": models}


def test_two_runs_do_not_share_a_directory(tiny: Tiny, tmp_path: Path) -> None:
    with hold_folder(tmp_path), pytest.raises(ConfigError, match="is being written by another run"):
        run(tiny("fedavg"), tmp_path)
    assert not list(tmp_path.iterdir())
    assert run(tiny("fedavg"), tmp_path).rows


def test_the_run_directory(tiny: Tiny, tmp_path: Path) -> None:
    experiment = tiny("fedavg", "local", seeds=[0, 3])
    results = run(experiment, tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        "config.toml",
        "environment.json",
        "ledger.jsonl",
        "results.json",
        "models",
        "checkpoints",
        "partition.json",
        "made-of.json",
    }
    assert (tmp_path / "run" / "config.toml").read_text() == experiment.to_toml()
    told = json.loads((tmp_path / "run" / "results.json").read_text())
    assert told["name"] == "tiny"
    assert [(r["label"], r["seed"], r["round"]) for r in told["rows"]] == [
        (label, seed, round_) for label in ("fedavg", "local") for seed in (0, 3) for round_ in (1, 2)
    ]
    assert all(set(row) == {*FLAT, "refused", "clipped"} for row in told["rows"])
    assert all(0 <= row["accuracy"] <= 1 and 0 <= row["ece"] <= 1 for row in told["rows"])
    assert sorted(p.name for p in (tmp_path / "run" / "models").iterdir()) == [
        f"{label}-{seed}.safetensors" for label in ("fedavg", "local") for seed in (0, 3)
    ]
    facts = load_model(tmp_path / "run" / "models" / "fedavg-3.safetensors")[1]
    assert facts == {"method": "fedavg", "label": "fedavg", "seed": 3, "round": 2, "task": "classification"}
    assert results.rows[0]["experiment"] == "tiny"
    assert results.table().startswith("| method |")


def test_the_partition_and_the_environment_are_on_record(tiny: Tiny, tmp_path: Path) -> None:
    run(tiny(seeds=[0, 3]), tmp_path / "run")
    parts = json.loads((tmp_path / "run" / "partition.json").read_text())
    assert parts["classes"] == [str(n) for n in range(10)]
    assert parts["seeds"].keys() == {"0", "3"}
    held = sum(sum(counts) for counts in parts["seeds"]["0"]["clients"].values())
    assert held == sum(prepare(tiny()).setting(0).population.sizes().values())
    facts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert facts["workers"] == 0
    assert facts["versions"]["torch"] == version("torch")
    assert facts["data"]["name"] == "digits"
    assert facts["data"]["classes"] == 10


def test_clients_are_scored_in_the_last_round_only(tiny: Tiny, tmp_path: Path) -> None:
    first, last = run(tiny(), tmp_path / "run").rows
    assert "client_accuracy_mean" not in first
    assert {"client_accuracy_mean", "client_accuracy_worst10", "own_accuracy_mean"} <= last.keys()
    assert last["clients"].keys() == {"client-00", "client-01", "client-02"}


def test_seconds_are_split_between_clients_and_server(tiny: Tiny, tmp_path: Path) -> None:
    for row in run(tiny("fedavg"), tmp_path / "run").rows:
        assert row["train_seconds"] > 0  # which of them takes longer depends on who else is at work here
        assert row["server_seconds"] > 0


@pytest.mark.parametrize("start", ["shared", "separate"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "local"])
def test_bytes_are_those_of_the_messages_themselves(tiny: Tiny, method: str, start: str) -> None:
    prepared = prepare(tiny(method, start=start, clients_per_round=2))
    setting, recipe = prepared.setting(0), prepared.recipes[method]
    listening = Listening(InProcess(setting.population))
    state = setting.start
    for _ in range(2):
        record = one_round(recipe, listening, setting.bench, None, state, setting.plan)
        heard, said = listening.tell()
        assert record.facts["bytes_down"] == heard
        assert record.facts["bytes_up"] == said
        state = record.state


class Listening:
    """An engine that counts the bytes its clients hear and say."""

    def __init__(self, engine: InProcess) -> None:
        self.engine, self.heard, self.said, self.terms = engine, 0, 0, engine.terms

    @property
    def clients(self) -> tuple[str, ...]:
        return self.engine.clients

    def exchange(self, brief: Any, work: Any, asked: tuple[str, ...]) -> Iterator[Any]:
        self.heard += sum(len(encode_brief(brief.to(client))) for client in asked)
        for envelope in self.engine.exchange(brief, work, asked):
            self.said += len(as_bytes(envelope.payload) or b"")
            yield envelope

    def tell(self) -> tuple[int, int]:
        told, self.heard, self.said = (self.heard, self.said), 0, 0
        return told


def test_client_sampling_asks_some_and_repeats(tiny: Tiny, tmp_path: Path) -> None:
    rows = run(tiny(clients_per_round=2, rounds=4), tmp_path / "one").rows
    asked = [sorted(row["clients"]) for row in rows[:-1]]
    assert all(len(clients) == 2 for clients in asked)
    assert len({tuple(clients) for clients in asked}) > 1
    again = run(tiny(clients_per_round=2, rounds=4), tmp_path / "two").rows
    assert [sorted(row["clients"]) for row in again[:-1]] == asked


def test_a_guarded_method_and_one_that_hands_over(tiny: Tiny, tmp_path: Path) -> None:
    methods = [
        {"name": "fedavg", "guard": {"name": "median"}},
        {"name": "fedavg", "rounds": 1, "then": {"name": "local"}},
    ]
    rows = run(tiny(methods=methods), tmp_path / "run").rows
    assert [row["label"] for row in rows[::2]] == ["fedavg+median", "fedavg→local"]
    assert "CoordinateMedian" in rows[0]["facts"]["guard"]
    assert rows[3]["parameters"] == 3 * rows[2]["parameters"]  # after the hand-over there are three networks


class Remembers(ServerPart):
    """A mean that drifts with every round it has seen, and keeps that count on itself."""

    laws: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        self.seen += 1
        return state.fused({n: t + 0.1 * self.seen for n, t in mean_of(cohort).items()})


def test_what_an_own_part_keeps_on_itself_does_not_reach_the_next_seed(tiny: Tiny, tmp_path: Path) -> None:
    @method("remembers")
    def remembers() -> Recipe:
        """It counts on `self`."""
        return Recipe(aggregate=Remembers())

    try:
        run(tiny("remembers", seeds=[0, 1]), tmp_path / "both")
        run(tiny("remembers", seeds=[1]), tmp_path / "alone")
    finally:
        forget_method("remembers")
    both, alone = (outcome(tmp_path / name)["models"] for name in ("both", "alone"))
    assert alone.items() <= both.items()


def test_train_once_fuse_many(tiny: Tiny, tmp_path: Path) -> None:
    methods = ("fedavg", "fednova", "fedavgm", "fedadam", "ensemble", "qfedavg", "fedprox")
    experiment = tiny(*methods, rounds=1)
    first = run(experiment, tmp_path / "one", memo=tmp_path / "memo")
    counts = {row["label"]: (row["trained"], row["remembered"]) for row in first.rows}
    assert counts == {name: (3, 0) if name in ("fedavg", "fedprox") else (0, 3) for name in methods}
    again = run(experiment, tmp_path / "two", memo=tmp_path / "memo")
    assert {(row["trained"], row["remembered"]) for row in again.rows} == {(0, 3)}
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")
    plain = run(experiment, tmp_path / "three")
    assert {(row["trained"], row["remembered"]) for row in plain.rows} == {(3, 0)}
    assert outcome(tmp_path / "one") == outcome(tmp_path / "three")


def test_the_number_of_threads_does_not_matter(tiny: Tiny, tmp_path: Path) -> None:
    run(tiny(), tmp_path / "one")
    torch.set_num_threads(2)
    try:
        run(tiny(), tmp_path / "two")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")


ALONE = """
import sys
from pathlib import Path
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.run import execute

told = []
done = execute(Experiment.model_validate_json(sys.argv[1]), Path(sys.argv[2]), workers=1, announce=told.append)
print(bool(told), all(f["facts"].get("compiled") for f in done.rows[-1]["clients"].values()), "numba" in sys.modules)
"""


def test_the_process_that_does_not_train_loads_no_compiler(tiny: Tiny, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    command = [
        sys.executable,
        "-c",
        ALONE,
        tiny("fedavg", "fednova").model_dump_json(exclude_none=True),
        tmp_path / "run",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "True True False\n", done.stderr


def test_a_lost_quorum_ends_the_run_and_leaves_what_was_done(tiny: Tiny, tmp_path: Path) -> None:
    wild = {"batch_size": 16, "optimizer": {"lr": 1e30}}
    with pytest.raises(QuorumLost, match="round 1: 0 of 3 clients were admitted") as lost:
        run(tiny(local=wild), tmp_path / "run")
    assert lost.value.exit_code == 3
    assert "not finite" in str(lost.value)
    assert Ledger(tmp_path / "run" / "ledger.jsonl").lines() == []


# Going on


class Crash(BaseException):
    """Stands for SIGKILL: nothing after it reaches the disk."""


@contextmanager
def crash_at(moment: int) -> Iterator[list[str]]:
    """Die at the n-th moment at which a file is about to be complete, or about to be in its place.

    A line of the ledger is then torn, and a file that was being written stays there by half, as after SIGKILL.
    """
    passed: list[str] = []
    dead = False
    patch = pytest.MonkeyPatch()
    unlink, replace = Path.unlink, Path.replace

    def pass_by(name: str) -> None:
        nonlocal dead
        passed.append(name)
        if len(passed) == moment:
            dead = True
            raise Crash(name)

    def sync(number: int) -> None:
        path = Path(f"/proc/self/fd/{number}").readlink()
        try:
            pass_by(f"writing {path.name}")
        except Crash:
            os.ftruncate(number, path.stat().st_size - 9)
            raise

    def put(self: Path, target: Path) -> Path:
        pass_by("placing a part" if target.parent.name == "parts" else f"placing {target.name}")
        return replace(self, target)

    def remove(self: Path, missing_ok: bool = False) -> None:
        if not dead:
            unlink(self, missing_ok)

    patch.setattr(os, "fsync", sync)
    patch.setattr(Path, "replace", put)
    patch.setattr(Path, "unlink", remove)
    try:
        yield passed
    finally:
        patch.undo()


def test_a_crash_at_any_write_changes_nothing(tiny: Tiny, tmp_path: Path) -> None:
    experiment = tiny("scaffold")
    with crash_at(-1) as moments:
        run(experiment, tmp_path / "whole")
    expected = outcome(tmp_path / "whole")
    assert len(moments) > 25
    assert {"writing ledger.jsonl", "placing seal.json", "placing a part", "placing config.toml"} <= set(moments)
    for moment in range(1, len(moments) + 1):
        out = tmp_path / f"crash-{moment}"
        with pytest.raises(Crash), crash_at(moment):
            run(experiment, out)
        run(experiment, out, resume=True)
        assert outcome(out) == expected, f"a crash at {moments[moment - 1]} ({moment})"
        assert not [path for path in out.rglob(".*") if path.is_file()], "what was left by half is gone"


@pytest.mark.parametrize("method", ["moon", "local", "fedavgm"])
def test_a_crash_between_rounds_changes_nothing(tiny: Tiny, tmp_path: Path, method: str) -> None:
    experiment = tiny(method, rounds=3, clients_per_round=2)
    run(experiment, tmp_path / "whole")
    for round_ in (1, 2):
        out = tmp_path / f"after-{round_}"
        watch = DiesAfter(round_)
        with pytest.raises(Crash):
            run(experiment, out, watch=watch)
        run(experiment, out, resume=True)
        assert outcome(out) == outcome(tmp_path / "whole")


LIGHT = {"epochs": 1, "steps": 2, "batch": 8, "width": 4, "latent": 8}  # of whatever a server trains
SOON = {"at": 2, "every": 1, "times": 1}  # a network that shrinks does so between two checkpoints
MLP, CONV = {"name": "mlp", "hidden": [6]}, {"name": "lenet", "maps": [4, 6], "hidden": [8]}
GO_ON = [name for name, method in sorted(all_methods().items()) if method.recipe().result != "mixture"]


@pytest.mark.slow
@pytest.mark.parametrize("method", GO_ON)
def test_every_method_goes_on_after_a_crash_as_if_undisturbed(tiny: Tiny, tmp_path: Path, method: str) -> None:
    data = {"clients": 3, "train_limit": 120, "test_limit": 60, "server_fraction": 0.2}
    known, small = all_methods()[method].schema.model_fields, LIGHT | SOON
    options = {key: small[key] for key in known if key in small}
    removes = any(isinstance(step, Prune) for step in all_methods()[method].recipe().steps)
    model = CONV if removes else MLP
    experiment = tiny(methods=[{"name": method, **options}], rounds=3, data=data, model=model)
    run(experiment, tmp_path / "whole")
    with pytest.raises(Crash):
        run(experiment, tmp_path / "stopped", watch=DiesAfter(2))
    run(experiment, tmp_path / "stopped", resume=True)
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")


class DiesAfter(Callback):
    """A watcher that ends the run when a round is on record."""

    def __init__(self, round_: int) -> None:
        self.round = round_
        self.begun: list[tuple[str, int, int, int]] = []

    def method_started(self, label: str, seed: int, done: int, rounds: int, clients: int) -> None:
        self.begun.append((label, done, rounds, clients))

    def client_done(self, client: str, seconds: float, remembered: bool) -> None:
        assert seconds >= 0

    def round_done(self, label: str, seed: int, round_: int, scores: Mapping[str, Any]) -> None:
        if round_ == self.round:
            raise Crash


def test_a_damaged_last_checkpoint_costs_a_round_and_nothing_else(tiny: Tiny, tmp_path: Path) -> None:
    experiment = tiny("scaffold", rounds=3)
    run(experiment, tmp_path / "whole")
    for damaged, goes_on_after in ((["round-000002"], 1), (["round-000002", "round-000001"], 0)):
        out = tmp_path / f"damaged-{len(damaged)}"
        with pytest.raises(Crash):
            run(experiment, out, watch=DiesAfter(2))
        for name, spoil in zip(damaged, (lambda d: d[:-1] + bytes([d[-1] ^ 1]), lambda d: d[:-1]), strict=False):
            path = out / "checkpoints" / "scaffold-0" / name / "model.safetensors"
            path.write_bytes(spoil(path.read_bytes()))  # a flipped bit, or a byte too few
        watch = DiesAfter(99)
        run(experiment, out, resume=True, watch=watch)
        assert watch.begun == [("scaffold", goes_on_after, 3, 3)]
        assert outcome(out) == outcome(tmp_path / "whole")


def test_more_rounds_seeds_and_methods_on_resume(tiny: Tiny, tmp_path: Path) -> None:
    run(tiny("scaffold", rounds=1, seeds=[1]), tmp_path / "grown")
    run(tiny("scaffold", rounds=2, seeds=[1]), tmp_path / "grown", resume=True)
    more = tiny("local", "scaffold", rounds=3, seeds=[0, 1])
    results = run(more, tmp_path / "grown", resume=True)
    run(more, tmp_path / "whole")
    assert outcome(tmp_path / "grown") == outcome(tmp_path / "whole")
    assert len(results.rows) == 2 * 2 * 3
    parts = [json.loads((tmp_path / name / "partition.json").read_text()) for name in ("grown", "whole")]
    assert parts[0] == parts[1]


def test_a_finished_run_trains_nobody_again(tiny: Tiny, tmp_path: Path) -> None:
    run(tiny("scaffold"), tmp_path / "run")
    before = outcome(tmp_path / "run"), (tmp_path / "run" / "ledger.jsonl").read_bytes()
    run(tiny("scaffold"), tmp_path / "run", resume=True, watch=DiesAfter(1))
    assert (outcome(tmp_path / "run"), (tmp_path / "run" / "ledger.jsonl").read_bytes()) == before


def test_the_best_model_survives_and_a_lost_one_is_found_again(tiny: Tiny, tmp_path: Path) -> None:
    data = {"clients": 3, "train_limit": 120, "test_limit": 60, "server_fraction": 0.3}
    local = {"batch_size": 8, "optimizer": {"lr": 1.5}}  # wild enough for the last round not to be the best
    experiment = tiny("fedavg", rounds=4, data=data, local=local, select="best-on-server")
    run(experiment, tmp_path / "whole")
    for lose in ("", "lost", "flipped"):  # one flipped bit was published, with exit code 0
        out = tmp_path / f"best-{lose}"
        with pytest.raises(Crash):
            run(experiment, out, watch=DiesAfter(3))
        best = out / "checkpoints" / "fedavg-0" / "best.safetensors"
        if lose == "lost":
            best.unlink()
        elif lose == "flipped":
            data = best.read_bytes()
            best.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
        watch = DiesAfter(99)
        run(experiment, out, resume=True, watch=watch)
        assert watch.begun[0][1] == (0 if lose else 3)
        assert outcome(out) == outcome(tmp_path / "whole")


# Directories that cannot be used


def test_a_directory_with_a_run_is_not_written_over(tiny: Tiny, tmp_path: Path) -> None:
    run(tiny(), tmp_path / "run")
    with pytest.raises(ConfigError, match="holds a run already; continue it with --resume or choose another --out"):
        run(tiny(), tmp_path / "run")
    with pytest.raises(
        ConfigError,
        match=r"another run: local\.epochs was 1 and is now 2, local\.batch_size was 16 ",
    ):
        run(tiny(local={"epochs": 2}), tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match="rounds was 2 and is now 1"):
        run(tiny(rounds=1), tmp_path / "run", resume=True)


def test_a_directory_of_something_else_is_left_alone(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is not a run directory: it has no config\.toml"):
        run(tiny(), tmp_path / "mine", resume=True)
    (tmp_path / "mine" / "ledger.jsonl").write_text("")
    with pytest.raises(ConfigError, match="is not a run directory"):
        run(tiny(), tmp_path / "mine")
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == ["ledger.jsonl", "notes.txt"]


def test_a_damaged_configuration_is_named(tiny: Tiny, tmp_path: Path) -> None:
    run(tiny(), tmp_path / "run")
    (tmp_path / "run" / "config.toml").write_text("rounds = ")
    with pytest.raises(ConfigError, match=r"config\.toml cannot be read"):
        run(tiny(), tmp_path / "run", resume=True)


def test_nothing_is_written_for_an_experiment_that_cannot_be(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="500 clients are to share 90 rows"):
        run(tiny(data={"clients": 500, "train_limit": 90}), tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the memo cannot use .*--no-memo"):
        run(tiny(), tmp_path / "run", memo=tmp_path / "file" / "memo")
    assert not (tmp_path / "run").exists()


def test_a_directory_that_cannot_be_made_stops_the_run_before_training(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*run: Not a directory; choose another --out"):
        run(tiny(), tmp_path / "file" / "run", watch=DiesAfter(1))


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[tuple[Any, ...]]:
    """The calls a function gets from here on."""
    calls: list[tuple[Any, ...]] = []
    real = getattr(owner, name)

    def call(*given: Any, **options: Any) -> Any:
        calls.append(given)
        return real(*given, **options)

    monkeypatch.setattr(owner, name, call)
    return calls


def test_partition_and_checks_are_computed_once_per_run_and_recipes_once_per_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "study.toml").write_text("""
seeds = [0, 1, 2]
methods = [{ name = "fedavg" }, { name = "fedprox" }]
data = { clients = 3, train_limit = 90, test_limit = 60 }
model = { name = "mlp", hidden = [4] }
""")
    partitions = counted(monkeypatch, preparation, "partition")
    made = counted(monkeypatch, MethodConfig, "recipe")
    checked = counted(monkeypatch, Recipe, "check")
    tried = counted(monkeypatch, preparation, "rehearse")
    run_jobs(tmp_path / "study.toml", out=tmp_path / "run", workers=0, memo=False)
    assert [given[3] for given in partitions] == [0, 1, 2]
    assert [entry.name for entry, *_ in made] == 4 * ["fedavg", "fedprox"]  # to be checked, and for each seed
    assert len(checked) == 2 * 3
    assert len(tried) == 2


def test_a_changed_method_is_run_again_alone(tiny: Tiny, tmp_path: Path) -> None:
    said = {"name": "fedprox", "label": "pulled", "mu": 0.1}
    before = run(tiny(methods=[{"name": "fedavg"}, said]), tmp_path / "run").rows
    changed = tiny(methods=[{"name": "fedavg"}, said | {"mu": 3.0}])
    watch = Started()
    after = run(changed, tmp_path / "run", resume=True, watch=watch).rows
    assert watch.begun == [("fedavg", 2), ("pulled", 0)]  # the first has all its rounds, the other none
    assert after[:2] == before[:2]
    run(changed, tmp_path / "whole")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    replaced = Ledger(tmp_path / "run" / "replaced.jsonl").lines()
    assert [(line["label"], line["nll"]) for line in replaced] == [(row["label"], row["nll"]) for row in before[2:]]


class Started(Callback):
    """Notes which methods start, and how many rounds each has already."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []

    def method_started(self, label: str, seed: int, done: int, rounds: int, clients: int) -> None:
        self.begun.append((label, done))


def test_a_method_that_was_taken_out_is_set_aside(tiny: Tiny, tmp_path: Path) -> None:
    run(tiny("fedavg", "fednova"), tmp_path / "run")
    assert {row["label"] for row in run(tiny("fednova"), tmp_path / "run", resume=True).rows} == {"fednova"}
    assert {line["label"] for line in Ledger(tmp_path / "run" / "ledger.jsonl").lines()} == {"fednova"}
    assert len(Ledger(tmp_path / "run" / "replaced.jsonl").lines()) == 2


def test_free_folders_are_numbered(tmp_path: Path) -> None:
    assert run_folder("a b", parent=tmp_path) == tmp_path / "a_b"
    for _ in range(2):
        run_folder("a b", parent=tmp_path).mkdir()
    assert run_folder("a b", parent=tmp_path) == tmp_path / "a_b-3"
    assert run_folder("a b", resume=True, parent=tmp_path) == tmp_path / "a_b-2"
    with pytest.raises(ConfigError, match="there is no run called 'other' in .* to resume; name its directory"):
        run_folder("other", resume=True, parent=tmp_path)
