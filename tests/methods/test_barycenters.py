"""Barycenters of Bayesian layers: each minimizes its own divergence; FedAvg at the edges of the family."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import trapezoid
from scipy.optimize import minimize
from torch import Tensor, nn

import fedfuse
from fedfuse.client.elbo import Elbo
from fedfuse.client.objectives import Proximal
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.engines.local import InProcess
from fedfuse.errors import ConfigError, NotConverged
from fedfuse.experiment.config import Experiment
from fedfuse.experiment.prepare import Setting, prepare
from fedfuse.experiment.results import Ledger
from fedfuse.experiment.run import execute
from fedfuse.linalg.kron import natural_mean
from fedfuse.methods.barycenters import AlphaDivergence, alpha_barycenter
from fedfuse.methods.fednova import NormalizedMean
from fedfuse.models.bayes import Bayesian, BayesianLayers
from fedfuse.server.aggregate.charts import FKLB, RKLB, mean_in
from fedfuse.server.loop import Record, run
from fedfuse.wire.files import load_model

MU, V, W = torch.tensor([0.0, 1.0, -0.7]), torch.tensor([1.0, 0.25, 2.0]), torch.tensor([0.5, 0.3, 0.2])
GRID = np.linspace(-40, 40, 40_001)


def one(alpha: float) -> tuple[float, float]:
    mean, variance = alpha_barycenter(MU[:, None], V[:, None], W, alpha)
    return mean.item(), variance.item()


# --- α-divergences


def log_density(m: float, v: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray(-((GRID - m) ** 2) / (2 * v) - np.log(2 * np.pi * v) / 2)


def total(alpha: float, m: float, v: float) -> float:
    """Σ w_k D_α(p_k ‖ q) by the definition, integrated numerically."""
    q, each = log_density(m, v), zip(W.tolist(), MU.tolist(), V.tolist(), strict=True)
    overlaps = [(w, trapezoid(np.exp(alpha * log_density(a, b) + (1 - alpha) * q), GRID)) for w, a, b in each]
    return float(sum(w * (1 - overlap) for w, overlap in overlaps) / (alpha * (1 - alpha)))


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.9, 1.5])
def test_it_minimizes_the_divergence_as_it_is_defined(alpha: float) -> None:
    m, v = one(alpha)
    best = minimize(
        lambda q: total(alpha, q[0], np.exp(q[1])),
        (m, np.log(v)),
        method="Nelder-Mead",
        options={"xatol": 1e-6, "fatol": 1e-12},
    )
    assert (m, np.log(v)) == pytest.approx(tuple(best.x), abs=1e-4)
    here = total(alpha, m, v)
    assert all(total(alpha, m + dm, v * np.exp(dv)) > here for dm in (-0.02, 0.02) for dv in (-0.02, 0.0, 0.02))


def test_it_is_the_projection_of_the_unconstrained_barycenter() -> None:
    """Theorem 1 gives p* ∝ (Σ w p_k^α)^{1/α}; by eq. 7 its nearest Gaussian is the same."""
    alpha = 0.5
    parts = zip(W.tolist(), MU.tolist(), V.tolist(), strict=True)
    root = sum(w * np.exp(alpha * log_density(m, v)) for w, m, v in parts) ** (1 / alpha)
    star = root / trapezoid(root, GRID)
    best = minimize(
        lambda q: -trapezoid(star**alpha * np.exp((1 - alpha) * log_density(q[0], np.exp(q[1]))), GRID),
        (0.0, 0.0),
        method="Nelder-Mead",
        options={"xatol": 1e-6, "fatol": 1e-12},
    )
    m, v = one(alpha)
    assert (m, np.log(v)) == pytest.approx(tuple(best.x), abs=1e-4)


def test_its_ends_are_reverse_kl_and_kl_and_it_is_continuous_there() -> None:
    for alpha, chart in ((0.0, RKLB), (1.0, FKLB)):
        mean, variance = mean_in(chart, list(MU), list(V), W.tolist())
        expected = float(mean), float(variance)
        assert one(alpha) == pytest.approx(expected, rel=1e-6)
        assert one(alpha + 1e-5) == pytest.approx(expected, rel=1e-3)
        assert one(alpha - 1e-5) == pytest.approx(expected, rel=1e-3)


parts = st.lists(st.tuples(st.floats(-1, 1), st.floats(-4, 1), st.floats(0.1, 1)), min_size=1, max_size=5)


@given(parts, st.floats(-1.0, 2.0))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_slope_vanishes_where_it_stops(given_parts: list[tuple[float, float, float]], alpha: float) -> None:
    """The mixture of tilted densities p_k^α q^{1−α} has q's own moments: the condition of stationarity (Minka 2005)."""
    mu, log_v, w = (torch.tensor(column, dtype=torch.float64) for column in zip(*given_parts, strict=True))
    v, w = log_v.exp(), w / w.sum()
    m, s = (t[0] for t in alpha_barycenter(mu[:, None], v[:, None], w, alpha))
    wide = alpha * s + (1 - alpha) * v
    assert (wide > 0).all()
    share = torch.softmax(
        w.log()
        + (alpha * s.log() + (1 - alpha) * v.log() - wide.log()) / 2
        - alpha * (1 - alpha) * (mu - m) ** 2 / (2 * wide),
        0,
    )
    precision = alpha / v + (1 - alpha) / s
    tilted = (alpha * mu / v + (1 - alpha) * m / s) / precision
    mean = (share * tilted).sum()
    assert float(mean) == pytest.approx(float(m), abs=1e-6)
    assert float((share * (1 / precision + (tilted - mean) ** 2)).sum() / s) == pytest.approx(1, abs=1e-6)


