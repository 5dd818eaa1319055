"""Control variates and remembered models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Batch, Work
from fedfuse.core.settings import LocalSettings, effective_steps
from fedfuse.core.spec import Spec
from fedfuse.core.state import Local, with_kind
from fedfuse.methods.scaffold import ControlDelta, KeepControl, total_step_size
from fedfuse.server.admission.admit import Contract, admit
from fedfuse.training.round import client_round
from fedfuse.wire.codec import decode

MODULE = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
SPEC = Spec.of(MODULE)
BRIEF = Brief(0, SPEC, {n: t.detach().clone() for n, t in MODULE.state_dict().items()}, classes=2)
ROWS = Rows(torch.randn(10, 3, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 2)


class Slope:
    """A loss with the same gradient everywhere: 2 for every weight."""

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        return 2 * sum(w.sum() for w in local.live.values())  # type: ignore[return-value]


def test_walked_counts_what_momentum_adds_step_by_step() -> None:
    for rho in (0.0, 0.5, 0.9):
        velocity, way = 0.0, 0.0
        for steps in range(1, 30):
            velocity = rho * velocity + 1
            way += velocity
            assert effective_steps(steps, rho) == pytest.approx(way)


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 3},
        {"epochs": 3, "batch_size": 4, "optimizer": {"lr": 0.1, "momentum": 0.9}},
        {"epochs": 4, "batch_size": 4, "decay": {"gamma": 0.5, "every": 1}, "optimizer": {"momentum": 0.5}},
        {"epochs": 3, "batch_size": 4, "drop_last": True, "decay": {"gamma": 0.1, "milestones": [2]}},
        {"epochs": 3, "batch_size": 3, "max_steps": 5, "decay": {"gamma": 0.5, "every": 1}},
    ],
)
def test_a_constant_gradient_is_found_again_whatever_the_schedule(settings: dict[str, object]) -> None:
    """(w₀ − w)/carried is the mean gradient: with the same gradient at every step it is that gradient."""
    work = Work(
        LocalSettings.model_validate(settings), objective=Slope(), evidence=(ControlDelta(),), memory=(KeepControl(),)
    )
    answer = client_round(work, BRIEF, "a", ROWS)
    notes = {n: t for n, t in decode(answer.payload).tensors.items() if n.startswith("~")}
    assert len(notes) == 4
    assert all(torch.allclose(t, torch.full_like(t, 2.0), atol=1e-4) for t in notes.values())
    assert all(answer.memory[n.removeprefix("~")].equal(t) for n, t in notes.items())


def test_at_a_constant_rate_carried_is_rate_times_walked() -> None:
    settings = LocalSettings(epochs=2, batch_size=4, optimizer={"lr": 0.3, "momentum": 0.8})
    local = Local("a", BRIEF, ROWS, settings, SPEC.build(), {}, seed=0, steps=6)
    assert total_step_size(local) == pytest.approx(0.3 * effective_steps(6, 0.8))


def test_the_delta_takes_the_servers_variate_off_and_the_client_adds_it_to_its_own() -> None:
    theirs = {n: torch.full_like(p, 0.25) for n, p in SPEC.build().named_parameters()}
    mine = {n: torch.full_like(p, 5.0) for n, p in theirs.items()}
    brief = Brief(0, SPEC, BRIEF.params, with_kind("control", theirs))
    work = Work(objective=Slope(), evidence=(ControlDelta(),), memory=(KeepControl(),))
    answer = client_round(work, brief, "a", ROWS, memory=with_kind("control", mine))
    for n in theirs:
        assert torch.allclose(decode(answer.payload).tensors[f"~control/{n}"], torch.tensor(1.75), atol=1e-4)
        assert torch.allclose(answer.memory[f"control/{n}"], torch.tensor(6.75), atol=1e-4)


def test_a_client_that_took_no_step_changes_nothing() -> None:
    work = Work(LocalSettings(drop_last=True), evidence=(ControlDelta(),))
    answer = client_round(work, BRIEF, "a", ROWS)
    notes = [t for n, t in decode(answer.payload).tensors.items() if n.startswith("~")]
    assert all(not t.any() for t in notes)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.outer.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu())


@pytest.mark.parametrize("module", [Tied(), MODULE])
def test_the_door_expects_what_the_client_sends(module: nn.Module) -> None:
    spec = Spec.of(module)
    brief = Brief(0, spec, {n: t.detach().clone() for n, t in module.state_dict().items()})
    answer = client_round(Work(evidence=(ControlDelta(),)), brief, "a", ROWS)
    update = admit(Envelope("a", answer.payload), Contract.of(brief, (ControlDelta(),)))
    assert {n.removeprefix("control/") for n in update.notes} == {n for n, _ in module.named_parameters()}
