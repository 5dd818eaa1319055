"""A round in which nobody trains: clients bring evidence at the model they were sent, the same through every door."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

pytest.importorskip("flwr")
sys.path.insert(0, str(Path(__file__).parent))

from small_runs import CLASSES, LOCAL, MLP, SEED, SIZES, bench, images, population, start, tensors  # noqa: I001
from fake_grid import Gathering, TestSite, grid_of
from flwr.app import ArrayRecord, Context, Message

import fedfuse
from fedfuse.client.class_sums import LabelCounts
from fedfuse.core.messages import Cohort
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.seams import Engine, ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines.local import InProcess
from fedfuse.engines.memo import Memo
from fedfuse.engines.pool import Pool
from fedfuse.errors import QuorumLost, RecipeError
from fedfuse.flower import FuseStrategy, train
from fedfuse.flower.engine import Federation, FlowerEngine
from fedfuse.flower.site import client_app
from fedfuse.server.judge import Judge
from fedfuse.server.loop import Record, RunPlan, run


@dataclass(frozen=True, slots=True)
class CountsAsBias(ServerPart):
    """The class counts become the last bias: a rule that reads evidence alone."""

    needs: ClassVar[frozenset[str]] = frozenset({"counts"})
    laws: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        counts = torch.stack([u.notes["counts/labels"] for u in cohort]).sum(0)
        mean = cohort.updates[0].posterior.mean
        return state.fused({**mean, "classifier.bias": counts.to(mean["classifier.bias"])})


ALONE = Recipe(name="bias", label="bias", evidence=(LabelCounts(),), aggregate=CountsAsBias(), trains=False)
AFTER_TRAINING = find_method("fedavg").recipe().then(1, ALONE)


def records(recipe: Recipe, engine: Engine, rounds: int = 2) -> list[Record]:
    plan = RunPlan(rounds, enrolled=population().sizes())
    return list(run(recipe, engine, bench(), Judge(images(7, 20), CLASSES), start(recipe), plan))


def in_process(recipe: Recipe = AFTER_TRAINING, rounds: int = 2) -> list[Record]:
    return records(recipe, InProcess(population(), SEED), rounds)


def assert_same(ours: Record, theirs: Record) -> None:
    a, b = tensors(ours.state), tensors(theirs.state)
    assert a.keys() == b.keys()
    assert all(a[n].equal(b[n]) for n in a)


def test_the_second_round_keeps_the_weights_and_sends_none_of_them() -> None:
    trained, rested = in_process()
    before, after = trained.state.single.posterior.mean, rested.state.single.posterior.mean
    assert all(after[n].equal(t) for n, t in before.items() if n != "classifier.bias")
    assert after["classifier.bias"].sum() == sum(SIZES)
    assert rested.facts["bytes_up"] < trained.facts["bytes_up"] / 2
    assert rested.facts["flops"] == 0
    assert {c["steps"] for c in rested.facts["clients"].values()} == {0}


def test_workers_and_the_memo_agree_with_one_process(tmp_path: Path) -> None:
    ours = in_process()
    with Pool(1) as pool:
        assert_same(ours[-1], records(AFTER_TRAINING, pool.engine(population(), SEED))[-1])
    memo = Memo(tmp_path)
    for remembered in (0, len(SIZES)):
        last = records(AFTER_TRAINING, memo.wrap(InProcess(population(), SEED)))[-1]
        assert_same(ours[-1], last)
        assert last.facts["remembered"] == remembered


def test_a_federation_agrees_with_one_process() -> None:
    grid = grid_of(client_app(TestSite(population(), AFTER_TRAINING, LOCAL)), len(SIZES))
    federation = Federation(grid, len(SIZES), deadline=60, names=population().clients)
    federation.gather()
    engine = FlowerEngine(federation, AFTER_TRAINING.label, AFTER_TRAINING, LOCAL, SEED)
    assert_same(in_process()[-1], records(AFTER_TRAINING, engine)[-1])


def test_a_strategy_agrees_with_one_process() -> None:
    def app(message: Message, context: Context) -> Message:
        client = population().clients[int(context.node_config["partition-id"])]
        return train(message, context, MLP, population().rows_of(client), recipe=AFTER_TRAINING)

    first, ours, grid = start(AFTER_TRAINING), in_process()[-1], Gathering()
    fuses = FuseStrategy(AFTER_TRAINING, MLP, clients="fedfuse", local=LOCAL, bench=bench(), fraction_evaluate=0)
    for place, client in enumerate(population().clients):
        grid.add(app, client, **{"partition-id": place})
    fuses.start(grid, ArrayRecord(dict(first.single.posterior.mean)), num_rounds=2)  # type: ignore[arg-type]
    assert fuses._state is not None
    assert_same(ours, replace(ours, state=fuses._state))
    with pytest.raises(RecipeError, match="not to train"):
        FuseStrategy(AFTER_TRAINING, MLP)


def updates(recipe: Recipe, begin: dict[str, torch.Tensor]) -> list[fedfuse.Update]:
    everybody = {c: population().rows_of(c) for c in population().clients}
    common = {"start": begin, "classes": CLASSES, "seed": SEED, **LOCAL.model_dump()}
    return [fedfuse.local_update(MLP, rows, recipe, client=c, **common) for c, rows in everybody.items()]


def test_files_agree_with_a_run_and_need_the_model_they_stand_at(tmp_path: Path) -> None:
    ours = in_process(ALONE, rounds=1)[-1]
    begin = dict(start(ALONE).single.posterior.mean)
    made = updates(ALONE, begin)
    assert made[0].state_dict() == {}
    paths = [update.save(tmp_path / f"{update.client}.safetensors") for update in made]
    for door in (made, paths):
        fused = fedfuse.fuse(door, ALONE, start=begin, seed=SEED)
        assert all(fused.state_dict()[n].equal(t) for n, t in ours.state.single.posterior.mean.items())
    with pytest.raises(RecipeError, match="--base"):
        fedfuse.fuse(paths, ALONE)


def test_weights_and_evidence_alone_are_not_mistaken_for_each_other() -> None:
    begin = dict(start(ALONE).single.posterior.mean)
    alone, trained = updates(ALONE, begin), updates(find_method("fedavg").recipe(), begin)
    with pytest.raises(QuorumLost, match="evidence alone"):
        fedfuse.fuse(alone, "fedavg")
    fused = fedfuse.fuse([*alone, trained[0].telling(client="another")], ALONE, start=begin, quorum=0.5)
    assert [r["field"] for r in fused.refused] == ["update"]
