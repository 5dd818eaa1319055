import math

import pytest
import torch
from scipy import stats
from torch import Tensor

import fedfuse
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.privacy import gaussian_epsilon
from fedfuse.core.registry import find_method
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import RecipeError
from fedfuse.server.client_noise import ClientNoise
from fedfuse.server.filters import with_filters
from fedfuse.server.round import fuse_round

SPEC = Spec("mlp", {"inputs": 20, "hidden": [30], "classes": 3})
START = ServerState(0, Single(SPEC, Posterior({n: torch.zeros_like(t) for n, t in SPEC.build().state_dict().items()})))


def vector(params: object) -> Tensor:
    return torch.cat([t.double().flatten() for t in dict(params).values()])  # type: ignore[call-overload]


def client(k: int, scale: float = 1.0) -> ClientUpdate:
    draw = torch.Generator().manual_seed(k)
    params = {n: scale * torch.randn(t.shape, generator=draw) for n, t in START.single.posterior.mean.items()}
    return ClientUpdate(f"c{k}", Posterior(params), 10.0 * (k + 1), 1, SPEC)


def mean_behind(guard: ClientNoise, updates: list[ClientUpdate]) -> Tensor:
    recipe = with_filters(find_method("fedavg").recipe(), guard=guard)
    return vector(fuse_round(recipe, Cohort.of(updates), START, Bench()).single.posterior.mean)


def test_one_client_moves_the_mean_by_no_more_than_its_share() -> None:
    """Without noise: whatever one of five clients sends, and however many rows it claims, by C/K at most."""
    guard, others = ClientNoise(clip=0.5, noise=0.0), [client(k) for k in range(4)]
    absent = ClientUpdate("c9", START.single.posterior, 1.0, 1, SPEC)
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
