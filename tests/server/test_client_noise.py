import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor

import fedfuse
from builders import constant, drawn, start_of, update_of
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.settings import LocalSettings, MoveNoise
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.linalg.privacy import gaussian_epsilon, sampled_epsilon
from fedfuse.server.aggregate.charts import Chart, MeanIn
from fedfuse.server.filters import with_filters
from fedfuse.server.guards import ClientNoise, _coordinates
from fedfuse.server.round import fuse_round
from fedfuse.training.round import disturb_move

SPEC = Spec("mlp", {"inputs": 20, "hidden": [30], "classes": 3})
START = start_of(SPEC, constant(SPEC, 0.0))


def vector(params: object) -> Tensor:
    return torch.cat([t.double().flatten() for t in dict(params).values()])  # type: ignore[call-overload]


def client(k: int, scale: float = 1.0) -> ClientUpdate:
    return update_of(f"c{k}", {n: scale * t for n, t in drawn(SPEC, k).items()}, SPEC, 10.0 * (k + 1))


def mean_behind(guard: ClientNoise, updates: list[ClientUpdate]) -> Tensor:
    recipe = with_filters(find_method("fedavg").recipe(), guard=guard)
    return vector(fuse_round(recipe, Cohort.of(updates), START, Bench()).single.posterior.mean)


def test_one_client_moves_the_mean_by_no_more_than_its_share() -> None:
    """Without noise: whatever one of five clients sends, and however many rows it claims, by C/K at most."""
    guard, others = ClientNoise(clip=0.5, noise=0.0), [client(k) for k in range(4)]
    absent = update_of("c9", START.single.posterior.mean, SPEC)
    without = mean_behind(guard, [*others, absent])
    for scale in (0.001, 1.0, 1e6):
        liar = client(9, scale)
        assert float((mean_behind(guard, [*others, liar]) - without).norm()) <= 0.5 / 5 + 1e-6


def test_the_mean_has_the_noise_it_claims() -> None:
    updates = [client(k) for k in range(5)]
    plain = mean_behind(ClientNoise(0.5, 0.0), updates)
    gaps = torch.cat([mean_behind(ClientNoise(0.5, 2.0, seed=s), updates) - plain for s in range(5)])
    assert stats.kstest((gaps / (2.0 * 0.5 / 5)).numpy(), "norm").pvalue > 1e-3


def test_noise_comes_from_the_operating_system_unless_a_seed_is_given() -> None:
    updates = [client(k) for k in range(3)]
    assert not mean_behind(ClientNoise(), updates).equal(mean_behind(ClientNoise(), updates))
    assert mean_behind(ClientNoise(seed=1), updates).equal(mean_behind(ClientNoise(seed=1), updates))


def test_the_record_adds_up_the_rounds() -> None:
    recipe = with_filters(find_method("fedavg").recipe(), guard={"name": "private", "noise": 4.0})
    state = START
    for rounds in (1, 2, 3):
        state = fuse_round(recipe, Cohort.of([client(k) for k in range(3)]), state, Bench())
        assert state.facts["privacy"]["epsilon"] == pytest.approx(gaussian_epsilon(math.sqrt(rounds) / 4, 1e-5))


@pytest.mark.parametrize("name", ["fedlpa", "fednova", "ridge", "ensemble"])
def test_methods_that_read_more_than_a_mean_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="reads more"):
        with_filters(find_method(name).recipe(), guard="private")


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedadam"])
def test_means_and_server_optimizers_are_covered(name: str) -> None:
    assert with_filters(find_method(name).recipe(), guard="private").label == f"{name}+private"


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(RecipeError, match="expected clip > 0"):
        ClientNoise(clip=0.0)


def test_files_are_fused_privately_too() -> None:
    states = [dict(client(k).posterior.mean) for k in range(3)]
    start, guard = dict(START.single.posterior.mean), {"name": "private", "seed": 0}
    fused = fedfuse.fuse(states, "fedavg", start=start, guard=guard)
    assert fused.facts["privacy"]["of"] == "a client"


SIZES = {"inputs": 6, "hidden": [5], "classes": 3}
CHARTS = ["eaa", "gaa", "aalv", "wb", "rklb", "fklb"]


def bayesian(name: str) -> tuple[Recipe, ServerState]:
    """A method whose last layer is Bayesian, and the prepared network it begins with."""
    recipe = find_method(name).recipe()
    return recipe, recipe.prepare_models(start_of(Spec("mlp", SIZES)), Bench(classes=3))


def walked(k: int, state: ServerState, scale: float) -> ClientUpdate:
    draw, model = torch.Generator().manual_seed(k), state.single
    params = {n: t + scale * torch.randn(t.shape, generator=draw).clamp(-9, 9) for n, t in model.posterior.mean.items()}
    return update_of(f"c{k}", params, model.spec, 10.0 * (k + 1))


