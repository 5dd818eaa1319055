"""The centre of a round: what is aligned and guarded is what is fused, and what the steps see."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState, with_kind
from fedfuse.errors import ConfigError
from fedfuse.server.aggregate.ensemble import KeepAll
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.filters import with_filters
from fedfuse.server.guards import Krum
from fedfuse.server.round import Clock, filter_cohort, fuse_round

SPEC = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 3})


def weights(value: float) -> dict[str, Tensor]:
    return {n: torch.full_like(t, value) for n, t in SPEC.build().state_dict().items()}


def update(client: str, value: float, spec: Spec = SPEC) -> ClientUpdate:
    mean = {n: torch.full_like(t, value) for n, t in spec.build().state_dict().items()}
    notes = with_kind("control", {n: torch.full_like(t, value) for n, t in mean.items()})
    return ClientUpdate(client, Posterior(mean), 1.0, 1, spec, notes)


def start() -> ServerState:
    return ServerState(0, Single(SPEC, Posterior(weights(0.0))))


def test_a_step_does_not_hear_whom_the_guard_dropped() -> None:
    """SCAFFOLD behind Krum: the liar's control variate must not reach the server's."""
    cohort = Cohort.of([*(update(f"c{i}", 0.01 * i) for i in range(5)), update("liar", 1e6)])
    recipe = with_filters(find_method("scaffold").recipe(), guard="krum")
    after = fuse_round(recipe, cohort, start(), Bench(population=6))
    assert after.facts["guard_dropped"] == ["liar"]
    control = after.memory["control/fc1.weight"]
    assert torch.allclose(control, torch.full_like(control, sum(0.01 * i for i in range(5)) / 6))


def test_steps_see_the_units_where_the_alignment_put_them() -> None:
    generator = torch.Generator().manual_seed(0)
    one = {n: torch.randn(t.shape, generator=generator) for n, t in weights(0.0).items()}
    order = torch.tensor([4, 2, 0, 1, 3])
    other = {
        "fc1.weight": one["fc1.weight"][order],
        "fc1.bias": one["fc1.bias"][order],
        "classifier.weight": one["classifier.weight"][:, order],
        "classifier.bias": one["classifier.bias"],
    }
    updates = [
        ClientUpdate(c, Posterior(m), 1.0, 1, SPEC, with_kind("control", m)) for c, m in (("a", one), ("b", other))
    ]
    after = fuse_round(
        with_filters(find_method("scaffold").recipe(), align="weights"),
        Cohort.of(updates),
        start(),
        Bench(population=2),
    )
    assert all(torch.allclose(after.memory[f"control/{n}"], t, atol=1e-6) for n, t in one.items())


def test_the_round_is_counted_and_facts_begin_anew() -> None:
    cohort = Cohort.of([update("a", 1.0), update("b", 3.0)])
    after = fuse_round(Recipe(aggregate=Mean()), cohort, replace(start(), facts={"old": 1}), Bench())
    assert (after.round, dict(after.facts)) == (1, {})
    assert after.single.posterior.mean["fc1.bias"].tolist() == [2.0] * 5


def test_without_filters_the_cohort_is_the_one_that_came() -> None:
    cohort = Cohort.of([update("a", 1.0)])
    assert filter_cohort(Recipe(aggregate=Mean()), cohort, start(), Bench()) == (cohort, {})


def test_a_guard_compares_networks_of_one_kind() -> None:
    wide = Spec("mlp", {"inputs": 4, "hidden": [6], "classes": 3})
    cohort = Cohort.of([update("a", 1.0), update("b", 1.0), update("c", 1.0), update("hospital", 1.0, wide)])
    with pytest.raises(ConfigError, match="compares weights, and hospital has another network than a"):
        fuse_round(Recipe(name="ensemble", aggregate=KeepAll(), guard=Krum()), cohort, start(), Bench())


@pytest.mark.parametrize("name", ["q.lora_A.weight", "q.lora_B.default.weight", "q.lora_magnitude_vector"])
def test_adapters_are_refused_by_methods_that_would_fuse_their_factors_apart(name: str) -> None:
    one = ClientUpdate("a", Posterior({name: torch.ones(2, 2)}), 1.0, 1, SPEC)
    with pytest.raises(ConfigError, match=f"'{name}' belongs to a low-rank adapter .* fuse by flora or flexlora"):
        fuse_round(Recipe(name="fedavg", aggregate=Mean()), Cohort.of([one]), start(), Bench())


def test_what_is_only_noted_is_counted_apart() -> None:
    """AMS measures how networks disturb each other; a reader must not take that for the method's own time."""
    cohort = Cohort.of([update("a", 0.1), update("b", 0.2)])
    with_note, without = Clock(), Clock()
    fuse_round(find_method("ams").recipe(), cohort, start(), Bench(population=2, classes=3), with_note)
    fuse_round(find_method("ams").recipe(disturbance=False), cohort, start(), Bench(population=2), without)
    assert with_note.seconds.keys() == {"server", "diagnostics"}
    assert without.seconds.keys() == {"server"}
