"""What methods that prune share: the spectrum of the curvature, once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.methods._pruning import CurvatureSpectrum
from fedfuse.nets.curvature import CurvatureProbe, curvature_in
from fedfuse.server.admission.admit import Contract, admit
from fedfuse.training.round import client_round

CLASSES = 3


def network() -> nn.Module:
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, CLASSES)).double()
    net[1].running_var.fill_(2.0)
    return net


def rows(n: int = 20) -> Rows:
    draw = torch.Generator().manual_seed(1)
    return Rows(torch.randn(n, 3, generator=draw).double(), torch.randint(CLASSES, (n,), generator=draw))


def moved(net: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() + 0.1 * torch.sin(torch.arange(p.numel()).view_as(p)) for n, p in net.named_parameters()}


def dense(net: nn.Module, data: Rows) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The Hessian, the gradient, and the parameters, all flat."""
    net.eval()
    names, sizes = zip(*((n, p.numel()) for n, p in net.named_parameters()), strict=True)
    shapes = [p.shape for p in net.parameters()]
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])

    def loss(w: Tensor) -> Tensor:
        params = {n: t.view(s) for n, t, s in zip(names, w.split(sizes), shapes, strict=True)}
        return F.cross_entropy(functional_call(net, params, (data.x,)), data.y)

    there = torch.cat([t.flatten() for t in moved(net).values()])
    slopes = [torch.autograd.functional.jacobian(loss, w) for w in (flat, there)]
    return torch.autograd.functional.hessian(loss, flat), there - flat, slopes


def test_every_eigenvalue_of_the_dense_hessian_is_found() -> None:
    net, data = network(), rows()
    H, back, slopes = dense(net, data)
    seen = CurvatureProbe(steps=1000, probes=2, rows=20)(net, moved(net), data, torch.Generator().manual_seed(0))
    want = torch.linalg.eigvalsh(H)
    assert seen.spectrum.values.shape == (2, len(want))
    for values in seen.spectrum.values:
        assert torch.allclose(values, want, atol=1e-6)
    assert torch.allclose(seen.spectrum.weights, torch.full_like(seen.spectrum.weights, 1 / len(want)))
    wanted = (H @ back - slopes[1] + slopes[0]).norm() / back.norm()
    assert seen.lipschitz == pytest.approx(float(wanted), rel=1e-9)


def test_few_steps_see_the_largest_eigenvalue_and_the_trace_on_average() -> None:
    net, data = network(), rows()
    H, _, _ = dense(net, data)
    seen = CurvatureProbe(steps=12, probes=60, rows=20)(net, moved(net), data, torch.Generator().manual_seed(0))
    assert float(seen.spectrum.values.max()) == pytest.approx(float(torch.linalg.eigvalsh(H)[-1]), rel=1e-6)
    mean = float((seen.spectrum.values * seen.spectrum.weights).sum()) / 60
    assert mean == pytest.approx(float(H.trace()) / len(H), rel=0.2)


def test_a_client_that_did_not_move_has_no_lipschitz_constant() -> None:
    net = network()
    at = {n: p.detach().clone() for n, p in net.named_parameters()}
    assert CurvatureProbe(steps=2)(net, at, rows(), torch.Generator()).lipschitz == 0


SPEC = Spec("mlp", {"inputs": 3, "hidden": [4], "classes": CLASSES})


def reply(kind: CurvatureSpectrum, round_: int) -> tuple[Brief, bytes]:
    torch.manual_seed(0)
    brief = Brief(round_, SPEC, SPEC.build().state_dict(), classes=CLASSES)
    own = Rows(rows().x.float(), rows().y)
    work = Work(LocalSettings(optimizer={"lr": 0.1}), evidence=(kind,))
    return brief, client_round(work, brief, "c", own).payload


def test_it_comes_in_its_round_only() -> None:
    kind = CurvatureSpectrum(2, CurvatureProbe(steps=5, probes=3, rows=10))
    for round_, notes in ((1, set()), (2, {"spectrum/values", "spectrum/weights", "spectrum/lipschitz"})):
        brief, payload = reply(kind, round_)
        update = admit(Envelope("c", payload), Contract.of(brief, (kind,)))
        assert set(update.notes) == notes
    assert curvature_in(update.notes).spectrum.values.shape == (3, 5)


def test_what_no_spectrum_could_be_is_refused() -> None:
    kind, one = CurvatureSpectrum(), torch.tensor(1.0).double()
    good = {
        "spectrum/values": torch.tensor([[0.0, 1.0]]).double(),
        "spectrum/weights": torch.tensor([[0.5, 0.5]]).double(),
        "spectrum/lipschitz": one,
    }
    assert kind.check(good, 1.0) is None
    for name, bad in (
        ("values", torch.tensor([[1.0, 0.0]])),
        ("weights", torch.tensor([[0.5, 0.6]])),
        ("weights", torch.tensor([[1.5, -0.5]])),
        ("lipschitz", torch.tensor(-1.0)),
    ):
        flaw = kind.check({**good, f"spectrum/{name}": bad.double()}, 1.0)
        assert flaw is not None
        assert flaw.field == f"spectrum/{name}"
