"""Weights that are held where they may be."""

from __future__ import annotations

import torch

from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.training.pulls import Masked
from fedfuse.training.round import train_on_rows
from fedfuse.wire.messages import decode_brief, encode_brief

SPEC = Spec("mlp", {"inputs": 3, "hidden": [4], "classes": 2})


def test_masked_weights_stay_zero_through_training_and_over_the_wire() -> None:
    torch.manual_seed(0)
    mask = torch.rand(4, 3) < 0.5
    params = dict(SPEC.build().state_dict())
    params["fc1.weight"] = params["fc1.weight"] * mask
    brief = Brief(0, SPEC, params, {"mask/fc1.weight": mask}, classes=2)
    brief = decode_brief(encode_brief(brief))
    rows = Rows(torch.randn(30, 3), torch.arange(30) % 2)
    settings = LocalSettings(batch_size=5, optimizer={"lr": 0.1, "momentum": 0.9})
    after = train_on_rows(Work(settings, project=Masked()), brief, "c", rows).params
    assert not after["fc1.weight"][~mask].any()
    assert not after["fc1.weight"][mask].equal(params["fc1.weight"][mask])
    assert not after["fc1.bias"].equal(params["fc1.bias"])
