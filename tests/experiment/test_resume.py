"""Checkpoints: what is saved comes back bit by bit, what is damaged falls back, what is old goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedfuse.core.messages import Start
from fedfuse.core.model import Apart, Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.spec import Spec
from fedfuse.core.state import ServerState
from fedfuse.errors import ConfigError
from fedfuse.experiment.rundir import Checkpoints, conflicts

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
