"""What a client tells of its confidence is what its own rows say."""

from __future__ import annotations

import pytest
import torch

from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.methods.ams import LogitScale
from fedfuse.nets.mixture import calibration
from fedfuse.training.round import client_round
from fedfuse.wire.codec import decode

SPEC = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 3})


@pytest.mark.parametrize("kind", ["temperature", "zscore"])
def test_the_numbers_are_those_of_the_trained_network_on_its_rows(kind: str) -> None:
    torch.manual_seed(0)
    rows = Rows(torch.randn(30, 4), torch.arange(30) % 3)
    evidence = LogitScale(kind, batch=7)  # type: ignore[arg-type]
    brief = Brief(0, SPEC, SPEC.build().state_dict(), classes=3)
    work = Work(LocalSettings(epochs=3, optimizer={"lr": 0.1}), evidence=(evidence,))
    packet = decode(client_round(work, brief, "a", rows).payload)
    trained = {n: t for n, t in packet.tensors.items() if not n.startswith("~")}
    expected = calibration(kind, SPEC.forward(trained, rows.x), rows.y)  # type: ignore[arg-type]
    sent = {n: float(packet.tensors[f"~logit_scale/{n}"]) for n in ("shift", "scale")}
    assert sent == pytest.approx(expected._asdict(), rel=1e-5)
    notes = {n.removeprefix("~"): t for n, t in packet.tensors.items() if n.startswith("~")}
    assert {n: (tuple(t.shape), t.dtype) for n, t in notes.items()} == dict(evidence.expects(brief))
    assert evidence.check(notes, 30.0) is None
    assert evidence.geometry(notes) is None


@pytest.mark.parametrize(("shift", "scale"), [(0.0, 0.0), (0.0, -1.0), (0.0, 1e9), (1e9, 1.0)])
def test_impossible_numbers_are_refused(shift: float, scale: float) -> None:
    notes = {"logit_scale/shift": torch.tensor(shift), "logit_scale/scale": torch.tensor(scale)}
    assert LogitScale().check(notes, 1.0) is not None
