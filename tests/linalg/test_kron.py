import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfuse.errors import ConfigError, NotConverged
from fedfuse.linalg import kron
from fedfuse.linalg.kron import KronInverse, KronSum, Split, balance, damp, kron_solve, natural_mean, natural_mean_diag

Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def factors(clients: int, d: int, rng: torch.Generator, damping: float = 0.1, rank: int | None = None) -> torch.Tensor:
    X = torch.randn(clients, rank or 2 * d, d, dtype=torch.float64, generator=rng)
    return X.mT @ X / X.shape[1] + damping * torch.eye(d)


def layer(clients: int = 4, out: int = 5, inn: int = 7, seed: int = 0) -> Layer:
    rng = torch.Generator().manual_seed(seed)
    Ms = torch.randn(clients, out, inn, dtype=torch.float64, generator=rng)
    return Ms, factors(clients, inn, rng), factors(clients, out, rng)


def dense(Ms: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor, weights: list[float]) -> torch.Tensor:
    """Σ f_k (B_k ⊗ A_k) vec M = Σ f_k (B_k ⊗ A_k) vec M_k, row-major, solved as one dense matrix."""
    f = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    precisions = [fk * torch.kron(B, A) for fk, A, B in zip(f, As, Bs, strict=True)]
    pull = sum(P @ M.flatten() for P, M in zip(precisions, Ms, strict=True))
    return torch.linalg.solve(sum(precisions), pull).view_as(Ms[0])


def test_the_operator_equals_its_definition() -> None:
    Ms, As, Bs = layer()
    f = [0.1, 0.2, 0.3, 0.4]
    expected = sum(w * B @ Ms[0] @ A for w, A, B in zip(f, As, Bs, strict=True))
    assert torch.allclose(KronSum.of(As, Bs, f)(Ms[0]), expected)


@pytest.mark.parametrize("chunk", [1, 8 * 5 * 7 * 2])
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    Ms, As, Bs = layer()
    whole = KronSum.of(As, Bs, [1.0] * 4)
    diagonals = KronSum.of(As.diagonal(dim1=1, dim2=2), Bs, [1.0] * 4)
    full, flat = whole(Ms[0]), diagonals(Ms[0])
    monkeypatch.setattr(kron, "_CHUNK_BYTES", chunk)
    assert torch.allclose(whole(Ms[0]), full, rtol=1e-12)
    assert torch.allclose(diagonals(Ms[0]), flat, rtol=1e-12)


def test_kron_solve_inverts_the_dense_kronecker_product() -> None:
    Ms, As, Bs = layer()
    expected = torch.linalg.solve(torch.kron(Bs[0], As[0]), Ms[0].flatten()).view(5, 7)
    assert torch.allclose(kron_solve(As[0], Bs[0], Ms[0]), expected)
    assert torch.allclose(Bs[0] @ KronInverse.of(As[0], Bs[0])(Ms[0]) @ As[0], Ms[0])


@given(clients=st.integers(1, 5), out=st.integers(1, 6), inn=st.integers(1, 6), seed=st.integers(0, 999))
@settings(deadline=None, max_examples=40)
def test_the_exact_mean_equals_the_dense_solve(clients: int, out: int, inn: int, seed: int) -> None:
    Ms, As, Bs = layer(clients, out, inn, seed)
    weights = [1.0 + k for k in range(clients)]
    found = natural_mean(Ms, As, Bs, weights, tol=1e-12)
    assert torch.allclose(found.x, dense(Ms, As, Bs, weights), rtol=1e-8, atol=1e-9)
    assert found.residual <= 1e-12


def test_the_residual_is_the_true_one_for_every_solver() -> None:
    Ms, As, Bs = layer(3)
    f = [0.5, 0.3, 0.2]
    Z = sum(w * B @ M @ A for w, M, A, B in zip(f, Ms, As, Bs, strict=True))
    ratios = [balance(A, B, "trace") for A, B in zip(As, Bs, strict=True)]
    scale = KronInverse.of(
        sum(w * A / r for w, A, r in zip(f, As, ratios, strict=True)),
        sum(w * B * r for w, B, r in zip(f, Bs, ratios, strict=True)),
    )
    for solver in ("exact", "expectation", "gradient"):
        found = natural_mean(Ms, As, Bs, f, solver=solver, max_iters=50)
        gap = Z - sum(w * B @ found.x @ A for w, A, B in zip(f, As, Bs, strict=True))
        assert found.residual == pytest.approx(float(scale(gap).norm() / scale(Z).norm()), rel=1e-5, abs=1e-14)