def in_chart(name: str, params: object, state: ServerState) -> Tensor:
    recipe = bayesian(name)[0]
    assert isinstance(recipe.aggregate, MeanIn)
    assert isinstance(recipe.aggregate.chart, Chart)
    start, pairs = state.single.posterior.mean, state.single.spec.layout.log_variances
    return vector(_coordinates(recipe.aggregate.chart, params, start, pairs))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CHARTS)
def test_one_client_moves_a_mean_in_a_chart_by_no_more_than_its_share(name: str) -> None:
    """Before the uncertainties are raised, which is done to what was released: in coordinates, by C/K at most."""
    recipe, state = bayesian(name)
    guard = ClientNoise(clip=0.05, noise=0.0).fit_to(recipe)
    others = [walked(k, state, 0.01) for k in range(4)]
    absent = update_of("c9", state.single.posterior.mean, state.single.spec)
    without = in_chart(name, guard(Cohort.of([*others, absent]), state).updates[0].posterior.mean, state)
    for scale in (0.001, 0.1, 3.0):
        found = guard(Cohort.of([*others, walked(9, state, scale)]), state).updates[0].posterior.mean
        assert float((in_chart(name, found, state) - without).norm()) <= 0.05 / 5 * (1 + 1e-3) + 1e-5


@pytest.mark.parametrize("name", CHARTS)
def test_without_noise_and_with_a_long_clip_a_chart_gives_its_own_mean(name: str) -> None:
    recipe, state = bayesian(name)
    cohort = Cohort.of([replace(walked(k, state, 0.05), num_examples=1.0) for k in range(3)])
    plain = fuse_round(recipe, cohort, state, Bench(classes=3)).single.posterior.mean
    behind = with_filters(recipe, guard=ClientNoise(clip=1e9, noise=0.0))
    found = fuse_round(behind, cohort, state, Bench(classes=3)).single.posterior.mean
    assert all(torch.allclose(found[n], tensor, rtol=1e-4, atol=1e-5) for n, tensor in plain.items())


@pytest.mark.parametrize("name", ["aalv", "eaa"])
def test_a_mean_in_a_chart_has_the_noise_it_claims(name: str) -> None:
    recipe, state = bayesian(name)
    cohort, clip = Cohort.of([walked(k, state, 0.01) for k in range(5)]), 1e-3
    found = []
    for z, seeds in ((0.0, [0]), (1.0, range(6))):
        guards = [ClientNoise(clip, z, seed=s).fit_to(recipe) for s in seeds]
        found.append([in_chart(name, g(cohort, state).updates[0].posterior.mean, state) for g in guards])
    gaps = torch.cat([one - found[0][0] for one in found[1]])
    assert stats.kstest((gaps / (clip / 5)).numpy(), "norm").pvalue > 1e-3


def test_charts_without_a_bound_are_refused() -> None:
    with pytest.raises(RecipeError, match="finds its barycenter by iteration"):
        with_filters(find_method("alpha").recipe(), guard="private")
    with pytest.raises(RecipeError, match="ends with a model for each"):
        with_filters(find_method("wb").recipe(personal=0.5), guard="private")


def test_clients_add_the_noise_themselves() -> None:
    """The sum of K moves has the noise that a server would have added, and a move is no longer than the clip."""
    how = MoveNoise(clip=0.5, noise=2.0, clients=4, reproducible=True)
    brief = START.brief((), 3)
    sums = []
    for seed in range(4):
        moves = []
        for k in range(4):
            draw = torch.Generator().manual_seed(100 * seed + k)
            moves.append(vector(disturb_move(client(k).posterior.mean, brief, how, draw)))
        sums.append(sum(moves))
    quiet = MoveNoise(clip=0.5, noise=1e-12, clients=4)
    exact = [vector(disturb_move(client(k).posterior.mean, brief, quiet, torch.Generator())) for k in range(4)]
    assert all(float(move.norm()) <= 0.5 + 1e-6 for move in exact)
    gaps = torch.cat([total - sum(exact) for total in sums])  # type: ignore[operator]
    assert stats.kstest((gaps / (2.0 * 0.5)).numpy(), "norm").pvalue > 1e-3


def test_the_server_adds_up_what_clients_noise_costs() -> None:
    guard = ClientNoise(at="clients")
    trained = LocalSettings(private={"clip": 0.5, "noise": 2.0, "clients": 4})
    cohort = Cohort.of([replace(client(k), training=trained) for k in range(4)])
    recipe = with_filters(find_method("fedavg").recipe(), guard=guard)
    state = fuse_round(recipe, cohort, START, Bench())
    told = fuse_round(recipe, cohort, state, Bench()).facts["privacy"]
    assert told["epsilon"] == pytest.approx(gaussian_epsilon(math.sqrt(2) / 2, 1e-5))
    assert told["epsilon_at_server"] == pytest.approx(gaussian_epsilon(math.sqrt(2) * 2 / 2, 1e-5))
    fewer = fuse_round(recipe, Cohort(cohort.updates[:2]), START, Bench()).facts["privacy"]
    assert fewer["epsilon"] == pytest.approx(gaussian_epsilon(math.sqrt(2) / 2, 1e-5))
    with pytest.raises(ConfigError, match="c0 says nothing of its noise"):
        fuse_round(recipe, Cohort.of([client(0)]), START, Bench())
    with pytest.raises(RecipeError, match=r"local\.private hides a client in its move"):
        find_method("fedlpa").recipe().work(trained)


