"""The centre of a round: what is aligned and guarded is fused, what steps see, and what a fusion must not return.

Clients that break a fusion are found, refused by name, and the round goes on; a method whose fused model does not fit
its network is named with the tensor, through every door, and no client is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.conftest import Fedfuse
from torch import Tensor, nn

from builders import constant, start_of, update_of
from fedfuse.api import fuse, recipe
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method, method
from fedfuse.core.seams import ServerPart
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState, with_kind
from fedfuse.errors import ConfigError, FuseError, MethodFault, NotConverged
from fedfuse.server.admission.admit import Admission, Spool
from fedfuse.server.aggregate.ensemble import KeepAll
from fedfuse.server.aggregate.mean import ALL_LAWS, Mean, mean_of
from fedfuse.server.filters import with_filters
from fedfuse.server.guards import Krum
from fedfuse.server.round import Clock, filter_cohort, fuse_admitted, fuse_round
from fedfuse.testing import check_method

SPEC = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 3})
ZERO = start_of(SPEC, constant(SPEC, 0.0))


def update(client: str, value: float, spec: Spec = SPEC) -> ClientUpdate:
    mean = constant(spec, value)
    return update_of(client, mean, spec, notes=with_kind("control", mean))


def test_a_step_does_not_hear_whom_the_guard_dropped() -> None:
    """SCAFFOLD behind Krum: the liar's control variate must not reach the server's."""
    cohort = Cohort.of([*(update(f"c{i}", 0.01 * i) for i in range(5)), update("liar", 1e6)])
    recipe = with_filters(find_method("scaffold").recipe(), guard="krum")
    after = fuse_round(recipe, cohort, ZERO, Bench(population=6))
    assert after.facts["guard_dropped"] == ["liar"]
    control = after.memory["control/fc1.weight"]
    assert torch.allclose(control, torch.full_like(control, sum(0.01 * i for i in range(5)) / 6))


def test_steps_see_the_units_where_the_alignment_put_them() -> None:
    generator = torch.Generator().manual_seed(0)
    one = {n: torch.randn(t.shape, generator=generator) for n, t in constant(SPEC, 0.0).items()}
    order = torch.tensor([4, 2, 0, 1, 3])
    other = {
        "fc1.weight": one["fc1.weight"][order],
        "fc1.bias": one["fc1.bias"][order],
        "classifier.weight": one["classifier.weight"][:, order],
        "classifier.bias": one["classifier.bias"],
    }
    updates = [update_of(c, m, SPEC, notes=with_kind("control", m)) for c, m in (("a", one), ("b", other))]
    after = fuse_round(
        with_filters(find_method("scaffold").recipe(), align="weights"),
        Cohort.of(updates),
        ZERO,
        Bench(population=2),
    )
    assert all(torch.allclose(after.memory[f"control/{n}"], t, atol=1e-6) for n, t in one.items())


def test_the_round_is_counted_and_facts_begin_anew() -> None:
    cohort = Cohort.of([update("a", 1.0), update("b", 3.0)])
    after = fuse_round(Recipe(aggregate=Mean()), cohort, replace(ZERO, facts={"old": 1}), Bench())
    assert (after.round, dict(after.facts)) == (1, {})
    assert after.single.posterior.mean["fc1.bias"].tolist() == [2.0] * 5


def test_without_filters_the_cohort_is_the_one_that_came() -> None:
    cohort = Cohort.of([update("a", 1.0)])
    assert filter_cohort(Recipe(aggregate=Mean()), cohort, ZERO, Bench()) == (cohort, {})


def test_a_guard_compares_networks_of_one_kind() -> None:
    wide = Spec("mlp", {"inputs": 4, "hidden": [6], "classes": 3})
    cohort = Cohort.of([update("a", 1.0), update("b", 1.0), update("c", 1.0), update("hospital", 1.0, wide)])
    with pytest.raises(ConfigError, match="compares weights, and hospital has another network than a"):
        fuse_round(Recipe(name="ensemble", aggregate=KeepAll(), guard=Krum()), cohort, ZERO, Bench())


@pytest.mark.parametrize("name", ["q.lora_A.weight", "q.lora_B.default.weight", "q.lora_magnitude_vector"])
def test_adapters_are_refused_by_methods_that_would_fuse_their_factors_apart(name: str) -> None:
    one = update_of("a", {name: torch.ones(2, 2)}, SPEC)
    with pytest.raises(ConfigError, match=f"'{name}' belongs to a low-rank adapter .* fuse by flora or flexlora"):
        fuse_round(Recipe(name="fedavg", aggregate=Mean()), Cohort.of([one]), ZERO, Bench())


def test_what_is_only_noted_is_counted_apart() -> None:
    """AMS measures how networks disturb each other; a reader must not take that for the method's own time."""
    cohort = Cohort.of([update("a", 0.1), update("b", 0.2)])
    with_note, without = Clock(), Clock()
    fuse_round(find_method("ams").recipe(), cohort, ZERO, Bench(population=2, classes=3), with_note)
    fuse_round(find_method("ams").recipe(disturbance=False), cohort, ZERO, Bench(population=2), without)
    assert with_note.seconds.keys() == {"server", "diagnostics"}
    assert without.seconds.keys() == {"server"}


