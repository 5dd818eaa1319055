"""Terms of local losses, each against its formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedfuse.client.objectives import Contrastive, KeepModel, Proximal
from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Objective, TaskLoss, Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Local, with_kind
from fedfuse.training.round import client_round
from fedfuse.wire.codec import decode

SPEC = Spec("mlp", {"inputs": 4, "hidden": [32], "classes": 3})
DRAW = torch.Generator().manual_seed(7)
BATCH = (torch.randn(6, 4, generator=DRAW), torch.randint(3, (6,), generator=DRAW))


def weights(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {n: t.detach().clone() for n, t in SPEC.build().state_dict().items()}


def at_work(memory: dict[str, Tensor] | None = None, told: dict[str, Tensor] | None = None) -> Local:
    """A client that was given weights(0) and is now at weights(1)."""
    module = SPEC.build()
    module.load_state_dict(weights(1))
    brief = Brief(1, SPEC, weights(0), told or {}, classes=3)
    return Local("a", brief, Rows(*BATCH), LocalSettings(), module, memory or {}, seed=0)


def gradient(objective: Objective, local: Local) -> dict[str, Tensor]:
    grads = torch.autograd.grad(objective(local, BATCH), list(local.live.values()))
    return dict(zip(local.live, grads, strict=True))


def plain() -> Tensor:
    return F.cross_entropy(SPEC.forward(weights(1), BATCH[0]), BATCH[1])


def test_the_plain_objective_is_cross_entropy() -> None:
    assert TaskLoss()(at_work(), BATCH).item() == pytest.approx(plain().item())


def test_the_proximal_term_is_half_mu_times_the_squared_distance() -> None:
    square = sum(((weights(1)[n] - weights(0)[n]) ** 2).sum() for n in weights(0))
    assert Proximal(0.4)(at_work(), BATCH).item() == pytest.approx((plain() + 0.2 * square).item(), rel=1e-6)


def test_the_proximal_gradient_points_away_from_the_global_model_so_a_step_pulls_back() -> None:
    with_term, without = gradient(Proximal(0.4), at_work()), gradient(TaskLoss(), at_work())
    for n in with_term:
        assert torch.allclose(with_term[n] - without[n], 0.4 * (weights(1)[n] - weights(0)[n]), atol=1e-6)


def test_without_mu_the_proximal_loss_is_the_base_bit_for_bit() -> None:
    a, b = gradient(Proximal(0.0), at_work()), gradient(TaskLoss(), at_work())
    assert all(a[n].equal(b[n]) for n in a)


def hidden(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ params["fc1.weight"].T + params["fc1.bias"]).relu()


def contrast(x: Tensor, temperature: float) -> Tensor:
    """−log e^{s⁺/T} / (e^{s⁺/T} + e^{s⁻/T}), written out: cosines to the global model and to the last one."""
    z, near, far = (hidden(weights(seed), x) for seed in (1, 0, 2))

    def cosine(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))

    plus, minus = (cosine(z, near) / temperature).exp(), (cosine(z, far) / temperature).exp()
    return -(plus / (plus + minus)).log().mean()


@pytest.mark.parametrize(("mu", "temperature"), [(1.0, 0.5), (5.0, 0.1)])
def test_the_contrastive_term_by_hand(mu: float, temperature: float) -> None:
    local = at_work(with_kind("last", weights(2)))
    expected = plain() + mu * contrast(BATCH[0], temperature)
    assert Contrastive(mu, temperature)(local, BATCH).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_contrastive_term_takes_a_batch_of_one() -> None:
    local, one = at_work(with_kind("last", weights(2))), (BATCH[0][:1], BATCH[1][:1])
    expected = F.cross_entropy(SPEC.forward(weights(1), one[0]), one[1]) + contrast(one[0], 0.5)
    assert Contrastive(1.0)(local, one).item() == pytest.approx(expected.item(), rel=1e-5)


def test_in_a_first_round_the_contrastive_loss_is_the_base_bit_for_bit() -> None:
    a, b = gradient(Contrastive(5.0), at_work()), gradient(TaskLoss(), at_work())
    assert all(a[n].equal(b[n]) for n in a)


def test_only_the_live_network_gets_a_contrastive_gradient() -> None:
    local = at_work(with_kind("last", weights(2)))
    Contrastive(1.0)(local, BATCH).backward()
    assert all(p.grad is not None for p in local.module.parameters())
    assert all(p.grad is None for p in local.frozen("global", {}).parameters())
    assert all(p.grad is None for p in local.frozen("last", {}).parameters())


def test_terms_compose() -> None:
    local = at_work(with_kind("last", weights(2)))
    square = sum(((weights(1)[n] - weights(0)[n]) ** 2).sum() for n in weights(0))
    expected = plain() + 0.2 * square + contrast(BATCH[0], 0.5)
    for both in (Proximal(0.4, Contrastive(1.0)), Contrastive(1.0, base=Proximal(0.4))):
        assert both(local, BATCH).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_last_model_is_the_trained_one_and_is_not_sent() -> None:
    answer = client_round(Work(memory=(KeepModel(),)), Brief(0, SPEC, weights(0), classes=3), "a", Rows(*BATCH))
    packet = decode(answer.payload)
    assert not any(n.startswith("~") for n in packet.tensors)
    assert {n.removeprefix("last/") for n in answer.memory} == set(packet.tensors)
    assert all(answer.memory[f"last/{n}"].equal(t) for n, t in packet.tensors.items())