def test_a_run_with_noise_at_clients(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(2, (60,), generator=draw)
    x = torch.randn(60, 3, generator=draw) + 2 * y[:, None]
    fedfuse.run(
        {
            "rounds": 2,
            "data": {"clients": 3},
            "model": {"name": "mlp", "inputs": 3, "hidden": []},
            "local": {"private": {"clip": 1.0, "noise": 1.0, "clients": 3, "reproducible": True}},
            "methods": [{"name": "fedavg", "guard": {"name": "private", "at": "clients"}}],
        },
        data=(x, y, x, y),
        workers=0,
        out=tmp_path / "run",
        progress=False,
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    wanted = [gaussian_epsilon(math.sqrt(rounds), 1e-5) for rounds in (1, 2)]
    assert [line["facts"]["privacy"]["epsilon"] for line in lines] == pytest.approx(wanted)


COINS = Bench(participation=0.5, population=8)


def mean_by_coins(guard: ClientNoise, updates: list[ClientUpdate], name: str = "fedavg") -> Tensor:
    recipe = with_filters(find_method(name).recipe(), guard=guard)
    return vector(fuse_round(recipe, Cohort.of(updates), START, COINS).single.posterior.mean)


def test_with_coins_a_sum_is_divided_by_the_number_that_is_expected() -> None:
    """A client that is not drawn changes the result by its own move alone, and not the others' weights."""
    guard, others = ClientNoise(clip=0.5, noise=0.0), [client(k) for k in range(4)]
    without, with_one = mean_by_coins(guard, others), mean_by_coins(guard, [*others, client(9, 1e3)])
    assert float((with_one - without).norm()) == pytest.approx(0.5 / 4, rel=1e-5)  # C / (q N), q N = 4
    moves = [0.5 * vector(u.posterior.mean) / vector(u.posterior.mean).norm() for u in others[:3]]
    torch.testing.assert_close(mean_by_coins(guard, others[:3]), sum(moves) / 4, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("drawn", [1, 3, 6])
def test_with_coins_the_noise_does_not_tell_how_many_came(drawn: int) -> None:
    updates = [client(k) for k in range(drawn)]
    plain = mean_by_coins(ClientNoise(0.5, 0.0), updates)
    gaps = torch.cat([mean_by_coins(ClientNoise(0.5, 2.0, seed=s), updates) - plain for s in range(5)])
    assert stats.kstest((gaps / (2.0 * 0.5 / 4)).numpy(), "norm").pvalue > 1e-3


def test_coins_lower_the_cost_of_rounds_and_a_second_throw_is_told() -> None:
    recipe = with_filters(find_method("fedavg").recipe(), guard={"name": "private", "noise": 2.0, "seed": 0})
    bench, state = replace(COINS, participation=0.1, population=200), START
    for rounds in (1, 2, 3):
        state = fuse_round(recipe, Cohort.of([client(k) for k in range(3)]), state, bench)
        told, wanted = state.facts["privacy"], sampled_epsilon(2.0, 0.1, rounds, 1e-5)
        assert told["epsilon"] == pytest.approx(wanted)
        assert told["delta"] == pytest.approx(1e-5 + (1 + math.exp(wanted)) * rounds * 0.9**200)
        assert told["epsilon"] < gaussian_epsilon(math.sqrt(rounds) / 2, 1e-5)


def test_noise_at_clients_and_coins_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="participation leaves it to coins"):
        ClientNoise(at="clients").drawn_by(COINS)


def test_a_run_by_coins(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(2, (120,), generator=draw)
    x = torch.randn(120, 3, generator=draw) + 2 * y[:, None]
    experiment = {
        "rounds": 4,
        "participation": 0.5,
        "data": {"clients": 12},
        "model": {"name": "mlp", "inputs": 3, "hidden": []},
        "methods": [{"name": "fedavg", "guard": {"name": "private", "noise": 2.0, "seed": 1}}, {"name": "wb"}],
    }
    fedfuse.run(experiment, data=(x, y, x, y), workers=0, out=tmp_path / "run", progress=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    private = [line for line in lines if line["method"] == "fedavg"]
    assert private[-1]["facts"]["privacy"]["epsilon"] == pytest.approx(sampled_epsilon(2.0, 0.5, 4, 1e-5))
    came = [len(line["clients"]) for line in private]
    assert len(set(came)) > 1  # coins, and no fixed number
    assert came == [len(line["clients"]) for line in lines if line["method"] == "wb"]  # the same for every method
    with pytest.raises(ConfigError, match="leave one of them out"):
        fedfuse.run({**experiment, "clients_per_round": 3}, data=(x, y, x, y), out=tmp_path / "other")