def admitted(count: int, bad: set[int], value: float = float("inf")) -> Admission:
    updates = []
    for place in range(count):
        mean = constant(SPEC, 0.5)
        if place in bad:
            mean["classifier.bias"][0] = value
        updates.append(update_of(f"c{place}", mean, SPEC))
    return Admission(Cohort.of(updates), Spool(2**20))


@dataclass(frozen=True, slots=True)
class Fragile(ServerPart):
    """A mean that fails in some way when it meets a large number, and counts how often it was asked."""

    error: type[Exception]
    calls: list[int] = field(default_factory=list)
    laws: ClassVar[frozenset[str]] = ALL_LAWS

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        self.calls.append(len(cohort))
        if any(float(u.posterior.mean["classifier.bias"].abs().max()) > 10 for u in cohort):
            raise self.error("no good")
        return Mean()(cohort, state, bench)


@pytest.mark.parametrize("bad", [{0}, {3}, {9}, {2, 7}, {0, 1, 2}])
def test_the_clients_without_whom_the_model_is_finite_are_refused(bad: set[int]) -> None:
    seen = admitted(10, bad)
    after = fuse_admitted(Recipe(name="mean", aggregate=Mean()), seen, ZERO, Bench())
    assert {r["client"] for r in seen.refused} == {f"c{i}" for i in bad}
    assert len(seen.cohort) == 10 - len(bad)
    assert all(torch.isfinite(t).all() for t in after.single.posterior.mean.values())
    assert seen.refused[0]["got"] == "the fused classifier.bias is not finite"


@pytest.mark.parametrize("error", [NotConverged, IndexError, RuntimeError, torch.linalg.LinAlgError, ZeroDivisionError])
def test_whatever_a_method_ends_in_the_culprit_is_found_by_halving(error: type[Exception]) -> None:
    rule, seen = Fragile(error), admitted(64, {37}, 100.0)
    fuse_admitted(Recipe(name="fragile", aggregate=rule), seen, ZERO, Bench())
    assert [r["client"] for r in seen.refused] == ["c37"]
    assert len(rule.calls) <= 2 + 2 * 6, "the whole, two halves at most for each of six levels, and what is left"


def test_what_no_absence_mends_ends_in_an_error_of_ours() -> None:
    seen = admitted(4, {0, 1, 2, 3}, 100.0)
    with pytest.raises(FuseError, match="method 'fragile' could not fuse these updates: IndexError: no good"):
        fuse_admitted(Recipe(name="fragile", aggregate=Fragile(IndexError)), seen, ZERO, Bench())
    with pytest.raises(NotConverged, match="no good"):
        fuse_admitted(Recipe(name="fragile", aggregate=Fragile(NotConverged)), seen, ZERO, Bench())
    assert (len(seen.cohort), seen.refused) == (4, [])


def test_a_sound_fusion_is_done_once() -> None:
    rule = Fragile(RuntimeError)
    fuse_admitted(Recipe(name="fragile", aggregate=rule), admitted(5, set()), ZERO, Bench())
    assert rule.calls == [5]


