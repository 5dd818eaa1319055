"""Compiled means in charts: what torch's path gives, to rounding, and the same bits however the work is shared."""

import math

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
    real = charts._sum_compiled

    def noted(*args: object) -> bool:
        answers.append(real(*args))  # type: ignore[arg-type]
        return answers[-1]

    monkeypatch.setattr(charts, "_sum_compiled", noted)
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
