import math
from dataclasses import replace

import pytest
import torch
from tests.server.aggregate.test_natural import cohort
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.rows import Rows
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import RecipeError
from fedfuse.linalg.factor import dense
from fedfuse.linalg.kron import natural_mean
from fedfuse.methods.fedlpa import BestStep, EarlyStopped, descend, early_mean, fedlpa
from fedfuse.methods.regmean import RegressionMean
from fedfuse.server.aggregate.mean import mean_of
from fedfuse.server.aggregate.natural import NaturalKron
from fedfuse.testing import check_method

EQUATION = NaturalKron(1e-1, "trace", scale="root", tol=1e-12)


def weights(state: ServerState) -> dict[str, Tensor]:
    return dict(state.single.posterior.mean)


def server_rows(n: int = 40) -> Bench:
    draw = torch.Generator().manual_seed(9)
    return Bench(Rows(torch.randn(n, 2, 3, 3, generator=draw) + 1, torch.randint(3, (n,), generator=draw)), classes=3)


def belief(who: Cohort) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    pairs = [[dense(f).double() for f in u.posterior.geometry.factors["4"]] for u in who]
    eye = torch.eye
    return (
        [u.posterior.mean["4.weight"] for u in who],
        [A + 0.1 * eye(len(A)) for A, _ in pairs],
        [B + 0.1 * eye(len(B)) for _, B in pairs],
        who.weights,
    )


def test_enough_iterations_are_the_exact_solve_from_any_start() -> None:
    who, state = cohort()
    system = belief(who)
    exact = natural_mean(*system, tol=1e-12).x
    for start in (torch.zeros(3, 16), torch.ones(3, 16)):
        found = early_mean(*system, start=start, iterations=500, what="a layer")
        assert torch.allclose(found.x, exact, atol=1e-8)
    for begin in ("mean", "regmean", "tasks"):
        fused = EarlyStopped(EQUATION, begin, 500)(who, state, Bench())
        assert torch.allclose(weights(fused)["4.weight"], weights(EQUATION(who, state, Bench()))["4.weight"], atol=1e-5)


def test_iterations_are_those_of_conjugate_gradients() -> None:
    """One step of steepest descent, by hand, on the equation written out as a dense system."""
    who, _ = cohort()
    Ms, As, Bs, shares = belief(who)
    H = sum(f * torch.kron(B, A) for f, A, B in zip(shares, As, Bs, strict=True))
    b = sum(f * (B @ M.double() @ A).flatten() for f, M, A, B in zip(shares, Ms, As, Bs, strict=True))
    x = torch.zeros(48, dtype=torch.float64)
    r = b - H @ x
    stepped = x + (r @ r) / (r @ H @ r) * r
    found = early_mean(Ms, As, Bs, shares, start=x.view(3, 16), iterations=1, what="a layer")
    assert torch.allclose(found.x.flatten(), stepped)
    assert found.iterations == 1


def test_no_iteration_is_where_it_began() -> None:
    who, state = cohort()
    base = weights(state)["4.weight"].double()
    tasks = base + 0.3 * sum(u.posterior.mean["4.weight"].double() - base for u in who)
    begun = {b: weights(EarlyStopped(EQUATION, b, 0)(who, state, Bench()))["4.weight"] for b in ("mean", "tasks")}
    assert torch.allclose(begun["mean"], mean_of(who)["4.weight"], atol=1e-6)
    assert torch.allclose(begun["tasks"], tasks.float(), atol=1e-6)


def test_the_start_regmean_is_regmean() -> None:
    """Without damping, so that both read the same input factors."""
    who, state = cohort()
    begun = EarlyStopped(NaturalKron(1e-14, "one"), "regmean", 0)(who, state, Bench())
    assert torch.allclose(
        weights(begun)["4.weight"], weights(RegressionMean(1.0)(who, state, Bench()))["4.weight"], atol=1e-3
    )


def test_adam_descends_to_the_natural_mean() -> None:
    system = belief(cohort()[0])
    exact = natural_mean(*system, tol=1e-12).x
    walk = descend(*system, start=torch.zeros(3, 16), rate=0.01, every=200)
    assert float((next(walk) - exact).norm()) < 1e-2 * float(exact.norm())


def test_the_best_step_is_kept() -> None:
    who, state = cohort()
    bench = server_rows()
    fused = BestStep(EQUATION, steps=60, every=20)(who, state, bench)
    losses = fused.facts["server_losses"]
    assert len(losses) == 4
    assert fused.facts["step"] == 20 * losses.index(min(losses))
    logits = fused.single.logits(bench.rows.x)
    assert math.isclose(float(bench.task.loss(logits, bench.rows.y)), min(losses), rel_tol=1e-5)
    assert losses[0] == pytest.approx(
        float(bench.task.loss(state.fused(mean_of(who)).single.logits(bench.rows.x), bench.rows.y)), rel=1e-4
    )


def test_fedlpa_offers_both_and_refuses_a_start_that_does_not_matter() -> None:
    assert fedlpa(solver="early", begin="tasks", max_iters=10).aggregate == replace(
        EarlyStopped(fedlpa(max_iters=10).aggregate, "tasks", 10)
    )
    assert fedlpa(solver="adam").needs == {"kron", "server_rows", "network"}
    with pytest.raises(RecipeError, match="begin is 'tasks'"):
        fedlpa(begin="tasks")


def test_stopping_early_keeps_the_laws() -> None:
    assert "order" in check_method("fedlpa", solver="early", max_iters=3, begin="regmean")
