"""The evidence lower bound: its KL against the definition, and a posterior that is known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.client.elbo import Elbo, Variational, kl_diagonal
from fedfuse.core.messages import Brief
from fedfuse.core.model import Single
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Batch, TaskLoss, Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Local, tell_examples
from fedfuse.errors import RecipeError
from fedfuse.models.bayes import BayesianLayers
from fedfuse.server.aggregate.charts import RKLB, MeanIn
from fedfuse.training.round import client_round
from fedfuse.wire.codec import decode

MLP = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 3})


def kl_normal(mean: Tensor, variance: Tensor, prior_mean: Tensor | float, prior_variance: Tensor | float) -> Tensor:
    """KL(N(m, v) ‖ N(m₀, v₀)) of every weight, by torch's own distributions."""
    own = torch.distributions.Normal(mean, variance.sqrt())
    prior = torch.distributions.Normal(*map(torch.as_tensor, (prior_mean, prior_variance**0.5)))
    return torch.distributions.kl_divergence(own, prior)


def bayesian_start(spec: Spec = MLP, **options: Any) -> Single:
    torch.manual_seed(0)
    return BayesianLayers(**options)(Single.of(spec.build(), spec), 3, seed=0)


def rows(n: int = 30, seed: int = 0) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    return Rows(torch.randn(n, 4, generator=draw), torch.randint(3, (n,), generator=draw))


def at_work(start: Single, own: Rows | None = None, round_: int = 0) -> Local:
    module = start.spec.build()
    module.load_state_dict(dict(start.posterior.mean))
    brief = Brief(round_, start.spec, start.posterior.mean, classes=3)
    return Local("a", brief, own or rows(), LocalSettings(), module, {}, seed=0)


def learned(start: Single, work: Work, own: Rows, seed: int = 0) -> dict[str, Tensor]:
    brief = Brief(0, start.spec, start.posterior.mean, classes=3)
    return dict(decode(client_round(work, brief, "a", own, seed=seed).payload).tensors)


# --- the KL


def test_kl_is_the_closed_form_and_what_sampling_says() -> None:
    draw = torch.Generator().manual_seed(0)
    mean, rho, m, log_v = (torch.randn(3, 2, generator=draw, dtype=torch.float64) for _ in range(4))
    found = kl_diagonal(mean, rho, m, log_v)
    assert float(found) == pytest.approx(float(kl_normal(mean, rho.exp(), m, log_v.exp()).sum()))
    q, p = torch.distributions.Normal(mean, (rho / 2).exp()), torch.distributions.Normal(m, (log_v / 2).exp())
    torch.manual_seed(0)
    sample = q.sample((200_000,))
    assert float(found) == pytest.approx(float((q.log_prob(sample) - p.log_prob(sample)).sum((1, 2)).mean()), rel=0.02)
    assert float(kl_diagonal(mean, rho, mean, rho)) == pytest.approx(0, abs=1e-12)


def test_the_objective_adds_the_kl_per_row() -> None:
    start = bayesian_start(last=2, bias=True)
    local = at_work(start)
    batch = local.rows.x[:8], local.rows.y[:8]
    local.module.eval()  # no noise, so that both see the same
    plain = TaskLoss()(local, batch)
    params = start.posterior.mean
    expected = sum(
        float(kl_normal(params[f"net.{n}.{mean}"], params[f"net.{n}.{log}"].exp(), 0.0, 0.25).sum())
        for n in ("fc1", "classifier")
        for mean, log in (("weight", "log_variance"), ("bias", "bias_log_variance"))
    )
    loss = Elbo(kl=0.3, scale=0.5)(local, batch)
    assert float((loss - plain).detach()) == pytest.approx(0.3 * expected / 30, rel=1e-5)
    assert Elbo(kl=0)(local, batch).equal(plain)


@torch.no_grad()
def test_the_prior_around_the_start_has_a_variance_per_layer() -> None:
    start = bayesian_start(last=2)
    params = start.posterior.mean
    expected = {
        mean: sum(
            float(kl_normal(params[f"net.{n}.weight"], params[f"net.{n}.log_variance"].exp(), m(n), 4.0 / fan_in).sum())
            for n, fan_in in (("fc1", 4), ("classifier", 5))
        )
        for mean, m in (("start", lambda n: params[f"net.{n}.weight"]), ("fan-in", lambda _: 0.0))
    }
    for prior, told in expected.items():
        found = Elbo(prior=prior, scale=2.0).divergence(at_work(start, round_=3))  # type: ignore[arg-type]
        assert float(found) == pytest.approx(told, rel=1e-5)


