"""Two options of a run: which round's model is kept, and whether clients begin from common weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedfuse.core.rows import Rows
from fedfuse.engines.local import InProcess
from fedfuse.errors import ConfigError
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.prepare import prepare
from fedfuse.experiment.run import execute
from fedfuse.server.loop import one_round, run
from fedfuse.wire.files import load_model

Tiny = Callable[..., Experiment]
# A rate so large that the last round is not the best, and server rows enough to tell rounds apart.
WILD: dict[str, Any] = {
    "rounds": 5,
    "select": "best-on-server",
    "data": {"clients": 3, "train_limit": 150, "test_limit": 60, "server_fraction": 0.3},
    "local": {"batch_size": 8, "optimizer": {"lr": 1.5}},
}


def lines(out: Path) -> list[dict[str, Any]]:
    return list(json.loads((out / "results.json").read_text())["rows"])


def accuracy(model: Any, rows: Rows) -> float:
    return float((model.logits(rows.x).argmax(1) == rows.y).double().mean())


def seen(params: Any) -> Tensor:
    return torch.cat([t.flatten().double() for t in params.values()])


# select = "best-on-server"


@pytest.mark.parametrize("method", ["fedavg", "swa"])
def test_the_kept_round_is_the_first_best_on_the_servers_rows(tiny: Tiny, tmp_path: Path, method: str) -> None:
    experiment = tiny(method, **WILD)
    execute(experiment, tmp_path / "run", workers=0)
    prepared = prepare(experiment)
    setting = prepared.setting(0)
    assert setting.bench.rows is not None
    engine = InProcess(setting.population)
    records = list(run(prepared.recipes[method], engine, setting.bench, None, setting.start, setting.plan))
    scores = [accuracy(r.state.model, setting.bench.rows) for r in records]
    best = scores.index(max(scores))
    assert best < len(scores) - 1, "this experiment must be able to tell best from last"
    chosen = [row["round"] for row in lines(tmp_path / "run") if row["selected"]]
    assert chosen == [best + 1]
    model, facts = load_model(tmp_path / "run" / "models" / f"{method}-0.safetensors")
    assert facts["round"] == best + 1
    assert seen(model.posterior.mean).equal(seen(records[best].state.single.posterior.mean))


def test_the_ledger_tells_the_servers_accuracy_beside_the_tests(tiny: Tiny, tmp_path: Path) -> None:
    execute(tiny(**WILD), tmp_path / "run", workers=0)
    told = [json.loads(text) for text in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    assert all(0 <= line["server_accuracy"] <= 1 for line in told)
    assert len({line["server_accuracy"] for line in told}) > 1
    assert any(line["server_accuracy"] != line["accuracy"] for line in told)


def test_test_rows_have_no_say(tiny: Tiny, tmp_path: Path) -> None:
    """Other test rows change the scores that are told, not the round that is kept."""
    for limit in (60, 7):
        changes = WILD | {"data": WILD["data"] | {"test_limit": limit}}
        execute(tiny(**changes), tmp_path / str(limit), workers=0)
    one, other = lines(tmp_path / "60"), lines(tmp_path / "7")
    assert [r["accuracy"] for r in one] != [r["accuracy"] for r in other]
    assert [r["selected"] for r in one] == [r["selected"] for r in other]
    models = [(tmp_path / name / "models" / "fedavg-0.safetensors").read_bytes() for name in ("60", "7")]
    assert models[0] == models[1]


def test_equal_rounds_keep_the_first(tiny: Tiny, tmp_path: Path) -> None:
    still = {"local": {"optimizer": {"lr": 1e-12}}, "rounds": 3}
    execute(tiny(**(WILD | still)), tmp_path / "run", workers=0)
    assert [row["selected"] for row in lines(tmp_path / "run")] == [True, False, False]


def test_the_servers_rows_are_nobodys_training_rows(tiny: Tiny) -> None:
    parts = prepare(tiny(**WILD)).setting(0).partition
    held = torch.cat(list(parts.clients.values()))
    assert len(parts.server) == 45
    assert not set(held.tolist()) & set(parts.server.tolist())


def test_by_default_the_last_round_is_kept_and_nothing_is_marked(tiny: Tiny, tmp_path: Path) -> None:
    execute(tiny(**(WILD | {"select": "last"})), tmp_path / "run", workers=0)
    assert all("selected" not in row for row in lines(tmp_path / "run"))
    assert load_model(tmp_path / "run" / "models" / "fedavg-0.safetensors")[1]["round"] == 5


def test_models_that_stay_apart_are_chosen_too(tiny: Tiny, tmp_path: Path) -> None:
    execute(tiny("local", **(WILD | {"rounds": 2})), tmp_path / "run", workers=0)
    assert sum(row["selected"] for row in lines(tmp_path / "run")) == 1


# start = "separate"


def test_shared_starts_are_one_and_separate_ones_differ(tiny: Tiny) -> None:
    shared = prepare(tiny()).setting(0).start
    assert not shared.starts
    separate = prepare(tiny(start="separate")).setting(0).start
    assert set(separate.starts) == {"client-00", "client-01", "client-02"}
    vectors = [seen(start.params) for start in separate.starts.values()]
    assert all(not a.equal(b) for i, a in enumerate(vectors) for b in vectors[:i])
    assert seen(separate.single.posterior.mean).equal(seen(shared.single.posterior.mean))


def test_separate_starts_follow_the_seed_and_the_client_alone(tiny: Tiny) -> None:
    def starts(seed: int, **changes: Any) -> dict[str, Tensor]:
        found = prepare(tiny(start="separate", **changes)).setting(seed).start.starts
        return {client: seen(start.params) for client, start in found.items()}

    here, again, elsewhere = starts(0), starts(0), starts(1)
    more = starts(0, data={"clients": 5, "train_limit": 90})
    for client, vector in here.items():
        assert vector.equal(again[client])
        assert vector.equal(more[client])
        assert not vector.equal(elsewhere[client])


def test_after_the_first_round_everybody_goes_on_from_the_fused_model(tiny: Tiny) -> None:
    prepared = prepare(tiny("swa", start="separate"))
    setting = prepared.setting(0)
    engine = InProcess(setting.population)
    record = one_round(prepared.recipes["swa"], engine, setting.bench, None, setting.start, setting.plan)
    assert not record.state.starts
    brief = record.state.brief(())
    assert brief.to("client-00").params is brief.to("client-01").params is record.state.single.posterior.mean


def test_the_first_fusion_is_of_networks_that_began_apart(tiny: Tiny) -> None:
    """Without any training to speak of, the plain mean is the mean of the starts."""
    prepared = prepare(
        tiny(start="separate", local={"optimizer": {"lr": 1e-12}}, methods=[{"name": "fedavg", "uniform": True}])
    )
    setting = prepared.setting(0)
    recipe = next(iter(prepared.recipes.values()))
    record = one_round(recipe, InProcess(setting.population), setting.bench, None, setting.start, setting.plan)
    mean = torch.stack([seen(s.params) for s in setting.start.starts.values()]).mean(0)
    assert torch.allclose(seen(record.state.single.posterior.mean), mean, atol=1e-6)


def test_methods_are_compared_from_the_same_separate_starts(tiny: Tiny, tmp_path: Path) -> None:
    execute(tiny("fedavg", "swa", start="separate", rounds=1), tmp_path / "run", workers=0)
    told = [json.loads(text) for text in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    losses = [{c: facts["facts"]["loss"] for c, facts in line["clients"].items()} for line in told]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("method", ["local", "scaffold", "moon", "swa"])
def test_a_run_from_separate_starts_is_resumed_where_it_was(tiny: Tiny, tmp_path: Path, method: str) -> None:
    execute(tiny(method, start="separate", rounds=3), tmp_path / "whole", workers=0)
    execute(tiny(method, start="separate", rounds=1), tmp_path / "grown", workers=0)
    execute(tiny(method, start="separate", rounds=3), tmp_path / "grown", workers=0, resume=True)
    models = [(tmp_path / name / "models" / f"{method}-0.safetensors").read_bytes() for name in ("whole", "grown")]
    assert models[0] == models[1]


@pytest.mark.parametrize("method", ["fednova", "fedadam"])
def test_methods_that_measure_from_a_common_start_say_so(tiny: Tiny, method: str) -> None:
    with pytest.raises(ConfigError, match=f"method '{method}' measures how far clients moved from a common start"):
        prepare(tiny(method, start="separate")).check()
    prepare(tiny(method)).check()
