"""Recipes fit together or say why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from fedfuse.client.class_sums import LabelCounts
from fedfuse.client.objectives import Proximal
from fedfuse.core.messages import Cohort, Start
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import AsChosen, Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.rng import seed_for
from fedfuse.core.rows import Rows
from fedfuse.core.seams import ClientsOnly, Free, OwnRows, ServerPart, TaskLoss, Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.methods.local import KeepApart
from fedfuse.methods.scaffold import ControlDelta, ControlStep
from fedfuse.server.aggregate.mean import Mean
from fedfuse.tasks import CLASSIFICATION, Task


@dataclass(frozen=True, slots=True)
class Needy(Mean):
    needs: ClassVar[frozenset[str]] = frozenset({"countss", "server_rows"})


@dataclass(frozen=True, slots=True)
class Many(Mean):
    result: ClassVar[str] = "mixture"


@dataclass(frozen=True, slots=True)
class Learns(Mean):
    needs: ClassVar[frozenset[str]] = frozenset({"server_rows"})


def test_everything_needed_must_be_sent_by_somebody() -> None:
    with pytest.raises(RecipeError, match=r"'x': nobody sends countss \(did you mean 'counts'\?\); add the evidence"):
        Recipe(name="x", aggregate=Needy(), evidence=(LabelCounts(),))
    with pytest.raises(RecipeError, match="nobody sends control"):
        Recipe(aggregate=Mean(), steps=(ControlStep(),))
    Recipe(aggregate=Mean(), steps=(ControlStep(),), evidence=(ControlDelta(),))


def test_composition_is_three_fields() -> None:
    recipe = Recipe(aggregate=Mean(), objective=Proximal(0.1), evidence=(ControlDelta(), LabelCounts()))
    assert recipe.reveals == (ControlDelta.reveals, LabelCounts.reveals)
    assert recipe.work(LocalSettings(epochs=3)).objective == Proximal(0.1)


def test_the_last_part_that_changes_the_result_says_what_it_is() -> None:
    assert Recipe(aggregate=Mean()).result == "single"
    assert Recipe(aggregate=KeepApart()).result == "apart"
    assert Recipe(aggregate=Many()).result == "mixture"


def test_a_mixture_cannot_be_followed_by_another_round() -> None:
    recipe = Recipe(name="many", aggregate=Many())
    recipe.check(1, Bench())
    with pytest.raises(RecipeError, match="'many' ends a round with a mixture"):
        recipe.check(2, Bench())
    with pytest.raises(RecipeError, match="mixture"):
        recipe.then(1, Recipe(aggregate=Mean())).check(2, Bench())
    Recipe(aggregate=Mean()).then(2, recipe).check(2, Bench())  # never reached


def test_server_rows_are_asked_for_before_any_training() -> None:
    later = Recipe(name="first", aggregate=Mean()).then(3, Recipe(name="second", aggregate=Learns()))
    later.check(3, Bench())
    with pytest.raises(RecipeError, match="'second' learns on the server's own rows"):
        later.check(4, Bench())
    later.check(4, Bench(rows=Rows(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))))


def test_a_recipe_can_hand_over_to_another() -> None:
    a, b, c = (Recipe(name=n, aggregate=Mean()) for n in "abc")
    chain = a.then(1, b.then(3, c))
    assert [chain.at(r).name for r in range(5)] == ["a", "b", "b", "c", "c"]
    assert chain.label == "a→b→c"
    with pytest.raises(RecipeError, match="at least one round"):
        a.then(0, b)


def test_work_has_a_key_unless_a_part_has_no_stable_text() -> None:
    work = Work(objective=Proximal(0.5))
    assert work.key == Work(objective=Proximal(0.5)).key
    assert work.key != Work(objective=Proximal(0.25)).key
    assert replace(work, objective=lambda local, batch: batch[0].sum()).key is None


def test_the_defaults_do_nothing() -> None:
    rows, value = Rows(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)), torch.ones(2)
    assert OwnRows()(rows, None) is rows  # type: ignore[arg-type]
    assert Free()("w", value, None) is value  # type: ignore[arg-type]
    assert ClientsOnly()("engine", Bench()) == "engine"  # type: ignore[arg-type,comparison-overlap]
    assert repr(TaskLoss()) == "TaskLoss()"


@dataclass(frozen=True, slots=True)
class Shifted:
    """A dress that moves every weight by its seed, so that one sees who was given which."""

    def __call__(self, start: Single, classes: int, seed: int, task: Task = CLASSIFICATION) -> Single:
        moved = {n: t + seed % 1000 + classes for n, t in start.posterior.mean.items()}
        return replace(start, posterior=Posterior(moved))


def test_a_recipe_dresses_the_model_and_every_start_with_seeds_of_their_own() -> None:
    spec = Spec("mlp", {"inputs": 1, "hidden": [], "classes": 2})
    zero = {n: torch.zeros_like(t) for n, t in spec.skeleton().state_dict().items()}
    starts = {"a": Start(spec, zero), "b": Start(spec, zero)}
    state = ServerState(0, Single(spec, Posterior(zero)), starts=starts)
    bench = Bench(classes=2, seed=5)
    assert Recipe(aggregate=Mean()).prepare_models(state, bench) is state
    after = Recipe(aggregate=Mean(), prepare_model=Shifted()).prepare_models(state, bench)
    moved = [
        float(p["classifier.bias"][0])
        for p in (after.single.posterior.mean, *(s.params for s in after.starts.values()))
    ]
    expected = [seed_for(5, "dress", *whose) % 1000 + 2 for whose in ((), ("a",), ("b",))]
    assert moved == expected
    assert len(set(moved)) == 3
    assert AsChosen()(state.single, 2, 0) is state.single


@dataclass(frozen=True, slots=True)
class Narrow(ServerPart):
    """A step that will have no network but one, and remembers nothing."""

    needs: frozenset[str] = frozenset()

    def check_network(self, networks: Mapping[str, Spec], bench: Bench, rounds: int) -> None:
        for client, spec in networks.items():
            if spec.options.get("hidden"):
                raise ConfigError(f"{client or 'everybody'} has hidden layers ({bench.classes} classes)")

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        return state


def test_parts_refuse_networks_before_anybody_trains() -> None:
    flat, deep = (Spec("mlp", {"inputs": 1, "hidden": h, "classes": 2}) for h in ([], [3]))
    state = ServerState(0, Single.of(flat.build(), flat))
    recipe, bench = Recipe(aggregate=Mean(), steps=(Narrow(),)), Bench(classes=2)
    recipe.check(1, bench, state)
    odd = replace(state, starts={"b": Start(deep, deep.build().state_dict())})
    with pytest.raises(ConfigError, match=r"b has hidden layers \(2 classes\)"):
        recipe.check(1, bench, odd)
    with pytest.raises(ConfigError, match="everybody has hidden layers"):
        recipe.check(1, bench, ServerState(0, Single.of(deep.build(), deep)))


def test_without_training_it_needs_the_weights_clients_stand_at() -> None:
    rests = replace(find_method("fedavg").recipe(), trains=False)
    assert "start" in rests.needs
    assert not rests.work(LocalSettings()).trains


def test_who_reads_off_the_training_says_that_there_is_none() -> None:
    with pytest.raises(RecipeError, match="'qfedavg' reads off the clients' training .* no epochs; set local.epochs"):
        find_method("qfedavg").recipe().work(LocalSettings(epochs=0))


def test_an_ending_comes_after_the_last_round_of_the_last_stage() -> None:
    first, second, last = (find_method(name).recipe() for name in ("fedavg", "fednova", "refit"))
    chain = first.then(2, second).ending(5, last)
    assert [chain.at(r).name for r in range(6)] == ["fedavg"] * 2 + ["fednova"] * 3 + ["refit"]
    assert (chain.exchanges(5), first.then(2, second).exchanges(5), last.exchanges(1)) == (6, 5, 1)