def test_agreeing_posteriors_come_back_for_every_order() -> None:
    mu, v = (
        torch.randn(4, generator=torch.Generator().manual_seed(0)).double(),
        torch.tensor([0.1, 1, 2, 1e-8]).double(),
    )
    for alpha in (-2.0, 0.3, 1.7):
        mean, variance = alpha_barycenter(mu.expand(3, 4), v.expand(3, 4), W, alpha)
        torch.testing.assert_close((mean, variance), (mu, v), rtol=1e-8, atol=1e-12)


def test_what_cannot_be_found_is_said() -> None:
    with pytest.raises(NotConverged, match=r"α = 0\.5: after 1 iterations 1 of 1 elements"):
        alpha_barycenter(MU[:, None], V[:, None], W, 0.5, max_iters=1)
    with pytest.raises(ConfigError, match="alpha is nan"):
        AlphaDivergence(float("nan"))


def test_as_a_rule_it_takes_and_gives_log_variances() -> None:
    mean, variance = mean_in(AlphaDivergence(0.5), list(MU), list(V), W.tolist())
    assert (mean.shape, mean.item(), variance.item()) == ((), *(pytest.approx(x, rel=1e-6) for x in one(0.5)))
    long = mean_in(AlphaDivergence(0.5), [m.expand(3, 2000) for m in MU], [v.expand(3, 2000) for v in V], W.tolist())
    torch.testing.assert_close(long[0], mean.expand(3, 2000))
    assert not AlphaDivergence(0.5).shrinks


# --- full covariances


def test_fedlpa_is_the_reverse_kl_barycenter_under_kronecker_covariance() -> None:
    """Σ f B M A = Σ f B_k M_k A_k is eq. 8 of BA-BFL with Σ_k = (B_k ⊗ A_k)⁻¹ on the rows of M."""
    draw = torch.Generator().manual_seed(0)
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)

    def factor(d: int) -> Tensor:
        root = torch.randn(d, d, generator=draw, dtype=torch.float64)
        return root @ root.T + 0.2 * torch.eye(d)

    Ms = [torch.randn(3, 4, generator=draw, dtype=torch.float64) for _ in range(3)]
    As, Bs = [factor(4) for _ in range(3)], [factor(3) for _ in range(3)]
    precisions = weights[:, None, None] * torch.stack([torch.kron(B, A) for A, B in zip(As, Bs, strict=True)])
    pull = (precisions @ torch.stack(Ms).flatten(1)[..., None]).sum(0)
    mean = torch.linalg.solve(precisions.sum(0), pull)  # eq. 8, densely
    found = natural_mean(Ms, As, Bs, weights, solver="exact", tol=1e-12, what="a layer")
    torch.testing.assert_close(found.x, mean.view(3, 4), rtol=1e-8, atol=1e-10)


FAMILY = ("eaa", "gaa", "aalv", "rklb", "wb", "fklb", "alpha")


