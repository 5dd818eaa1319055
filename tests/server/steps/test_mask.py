"""Masks by magnitude and by worth."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fedfuse.core.model import Single
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState, entries_of
from fedfuse.engines.local import InProcess, Population
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.nets.cost import density
from fedfuse.server.loop import Record, RunPlan, run
from fedfuse.server.steps.mask import (
    Exchange,
    PruneFirst,
    iterated_rate,
    magnitude_masks,
    masks_of,
    select_while_rising,
)

SPEC = Spec("mlp", {"inputs": 5, "hidden": [8], "classes": 3})


def test_the_smallest_magnitudes_of_all_layers_go() -> None:
    draw = torch.Generator().manual_seed(0)
    params = {"a": torch.randn(6, 5, generator=draw), "b": 3 * torch.randn(10, generator=draw)}
    masks = magnitude_masks(params, ("a", "b"), 0.5)
    kept = torch.cat([params[n][masks[n]].abs() for n in params])
    gone = torch.cat([params[n][~masks[n]].abs() for n in params])
    assert len(gone) == 20
    assert gone.max() < kept.min()
    assert all(m.all() for m in magnitude_masks(params, ("a", "b"), 0.01).values())


def test_every_pruning_leaves_the_same_share_of_the_rest() -> None:
    left = [1 - iterated_rate(0.9, i, 3) for i in range(4)]
    assert left[0] == 1
    assert left[3] == pytest.approx(0.1)
    assert left[1] / left[0] == pytest.approx(left[2] / left[1]) == pytest.approx(left[3] / left[2])


def best_by_force(worth: Tensor, times: Tensor, gain: float, time: float) -> float:
    """The largest Γ over all subsets."""
    return max(
        (gain + float(worth[list(s)].sum())) / (time + float(times[list(s)].sum()))
        for s in ([i for i, f in enumerate(flags) if f] for flags in product((0, 1), repeat=len(worth)))
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_election_is_the_best_of_all_subsets(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    worth, times = torch.rand(9, generator=draw).double(), torch.randint(1, 5, (9,), generator=draw).double()
    gain, time = 1.0, 4.0
    taken = select_while_rising(worth / times, times, gain, time)
    gamma = (gain + float(worth[taken].sum())) / (time + float(times[taken].sum()))
    assert gamma == pytest.approx(best_by_force(worth, times, gain, time))


def test_an_exchange_keeps_what_is_sure_and_elects_the_rest() -> None:
    """Four of ten in force; half of them, the smallest, become doubtful; one masked weight is worth more than all."""
    weight = torch.tensor([4.0, 3.0, 2.0, 1.0, 0, 0, 0, 0, 0, 0])
    mask = weight != 0
    worth = torch.tensor([1.0, 1.0, 0.0, 0.9, 0, 0, 50.0, 0, 0, 0])
    new = Exchange(drop=0.5, overhead=0.1)({"w": weight}, {"w": mask}, {"w": worth}, {"w": 1})["w"]
    assert new.nonzero()[:, 0].tolist() == [0, 1, 6]


def test_weights_that_cost_more_time_must_be_worth_more() -> None:
    weights = {"conv": torch.zeros(2), "fc": torch.zeros(2)}
    masks = {n: torch.tensor([True, False]) for n in weights}
    worth = {n: torch.tensor([1.0, 1.0]) for n in weights}
    new = Exchange(drop=0.3, overhead=0.0)(weights, masks, worth, {"conv": 100, "fc": 1})
    assert new["conv"].tolist() == [True, False]
    assert new["fc"].tolist() == [True, True]


def rows(n: int, seed: int, only: int | None = None) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=draw) if only is None else torch.full((n,), only)
    return Rows(torch.randn(n, 5, generator=draw) + y[:, None], y)


def bench(server: bool = True) -> Bench:
    local = LocalSettings(batch_size=6, optimizer={"lr": 0.05})
    return Bench(rows(30, 9) if server else None, None, 3, 3, local, seed=1)


def start() -> ServerState:
    torch.manual_seed(0)
    return ServerState(0, Single.of(SPEC.build(), SPEC))


def federate(name: str, rounds: int, server: bool = True, **options: Any) -> list[Record]:
    population = Population.of({f"c{i}": rows(12, i, only=i) for i in range(3)})
    recipe = find_method(name).recipe(**options)
    plan = RunPlan(rounds, enrolled=population.sizes())
    return list(run(recipe, InProcess(population), bench(server), None, start(), plan))


def masks_in(record: Record) -> dict[str, Tensor]:
    masks, params = entries_of(record.state.memory, "mask"), record.state.single.posterior.mean
    assert all(not params[n][~m].any() for n, m in masks.items()), "masked weights are zero"
    return masks


def test_imc_reaches_its_rate_in_steps_and_what_is_gone_stays_gone() -> None:
    records = federate("imc", 6, server=False, at=2, every=2, times=2, rule="fixed", rate=0.75)
    held = [sum(int(m.sum()) for m in masks_in(r).values()) for r in records]
    assert held == [0, 32, 32, 16, 16, 16]
    early, late = masks_in(records[1]), masks_in(records[4])
    assert all(not (late[n] & ~early[n]).any() for n in late)
    assert [round(r.facts["facts"]["density"], 3) for r in records] == [
        1.0,
        *[round(43 / 75, 3)] * 2,
        *[round(27 / 75, 3)] * 3,
    ]


def test_sparse_messages_count_as_sparse() -> None:
    records = federate("imc", 3, server=False, at=1, every=1, times=1, rule="fixed", rate=0.75)
    before, after = records[0].facts, records[1].facts
    assert before["bytes_up"] - after["bytes_up"] == 3 * 48 * 4
    plain = federate("fedavg", 2)[1].facts
    assert plain["bytes_down"] - 3 * 48 * 4 < after["bytes_down"] < plain["bytes_down"]


def test_imc_finds_its_rate_as_fedap_does() -> None:
    told = federate("imc", 2, at=1, every=1, times=1, lanczos=8, sample=10)[0].facts["facts"]["pruned"]
    assert set(told["rates"]) == {"c0", "c1", "c2", "server"}


def test_a_last_pruning_that_never_comes_is_refused() -> None:
    with pytest.raises(ConfigError, match="last time after round 7 and the run ends after 5"):
        federate("imc", 5, at=3, every=2, times=3, rule="fixed")


def test_prunefl_begins_small_and_trades() -> None:
    records = federate("prunefl", 4, every=2, steps=5)
    first, second = masks_in(records[0]), masks_in(records[1])
    assert records[0].facts["facts"]["density"] < 0.9
    assert any(not first[n].equal(second[n]) for n in first)
    assert all(m.any() for m in second.values())
    assert not any(r.facts["refused"] for r in records)
    assert records[1].facts["bytes_up"] > records[0].facts["bytes_up"], "squared gradients came"


def test_the_first_stage_ends_when_the_density_settles() -> None:
    settled = PruneFirst(steps=2, change=0.9, patience=2, most=50)(start(), bench())
    twice = PruneFirst(steps=2, change=1e-9, patience=2, most=2)(start(), bench())
    assert all(settled.memory[n].equal(twice.memory[n]) for n in twice.memory)
    assert density(settled.single.posterior.mean, settled.memory) < 1


def test_without_masks_everything_is_in_force() -> None:
    assert all(m.all() for m in masks_of(start()).values())


def test_prunefl_needs_server_rows() -> None:
    with pytest.raises(RecipeError, match="'prunefl' learns on the server's own rows and there are none"):
        federate("prunefl", 1, server=False)