def test_a_client_of_a_billionth_of_the_scale_still_has_its_say_where_nobody_else_knows_anything() -> None:
    """The residual of the equation itself is 1e-9 before its directions are looked at."""
    rng = torch.Generator().manual_seed(0)
    Ms = torch.randn(3, 4, 6, dtype=torch.float64, generator=rng)
    As = factors(3, 6, rng, damping=1e-3, rank=2)
    Bs = factors(3, 4, rng, damping=1e-3, rank=2)
    As[2] *= 1e-5
    Bs[2] *= 1e-4
    found = natural_mean(Ms, As, Bs, [1, 1, 1], tol=1e-9)
    assert torch.allclose(found.x, dense(Ms, As, Bs, [1, 1, 1]), atol=1e-6)


@pytest.mark.parametrize("solver", ["exact", "expectation", "gradient"])
def test_one_client_comes_back(solver: kron.Solver) -> None:
    Ms, As, Bs = layer(1)
    assert torch.allclose(natural_mean(Ms, As, Bs, [7.0], solver=solver, max_iters=20).x, Ms[0], atol=1e-12)


def test_clients_that_agree_come_back_to_the_last_bit_whatever_their_certainty() -> None:
    Ms, As, Bs = layer(4)
    found = natural_mean(Ms[:1].expand(4, 5, 7), As, Bs, [1.0] * 4)
    assert found.iterations == 0
    assert torch.equal(found.x, Ms[0])


@pytest.mark.parametrize("side", ["A", "B"])
def test_the_expectation_is_exact_where_one_side_agrees(side: str) -> None:
    Ms, As, Bs = layer(4)
    As, Bs = (As[:1].expand_as(As), Bs) if side == "A" else (As, Bs[:1].expand_as(Bs))
    found = natural_mean(Ms, As, Bs, [1, 2, 3, 4], solver="expectation")
    assert torch.allclose(found.x, dense(Ms, As, Bs, [1, 2, 3, 4]), atol=1e-10)
    assert found.iterations == 0
    assert found.residual < 1e-12


def test_the_expectation_is_its_formula_where_nothing_agrees() -> None:
    Ms, As, Bs = layer(3)
    Z = sum(B @ M @ A for M, A, B in zip(Ms, As, Bs, strict=True)) / 3
    expected = torch.linalg.inv(Bs.mean(0)) @ Z @ torch.linalg.inv(As.mean(0))
    found = natural_mean(Ms, As, Bs, [1, 1, 1], solver="expectation")
    assert torch.allclose(found.x, expected, atol=1e-11)
    assert found.residual > 1e-3


def test_the_gradient_is_torchs_gradient_of_the_mean_squared_error() -> None:
    Ms, As, Bs = layer(3)
    M = natural_mean(Ms, As, Bs, [1, 1, 1], solver="expectation").x.requires_grad_()
    Z = sum(B @ Mk @ A for Mk, A, B in zip(Ms, As, Bs, strict=True)) / 3
    loss = (sum(B @ M @ A for A, B in zip(As, Bs, strict=True)) / 3 - Z).square().mean()
    (slope,) = torch.autograd.grad(loss, M)
    found = natural_mean(Ms, As, Bs, [1, 1, 1], solver="gradient", max_iters=1)
    assert torch.allclose(found.x, (M - slope).detach(), atol=1e-13)


def test_the_gradient_creeps_towards_the_exact_answer() -> None:
    Ms, As, Bs = layer(3)
    exact = natural_mean(Ms, As, Bs, [1, 1, 1], tol=1e-12).x
    away = [
        float((natural_mean(Ms, As, Bs, [1, 1, 1], solver="gradient", max_iters=n).x - exact).norm())
        for n in (0, 200, 2000)
    ]
    assert away[0] > away[1] > away[2] > 0


def test_a_gradient_that_explodes_is_reported() -> None:
    Ms, As, Bs = layer(3)
    with pytest.raises(NotConverged, match=r"conv1: gradient descent diverged.*below 6"):
        natural_mean(Ms, 50 * As, 50 * Bs, [1, 1, 1], solver="gradient", max_iters=500, what="conv1")


def test_the_scale_of_weights_and_factors_does_not_matter() -> None:
    Ms, As, Bs = layer(3)
    one = natural_mean(Ms, As, Bs, [1, 2, 3], tol=1e-12).x
    assert torch.allclose(one, natural_mean(Ms, As, Bs, [100, 200, 300], tol=1e-12).x, atol=1e-10)
    assert torch.allclose(one, natural_mean(Ms, 1e-6 * As, 1e4 * Bs, [1, 2, 3], tol=1e-12).x, atol=1e-10)


