"""Where posteriors are Gaussian and diagonal: fusion gives the posterior of all rows, to the last digits.

Every row has one feature that is not zero, so that a regression's posterior is diagonal and the mean field exact. A
client's best posterior is known, and shown to be best by the gradient of its own objective.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedfuse.client.elbo import Elbo, Prior
from fedfuse.core.messages import Brief, ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Batch
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, Local, ServerState, tell_examples
from fedfuse.methods.pvi import Cavity, KeepFactor, Product
from fedfuse.models.bayes import BayesianLayers, factors
from fedfuse.server.aggregate.charts import RKLB, MeanIn

FEATURES, NOISE, SCALE = 3, 0.25, 1.5
PRIOR = FEATURES / SCALE**2  # the precision of N(start, scale²/fan-in)


@dataclass(frozen=True, slots=True)
class ExpectedLoss:
    """E_q[−log N(y; w x, σ²)] per row, but for its constant: no draw is needed."""

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        (weight,) = factors(local.module)
        x, y = batch
        error = (x @ weight.mean[0] - y).square() + x.square() @ weight.log_variance[0].exp()
        return error.mean() / (2 * NOISE)


@dataclass(frozen=True, slots=True)
class Site:
    """A client's rows, and the precision and shift they bring."""

    rows: Rows
    precision: Tensor = field(init=False)
    shift: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", self.rows.x.square().sum(0) / NOISE)
        object.__setattr__(self, "shift", (self.rows.x * self.rows.y[:, None]).sum(0) / NOISE)


@cache
def start() -> Single:
    module = nn.Linear(FEATURES, 1, bias=False).double()
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[0.3, -0.2, 0.1]]))
    return BayesianLayers()(Single.of(module, Spec.of(module)), 1, seed=0)


def sites(sizes: tuple[int, ...], seed: int = 0) -> list[Site]:
    draw, found = torch.Generator().manual_seed(seed), []
    for size in sizes:
        which = torch.randint(FEATURES, (size,), generator=draw)
        x = torch.zeros(size, FEATURES, dtype=torch.float64)
        x[torch.arange(size), which] = 0.5 + torch.rand(size, generator=draw, dtype=torch.float64)
        y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64) + torch.randn(size, generator=draw).double() / 2
        found.append(Site(Rows(x, y)))
    return found


def pooled(clients: list[Site]) -> tuple[Tensor, Tensor]:
    """Mean and variance of the posterior of all rows under N(start, scale²/fan-in)."""
    first = start().posterior.mean["net.weight"][0]
    precision = PRIOR + sum((c.precision for c in clients), torch.zeros(FEATURES).double())
    return (PRIOR * first + sum((c.shift for c in clients), torch.zeros(FEATURES).double())) / precision, 1 / precision


def at_work(own: Rows, state: ServerState, n: int = 0, memory: dict[str, Tensor] | None = None) -> Local:
    brief = Brief(state.round, state.start.spec, state.start.params, tell_examples(n), classes=1)
    module = state.start.spec.build()
    module.load_state_dict(dict(state.start.params))
    return Local("a", brief, own, LocalSettings(), module.train(), dict(memory or {}), seed=0)


def settle(local: Local, objective: Elbo, precision: Tensor, shift: Tensor) -> dict[str, Tensor]:
    """Put a client at what should be its best posterior, and see that its objective is flat there."""
    with torch.no_grad():
        local.live["net.weight"].copy_((shift / precision)[None])
        local.live["net.log_variance"].copy_(-precision.log()[None])
    slope = torch.autograd.grad(objective(local, (local.rows.x, local.rows.y)), list(local.live.values()))
    assert all(float(s.abs().max()) < 1e-9 for s in slope)
    return {name: tensor.detach().clone() for name, tensor in local.module.state_dict().items()}


def update(name: str, params: dict[str, Tensor], n: int) -> ClientUpdate:
    return ClientUpdate(name, Posterior(params), float(n), 1, start().spec)


def fused_by_rklb(clients: list[Site], kl: str | float, prior: Prior) -> tuple[Tensor, Tensor]:
    """The reverse-KL barycenter of the clients' best posteriors after one round: mean and variance."""
    total, state = sum(len(c.rows) for c in clients), ServerState(0, start())
    first = start().posterior.mean["net.weight"][0] if prior == "start" else torch.zeros(FEATURES).double()
    base, updates = PRIOR if prior in ("start", "fan-in") else 1 / SCALE**2, []
    for place, client in enumerate(clients):
        share = len(client.rows) / total if kl == "share" else float(kl)
        precision, shift = base + client.precision / share, base * first + client.shift / share
        objective = Elbo(kl, prior, SCALE, ExpectedLoss())  # type: ignore[arg-type]
        params = settle(at_work(client.rows, state, total), objective, precision, shift)
        updates.append(update(f"c{place}", params, len(client.rows)))
    after = MeanIn(RKLB)(Cohort.of(updates), state, Bench()).single.posterior.mean
    return after["net.weight"][0], after["net.log_variance"][0].exp()