def test_a_share_of_the_prior_is_by_all_examples_or_all_of_it_where_nobody_tells() -> None:
    start = bayesian_start(last=1)
    for told, n in ((500, 500), (0, 30), (7, 30)):  # fewer than its own rows cannot be
        local = at_work(start)
        local.brief = replace(local.brief, memory=tell_examples(told))
        local.module.eval()
        batch = local.rows.x[:8], local.rows.y[:8]
        pull = Elbo("share")(local, batch) - TaskLoss()(local, batch)
        assert float(pull.detach()) == pytest.approx(float(Elbo().divergence(local).detach()) / n, rel=1e-3)


@torch.no_grad()
def test_the_global_prior_is_the_rounds_first_posterior_but_for_the_random_start() -> None:
    start = bayesian_start(last=1, log_variance=-6.0)
    prior = Elbo(prior="global")
    assert float(prior.divergence(at_work(start))) == pytest.approx(float(Elbo().divergence(at_work(start))))
    later = at_work(start, round_=1)
    assert float(prior.divergence(later)) == pytest.approx(0, abs=1e-3)
    later.live["net.classifier.weight"].add_(0.1)
    assert float(prior.divergence(later)) == pytest.approx(15 * 0.01 / (2 * torch.tensor(-6.0).exp().item()), rel=1e-3)


def test_a_network_without_bayesian_layers_has_no_bound() -> None:
    with pytest.raises(RecipeError, match="the network has none; use last ≥ 1"):
        Elbo().divergence(at_work(Single.of(MLP.build(), MLP)))


# --- a posterior that is known

SCALE = 1e6  # rows carry whole numbers as labels, so regression targets travel as millionths


@dataclass(frozen=True, slots=True)
class Gaussian:
    """−log N(y; f(x), σ²) per row, but for its constant."""

    variance: float

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        x, y = batch
        return F.mse_loss(local.predict(x)[:, 0], y.to(x) / SCALE) / (2 * self.variance)


def regression(n: int = 256) -> tuple[Rows, Tensor, Tensor]:
    """Correlated inputs of very different scales, and the exact mean and precision of the weights' posterior."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(n, 4, generator=draw) * torch.tensor([1.0, 0.5, 0.2, 0.1])
    x[:, 1] += 0.1 * x[:, 0]
    y = x @ torch.tensor([1.0, -2.0, 0.5, 3.0]) + 0.5 * torch.randn(n, generator=draw)
    precision = x.double().T @ x.double() / 0.25 + torch.eye(4)
    mean = torch.linalg.solve(precision, x.double().T @ y.double() / 0.25)
    return Rows(x, (y * SCALE).round().long()), mean, precision


def test_learned_means_and_variances_are_those_of_the_posterior() -> None:
    """Bayesian linear regression: the best mean field has the posterior's mean and 1 / diag(precision)."""
    own, mean, precision = regression()
    module = nn.Linear(4, 1, bias=False)
    start = BayesianLayers()(Single.of(module, Spec.of(module)), 1, seed=0)
    decay = {"gamma": 0.97, "every": 2}
    settings = LocalSettings(epochs=250, optimizer={"lr": 0.1, "momentum": 0.9}, decay=decay, log_variance_lr=0.1)
    found = learned(start, Work(settings, Elbo(base=Gaussian(0.25))), own)
    torch.testing.assert_close(found["net.weight"][0].double(), mean, atol=0.03, rtol=0.02)
    torch.testing.assert_close(found["net.log_variance"][0].double(), -precision.diagonal().log(), atol=0.1, rtol=0)
    spread = (found["net.log_variance"].max() - found["net.log_variance"].min()) / 2
    assert spread.exp() > 5  # standard deviations differ by more than a factor of five