def test_a_client_without_weight_is_not_heard() -> None:
    Ms, As, Bs = layer(3)
    heard = natural_mean(Ms[:2], As[:2], Bs[:2], [1, 2], tol=1e-12).x
    assert torch.allclose(natural_mean(Ms, As, Bs, torch.tensor([1, 2, 0]), tol=1e-12).x, heard, atol=1e-10)


def test_the_sure_client_wins() -> None:
    Ms, As, Bs = layer(2)
    As, Bs = As.clone(), Bs.clone()
    As[1] *= 1e6
    assert torch.allclose(natural_mean(Ms, As, Bs, [1, 1]).x, Ms[1], atol=1e-3)


def test_directions_nobody_informs_keep_the_plain_mean() -> None:
    Ms, As, Bs = layer(3)
    As, Bs = As.clone(), Bs.clone()
    As[:, 2, :] = As[:, :, 2] = 0  # an input that was always zero
    Bs[:, 4, :] = Bs[:, :, 4] = 0  # an output without gradient
    plain = Ms.mean(0)
    for solver in ("exact", "expectation"):
        found = natural_mean(Ms, As, Bs, [1, 1, 1], solver=solver)
        assert torch.allclose(found.x[:, 2], plain[:, 2])
        assert torch.allclose(found.x[4], plain[4])
    rows, cols = [0, 1, 2, 3], [0, 1, 3, 4, 5, 6]
    core = dense(Ms[:, rows][..., cols], As[:, cols][..., cols], Bs[:, rows][..., rows], [1, 1, 1])
    exact = natural_mean(Ms, As, Bs, [1, 1, 1], tol=1e-12).x
    assert torch.allclose(exact[rows][:, cols], core, atol=1e-9)
    silent = natural_mean(Ms, As, 0 * Bs, [1, 1, 1])
    assert torch.allclose(silent.x, plain)


def test_means_that_cancel_have_a_zero_answer() -> None:
    Ms, As, Bs = layer(1)
    found = natural_mean(torch.cat([Ms, -Ms]), As.expand(2, 7, 7), Bs.expand(2, 5, 5), [1, 1])
    assert torch.allclose(found.x, torch.zeros(5, 7).double(), atol=1e-12)


def test_floats_come_from_any_iterable_and_inputs_are_left_alone() -> None:
    Ms, As, Bs = (t.float() for t in layer(3))
    kept = [t.clone() for t in (Ms, As, Bs)]
    stacked = natural_mean(Ms, As, Bs, [1, 2, 3])
    streamed = natural_mean(iter(list(Ms)), (A for A in As), tuple(Bs), (1, 2, 3))
    assert stacked.x.dtype == torch.float64
    assert torch.equal(stacked.x, streamed.x)
    assert all(torch.equal(a, b) for a, b in zip(kept, (Ms, As, Bs), strict=True))


def test_ten_clients_of_a_lenet_layer_converge_in_few_iterations() -> None:
    rng = torch.Generator().manual_seed(0)
    Ms = torch.randn(10, 84, 121, generator=rng) / 10
    As, Bs = (factors(10, d, rng, damping=0.03).float() for d in (121, 84))
    found = natural_mean(Ms, As, Bs, [1] * 10)
    assert found.residual <= 1e-8
    assert found.iterations <= 40


def test_bad_input_is_explained() -> None:
    Ms, As, Bs = layer(2)
    with pytest.raises(ConfigError, match=r"fc1: weights are \[1.0, -1.0\]"):
        natural_mean(Ms, As, Bs, [1, -1], what="fc1")
    with pytest.raises(ConfigError, match="not all 0"):
        natural_mean(Ms, As, Bs, [])
    with pytest.raises(ConfigError, match="got 3 weights, expected as many"):
        natural_mean(Ms, As, Bs, [1, 1, 1])
    with pytest.raises(ConfigError, match="expected out × in, in × in and out × out"):
        natural_mean(Ms, Bs, As, [1, 1])
    with pytest.raises(ConfigError, match="client 1 has M"):
        natural_mean([Ms[0], Ms[1][:4]], As, Bs, [1, 1])
    with pytest.raises(ConfigError, match="solver is 'newton', expected one of exact, expectation, gradient"):
        natural_mean(Ms, As, Bs, [1, 1], solver="newton")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no factors"):
        KronSum.of([], [], [])


