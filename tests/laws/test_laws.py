"""Laws that aggregators claim, held over everything registered.

A new aggregator or method is covered by being there: cohorts come from real client rounds with the recipe's own
evidence, through the real door, so whatever evidence there is, it is sound. Then clients are reordered, agree, are
scaled, and the result is compared: weights of single networks, answers of mixtures.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedfuse.client
import fedfuse.methods
import fedfuse.server.aggregate
from fedfuse.core.messages import ClientUpdate, Cohort, Envelope
from fedfuse.core.model import Apart, Single
from fedfuse.core.params import Params
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import all_methods
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Aggregator, Evidence
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.nets.mixture import Mixture
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.aggregate.mean import ALL_LAWS, Mean
from fedfuse.server.guards import GUARDS
from fedfuse.server.round import PartedRound, filter_cohort
from fedfuse.training.round import client_round

CLIENTS, FEATURES, CLASSES = 5, 6, 3
few = settings(max_examples=6, deadline=None, derandomize=True)


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


# Methods whose options bring aggregators that no default has.
VARIANTS: tuple[tuple[str, dict[str, object]], ...] = (
    ("fedlpa", {"solver": "adam", "max_iters": 5}),
    ("refit", {"layers": True}),
    ("ties", {"metric": "regmean"}),
    ("task_arithmetic", {"metric": "fedlpa"}),
)
NETWORKS = {
    "plain": Spec("mlp", {"inputs": FEATURES, "hidden": [7], "classes": CLASSES}),
    "with norm": Spec.of(with_norm()),
}


def classes_in(*packages: ModuleType) -> Iterator[type]:
    """Every dataclass that these packages define."""
    names = [f"{p.__name__}.{found.name}" for p in packages for found in pkgutil.iter_modules(p.__path__)]
    for module in map(importlib.import_module, names):
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ == module.__name__ and is_dataclass(cls) and callable(cls):
                yield cls


def needs_nothing(cls: type) -> bool:
    return all(f.default is not MISSING or f.default_factory is not MISSING for f in fields(cls) if f.init)


def evidence_for(needs: frozenset[str]) -> tuple[Evidence, ...]:
    defined = [*classes_in(fedfuse.client, fedfuse.methods)][::-1]  # of those that share a name, the first stays
    kinds = {c.name: c for c in defined if hasattr(c, "expects") and needs_nothing(c)}
    return tuple(kinds[n]() for n in sorted(needs) if n in kinds)


def aggregators() -> list[type]:
    defined = classes_in(fedfuse.server.aggregate, fedfuse.methods)
    return [c for c in defined if hasattr(c, "laws") and hasattr(c, "needs")]


@cache
def cases() -> dict[str, Recipe]:
    """Every method, every aggregator that can stand alone, and every guard before the plain mean."""
    found = {name: method.recipe() for name, method in all_methods().items()}
    found |= {f"{name} {options}": all_methods()[name].recipe(**options) for name, options in VARIANTS}
    for cls in aggregators():
        if needs_nothing(cls):
            made: Aggregator = cls()
            found[cls.__name__] = Recipe(aggregate=made, evidence=evidence_for(made.needs))
    for name, guard in GUARDS.items():
        found[f"{name} before mean"] = Recipe(aggregate=Mean(), guard=guard())
    return found


def fuse(recipe: Recipe, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
    """A round without the server's steps: what the laws are about."""
    filtered, _ = filter_cohort(recipe, cohort, state, bench)
    return recipe.aggregate(filtered, state, bench)


@dataclass(frozen=True, slots=True)
class Trial:
    """A cohort that came through the door, and what an aggregator sees beside it."""

    recipe: Recipe
    cohort: Cohort
    state: ServerState
    bench: Bench

    def fuse(self, cohort: Cohort | None = None) -> dict[str, Tensor]:
        """What the aggregator makes of a cohort, as tensors one can compare."""
        return outcome(fuse(self.recipe, cohort or self.cohort, self.state, self.bench))


def rows(seed: int, n: int) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    return Rows(torch.randn(n, FEATURES, generator=draw), torch.randint(CLASSES, (n,), generator=draw))


