import pytest
import scipy.sparse.linalg
import torch

from fedfuse.errors import NotConverged
from fedfuse.linalg.cg import conjugate_gradient


def spd(d: int, condition: float, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=rng))
    return Q @ torch.logspace(0, torch.tensor(condition).log10().item(), d, dtype=torch.float64).diag() @ Q.T


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e6])
def test_equals_the_dense_solve(condition: float) -> None:
    A, b = spd(60, condition), normal(60)
    tol = condition * 1e-15  # a residual far below eps times the condition cannot be reached
    found = conjugate_gradient(lambda x: A @ x, b, tol=tol)
    assert torch.allclose(found.x, torch.linalg.solve(A, b), rtol=1e-5, atol=1e-9)
    assert found.residual <= tol
    assert found.residual == pytest.approx(float((b - A @ found.x).norm() / b.norm()), abs=1e-15)


def test_matrix_unknowns_solve_a_sylvester_like_equation() -> None:
    A, B, Z = spd(7, 50.0), spd(5, 30.0, seed=2), normal(5, 7)
    found = conjugate_gradient(lambda X: B @ X + X @ A, Z, tol=1e-12)
    dense = torch.kron(B, torch.eye(7).double()) + torch.kron(torch.eye(5).double(), A)
    assert torch.allclose(found.x.flatten(), torch.linalg.solve(dense, Z.flatten()), atol=1e-11)


def test_takes_no_more_iterations_than_scipy_and_at_most_one_per_distinct_eigenvalue() -> None:
    A, b = spd(80, 1e3), normal(80)
    steps: list[int] = []
    scipy.sparse.linalg.cg(A.numpy(), b.numpy(), rtol=1e-8, callback=lambda _: steps.append(1))
    assert conjugate_gradient(lambda x: A @ x, b).iterations <= len(steps) + 2
    few = torch.tensor([1.0, 5.0, 9.0]).double().repeat(20)
    assert conjugate_gradient(lambda x: few * x, normal(60), tol=1e-10).iterations <= 3


def test_the_perfect_preconditioner_needs_one_step_and_the_answer_needs_none() -> None:
    A, b = spd(40, 1e4), normal(40)
    inverse, answer = torch.linalg.inv(A), torch.linalg.solve(A, b)
    assert conjugate_gradient(lambda x: A @ x, b, precondition=lambda r: inverse @ r).iterations == 1
    assert conjugate_gradient(lambda x: A @ x, b, x0=answer).iterations == 0


def test_a_diagonal_preconditioner_does_not_change_the_answer() -> None:
    d = torch.logspace(0, 6, 50, dtype=torch.float64)
    A = spd(50, 10.0) * d.sqrt()[:, None] * d.sqrt()
    b = normal(50)
    plain = conjugate_gradient(lambda x: A @ x, b, tol=1e-10, max_iters=5000)
    helped = conjugate_gradient(lambda x: A @ x, b, precondition=lambda r: r / d, tol=1e-10)
    assert helped.iterations < plain.iterations
    assert torch.allclose(helped.x * d.sqrt(), plain.x * d.sqrt(), rtol=1e-4, atol=1e-5)


def test_float32_is_solved_in_float64_and_the_start_is_left_alone() -> None:
    b, x0 = torch.ones(3), torch.full((3,), 7.0, dtype=torch.float64)
    found = conjugate_gradient(lambda x: 2 * x, b, x0=x0)
    assert found.x.dtype == torch.float64
    assert torch.equal(x0, torch.full((3,), 7.0).double())
    assert torch.allclose(found.x, torch.full((3,), 0.5).double())


def test_nothing_asked_nothing_done() -> None:
    found = conjugate_gradient(lambda x: 3 * x, torch.zeros(2, 2), x0=torch.ones(2, 2))
    assert (found.iterations, found.residual) == (0, 0.0)
    assert torch.equal(found.x, torch.zeros(2, 2).double())


def test_drift_is_noticed_and_the_search_restarts() -> None:
    A, b = spd(60, 1e3), normal(60)

    def sloppy(x: torch.Tensor) -> torch.Tensor:
        return (A.float() @ x.float()).double() if x.norm() < 1 else A @ x

    found = conjugate_gradient(sloppy, b, tol=1e-9)
    assert float((b - sloppy(found.x)).norm() / b.norm()) <= 1e-9


def test_too_few_iterations_name_the_system() -> None:
    A = spd(50, 1e6)
    with pytest.raises(NotConverged, match=r"layer fc1: .* after 3 iterations, expected 1\.0e-08; allow more"):
        conjugate_gradient(lambda x: A @ x, normal(50), max_iters=3, what="layer fc1")


def test_a_tolerance_below_rounding_is_reported_not_chased() -> None:
    A = spd(50, 1e6)
    with pytest.raises(NotConverged, match=r"stopped at a relative residual .* rounding allows no better"):
        conjugate_gradient(lambda x: A @ x, normal(50), tol=1e-30, max_iters=100_000)


@pytest.mark.parametrize(
    ("sign", "pre_sign", "culprit"), [(-1.0, 1.0, "the operator"), (1.0, -1.0, "the preconditioner")]
)
def test_indefinite_parts_are_named(sign: float, pre_sign: float, culprit: str) -> None:
    with pytest.raises(NotConverged, match=f"fc1: {culprit} has curvature -.*not positive definite"):
        conjugate_gradient(lambda x: sign * x, torch.ones(3), precondition=lambda r: pre_sign * r, what="fc1")


def test_a_saddle_is_found_before_any_harm() -> None:
    d = torch.tensor([1.0, 1.0, -1e-3]).double()
    with pytest.raises(NotConverged, match="not positive definite"):
        conjugate_gradient(lambda x: d * x, torch.ones(3))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(NotConverged, match="not finite"):
        conjugate_gradient(lambda x: x, torch.tensor([1.0, bad]))