def experiment(*methods: dict[str, Any], rounds: int = 2, **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "rounds": rounds,
        "data": {"clients": 3, "partition": {"kind": "classes", "per_client": 4}, "train_limit": 300, "test_limit": 90},
        "model": {"name": "mlp", "hidden": [10]},
        "local": {
            "epochs": 3,
            "batch_size": 16,
            "optimizer": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
            "kernel": "torch",  # one for all: layers that only torch knows are compared with others to the last bit
        },
        "judge": {"clients": "never"},
        "methods": methods or [{"name": "fedavg"}],
    }
    return Experiment(**(settings | changes))


@cache
def setting() -> Setting:
    return prepare(experiment()).setting(0)


@cache
def records(name: str, **options: Any) -> tuple[Record, ...]:
    at = setting()
    recipe = find_method(name).recipe(**options)
    return tuple(run(recipe, InProcess(at.population, at.seed), at.bench, at.judge, at.start, at.plan))


def weights(record: Record) -> dict[str, Tensor]:
    return dict(record.state.single.posterior.mean)


@pytest.mark.parametrize("name", FAMILY)
def test_without_bayesian_layers_every_rule_is_fedavg_to_the_last_bit(name: str) -> None:
    for mine, plain in zip(records(name, last=0), records("fedavg"), strict=True):
        assert mine.state.single.spec == plain.state.single.spec
        assert all(weights(mine)[n].equal(t) for n, t in weights(plain).items())
    assert all(
        weights(mine)[n].equal(t)
        for mine, plain in zip(records(name, last=0, uniform=True), records("fedavg", uniform=True), strict=True)
        for n, t in weights(plain).items()
    )


def test_without_noise_and_prior_bayesian_layers_are_fedavg_too() -> None:
    """The first control: the same layers and the same start, and nothing Bayesian happens to the means."""
    for mine, plain in zip(records("aalv", last=2, noise=False, kl=0), records("fedavg"), strict=True):
        assert all(weights(mine)[f"net.{n}"].equal(t) for n, t in weights(plain).items())
        assert len(weights(mine)["net.fc1.log_variance"].unique()) == 1
        assert mine.facts["accuracy"] == plain.facts["accuracy"]
        assert mine.facts["nll"] == pytest.approx(plain.facts["nll"])


def test_without_noise_only_the_prior_pulls() -> None:
    """The second control: no noise, but the pull on the means of the KL term."""
    pulled, plain = (records("aalv", last=2, noise=False, kl=kl)[-1] for kl in (5.0, 0.0))
    assert weights(pulled)["net.fc1.weight"].norm() < weights(plain)["net.fc1.weight"].norm()
    assert "mutual_information" not in pulled.facts


def test_all_rules_train_the_same_way_and_then_differ() -> None:
    works = {repr(find_method(name).recipe(last=2).work(setting().bench.local)) for name in FAMILY}
    assert len(works) == 1
    first = {name: weights(records(name, last=2)[0])["net.fc1.log_variance"] for name in FAMILY}
    assert (first["rklb"] <= first["aalv"] + 1e-5).all()
    assert (first["aalv"] <= first["wb"] + 1e-5).all()
    assert (first["wb"] <= first["eaa"] + 1e-5).all()
    assert (first["eaa"] <= first["fklb"] + 1e-5).all()
    assert (first["gaa"] < first["eaa"] - 0.5).all()
    means = {name: weights(records(name, last=2)[0])["net.fc1.weight"] for name in FAMILY}
    assert all(means[name].allclose(means["eaa"]) for name in ("gaa", "aalv", "wb", "fklb"))
    assert not means["rklb"].allclose(means["eaa"])


def test_variances_learn_and_the_record_tells_how_wide_they_are() -> None:
    at = setting()
    bench = replace(at.bench, local=at.bench.local.model_copy(update={"log_variance_lr": 2.0}))
    recipe = find_method("rklb").recipe(last=2)
    *_, last = run(recipe, InProcess(at.population, at.seed), bench, at.judge, at.start, replace(at.plan, rounds=4))
    sigma = last.facts["facts"]["sigma"]["net.classifier"]
    assert sigma["95 %"] > 2 * sigma["5 %"]  # standard deviations differ by more than a factor of two
    assert set(last.facts["facts"]["sigma_clients"]["net.classifier"]) == set(at.population.clients)
    assert last.facts["facts"]["sigma_apart"]["net.classifier"] > 0
    assert last.facts["mutual_information"] > 0