@cache
def trial(name: str, network: str, seed: int = 0) -> Trial | None:
    """A real round up to the aggregator; None where the recipe says it does not fit the network."""
    recipe, spec = cases()[name], NETWORKS[network]
    local = LocalSettings(batch_size=8, epochs=2, optimizer={"lr": 0.1})
    server = rows(99, 30)
    bench = Bench(server, server.x, CLIENTS, CLASSES, local, seed)
    torch.manual_seed(seed)
    start, asked = ServerState(0, Single.of(spec.build(), spec)), tuple(f"c{i}" for i in range(CLIENTS))
    try:
        state = recipe.prepare_models(start, bench)
        brief = state.brief(recipe.publishes, CLASSES)
        envelopes = [
            Envelope(c, client_round(recipe.work(local), brief, c, rows(seed + i, 11 + 4 * i), seed=seed).payload)
            for i, c in enumerate(asked)
        ]
        admission = admit_all(envelopes, brief, recipe.evidence, asked, trains=recipe.trains)
        assert not admission.refused
        fuse(recipe, admission.cohort, state, bench)
    except (RecipeError, ConfigError):
        return None
    return Trial(recipe, admission.cohort, state, bench)


def outcome(state: ServerState) -> dict[str, Tensor]:
    if isinstance(state.model, Single):
        return dict(state.model.posterior.mean)
    if isinstance(state.model, Mixture):
        return {"answer": state.model.logits(rows(7, 20).x).log_softmax(-1)}
    return {f"{i}/{n}": t for i, m in enumerate(state.model.members) for n, t in m.posterior.mean.items()}


def alone(update: ClientUpdate) -> dict[str, Tensor]:
    return dict(update.posterior.mean)


def close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-5) -> bool:
    return a.keys() == b.keys() and all(
        torch.allclose(a[n].double(), b[n].double(), rtol=tolerance, atol=tolerance) for n in a
    )


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and a[n].equal(b[n]) for n in a)


def compared(state: ServerState, update: ClientUpdate) -> dict[str, Tensor]:
    """What an outcome must be if it is one client's model: its weights, or its answers."""
    if isinstance(state.model, Mixture):
        lone = Single(update.spec, update.posterior)
        return {"answer": lone.logits(rows(7, 20).x).log_softmax(-1)}
    return alone(update)


def claims(law: str) -> pytest.MarkDecorator:
    """Every case that claims a law, on every network; with norms, behind `make test-all`."""
    marks = {"plain": (), "with norm": (pytest.mark.slow,)}
    names = [n for n, recipe in cases().items() if law in recipe.laws]
    who = [pytest.param(n, net, id=f"{n}, {net}", marks=marks[net]) for n in names for net in NETWORKS]
    return pytest.mark.parametrize(("name", "network"), who)


num_examples = st.lists(st.floats(0.5, 500.0), min_size=CLIENTS, max_size=CLIENTS)


@claims("order")
@few
@given(order=st.permutations(range(CLIENTS)), seed=st.sampled_from([0, 1]))
def test_the_order_of_clients_does_not_matter(name: str, network: str, order: list[int], seed: int) -> None:
    if (it := trial(name, network, seed)) is None:
        return
    updates = it.cohort.updates
    assert same(it.fuse(Cohort.of([updates[i] for i in order])), it.fuse()), "who answered first"
    renamed = [replace(updates[i], client=f"c{place}") for place, i in enumerate(order)]
    assert close(it.fuse(Cohort.of(renamed)), it.fuse()), "who is called what"


@claims("one")
@few
@given(who=st.integers(0, CLIENTS - 1), num_examples=st.floats(0.5, 500.0))
def test_one_client_is_that_client(name: str, network: str, who: int, num_examples: float) -> None:
    if (it := trial(name, network)) is None:
        return
    update = replace(it.cohort.updates[who], num_examples=num_examples)
    state = fuse(it.recipe, Cohort((update,)), it.state, it.bench)
    assert close(outcome(state), compared(state, update))


@claims("agree")
@few
@given(who=st.integers(0, CLIENTS - 1), weights=num_examples)
def test_agreeing_clients_change_nothing(name: str, network: str, who: int, weights: list[float]) -> None:
    if (it := trial(name, network)) is None:
        return
    update = it.cohort.updates[who]
    cohort = Cohort(tuple(replace(update, client=f"c{i}", num_examples=m) for i, m in enumerate(weights)))
    state = fuse(it.recipe, cohort, it.state, it.bench)
    assert close(outcome(state), compared(state, update))


@claims("scale")
@few
@given(factor=st.floats(1e-3, 1e3), weights=num_examples)
def test_only_the_ratios_of_masses_matter(name: str, network: str, factor: float, weights: list[float]) -> None:
    if (it := trial(name, network)) is None:
        return
    weighed = [replace(u, num_examples=m) for u, m in zip(it.cohort, weights, strict=True)]
    scaled = [replace(u, num_examples=u.num_examples * factor) for u in weighed]
    assert close(it.fuse(Cohort.of(weighed)), it.fuse(Cohort.of(scaled)))


