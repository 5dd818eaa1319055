"""Compiled means in charts: what torch's path gives, to rounding, and the same bits however the work is shared."""

import math

import numpy as np
import pytest
import torch

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.models.bayes import BayesianLayers
from fedfuse.server.aggregate import charts
from fedfuse.server.aggregate.charts import CHARTS, MeanIn

pytest.importorskip("numba")
CLIENTS = 7


def cohort(shift: float = 0.0) -> tuple[Cohort, ServerState]:
    """Clients of a network with Bayesian layers, one log-variance of the first moved by `shift`."""
    spec = Spec("mlp", {"hidden": [30]})
    first = BayesianLayers(last=2)(Single.of(spec.build(), spec), 10, seed=0)
    draw = torch.Generator().manual_seed(1)
    updates = []
    for place in range(CLIENTS):
        params = {n: t + 0.3 * torch.randn(t.shape, generator=draw) for n, t in first.posterior.mean.items()}
        name = next(iter(first.spec.layout.log_variances.values()))
        params[name].view(-1)[5] += shift if place == 0 else 0.0
        updates.append(ClientUpdate(f"c{place}", Posterior(params), 10.0 + place, 1, first.spec))
    return Cohort.of(updates), ServerState(0, first)


def fused(name: str, who: tuple[Cohort, ServerState]) -> dict[str, torch.Tensor]:
    return dict(MeanIn(CHARTS[name])(*who, Bench()).single.posterior.mean)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Every tensor goes to compiled code; the list says for each whether it could be done there."""
    answers: list[bool] = []
    real = charts._fill_compiled

    def noted(*args: object) -> bool:
        answers.append(real(*args))  # type: ignore[arg-type]
        return answers[-1]

    monkeypatch.setattr(charts, "_fill_compiled", noted)
    monkeypatch.setattr(charts, "MIN_COMPILED", 0)
    return answers


@pytest.mark.parametrize("name", CHARTS)
def test_compiled_code_computes_what_torch_does(
    monkeypatch: pytest.MonkeyPatch, compiled: list[bool], name: str
) -> None:
    who = cohort()
    found = fused(name, who)
    assert compiled
    assert all(compiled)
    monkeypatch.setattr(charts, "MIN_COMPILED", math.inf)
    for tensor, expected in fused(name, who).items():
        assert torch.allclose(found[tensor], expected, rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", ["AALV", "WB", "RKLB", "FKLB"])
def test_threads_and_blocks_move_no_bit(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    who = cohort()
    one = fused(name, who)
    monkeypatch.setattr(charts, "BLOCK", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    again = fused(name, who)
    assert all(torch.equal(t, again[n]) for n, t in one.items())


@pytest.mark.parametrize("name", ["EAA", "RKLB", "FKLB"])
@pytest.mark.parametrize("shift", [-95.0, 95.0])
def test_an_exponential_out_of_reach_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, compiled: list[bool], name: str, shift: float
) -> None:
    who = cohort(shift)
    found = fused(name, who)
    assert not all(compiled)
    monkeypatch.setattr(charts, "MIN_COMPILED", math.inf)
    assert all(torch.allclose(found[n], t, rtol=2e-6, atol=2e-6) for n, t in fused(name, who).items())


def closed_form(name: str, m: np.ndarray, rho: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and log-variance in float64, by the formulas of `server.aggregate.charts`."""
    v, w = np.exp(rho), weights[:, None]
    mean = (w * m).sum(0)
    match name:
        case "LOGS":
            return mean, (w * rho).sum(0)
        case "VARIANCES":
            return mean, np.log((w * v).sum(0))
        case "DEVIATIONS":
            return mean, 2 * np.log((w * np.sqrt(v)).sum(0))
        case "PRECISIONS":
            return (w * m / v).sum(0) / (w / v).sum(0), -np.log((w / v).sum(0))
        case _:
            return mean, np.log((w * (v + (m - mean) ** 2)).sum(0))