def test_layers_can_be_named_and_biases_join() -> None:
    found = weights(records("wb", layers=("fc1",), bias=True)[-1])
    assert {n for n in found if "log_variance" in n} == {"net.fc1.log_variance", "net.fc1.bias_log_variance"}


def test_too_many_layers_are_told_before_any_training() -> None:
    with pytest.raises(ConfigError, match="last is 3, expected at most 2"):
        prepare(experiment({"name": "rklb", "last": 3})).check()
    with pytest.raises(ConfigError, match="no linear layer or convolution 'fc9'; Sequential has fc1, classifier"):
        prepare(experiment({"name": "rklb", "layers": ["fc9"]})).check()
    with pytest.raises(ConfigError, match="option last is -1"):
        find_method("rklb").recipe(last=-1)


def test_a_method_can_take_over_and_dress_what_it_finds() -> None:
    chain = find_method("fedavg").recipe().then(1, find_method("rklb").recipe(last=1))
    at = setting()
    first, second = run(chain, InProcess(at.population, at.seed), at.bench, None, at.start, at.plan)
    assert all(weights(first)[n].equal(t) for n, t in weights(records("fedavg")[0]).items())
    assert isinstance(second.state.single.spec.build(), Bayesian)


def test_recipes_and_dressed_networks_travel_between_processes() -> None:
    recipe = find_method("alpha").recipe(last=2, alpha=0.3)
    dressed = recipe.prepare_models(setting().start, setting().bench).single
    work, spec = ForkingPickler.loads(ForkingPickler.dumps((recipe.work(setting().bench.local), dressed.spec)))
    assert work == recipe.work(setting().bench.local)
    assert spec == dressed.spec


def test_a_run_is_recorded_remembered_resumed_and_its_model_read_back(tmp_path: Path) -> None:
    methods = ({"name": "rklb", "last": 1}, {"name": "wb", "last": 1})
    changes: dict[str, Any] = {"judge": {"clients": "last", "ood": "digits"}}
    execute(experiment(*methods, rounds=1, **changes), tmp_path / "run", workers=0, memo=tmp_path / "memo")
    execute(experiment(*methods, **changes), tmp_path / "run", workers=0, resume=True, memo=tmp_path / "memo")
    execute(experiment(*methods, **changes), tmp_path / "whole", workers=0)
    stopped, whole = (Ledger(tmp_path / folder / "ledger.jsonl").lines() for folder in ("run", "whole"))
    told = ("label", "round", "accuracy", "nll", "entropy", "mutual_information", "ood_auroc", "facts")
    assert [{k: line[k] for k in told} for line in sorted(stopped, key=_place)] == [
        {k: line[k] for k in told} for line in sorted(whole, key=_place)
    ]
    assert next(line for line in stopped if line["label"].startswith("wb"))["remembered"] == 3
    assert whole[0]["ood_auroc"] == 0.5  # strangers that are the test rows themselves
    assert all("accuracy" in client for client in whole[1]["clients"].values())
    model, facts = load_model(tmp_path / "whole" / "models" / "rklb_last_1-0.safetensors")
    assert facts["round"] == 2
    assert model.logits(setting().judge.test.x[:4]).exp().sum(-1).allclose(torch.ones(4))  # type: ignore[union-attr]


def _place(line: dict[str, Any]) -> tuple[str, int]:
    return line["label"], line["round"]


# --- a site that only has files


