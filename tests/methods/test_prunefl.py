"""PruneFL: the squared gradients that clients send in the rounds that trade."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.methods.prunefl import SquaredGradients
from fedfuse.nets.curvature import maskable, squared_gradients
from fedfuse.server.admission.admit import Contract, admit
from fedfuse.training.pulls import Masked
from fedfuse.training.round import client_round

SPEC = Spec("mlp", {"inputs": 3, "hidden": [4], "classes": 2})
ROWS = Rows(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2)


def test_the_mean_of_squares_over_batches() -> None:
    torch.manual_seed(1)
    net = SPEC.build()
    draw = torch.Generator().manual_seed(3)
    found = squared_gradients(net, maskable(SPEC), ROWS, batch=5, batches=2, generator=draw)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3)).split(5)[:2]
    for name, value in net.named_parameters():
        if name in found:
            slopes = [torch.autograd.grad(F.cross_entropy(net(ROWS.x[i]), ROWS.y[i]), value)[0] for i in order]
            assert torch.allclose(found[name], (slopes[0] ** 2 + slopes[1] ** 2) / 2)


def test_they_come_when_due_and_tell_of_masked_weights_too() -> None:
    torch.manual_seed(1)
    params = dict(SPEC.build().state_dict())
    params["fc1.weight"] = torch.zeros_like(params["fc1.weight"])
    masks = {"mask/fc1.weight": torch.zeros(4, 3, dtype=torch.bool)}
    kind = SquaredGradients(every=2)
    for round_, due in ((0, False), (1, True)):
        brief = Brief(round_, SPEC, params, masks, classes=2)
        work = Work(LocalSettings(batch_size=4), project=Masked(), evidence=(kind,))
        payload = client_round(work, brief, "c", ROWS).payload
        update = admit(Envelope("c", payload), Contract.of(brief, (kind,)))
        assert set(update.notes) == ({f"gradients/{n}" for n in maskable(SPEC)} if due else set())
    assert not update.posterior.mean["fc1.weight"].any()
    assert update.notes["gradients/fc1.weight"].any()


def test_a_negative_square_is_refused() -> None:
    flaw = SquaredGradients().check({"gradients/w": torch.tensor([1.0, -1.0])}, 1.0)
    assert flaw is not None
    assert flaw.field == "gradients/w"
    assert SquaredGradients().check({"counts/labels": torch.tensor([-1])}, 1.0) is None
