"""What clients keep from round to round, none of which is sent."""

from __future__ import annotations

import torch
from torch import nn

from fedfuse.client.kfac import KroneckerFactors
from fedfuse.client.objectives import KeepModel
from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.spec import Spec
from fedfuse.methods.fedlpa import KeepFactors
from fedfuse.training.round import client_round
from fedfuse.wire.codec import decode

MODULE = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
BRIEF = Brief(0, Spec.of(MODULE), MODULE.state_dict(), classes=2)
ROWS = Rows(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2)


def test_the_last_model_is_the_trained_one_and_is_not_sent() -> None:
    answer = client_round(Work(memory=(KeepModel(),)), BRIEF, "a", ROWS)
    packet = decode(answer.payload)
    assert not any(n.startswith("~") for n in packet.tensors)
    assert {n.removeprefix("last/") for n in answer.memory} == set(packet.tensors)
    assert all(answer.memory[f"last/{n}"].equal(t) for n, t in packet.tensors.items())


def test_factors_are_kept_as_they_were_sent_and_only_when_asked() -> None:
    evidence = (KroneckerFactors(choose=True, min_rows=1),)
    sent = client_round(Work(evidence=evidence), BRIEF, "a", ROWS)
    kept = client_round(Work(evidence=evidence, memory=(KeepFactors(),)), BRIEF, "a", ROWS)
    assert sent.memory == {}
    assert set(kept.memory) == {f"kron/{layer}/{side}" for layer in "02" for side in ("in", "out")}
    assert all(decode(kept.payload).tensors[f"~{n}"].equal(t) for n, t in kept.memory.items())
