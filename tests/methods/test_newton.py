"""Newton steps from sums: the pooled fit, and statsmodels' statistics on the pooled rows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from torch import Tensor, nn

import fedfuse
from fedfuse.core.messages import Envelope
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError
from fedfuse.nets.glm import WEIGHTS, newton_sums
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.round import fuse_round
from fedfuse.tasks import BINARY, CLASSIFICATION, REGRESSION, Task
from fedfuse.training.round import client_round
from fedfuse.wire.codec import decode, encode

FEATURES = 4
DRAW = torch.Generator().manual_seed(3)
X = torch.randn(400, FEATURES, generator=DRAW)
SCORE = X @ torch.tensor([1.0, -0.5, 0.3, 0.0]) + 0.2
NOISE = torch.rand(400, generator=DRAW)
SITES = (torch.arange(0, 50), torch.arange(50, 170), torch.arange(170, 400))
TARGETS: dict[str, Tensor] = {
    "bernoulli": (SCORE.sigmoid() > NOISE).long(),
    "multinomial": ((SCORE + 2 * NOISE > 0.5).long() + (SCORE + 3 * NOISE > 2).long()),
    "gaussian": SCORE + torch.randn(400, generator=DRAW),
    "poisson": torch.poisson((SCORE / 2).exp(), generator=DRAW),
}
TASK: dict[str, Task] = {
    "bernoulli": BINARY,
    "multinomial": CLASSIFICATION,
    "gaussian": REGRESSION,
    "poisson": REGRESSION,
}
CLASSES = {"bernoulli": 2, "multinomial": 3, "gaussian": 1, "poisson": 1}


def run(family: str, rounds: int = 9, sites: tuple[Tensor, ...] = SITES, **options: Any) -> list[ServerState]:
    """The states after each exchange; clients' replies pass the door."""
    task, classes = TASK[family], CLASSES[family]
    spec = Spec("mlp", {"inputs": FEATURES, "hidden": [], "classes": task.outputs(classes)})
    zeros = {n: torch.zeros_like(t) for n, t in spec.build().state_dict().items()}
    recipe = fedfuse.recipe("newton", **({"family": "poisson"} if family == "poisson" else {}), **options)
    bench = Bench(population=len(sites), classes=classes, task=task)
    state, states = ServerState(0, Single(spec, Posterior(zeros))), []
    for _ in range(rounds):
        brief = state.brief(recipe.publishes, classes, task)
        work, asked = recipe.work(LocalSettings()), tuple(f"s{i}" for i in range(len(sites)))
        sent = [
            Envelope(c, client_round(work, brief, c, Rows(X[own], TARGETS[family][own])).payload)
            for c, own in zip(asked, sites, strict=True)
        ]
        admission = admit_all(sent, brief, recipe.evidence, asked, trains=recipe.trains)
        assert not admission.refused
        state = fuse_round(recipe, admission.cohort, state, bench)
        states.append(state)
    return states


def pooled(family: str) -> Any:
    """Statsmodels on all rows, the constant last."""
    design, y = np.column_stack([X.double().numpy(), np.ones(len(X))]), TARGETS[family].double().numpy()
    if family == "multinomial":
        return sm.MNLogit(y, design).fit(disp=0, tol=1e-14, maxiter=100)
    if family == "gaussian":
        return sm.OLS(y, design).fit()
    kind = sm.families.Binomial() if family == "bernoulli" else sm.families.Poisson()
    return sm.GLM(y, design, kind).fit(tol=1e-14, maxiter=100)


