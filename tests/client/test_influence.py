"""Each kind of evidence names what of it scales its client's influence, and the value scales with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedfuse.client.class_sums import LabelCounts
from fedfuse.client.fisher import FisherDiagonal
from fedfuse.client.kfac import KroneckerFactors
from fedfuse.core.seams import Evidence
from fedfuse.linalg.psd import pack
from fedfuse.methods._pruning import CurvatureSpectrum
from fedfuse.methods.ams import LogitScale
from fedfuse.methods.prunefl import SquaredGradients
from fedfuse.methods.qfedavg import StartLoss
from fedfuse.methods.scaffold import ControlDelta

TWO = torch.tensor([1.0, 3.0], dtype=torch.float64)
SPECTRUM = {"spectrum/values": torch.tensor([[-5.0, 2.0]]), "spectrum/lipschitz": torch.tensor(7.0)}


@pytest.mark.parametrize(
    ("kind", "notes", "expected"),
    [
        (LabelCounts(), {"counts/labels": torch.tensor([3, 4])}, {}),
        (LogitScale(), {"logit_scale/scale": torch.tensor(0.25)}, {}),
        (ControlDelta(), {"control/w": torch.tensor([3.0]), "control/b": torch.tensor([4.0])}, {"control": 5.0}),
        (SquaredGradients(), {"gradients/w": TWO}, {"gradients/w": 2.0}),
        (StartLoss(), {"start_loss/mean": torch.tensor(2.5)}, {"start_loss": 2.5}),
        (CurvatureSpectrum(), SPECTRUM, {"spectrum/lipschitz": 7.0, "spectrum/values": 5.0}),
        (CurvatureSpectrum(), {}, {}),
        (FisherDiagonal(), {"fisher/w": TWO, "other/w": TWO}, {"fisher/w": 2.0}),
        (
            KroneckerFactors(),
            {
                "kron/fc/in": pack(torch.diag(TWO)),
                "kron/fc/out": torch.stack([pack(torch.eye(2)), pack(3 * torch.eye(2))]),
            },
            {"kron/fc/in": 2.0, "kron/fc/out": 2.0},
        ),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "name") else "",
)
def test_influence_is_what_scales_a_say(kind: Evidence, notes: dict[str, Tensor], expected: dict[str, float]) -> None:
    assert dict(kind.influence(notes)) == expected