@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_with_shares_the_reverse_kl_barycenter_is_the_posterior_of_all_rows(sizes: list[int], seed: int) -> None:
    """For any number and size of clients: Σ f_k (P₀ + Λ_k/f_k) = P₀ + Σ Λ_k."""
    clients = sites(tuple(sizes), seed)
    mean, variance = fused_by_rklb(clients, "share", "start")
    torch.testing.assert_close((mean, variance), pooled(clients), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("prior", ["fan-in", "standard"])
def test_it_is_so_for_every_prior_that_stays(prior: Prior) -> None:
    clients = sites((5, 17, 9, 40))
    base = PRIOR if prior == "fan-in" else 1 / SCALE**2
    precision = base + sum((c.precision for c in clients), torch.zeros(FEATURES).double())
    shift = sum((c.shift for c in clients), torch.zeros(FEATURES).double())
    torch.testing.assert_close(
        fused_by_rklb(clients, "share", prior), (shift / precision, 1 / precision), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("count", [3, 10, 50])
def test_the_published_weight_counts_every_likelihood_once_among_so_many(count: int) -> None:
    """With kl = 1 the fused precision is P₀ + Σ f_k Λ_k, too wide by nearly the number of clients."""
    clients = sites((30,) * count)
    _, variance = fused_by_rklb(clients, 1.0, "start")
    wide = variance / pooled(clients)[1]
    assert 0.6 * count < float(wide.min()) < float(wide.max()) < count


def test_the_product_of_experts_is_the_posterior_of_all_rows_in_every_round() -> None:
    """Partitioned inference: whoever is asked, in any round, everybody's rows count once and the prior once."""
    clients, state = sites((4, 25, 11)), ServerState(0, start())
    memories: list[dict[str, Tensor]] = [{}, {}, {}]
    heard: set[int] = set()
    for asked in ((0, 1), (0, 1, 2), (2,), (0, 1, 2)):
        state, memories = one_pvi_round(clients, state, memories, asked)
        heard |= set(asked)
        found = state.single.posterior.mean
        mean, variance = pooled([clients[k] for k in sorted(heard)])
        torch.testing.assert_close(found["net.weight"][0], mean, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found["net.log_variance"][0].exp(), variance, rtol=1e-9, atol=0)
        assert state.facts["undecided"] == 0


def one_pvi_round(
    clients: list[Site],
    state: ServerState,
    memories: list[dict[str, Tensor]],
    asked: tuple[int, ...],
    damping: float = 1.0,
) -> tuple[ServerState, list[dict[str, Tensor]]]:
    """Clients learn from their cavities, keep their factors, and the server multiplies."""
    updates, kept = [], list(memories)
    for k in asked:
        local = at_work(clients[k].rows, state, memory=memories[k])
        mean, log_variance = Cavity(SCALE)(local)["net.weight"]
        left = (-log_variance[0]).exp()
        precision, shift = left + clients[k].precision, left * mean[0] + clients[k].shift
        params = settle(local, Elbo(1.0, Cavity(SCALE), base=ExpectedLoss()), precision, shift)
        kept[k] = dict(KeepFactor(SCALE, damping)(local, {}))
        updates.append(update(f"c{k}", params, len(clients[k].rows)))
    after = Product(SCALE, damping)(Cohort.of(updates), state, Bench())
    return replace(after, round=state.round + 1), kept


def test_damped_products_arrive_at_the_same_posterior() -> None:
    clients, state = sites((4, 25, 11)), ServerState(0, start())
    memories: list[dict[str, Tensor]] = [{}, {}, {}]
    far = []
    for _ in range(12):
        state, memories = one_pvi_round(clients, state, memories, (0, 1, 2), damping=0.5)
        variance = state.single.posterior.mean["net.log_variance"][0].exp()
        far.append(float((variance / pooled(clients)[1] - 1).abs().max()))
    assert far[0] > 0.5
    assert far[-1] < 1e-3


def test_counting_rows_again_would_make_it_narrower_every_round() -> None:
    """Without cavities, with the fused posterior as prior, the same rows are counted in each round."""
    clients, state = sites((4, 25, 11)), ServerState(0, start())
    for _ in range(3):
        state, _ = one_pvi_round(clients, state, [{}, {}, {}], (0, 1, 2))
    variance = state.single.posterior.mean["net.log_variance"][0].exp()
    assert float((variance / pooled(clients)[1]).max()) < 0.45


def test_a_weight_that_clients_make_impossible_stays_as_it_was() -> None:
    state = ServerState(0, start())
    wide = dict(start().posterior.mean) | {"net.log_variance": torch.full((1, FEATURES), 9.0, dtype=torch.float64)}
    after = Product(SCALE)(Cohort.of([update(n, wide, 3) for n in "abc"]), state, Bench())
    assert after.facts["undecided"] == FEATURES
    assert after.single.posterior.mean["net.weight"].equal(start().posterior.mean["net.weight"])
    assert float(after.single.posterior.mean["net.log_variance"][0, 0].exp()) == pytest.approx(1 / PRIOR)


def test_its_recipe_says_what_it_needs() -> None:
    recipe = find_method("pvi").recipe(last=2, scale=0.5, damping=0.25)
    assert recipe.needs == {"start"}
    assert recipe.laws == find_method("pvi").recipe().laws - {"one"}