def test_at_the_optimizers_own_rate_variances_would_stand_still() -> None:
    own, _, _ = regression()
    module = nn.Linear(4, 1, bias=False)
    start = BayesianLayers(log_variance=-6.0)(Single.of(module, Spec.of(module)), 1, seed=0)
    settings = LocalSettings(
        epochs=5, optimizer={"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}, log_variance_lr=0.5
    )
    work = Work(settings, Elbo(base=Gaussian(0.25)))
    moved = learned(start, work, own)["net.log_variance"]
    assert (moved + 6).abs().max() > 0.5
    still = replace(work, settings=settings.model_copy(update={"log_variance_lr": 0.0}))
    assert learned(start, still, own)["net.log_variance"].equal(torch.full((1, 4), -6.0))  # no decay, no momentum


def test_variances_the_data_say_nothing_about_go_to_the_priors() -> None:
    start = bayesian_start(last=1)
    silent = Rows(torch.zeros(40, 4), rows(40).y)
    module = start.spec.build()
    with torch.no_grad():  # the first layer gives zeros, so the classifier's weights never meet the data
        params = {n: torch.zeros_like(t) if "fc1" in n else t for n, t in start.posterior.mean.items()}
        module.load_state_dict(params)
    settings = LocalSettings(epochs=300, batch_size=40, log_variance_lr=0.1)
    brief = Brief(0, start.spec, params, classes=3)
    work = Work(settings, Elbo(scale=0.2))
    found = decode(client_round(work, brief, "a", silent).payload).tensors["net.classifier.log_variance"]
    torch.testing.assert_close(found, torch.full_like(found, 2 * torch.tensor(0.2).log().item()), atol=0.01, rtol=0)


def test_variances_of_small_and_large_clients_go_equally_far_where_rows_say_nothing() -> None:
    """Counted in steps, a client with few rows would stay at its narrow start and seem the surest of all."""
    start = bayesian_start(last=1)
    params = {n: torch.zeros_like(t) if "fc1" in n else t for n, t in start.posterior.mean.items()}
    brief = Brief(0, start.spec, params, classes=3, memory={"examples/all": torch.tensor(340.0)})
    work = Work(LocalSettings(epochs=4, batch_size=10, log_variance_lr=0.15), Elbo(kl="share", prior="start"))
    moved = []
    for count in (20, 320):
        silent = Rows(torch.zeros(count, 4), rows(count).y)
        found = decode(client_round(work, brief, "a", silent).payload).tensors["net.classifier.log_variance"]
        moved.append(found - params["net.classifier.log_variance"])
    torch.testing.assert_close(moved[0], moved[1], atol=0.01, rtol=0)
    torch.testing.assert_close(moved[0], torch.full_like(moved[0], 4 * 0.15), atol=0.02, rtol=0)


def test_the_released_start_never_moves() -> None:
    start = bayesian_start(last=1, released=True)
    found = learned(start, Work(LocalSettings(epochs=2, log_variance_lr=0.5), Elbo()), rows())
    assert found["net.classifier.log_variance"].equal(start.posterior.mean["net.classifier.log_variance"])


def test_noise_follows_the_clients_seed() -> None:
    start, work = bayesian_start(last=2), Work(LocalSettings(epochs=1, batch_size=8), Elbo())
    first, again, other = (learned(start, work, rows(), seed=s)["net.fc1.weight"] for s in (0, 0, 1))
    assert first.equal(again)
    assert not first.equal(other)


# --- the group of options


def test_options_become_a_recipe() -> None:
    recipe = Variational(prior="global", scale=0.5, noise=False, predict_draws=7).recipe(2, MeanIn(RKLB))
    assert recipe.objective == Elbo("share", "global", 0.5)
    assert recipe.publishes == ("examples",)
    assert recipe.prepare_model == BayesianLayers(last=2, noise=False, draws=7)
    assert Variational(kl=0.5).recipe(1, MeanIn(RKLB)).publishes == ()
    plain = Variational().recipe(0, MeanIn(RKLB))
    assert (plain.objective, plain.prepare_model) == (TaskLoss(), type(plain.prepare_model)())
    assert Variational(layers=("fc1",)).recipe(0, MeanIn(RKLB)).prepare_model == BayesianLayers(0, ("fc1",))


@pytest.mark.parametrize("prior", ["numbers", "tensors"])
def test_the_divergence_has_the_slopes_of_its_formula(prior: str) -> None:
    draw = torch.Generator().manual_seed(0)
    mean, rho, m, log_v = torch.randn(4, 3, 5, dtype=torch.float64, generator=draw)
    given = (m, log_v) if prior == "tensors" else (0.3, -0.7)
    mean.requires_grad_()
    rho.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: kl_diagonal(a, b, *given), (mean, rho))
