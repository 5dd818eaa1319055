"""q-FedAvg: Algorithm 2 of arXiv:1905.10497, written out, and the loss that clients send for it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.core.messages import Brief, ClientUpdate, Cohort, Envelope
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.methods.qfedavg import FairMean, StartLoss
from fedfuse.server.admission.admit import Contract, admit
from fedfuse.training.round import client_round

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


MLP = Spec("mlp", {"inputs": 3, "hidden": [4], "classes": 2})


@pytest.mark.parametrize("batch", [1, 4, 1000])
def test_it_is_the_mean_over_the_clients_rows_before_training(batch: int) -> None:
    brief = Brief(0, MLP, MLP.build().state_dict(), classes=2)
    rows = Rows(torch.randn(10, 3), torch.arange(10) % 2)
    kind = StartLoss(batch)
    answer = client_round(Work(evidence=(kind,)), brief, "a", rows)
    update = admit(Envelope("a", answer.payload), Contract.of(brief, (kind,)))
    expected = F.cross_entropy(MLP.forward(brief.params, rows.x).double(), rows.y)
    assert float(update.notes["start_loss/mean"]) == pytest.approx(float(expected), rel=1e-6)


def test_a_negative_loss_is_a_lie() -> None:
    assert StartLoss().check({"start_loss/mean": torch.tensor(-0.1, dtype=torch.float64)}, 1.0) is not None
    assert StartLoss().check({"start_loss/mean": torch.tensor(0.1, dtype=torch.float64)}, 1.0) is None
