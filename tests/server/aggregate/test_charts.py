import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import nn

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Diag, Posterior
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError
from fedfuse.linalg.kron import natural_mean_diag
from fedfuse.models.bayes import BayesianLayers
from fedfuse.server.aggregate import charts
from fedfuse.server.aggregate.charts import AALV, CHARTS, EAA, FKLB, GAA, RKLB, WB, Chart, MeanIn, mean_in
from fedfuse.server.aggregate.mean import Mean
from fedfuse.wire.codec import decode, encode

TOY = {
    "EAA": (1, 0.625),
    "GAA": (1, 0.3125),
    "AALV": (1, 0.5),
    "RKLB": (1.6, 0.4),
    "WB": (1, 0.5625),
    "FKLB": (1, 1.625),
}


def doubles(*values: float) -> list[torch.Tensor]:
    return [torch.tensor(v, dtype=torch.float64) for v in values]


@pytest.mark.parametrize("name", TOY)
def test_the_published_toy(name: str) -> None:
    """N(0, 1) and N(2, ¼) with equal weights: arXiv:2412.11646, Figure 1."""
    found = mean_in(CHARTS[name], doubles(0.0, 2.0), doubles(1.0, 0.25), [1, 1])
    assert [float(t) for t in found] == pytest.approx(TOY[name])


gaussians = st.lists(st.tuples(st.floats(-3, 3), st.floats(1e-3, 10), st.floats(0.1, 5)), min_size=1, max_size=5)


@given(parts=gaussians)
@settings(deadline=None, max_examples=60)
def test_the_variances_are_ordered_as_the_means_they_are(parts: list[tuple[float, float, float]]) -> None:
    mus, vs, ws = zip(*parts, strict=True)
    v = {c.name: float(mean_in(c, doubles(*mus), doubles(*vs), ws)[1]) for c in CHARTS.values()}
    slack = 1 + 1e-9
    assert v["RKLB"] <= v["AALV"] * slack <= v["WB"] * slack**2 <= v["EAA"] * slack**3 <= v["FKLB"] * slack**4
    assert v["GAA"] <= v["EAA"] * slack


def kl(m0: float, v0: float, m1: float, v1: float) -> float:
    return 0.5 * (v0 / v1 + (m0 - m1) ** 2 / v1 - 1 + torch.tensor(v1 / v0, dtype=torch.float64).log().item())


@pytest.mark.parametrize("name", ["RKLB", "FKLB", "WB"])
def test_barycenters_minimize_their_divergence(name: str) -> None:
    mus, vs, ws = [0.0, 2.0, -1.0], [1.0, 0.25, 3.0], [0.5, 0.3, 0.2]

    def total(q: tuple[float, float]) -> float:
        m, v = q[0], float(torch.tensor(q[1], dtype=torch.float64).exp())
        costs = {
            "RKLB": [kl(m, v, mu, s) for mu, s in zip(mus, vs, strict=True)],
            "FKLB": [kl(mu, s, m, v) for mu, s in zip(mus, vs, strict=True)],
            "WB": [(m - mu) ** 2 + (v**0.5 - s**0.5) ** 2 for mu, s in zip(mus, vs, strict=True)],
        }
        return sum(w * c for w, c in zip(ws, costs[name], strict=True))

    best = minimize(total, (0.0, 0.0), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12})
    mean, variance = mean_in(CHARTS[name], doubles(*mus), doubles(*vs), ws)
    assert float(mean) == pytest.approx(best.x[0], abs=1e-5)
    assert float(variance.log()) == pytest.approx(best.x[1], abs=1e-5)


def test_reverse_kl_is_the_natural_mean_and_mixture_moments_lose_no_digits() -> None:
    draw = torch.Generator().manual_seed(0)
    mus, vs = torch.randn(4, 6, dtype=torch.float64, generator=draw), torch.rand(4, 6, generator=draw).double() + 0.1
    mean, precision = natural_mean_diag(mus, 1 / vs, [1, 2, 3, 4])
    found = mean_in(RKLB, list(mus), list(vs), [1, 2, 3, 4])
    assert torch.allclose(found[0], mean)
    assert torch.allclose(found[1], 1 / precision)
    far = mean_in(FKLB, doubles(1e8, 1e8), doubles(1e-6, 1e-6), [1, 1])
    assert float(far[1]) == pytest.approx(1e-6)


def test_vanishing_variances_give_the_weighted_mean() -> None:
    for chart in (RKLB, WB):
        mean, variance = mean_in(chart, doubles(0.0, 4.0), doubles(1e-30, 1e-30), [1, 3])
        assert float(mean) == pytest.approx(3.0)
        assert float(variance) == pytest.approx(1e-30)


def test_whoever_knows_nothing_has_no_say_and_if_nobody_does_the_plain_mean_stays() -> None:
    inf = float("inf")
    assert [float(t) for t in mean_in(RKLB, doubles(1.0, 5.0), doubles(2.0, inf), [1, 1])] == pytest.approx([1.0, 4.0])
    mean, variance = mean_in(RKLB, doubles(1.0, 5.0), doubles(inf, inf), [1, 1])
    assert float(mean) == 3.0
    assert float(variance) == inf