@pytest.mark.parametrize("family", TASK)
def test_the_fit_is_the_pooled_one_with_its_standard_errors_and_p_values(family: str) -> None:
    states, oracle = run(family), pooled(family)
    facts = states[-1].facts["newton"]
    found = facts["coefficients"]
    for ours, theirs in (("estimate", oracle.params), ("standard_error", oracle.bse), ("p", oracle.pvalues)):
        expected = np.asarray(theirs).T.flatten()
        assert [c[ours] for c in found] == pytest.approx(expected, abs=1e-8)
    limits = np.asarray(oracle.conf_int()).reshape(-1, 2)
    assert [c["low"] for c in found] == pytest.approx(limits[:, 0], abs=1e-7)
    assert facts["gradient"] < 1e-8
    assert facts["separation"] is False
    if family == "bernoulli":
        assert found[0]["odds_ratio"] == pytest.approx(np.exp(oracle.params[0]))


def test_it_converges_in_a_few_exchanges() -> None:
    steps = [s.facts["newton"]["step"] for s in run("bernoulli", 7)]
    assert steps[-1] < 1e-10
    assert steps[0] > 0.1


def test_the_partition_changes_nothing() -> None:
    one, many = (run("bernoulli", 6, sites)[-1] for sites in ((torch.arange(400),), SITES))
    torch.testing.assert_close(one.memory[WEIGHTS], many.memory[WEIGHTS], atol=1e-10, rtol=0)


def test_ridge_is_the_penalized_optimum() -> None:
    state = run("multinomial", 9, ridge=2.0)[-1]
    weights = state.memory[WEIGHTS]
    phi = torch.cat([X.double(), torch.ones(400, 1, dtype=torch.float64)], 1)
    sums = newton_sums(phi, TARGETS["multinomial"], weights, "multinomial")
    slope = sums.gradient.clone()
    slope[:, :-1] += 2.0 * weights[:, :-1]
    assert float(slope.abs().max()) < 1e-8


