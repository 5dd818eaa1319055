"""q-FedAvg against its algorithm, written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.methods.qfedavg import FairMean

NET = nn.Linear(3, 2)
SPEC = Spec.of(NET)
LOSSES, RATE = (0.5, 2.0, 1.0), 0.1


def drawn(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=draw) for n, t in NET.state_dict().items()}


def fused(q: float) -> dict[str, Tensor]:
    updates = tuple(
        ClientUpdate(
            f"c{k}",
            Posterior(drawn(k)),
            1.0 + k,
            1,
            SPEC,
            {"start_loss/mean": torch.tensor(f).double()},
            training=LocalSettings(optimizer={"lr": RATE}),
        )
        for k, f in enumerate(LOSSES)
    )
    bench = Bench()
    state = FairMean(q)(Cohort(updates), ServerState(0, Single(SPEC, Posterior(drawn(9)))), bench)
    return dict(state.single.posterior.mean)


@pytest.mark.parametrize("q", [0.0, 0.5, 2.0])
def test_it_is_algorithm_two(q: float) -> None:
    """Δ_k = L (w₀ − w_k); h_k = q F^{q−1} ‖Δ_k‖² + L F^q; w = w₀ − Σ F^q Δ_k / Σ h_k."""
    start, smooth = drawn(9), 1 / RATE
    deltas = [{n: smooth * (start[n] - drawn(k)[n]).double() for n in start} for k in range(3)]
    squares = [sum((d**2).sum() for d in delta.values()) for delta in deltas]
    h = sum(q * f ** (q - 1) * s + smooth * f**q for f, s in zip(LOSSES, squares, strict=True))
    for n, got in fused(q).items():
        step = sum(f**q * d[n] for f, d in zip(LOSSES, deltas, strict=True)) / h
        assert torch.allclose(got.double(), start[n].double() - step, atol=1e-5)


def test_without_q_every_client_weighs_alike() -> None:
    for n, got in fused(0.0).items():
        assert torch.allclose(got, sum(drawn(k)[n] for k in range(3)) / 3, atol=1e-5)  # type: ignore[operator]