@pytest.mark.parametrize("chart", [c for c in CHARTS.values() if c is not GAA], ids=repr)
def test_agreeing_gaussians_come_back(chart: Chart) -> None:
    mu, v = torch.tensor([0.3, -7.0]).double(), torch.tensor([0.1, 5.0]).double()
    mean, variance = mean_in(chart, [mu] * 3, [v] * 3, [1, 2, 5])
    assert torch.allclose(mean, mu, rtol=1e-12)
    assert torch.allclose(variance, v, rtol=1e-12)


def test_charts_travel_and_are_spoken_of_by_name() -> None:
    assert repr(MeanIn(WB)) == "MeanIn(chart=WB, source='', damping=0.0, keep=True, uniform=False)"
    for chart in CHARTS.values():
        assert copy.deepcopy(MeanIn(chart)) == MeanIn(chart)
        assert "<locals>" not in repr((chart.to.__qualname__, chart.back.__qualname__))  # so workers can receive it


SPEC = Spec("mlp", {"inputs": 2, "hidden": [], "classes": 2})


def cohort(clients: int = 3, with_variance: bool = True) -> Cohort:
    updates = []
    for k in range(clients):
        draw = torch.Generator().manual_seed(k)
        mean = {n: torch.randn(t.shape, generator=draw) for n, t in SPEC.skeleton().state_dict().items()}
        variance = {"classifier.weight": torch.rand(2, 2, generator=draw) + 0.1}
        posterior = Posterior(mean, Diag(variance)) if with_variance else Posterior(mean)
        updates.append(ClientUpdate(f"c{k}", posterior, num_examples=1.0 + k, steps=1, spec=SPEC))
    return Cohort.of(updates)


def fuse(aggregate: MeanIn, who: Cohort) -> Posterior:
    state = ServerState(0, Single(SPEC, who.updates[0].posterior))
    return aggregate(who, state, Bench()).single.posterior


@pytest.mark.parametrize("chart", CHARTS.values(), ids=repr)
@pytest.mark.parametrize("block", [1, 1 << 18])
def test_a_cohort_is_fused_tensor_by_tensor(monkeypatch: pytest.MonkeyPatch, chart: Chart, block: int) -> None:
    monkeypatch.setattr(charts, "BLOCK", block)
    who = cohort()
    found = fuse(MeanIn(chart, source="variance"), who)
    name = "classifier.weight"
    mus, vs = zip(*((u.posterior.mean[name], u.posterior.geometry.variance[name]) for u in who), strict=True)
    mean, variance = mean_in(chart, mus, vs, [1.0, 2.0, 3.0])
    assert torch.allclose(found.mean[name], mean.float())
    assert torch.allclose(found.geometry.variance[name], variance.float())
    bias = sum(w * u.posterior.mean["classifier.bias"] for w, u in zip((1 / 6, 2 / 6, 3 / 6), who, strict=True))
    assert torch.allclose(found.mean["classifier.bias"], bias)  # a point num_examples takes the plain mean
    assert set(found.geometry.variance) == {name}
    assert {t.dtype for t in found.mean.values()} == {torch.float32}


def test_damping_adds_precision_and_variances_can_be_left_behind() -> None:
    who, name = cohort(), "classifier.weight"
    found = fuse(MeanIn(RKLB, source="variance", damping=0.7, keep=False), who)
    assert not isinstance(found.geometry, Diag)
    precisions = [1 / u.posterior.geometry.variance[name] + 0.7 for u in who]
    expected, _ = natural_mean_diag([u.posterior.mean[name] for u in who], precisions, [1, 2, 3])
    assert torch.allclose(found.mean[name], expected.float())
    flat = fuse(MeanIn(RKLB, source="variance", damping=1e9, keep=False), who)
    plain = fuse(MeanIn(EAA, source="variance"), cohort(with_variance=False))
    assert torch.allclose(flat.mean[name], plain.mean[name], atol=1e-5)