def test_a_solver_out_of_breath_names_the_layer() -> None:
    Ms, As, Bs = layer(5)
    with pytest.raises(NotConverged, match="layer fc1"):
        natural_mean(Ms, As, Bs, [1] * 5, max_iters=2, what="layer fc1")


def test_the_diagonal_mean_is_precision_weighted() -> None:
    rng = torch.Generator().manual_seed(0)
    m, p = torch.randn(3, 4, 2, generator=rng), torch.rand(3, 4, 2, generator=rng)
    p[:, 0, 0] = 0
    f = torch.tensor([1.0, 2.0, 5.0])[:, None, None] / 8
    mean, precision = natural_mean_diag(m, p, [1, 2, 5])
    assert torch.allclose(precision, (f * p).sum(0).double())
    informed = (f * p * m).sum(0) / (f * p).sum(0)
    informed[0, 0] = (f * m).sum(0)[0, 0]
    assert torch.allclose(mean, informed.double(), atol=1e-6)
    with pytest.raises(ConfigError, match="expected one shape"):
        natural_mean_diag(m, p[:, :1], [1, 2, 5])


def test_diagonal_factors_make_the_two_means_one() -> None:
    rng = torch.Generator().manual_seed(0)
    Ms = torch.randn(3, 4, 5, generator=rng).double()
    a, b = torch.rand(3, 5, generator=rng).double() + 0.1, torch.rand(3, 4, generator=rng).double() + 0.1
    full = natural_mean(Ms, torch.diag_embed(a), torch.diag_embed(b), [1, 2, 3], tol=1e-13).x
    assert torch.allclose(full, natural_mean_diag(Ms, b[:, :, None] * a[:, None, :], [1, 2, 3])[0], atol=1e-11)


@pytest.mark.parametrize("pi", ["one", "trace", "frobenius"])
def test_damping_adds_lambda_and_balances(pi: Split) -> None:
    _, As, Bs = layer(1)
    A, B = 9 * As[0], Bs[0]
    lam = 1e-2
    damped_A, damped_B = damp(A, B, lam, pi)
    on_A, on_B = (float((damped - plain)[0, 0]) for damped, plain in ((damped_A, A), (damped_B, B)))
    assert on_A * on_B == pytest.approx(lam)
    balance = {
        "one": 1.0,
        "trace": float((A.trace() / 7) / (B.trace() / 5)),
        "frobenius": float((A.norm() / 7**0.5) / (B.norm() / 5**0.5)),
    }[pi]
    assert on_A / on_B == pytest.approx(balance)
    assert torch.allclose(damped_A - A, on_A * torch.eye(7).double())


@pytest.mark.parametrize("pi", ["trace", "frobenius"])
def test_a_vanishing_factor_is_the_limit_of_a_small_one(pi: Split) -> None:
    _, As, Bs = layer(1)
    small = torch.kron(*damp(As[0], 1e-20 * Bs[0], 1e-2, pi))
    gone = torch.kron(*damp(As[0], torch.zeros_like(Bs[0]), 1e-2, pi))
    assert torch.allclose(small, gone, rtol=1e-6, atol=1e-9)


def test_the_scale_of_a_pair_does_not_matter_to_the_exact_mean() -> None:
    """A_k ⊗ B_k is all that counts, so a client that scales its factors against each other changes nothing."""
    Ms, As, Bs = layer(4)
    scales = torch.tensor([1e-12, 1.0, 1e6, 1e12], dtype=torch.float64)[:, None, None]
    plain = natural_mean(Ms, As, Bs, [1, 2, 3, 4], tol=1e-10)
    scaled = natural_mean(Ms, As * scales, Bs / scales, [1, 2, 3, 4], tol=1e-10)
    assert torch.allclose(plain.x, scaled.x, atol=1e-8)
    assert abs(plain.iterations - scaled.iterations) <= 1


def test_damping_has_guards() -> None:
    zero, one = torch.zeros(2, 2), torch.eye(2)
    for (A, B), pi in itertools.product([(zero, one), (one, zero), (zero, zero)], ["trace", "frobenius"]):
        for side in damp(A, B, 0.25, pi):  # type: ignore[arg-type]
            assert torch.equal(side, 0.5 * one)
    assert torch.equal(damp(one, zero, 0.25, "one")[0], 1.5 * one)  # as the formula says
    assert torch.equal(damp(one, one, 0.0, "trace")[0], one)
    with pytest.raises(ConfigError, match="lambda is -1"):
        damp(one, one, -1)
    with pytest.raises(ConfigError, match="pi is 'fro', expected one of one, trace, frobenius"):
        damp(one, one, 1.0, "fro")  # type: ignore[arg-type]
