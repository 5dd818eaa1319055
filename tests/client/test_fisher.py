"""The diagonal of the Fisher information against per-row gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedfuse.client import fisher as variance
from fedfuse.client.fisher import FisherDiagonal, diagonal_fisher
from fedfuse.core.messages import Brief, Envelope, Form
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.server.admission.admit import Contract, admit
from fedfuse.training.round import client_round
from fedfuse.wire.codec import decode
from fedfuse.wire.messages import split


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    ).double()


def examples(n: int = 7) -> Rows:
    draw = torch.Generator().manual_seed(0)
    return Rows(torch.randn(n, 2, 5, 5, dtype=torch.float64, generator=draw), torch.randint(3, (n,), generator=draw))


@pytest.mark.parametrize("at_once", [1, 1 << 24])
def test_it_is_the_mean_squared_gradient_of_single_rows(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(variance, "_GRADIENTS", at_once)
    module, rows = net().eval(), examples()
    expected = {n: torch.zeros_like(p) for n, p in module.named_parameters()}
    for x, y in zip(rows.x, rows.y, strict=True):
        grads = torch.autograd.grad(F.cross_entropy(module(x[None]), y[None]), list(module.parameters()))
        for name, g in zip(expected, grads, strict=True):
            expected[name] += g.square() / len(rows)
    found = diagonal_fisher(module, rows)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[n], expected[n], rtol=1e-10, atol=1e-16) for n in expected)


def test_sampled_labels_give_the_fisher_information_proper() -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(1, 3, bias=False).double(), torch.ones(1, 1, dtype=torch.float64)
    rows = Rows(x.repeat(20_000, 1), torch.zeros(20_000, dtype=torch.int64))
    p = module(x).softmax(-1)[0].detach()
    found = diagonal_fisher(module, rows, fisher="sampled", generator=torch.Generator().manual_seed(0))
    assert torch.allclose(found["weight"][:, 0], p * (1 - p), atol=0.01)


def test_what_is_brought_passes_the_door_and_becomes_a_variance() -> None:
    evidence, spec = FisherDiagonal(), Spec.of(net().float())
    rows = examples()
    brief = Brief(0, spec, spec.build().state_dict(), classes=3)
    work = Work(LocalSettings(), evidence=(evidence,))
    payload = client_round(work, brief, "site", Rows(rows.x.float(), rows.y)).payload
    notes = split(decode(payload))[1]
    assert dict(evidence.expects(brief)) == {n: Form.of(t) for n, t in notes.items()}
    found = admit(Envelope("site", payload), Contract.of(brief, (evidence,))).posterior.geometry.variance
    assert set(found) == {n for n, _ in spec.build().named_parameters()}
    assert torch.equal(found["4.weight"], 1 / notes["fisher/4.weight"])
    assert found.piece("4.weight", 3, 7).shape == (4,)


def test_a_negative_square_is_refused_by_name() -> None:
    flaw = FisherDiagonal().check({"fisher/w": torch.tensor([0.0, -1.0]), "other/w": torch.tensor([-1.0])}, 3.0)
    assert flaw.field == "fisher/w"
    assert flaw.got == -1.0
    assert FisherDiagonal().check({"fisher/w": torch.zeros(2)}, 3.0) is None
