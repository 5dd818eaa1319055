"""Moments of a layer's input: against the rows themselves, on networks of many kinds, and at the door."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.client.class_sums import Moments, collect_sums
from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError, Refused
from fedfuse.nets.head import linear_layer, sums_in, total_sums
from fedfuse.server.admission.admit import Contract, admit
from fedfuse.tasks import REGRESSION
from fedfuse.training.round import client_round
from fedfuse.wire.codec import decode, encode

MLP = Spec("mlp", {"inputs": 5, "hidden": [4], "classes": 3})


def rows(n: int = 40, seed: int = 0, classes: int = 3) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    return Rows(torch.randn(n, 5, generator=draw), torch.randint(classes, (n,), generator=draw))


def brief_of(spec: Spec) -> Brief:
    torch.manual_seed(0)
    return Brief(0, spec, dict(spec.build().state_dict()), classes=3)


def reply(evidence: Moments, brief: Brief, data: Rows) -> bytes:
    return client_round(Work(LocalSettings(), evidence=(evidence,), trains=False), brief, "site", data).payload


def admitted(evidence: Moments, brief: Brief, data: Rows) -> Any:
    contract = Contract.of(brief, (evidence,), trains=False)
    return admit(Envelope("site", reply(evidence, brief, data)), contract)


@pytest.mark.parametrize("batch", [1, 7, 256])
def test_sums_are_those_of_the_features(batch: int) -> None:
    brief, data = brief_of(MLP), rows()
    update = admitted(Moments(batch=batch), brief, data)
    net = MLP.build()
    net.load_state_dict(dict(brief.params))
    phi = torch.cat([net[:-1](data.x), torch.ones(40, 1)], 1).detach().double()
    sums = sums_in(update.notes)
    assert torch.allclose(sums.gram, phi.mT @ phi, rtol=1e-6, atol=1e-6)
    assert torch.allclose(sums.cross, phi.mT @ F.one_hot(data.y, 3).double(), rtol=1e-6, atol=1e-6)
    assert sums.count == 40
    assert sums.squares.tolist() == data.counts(3).tolist()
    assert update.posterior.mean.keys() == brief.params.keys()


def test_another_layer_by_name() -> None:
    brief, data = brief_of(MLP), rows()
    sums = sums_in(admitted(Moments("fc1"), brief, data).notes)
    phi = torch.cat([data.x, torch.ones(40, 1)], 1).double()
    assert torch.allclose(sums.gram, phi.mT @ phi, rtol=1e-6, atol=1e-6)
    with pytest.raises(ConfigError, match="no linear layer 'fc2'; did you mean 'fc1'?"):
        reply(Moments("fc2"), brief, data)


def test_in_float64_any_split_gives_the_same_sums() -> None:
    brief, data, how = brief_of(MLP), rows(101), Moments(precision="float64", batch=16)
    whole = sums_in(admitted(how, brief, data).notes)
    index = torch.randperm(101, generator=torch.Generator().manual_seed(3))
    parts = [admitted(how, brief, data.take(part)).notes for part in index.split(23)]
    total = total_sums(parts)
    assert torch.allclose(total.gram, whole.gram, rtol=1e-13, atol=1e-12)
    assert torch.allclose(total.cross, whole.cross, rtol=1e-13, atol=1e-12)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, _ = self.lstm(x[..., None])
        return self.head(out[:, -1]), out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(2, 1, batch_first=True)
        self.lift, self.head = nn.Linear(1, 2), nn.Linear(10, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.lift(x[..., None])
        return self.head(input=self.mix(z, z, z, need_weights=False)[0].flatten(1))


NETWORKS: dict[str, Spec] = {
    "tuple output": Spec.of(Recurrent(), 0),
    "attention, keyword call, no bias": Spec.of(Attention()),
    "bfloat16": Spec.of(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).bfloat16()),
    "frozen": Spec.of(nn.Sequential(nn.Linear(5, 4).requires_grad_(False), nn.BatchNorm1d(4), nn.Linear(4, 3))),
    "one layer": Spec.of(nn.Linear(5, 3)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("precision", ["network", "float64"])
def test_networks_of_many_kinds(name: str, precision: Any) -> None:
    update = admitted(Moments(precision=precision), brief_of(NETWORKS[name]), rows())
    sums = sums_in(update.notes)
    assert sums.count == 40
    assert sums.gram.isfinite().all()


def test_a_layer_that_reads_positions_or_shares_its_weight_says_so() -> None:
    class PerPosition(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x[..., None]).mean(1)

    with pytest.raises(ConfigError, match=r"one vector per row .* a tensor of shape \(40, 5, 1\)"):
        reply(Moments(), brief_of(Spec.of(PerPosition())), rows())
    tied = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    tied[1].weight = tied[0].weight
    with pytest.raises(ConfigError, match="shares its weight with another part"):
        linear_layer(Spec.of(tied).layout)
    with pytest.raises(ConfigError, match="no linear layer to fit"):
        linear_layer(Spec.of(nn.Sequential(nn.Conv2d(1, 1, 1))).layout)
    with pytest.raises(ConfigError, match="the label 4 and there are 3 classes"):
        collect_sums(nn.Linear(5, 3), "", rows(classes=5), 3)


def forged(brief: Brief | None = None, data: Rows | None = None, **changes: Any) -> Refused:
    brief, evidence = brief or brief_of(MLP), Moments()
    packet = decode(reply(evidence, brief, data or rows()))
    tensors = {name: tensor.clone() for name, tensor in packet.tensors.items()}
    for part, change in changes.items():
        tensors[f"~moments/{part}"] = change(tensors[f"~moments/{part}"])
    envelope, contract = (
        Envelope("site", encode(tensors, packet.header)),
        Contract.of(brief, (evidence,), trains=False),
    )
    with pytest.raises(Refused) as why:
        admit(envelope, contract)
    return why.value


def test_the_door_refuses_what_no_rows_could_give() -> None:
    def more_rows(gram: Tensor) -> Tensor:
        return torch.cat([gram[:-1], gram[-1:] + 1])

    def negative(gram: Tensor) -> Tensor:
        return torch.cat([-gram[:1] - 1, gram[1:]])

    def shifted(cross: Tensor) -> Tensor:
        return torch.cat([cross[:-1], cross[-1:].roll(1, 1)])

    assert "a count of 41" in str(forged(gram=more_rows))
    assert "not positive semi-definite" in str(forged(gram=negative))
    assert "other class counts" in str(forged(cross=shifted))
    assert "target sums beyond the second moments" in str(forged(cross=lambda c: torch.cat([c[:-1] * 100, c[-1:]])))
    assert "a mean square of" in str(forged(gram=lambda g: torch.cat([g[:1] + 1e15, g[1:]])))
    assert "other class counts" in str(forged(squares=lambda s: s + 1))


def test_sums_of_numbers_are_held_to_what_numbers_can_give() -> None:
    brief, data = replace(brief_of(MLP), task=REGRESSION), replace(rows(), y=torch.linspace(-1, 1, 120).reshape(40, 3))
    sums = sums_in(admitted(Moments(), brief, data).notes)
    assert torch.allclose(sums.squares, data.y.double().square().sum(0))
    assert torch.allclose(sums.cross[-1], data.y.double().sum(0))
    assert "target_squares is below zero" in str(forged(brief, data, target_squares=lambda s: -s))
    assert "target sums beyond the second moments" in str(forged(brief, data, cross=lambda c: c * 100))
    forward, far = (
        Moments().influence(admitted(Moments(), brief, d).notes) for d in (data, replace(data, y=9 * data.y))
    )
    assert far["moments/cross"] / forward["moments/cross"] == pytest.approx(9)


def test_influence_is_the_mean_square_of_a_feature() -> None:
    brief, data = brief_of(MLP), rows()
    one = admitted(Moments("fc1"), brief, data).notes
    larger = admitted(Moments("fc1"), brief, replace(data, x=data.x * 10)).notes
    (small,), (large,) = (Moments("fc1").influence(notes).values() for notes in (one, larger))
    assert large / small == pytest.approx(100, rel=0.2)