class Mine(nn.Module):
    """A user's own network."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


def test_sites_with_files_and_a_network_of_their_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, recipe = Mine(), fedfuse.recipe("rklb", last=1)

    def bring(site: int, start: Any = None) -> Path:
        draw = torch.Generator().manual_seed(site)
        rows = torch.randn(30, 4, generator=draw), torch.randint(3, (30,), generator=draw)
        update = fedfuse.local_update(net, rows, recipe, client=f"site-{site}", start=start, classes=3, lr=0.1)
        return update.save(tmp_path / f"site-{site}.safetensors")

    before = {n: t.clone() for n, t in net.state_dict().items()}
    fused = fedfuse.fuse([bring(1), bring(2)], recipe, model=net)
    assert all(net.state_dict()[n].equal(t) for n, t in before.items())
    assert not fused.refused
    assert fused.state_dict().keys() == {f"net.{n}" for n in before} | {"net.head.log_variance"}
    assert fused.logits(torch.ones(2, 4)).exp().sum(-1).allclose(torch.ones(2))
    again = fedfuse.fuse(
        [bring(1, fused.state_dict()), bring(2, fused.save(tmp_path / "g.safetensors"))], recipe, model=net
    )
    assert not again.refused
    assert not again.state_dict()["net.head.log_variance"].equal(fused.state_dict()["net.head.log_variance"])


def test_a_recipe_of_ones_own_can_be_composed() -> None:
    """FedProx's pull on a Bayesian network fused by FedNova: log_variances are one more role, and nothing breaks."""
    recipe = Recipe(objective=Proximal(0.1, Elbo()), aggregate=NormalizedMean(), prepare_model=BayesianLayers(last=2))
    at = setting()
    *_, last = run(recipe, InProcess(at.population, at.seed), at.bench, at.judge, at.start, at.plan)
    assert last.facts["accuracy"] > 0.3


# --- models of their own


def test_personal_models_lie_between_the_fused_posterior_and_each_clients_own() -> None:
    """By reverse KL precisions are mixed, (1 − a)/v + a/v_k, and the next round begins with the fused network."""
    fused, own = records("rklb", last=1), records("rklb", last=1, personal=0.25)
    assert own[-1].state.start.params.keys() == weights(fused[-1]).keys()
    assert all(own[-1].state.start.params[n].equal(t) for n, t in weights(fused[-1]).items())
    members = own[-1].state.model.members
    assert len(members) == len(setting().population.clients)
    name = "net.classifier.log_variance"
    mixed = torch.stack([member.posterior.mean[name] for member in members])
    assert mixed.std(0).max() > 0  # each its own
    whole = records("rklb", last=1, personal=1.0)[-1].state.model.members
    for near, client in zip(members, whole, strict=True):
        expected = 0.75 * (-weights(fused[-1])[name]).exp() + 0.25 * (-client.posterior.mean[name]).exp()
        torch.testing.assert_close(near.posterior.mean[name], -expected.log())


def test_they_are_judged_on_rows_their_clients_kept_out() -> None:
    at = prepare(experiment(data=experiment().data.model_copy(update={"validation_fraction": 0.3}))).setting(0)
    judge = replace(at.judge, clients="last")
    scores = {}
    for share in (0.0, 0.5):
        recipe = find_method("wb").recipe(last=1, personal=share)
        *_, last = run(recipe, InProcess(at.population, at.seed), at.bench, judge, at.start, at.plan)
        scores[share] = last.facts["own_accuracy_mean"]
    assert scores[0.5] > scores[0.0]  # clients hold four classes of ten


# --- how many examples there are


def test_a_run_tells_clients_how_many_examples_all_hold() -> None:
    told = records("rklb", last=1)[-1].state.memory["examples/all"]
    assert float(told) == sum(setting().plan.enrolled.values()) == setting().bench.num_examples
    assert "examples/all" not in records("rklb", last=1, kl=1.0)[-1].state.memory


def test_a_site_that_is_told_trains_as_in_a_run_and_one_that_is_not_counts_the_prior_in_full() -> None:
    recipe, at = find_method("rklb").recipe(last=1), setting()
    bench = replace(at.bench, num_examples=100)
    (record, *_) = run(recipe, InProcess(at.population, at.seed), bench, None, at.start, replace(at.plan, rounds=1))
    client = at.population.clients[0]
    common: dict[str, Any] = dict(at.bench.local) | {"client": client, "seed": at.seed, "classes": at.bench.classes}
    start, spec = dict(at.start.single.posterior.mean), at.start.single.spec

    def weight(**told: int) -> Tensor:
        made = fedfuse.local_update(spec, at.population.rows_of(client), recipe, start=start, **common, **told)
        return made.state_dict()["net.classifier.log_variance"]

    one = replace(at.population, index={client: at.population.index[client]})
    (alone, *_) = run(recipe, InProcess(one, at.seed), bench, None, at.start, replace(at.plan, rounds=1))
    assert weight(all_examples=100).allclose(weights(alone)["net.classifier.log_variance"])
    assert weight().allclose(weight(all_examples=len(at.population.rows_of(client))))
    assert not weight().allclose(weight(all_examples=100))
    assert record.state.round == 1