@pytest.mark.parametrize("family", TASK)
def test_gradient_and_hessian_are_autograds(family: str) -> None:
    phi, y = X.double(), TARGETS[family]
    outputs = 3 if family == "multinomial" else 1
    weights = torch.randn(outputs, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 3
    sums = newton_sums(phi, y, weights, family, batch=37)  # type: ignore[arg-type]

    def loss(flat: Tensor) -> Tensor:
        return newton_sums(phi, y, flat.view_as(weights), family).loss  # type: ignore[arg-type]

    flat = weights.flatten()
    torch.testing.assert_close(sums.gradient.flatten(), torch.autograd.functional.jacobian(loss, flat))
    torch.testing.assert_close(sums.hessian, torch.autograd.functional.hessian(loss, flat))


def test_local_fits_give_the_inverse_variance_estimate_and_cochrans_q() -> None:
    state = run("bernoulli", 1, first="local")[0]
    design, y = np.column_stack([X.double().numpy(), np.ones(400)]), TARGETS["bernoulli"].numpy()
    fits = [sm.GLM(y[s], design[s], sm.families.Binomial()).fit(tol=1e-14) for s in (o.numpy() for o in SITES)]
    precisions = [np.linalg.inv(f.cov_params()) for f in fits]
    mean = np.linalg.solve(sum(precisions), sum(p @ f.params for p, f in zip(precisions, fits, strict=True)))
    assert state.memory[WEIGHTS].flatten().numpy() == pytest.approx(mean, abs=1e-8)
    q = sum((f.params - mean) @ p @ (f.params - mean) for p, f in zip(precisions, fits, strict=True))
    found = state.facts["newton"]["heterogeneity"]
    assert (found["Q"], found["df"]) == (pytest.approx(q, abs=1e-8), 2 * (FEATURES + 1))


def test_a_site_unlike_the_others_is_heterogeneity() -> None:
    turned = run("bernoulli", 1)[0]
    alike = run("bernoulli", 8)[-1].facts["newton"]["heterogeneity"]
    assert turned.facts["newton"]["heterogeneity"]["df"] == alike["df"] == 10
    saved = TARGETS["bernoulli"].clone()
    try:
        TARGETS["bernoulli"][SITES[2]] = 1 - saved[SITES[2]]
        odd = run("bernoulli", 8)[-1].facts["newton"]["heterogeneity"]
    finally:
        TARGETS["bernoulli"] = saved
    assert odd["I2"] > 0.8 > alike["I2"]
    assert odd["p"] < 1e-6 < alike["p"]


def test_separation_is_told() -> None:
    saved = TARGETS["bernoulli"].clone()
    try:
        TARGETS["bernoulli"] = (SCORE > 0).long()
        facts = run("bernoulli", 12)[-1].facts["newton"]
    finally:
        TARGETS["bernoulli"] = saved
    assert facts["separation"] is True


def test_a_step_that_raises_the_loss_is_halved() -> None:
    saved = TARGETS["poisson"].clone()
    try:
        TARGETS["poisson"] = torch.where(torch.arange(400) == 0, 4000.0, 0.0)
        found = [s.facts["newton"] for s in run("poisson", 40)]
    finally:
        TARGETS["poisson"] = saved
    assert any(f["halved"] for f in found)
    taken = [f["loss"] for f in found if not f["halved"]]
    assert all(after <= before + 1e-9 * abs(before) for before, after in itertools.pairwise(taken))


def test_counts_need_numbers() -> None:
    spec = Spec("mlp", {"inputs": FEATURES, "hidden": [], "classes": 1})
    state, recipe = ServerState(0, Single.of(spec.build(), spec)), fedfuse.recipe("newton", family="poisson")
    with pytest.raises(ConfigError, match="for counts and the task is binary"):
        recipe.check(1, Bench(classes=2, task=BINARY), state)


def test_from_files_in_double_precision() -> None:
    torch.manual_seed(0)
    module = nn.Linear(FEATURES, 1).double()
    for _ in range(7):
        updates = [
            fedfuse.local_update(
                module, (X[s].double(), TARGETS["bernoulli"][s]), "newton", task="binary", client=f"s{i}"
            )
            for i, s in enumerate(SITES)
        ]
        fused = fedfuse.fuse(updates, "newton", start=module.state_dict(), model=module)
        module.load_state_dict(fused.state_dict())
    expected = pooled("bernoulli").params
    assert torch.cat([module.weight.flatten(), module.bias]).tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("note", "factor", "field"),
    [
        ("gradient", 1e6, "newton/gradient"),
        ("hessian", 1e6, "newton/hessian"),
        ("loss", 1e6, "newton/loss"),
        ("fit", 1e6, "newton/fit"),
        ("gradient", 1e12, "newton/gradient"),
        ("loss", -1.0, "newton/loss"),
    ],
)
def test_who_multiplies_its_sums_is_weakened_or_refused(note: str, factor: float, field: str) -> None:
    """A gradient times a hundred was the whole step: nothing of Newton's sums was compared with the others'."""
    spec = Spec("mlp", {"inputs": FEATURES, "hidden": [], "classes": 3})
    recipe = fedfuse.recipe("newton", ridge=1.0, first="local" if note == "fit" else "sums")
    brief = ServerState(0, Single.of(spec.build(), spec)).brief(recipe.publishes, 3, CLASSIFICATION)
    sent = {}
    for place, own in enumerate(torch.arange(400).chunk(8)):
        rows = Rows(X[own], TARGETS["multinomial"][own])
        sent[f"s{place}"] = client_round(recipe.work(LocalSettings()), brief, f"s{place}", rows).payload
    honest = admit_all([Envelope(c, p) for c, p in sent.items()], brief, recipe.evidence, list(sent), trains=False)
    assert (honest.refused, honest.clipped) == ([], [])
    packet = decode(sent["s0"])
    name = f"~newton/{note}"
    sent["s0"] = encode({**packet.tensors, name: packet.tensors[name] * factor}, packet.header)
    seen = admit_all([Envelope(c, p) for c, p in sent.items()], brief, recipe.evidence, list(sent), trains=False)
    assert {(r["client"], r["field"]) for r in (*seen.refused, *seen.clipped)} == {("s0", field)}