Means = Mapping[str, Tensor]

ODD: dict[str, tuple[Callable[[Means], Any], str]] = {
    "without biases": (
        lambda m: {n: t for n, t in m.items() if "bias" not in n},
        "bias is missing, expected 3 float32",
    ),
    "wide": (lambda m: {n: torch.cat([t, t]) for n, t in m.items()}, "bias is 6 float32, expected 3 float32"),
    "double": (lambda m: {n: t.double() for n, t in m.items()}, "bias is 3 float64, expected 3 float32"),
    "more": (lambda m: {**m, "zz": torch.zeros(2)}, "zz is 2 float32, expected no such tensor"),
    "numpy": (lambda m: {n: t.numpy() for n, t in m.items()}, "weight is a ndarray, expected a tensor"),
    "none": (lambda _: None, r"fused nothing \(None\), expected a mapping"),
}


@dataclass(frozen=True, slots=True)
class Odd(ServerPart):
    """A mean with something wrong."""

    change: Callable[[Means], Any]
    laws: ClassVar[frozenset[str]] = ALL_LAWS

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        return state.fused(self.change(mean_of(cohort)))


class Forgets(ServerPart):
    """It forgets its `return`, as an aggregator and as a step."""

    laws: ClassVar[frozenset[str]] = ALL_LAWS

    def __call__(self, *_: object) -> None:
        pass


@pytest.fixture(params=ODD)
def odd(request: pytest.FixtureRequest) -> tuple[Recipe, str]:
    """A recipe that is registered as "odd", and what is to be said of it."""
    change, words = ODD[request.param]
    method("odd")(lambda: Recipe(aggregate=Odd(change)))
    return recipe("odd"), f"method 'odd': Odd .*{words}"


def test_files_and_state_dicts(odd: tuple[Recipe, str]) -> None:
    made, words = odd
    network = nn.Linear(2, 3)
    with pytest.raises(MethodFault, match=words):
        fuse([network.state_dict()] * 3, made, num_examples=[1, 1, 1])
    with pytest.raises(MethodFault, match=words):
        fuse([network] * 3, made, model=network, num_examples=[1, 1, 1])


def test_a_run(odd: tuple[Recipe, str], fedfuse: Fedfuse, tmp_path: Path) -> None:
    said = 'rounds = 2\nmethods = [{ name = "odd" }]\n[model]\nname = "mlp"\nhidden = []\n'
    (tmp_path / "odd.toml").write_text(said + "[data]\ntrain_limit = 40\ntest_limit = 20\nclients = 2\n")
    code, _, err = fedfuse("run", str(tmp_path / "odd.toml"), "--out", str(tmp_path / "run"), "--workers", "0")
    assert code == 1
    assert "method 'odd': Odd" in err
    assert not list((tmp_path / "run").glob("models/*"))


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight


def test_a_lost_tensor_that_is_tied_to_another_is_named_too() -> None:
    made = Recipe(name="mine", aggregate=Odd(lambda m: {n: t for n, t in m.items() if n != "first.weight"}))
    with pytest.raises(MethodFault, match=r"'mine': Odd .* first.weight is missing, expected 3×3 float32"):
        fuse([Tied()] * 3, made, model=Tied(), num_examples=[1, 1, 1])


def test_the_laws(odd: tuple[Recipe, str]) -> None:
    with pytest.raises(MethodFault, match="method 'odd': Odd"):
        check_method("odd")


@pytest.mark.parametrize("seam", ["aggregate", "steps"])
def test_a_forgotten_return(seam: str) -> None:
    parts: dict[str, Any] = {"aggregate": Odd(dict)} | {seam: Forgets() if seam == "aggregate" else (Forgets(),)}
    network = nn.Linear(2, 3)
    with pytest.raises(MethodFault, match=r"method 'mine': Forgets returned nothing \(None\), expected a ServerState"):
        fuse([network.state_dict()] * 3, Recipe(name="mine", **parts), num_examples=[1, 1, 1])