class Bayesian(nn.Linear):
    """A layer that keeps its log-variances beside its means."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.log_variance = nn.Parameter(torch.zeros(2, 2))


@pytest.mark.parametrize("chart", CHARTS.values(), ids=repr)
def test_a_network_that_holds_its_log_variances_is_fused_by_them(chart: Chart) -> None:
    spec = Spec.of(Bayesian())
    updates = []
    for k in range(3):
        draw = torch.Generator().manual_seed(k)
        mean = {n: torch.randn(t.shape, generator=draw) for n, t in Bayesian().state_dict().items()}
        updates.append(ClientUpdate(f"c{k}", Posterior(mean), num_examples=1.0 + k, steps=1, spec=spec))
    who = Cohort.of(updates)
    state = MeanIn(chart)(who, ServerState(0, Single(spec, updates[0].posterior)), Bench())
    found = state.single.posterior.mean
    mus, vs = [u.posterior.mean["weight"] for u in who], [u.posterior.mean["log_variance"].exp() for u in who]
    mean, variance = mean_in(chart, mus, vs, [1, 2, 3])
    assert list(found) == ["weight", "bias", "log_variance"]
    assert torch.allclose(found["weight"], mean.float(), atol=1e-6)
    assert torch.allclose(found["log_variance"], variance.log().float(), atol=1e-6)


def test_needs_laws_and_impossible_damping() -> None:
    assert MeanIn(RKLB, source="fisher").needs == {"fisher"}
    assert MeanIn(RKLB).needs == frozenset()
    assert "agree" in MeanIn(AALV).laws
    assert "agree" not in MeanIn(GAA).laws
    with pytest.raises(ConfigError, match="damping is -1"):
        MeanIn(RKLB, damping=-1.0)


BELIEVING = BayesianLayers(last=1, bias=True)(Single.of(SPEC.build(), SPEC), 2, seed=0)


def believing(clients: int = 3) -> Cohort:
    """Networks that hold their variances themselves, as they come through the door."""
    updates = []
    for k in range(clients):
        draw = torch.Generator().manual_seed(k)
        mean = {n: torch.randn(t.shape, generator=draw) for n, t in BELIEVING.posterior.mean.items()}
        told = decode(encode(mean, {})).tensors
        updates.append(ClientUpdate(f"c{k}", Posterior(told), num_examples=1.0 + k, steps=1, spec=BELIEVING.spec))
    return Cohort.of(updates)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("chart", CHARTS.values(), ids=repr)
def test_bayesian_layers_are_fused_by_their_own_log_variances(chart: Chart, uniform: bool) -> None:
    who, weights = believing(), [1.0, 1.0, 1.0] if uniform else [1.0, 2.0, 3.0]
    after = MeanIn(chart, uniform=uniform)(who, ServerState(0, BELIEVING), Bench()).single.posterior
    assert not isinstance(after.geometry, Diag)  # the geometry is in the network
    assert list(after.mean) == list(BELIEVING.posterior.mean)
    for name, log in (("weight", "log_variance"), ("bias", "bias_log_variance")):
        mus, logs = ([u.posterior.mean[f"net.classifier.{n}"] for u in who] for n in (name, log))
        mean, variance = mean_in(chart, mus, [rho.double().exp() for rho in logs], weights)
        torch.testing.assert_close(after.mean[f"net.classifier.{name}"], mean.float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(after.mean[f"net.classifier.{log}"], variance.log().float(), rtol=1e-5, atol=1e-6)


WIDE = BayesianLayers(last=1)(Single.of(Spec("mlp", {"hidden": [200]}).build(), Spec("mlp", {"hidden": [200]})), 10, 0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "examples", [(1200.0,) * 7, (1199.0, 7.0, 60_000.0, 1.0, 33.0, 600.0, 90.0)], ids=["even", "odd"]
)
@pytest.mark.parametrize("chart", [EAA, GAA, AALV, WB], ids=repr)
def test_means_are_fedavgs_to_the_last_bit_where_the_chart_leaves_them(
    monkeypatch: pytest.MonkeyPatch, chart: Chart, examples: tuple[float, ...], compiled: bool
) -> None:
    """Shares n_k / n would be rounded before they are used: even clients would differ in every hundredth weight."""
    if compiled:
        pytest.importorskip("numba")
    monkeypatch.setattr(charts, "MIN_COMPILED", 1 if compiled else 1 << 62)
    updates = []
    for k, count in enumerate(examples):
        draw = torch.Generator().manual_seed(k)
        mean = {n: 0.1 * torch.randn(t.shape, generator=draw) for n, t in WIDE.posterior.mean.items()}
        updates.append(ClientUpdate(f"c{k}", Posterior(decode(encode(mean, {})).tensors), count, 1, WIDE.spec))
    who, state = Cohort.of(updates), ServerState(0, WIDE)
    found, plain = (rule(who, state, Bench()).single.posterior.mean for rule in (MeanIn(chart), Mean()))
    names = [name for name in plain if not name.endswith("log_variance")]
    assert len(names) == 4
    assert all(found[name].equal(plain[name]) for name in names)


def test_half_precision_is_widened_before_anything_is_summed() -> None:
    mean, rho = RKLB([torch.tensor([1.0, 2.0]).half()] * 2, [torch.tensor([-14.0, -20.0]).half()] * 2, [0.5, 0.5])
    assert mean.tolist() == pytest.approx([1.0, 2.0])
    assert rho.tolist() == pytest.approx([-14.0, -20.0], abs=1e-5)


def test_the_record_tells_how_wide_posteriors_are() -> None:
    who = believing()
    facts = MeanIn(WB)(who, ServerState(0, BELIEVING), Bench()).facts
    logs = torch.stack([u.posterior.mean["net.classifier.log_variance"].flatten() / 2 for u in who])
    middle = logs.sort(1).values[:, round(0.5 * (logs.shape[1] - 1))]
    medians = dict(zip(who.clients, middle.exp().tolist(), strict=True))
    assert facts["sigma_clients"]["net.classifier"] == pytest.approx(medians)
    assert facts["sigma_apart"]["net.classifier"] == pytest.approx(float(logs.std(0, correction=0).mean()))
    assert list(facts["sigma"]["net.classifier"]) == ["5 %", "50 %", "95 %"]
