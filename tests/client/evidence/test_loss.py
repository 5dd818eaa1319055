"""The global model's loss at a client."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.spec import Spec
from fedfuse.methods.qfedavg import StartLoss
from fedfuse.server.admission.admit import Contract, admit
from fedfuse.training.round import client_round

SPEC = Spec("mlp", {"inputs": 3, "hidden": [4], "classes": 2})


@pytest.mark.parametrize("batch", [1, 4, 1000])
def test_it_is_the_mean_over_the_clients_rows_before_training(batch: int) -> None:
    brief = Brief(0, SPEC, SPEC.build().state_dict(), classes=2)
    rows = Rows(torch.randn(10, 3), torch.arange(10) % 2)
    kind = StartLoss(batch)
    answer = client_round(Work(evidence=(kind,)), brief, "a", rows)
    update = admit(Envelope("a", answer.payload), Contract.of(brief, (kind,)))
    expected = F.cross_entropy(SPEC.forward(brief.params, rows.x).double(), rows.y)
    assert float(update.notes["start_loss/mean"]) == pytest.approx(float(expected), rel=1e-6)


def test_a_negative_loss_is_a_lie() -> None:
    assert StartLoss().check({"start_loss/mean": torch.tensor(-0.1, dtype=torch.float64)}, 1.0) is not None
    assert StartLoss().check({"start_loss/mean": torch.tensor(0.1, dtype=torch.float64)}, 1.0) is None