@pytest.mark.parametrize("name", ["LOGS", "VARIANCES", "DEVIATIONS", "PRECISIONS", "MOMENTS"])
@pytest.mark.parametrize("clients", [1, 10, 23])
def test_any_number_of_clients_and_weights_is_fused_by_the_formulas(name: str, clients: int) -> None:
    from fedfuse.kernels import charts as kernel

    draw = np.random.default_rng(clients)
    for count in (kernel.LEAST, kernel.LEAST + 1, 9001):
        m = draw.normal(size=(clients, count + 3)).astype(np.float32)
        rho = draw.uniform(-40, 40, count + 3).astype(np.float32) + draw.normal(size=(clients, count + 3))
        rho = rho.astype(np.float32)
        rows = tuple(np.array([row.ctypes.data for row in side], np.int64) for side in (m, rho))
        weights = draw.integers(1, 9, clients).astype(float)
        total, (mean, logs) = weights.sum(), np.zeros((2, count), np.float32)
        assert kernel.fuse(getattr(kernel, name), rows, (weights, weights), (total, total), 3, mean, logs)
        expected = closed_form(name, m[:, 3:].astype(float), rho[:, 3:].astype(float), weights / total)
        np.testing.assert_allclose(mean, expected[0], rtol=3e-7, atol=1e-6)
        np.testing.assert_allclose(logs, expected[1], rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("odd", [60.0, -60.0, 3e6, -3e6, np.inf, -np.inf, np.nan])
def test_whatever_has_no_exponential_here_is_told(odd: float) -> None:
    from fedfuse.kernels import charts as kernel

    m, rho = np.zeros((2, 100), np.float32)
    rho[77] = odd
    rows = tuple(np.array([row.ctypes.data], np.int64) for row in (m, rho))
    out, one = np.zeros((2, 100), np.float32), np.ones(1)
    assert not kernel.fuse(kernel.VARIANCES, rows, (one, one), (1.0, 1.0), 0, *out)


def logarithms(numbers: np.ndarray) -> tuple[np.ndarray, int]:
    """What `log_lanes` gives, and the most it has seen."""
    import numba
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    from fedfuse.kernels.target import STEP
    from fedfuse.kernels.vectors import all_seen, element_at, load_vector, log_lanes, nothing_seen

    @intrinsic
    def take(typing, x, at):  # type: ignore[no-untyped-def]
        def generate(context, build, signature, args):  # type: ignore[no-untyped-def]
            place = element_at(context, build, signature.args[0], *args)
            value, seen = log_lanes(build, load_vector(build, place, STEP), nothing_seen())
            build.store(value, build.bitcast(place, ir.VectorType(ir.FloatType(), STEP).as_pointer()), align=4)
            return all_seen(build, seen)

        return types.int64(x, types.int64), generate

    @numba.njit
    def take_all(x):  # type: ignore[no-untyped-def]
        most = 0
        for at in range(0, x.size, STEP):
            most = max(most, take(x, at))
        return most

    found = np.resize(numbers, -(-numbers.size // STEP) * STEP).astype(np.float32)
    seen = take_all(found)
    return found[: numbers.size], seen


def test_logarithms_are_right_to_two_units() -> None:
    from fedfuse.kernels.vectors import REACH

    numbers = np.exp(np.random.default_rng(0).uniform(-80, 80, 3000)).astype(np.float32)
    numbers[:1000] = np.random.default_rng(1).uniform(0.5, 2.0, 1000)
    found, seen = logarithms(numbers)
    exact = np.log(numbers.astype(np.float64))
    assert (np.abs(found - exact) <= 2 * np.spacing(np.abs(exact).astype(np.float32))).all()
    assert seen < REACH


@pytest.mark.parametrize("odd", [0.0, -0.0, -1.0, 1e-38, 3e38, -1e-38, -3e38, np.inf, -np.inf, np.nan, -np.nan])
def test_whatever_has_no_logarithm_here_is_told(odd: float) -> None:
    from fedfuse.kernels.vectors import REACH

    assert logarithms(np.array([1.0, odd, 2.0], np.float32))[1] >= REACH