def everything_in(it: Trial) -> dict[str, Tensor]:
    seen = {f"start/{n}": t for n, t in it.state.single.posterior.mean.items()}
    for u in it.cohort:
        seen |= {f"{u.client}/mean/{n}": t for n, t in u.posterior.mean.items()}
        seen |= {f"{u.client}/note/{n}": t for n, t in u.notes.items()}
    assert it.bench.rows is not None
    return seen | {"rows/x": it.bench.rows.x, "rows/y": it.bench.rows.y}


@claims("pure")
def test_inputs_are_left_as_they_were(name: str, network: str) -> None:
    if (it := trial(name, network)) is None:
        return
    before = {n: t.clone() for n, t in everything_in(it).items()}
    stream = torch.random.get_rng_state()
    fused = it.fuse()
    for tensor in fused.values():
        tensor.zero_()  # and the result is nobody's memory but its own
    assert same(everything_in(it), before)
    assert torch.random.get_rng_state().equal(stream), "no global randomness"


def cast(params: Params, dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in params.items()}


@claims("dtype")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_what_comes_in_one_dtype_goes_out_in_it(name: str, network: str, dtype: torch.dtype) -> None:
    if (it := trial(name, network)) is None:
        return
    start = it.state.single
    state = replace(it.state, model=Single(start.spec, Posterior(cast(start.posterior.mean, dtype))))
    updates = [replace(u, posterior=replace(u.posterior, mean=cast(u.posterior.mean, dtype))) for u in it.cohort]
    model = fuse(it.recipe, Cohort.of(updates), state, it.bench).model
    members = [model] if isinstance(model, Single) else model.members
    for member in members:
        forms = {n: t.dtype for n, t in member.posterior.mean.items()}
        assert forms == {n: t.dtype for n, t in updates[0].posterior.mean.items()}


@claims("finite")
@few
@given(weights=st.lists(st.floats(1e-9, 1e9), min_size=CLIENTS, max_size=CLIENTS), seed=st.sampled_from([0, 1]))
def test_finite_clients_make_a_finite_model(name: str, network: str, weights: list[float], seed: int) -> None:
    if (it := trial(name, network, seed)) is None:
        return
    fused = it.fuse(Cohort.of([replace(u, num_examples=m) for u, m in zip(it.cohort, weights, strict=True)]))
    assert all(t.isfinite().all() for t in fused.values())


@claims("repeat")
def test_the_same_seed_gives_the_same_bytes(name: str, network: str) -> None:
    if (it := trial(name, network)) is None:
        return
    first = {n: t.clone() for n, t in it.fuse().items()}
    torch.rand(7)  # wherever the global generator stands
    assert same(it.fuse(), first)


def in_parts() -> pytest.MarkDecorator:
    """Every case that fuses a tensor, or a layer with its evidence, by that alone, on every network."""
    who = [(n, net) for n, recipe in cases().items() if recipe.layerwise for net in NETWORKS]
    return pytest.mark.parametrize(("name", "network"), who, ids=[f"{n}, {net}" for n, net in who])


@in_parts()
def test_a_round_in_parts_gives_the_bytes_of_the_whole(name: str, network: str) -> None:
    it = trial(name, network)
    assert it is not None
    parts = PartedRound(it.recipe, it.cohort, it.state, it.bench)
    assert same(dict(parts.result().posterior.mean), it.fuse())


@pytest.mark.parametrize("name", cases())
def test_laws_are_known_and_every_case_runs_somewhere(name: str) -> None:
    assert cases()[name].laws <= ALL_LAWS
    assert any(trial(name, network) is not None for network in NETWORKS)


def test_no_aggregator_escapes_the_laws() -> None:
    """Each stands alone here or is used by some method; one inside another counts."""
    used: set[type] = set()
    for recipe in cases().values():
        part: object = recipe.aggregate
        while part is not None:
            used.add(type(part))
            part = getattr(part, "then", None)
    assert set(aggregators()) <= used


def test_models_that_stay_apart_are_compared_member_by_member() -> None:
    it = trial("local", "plain")
    assert it is not None
    assert isinstance(fuse(it.recipe, it.cohort, it.state, it.bench).model, Apart)
    assert len(it.fuse()) == CLIENTS * len(it.state.single.posterior.mean)
