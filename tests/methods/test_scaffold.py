"""SCAFFOLD: Algorithm 1 of arXiv:1910.06378, option II, and each of its parts by itself."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from builders import drawn, rows
from fedfuse.core.messages import Brief, ClientUpdate, Cohort, Envelope
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Batch, Objective, TaskLoss, Work
from fedfuse.core.settings import LocalSettings, effective_steps
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, Local, ServerState, with_kind
from fedfuse.engines.local import InProcess, Population
from fedfuse.methods import scaffold
from fedfuse.methods.scaffold import ControlDelta, Controlled, ControlStep, KeepControl, total_step_size
from fedfuse.server.admission.admit import Contract, admit
from fedfuse.server.loop import RunPlan, run
from fedfuse.training.round import client_round
from fedfuse.wire.codec import decode

RATE, STEPS = 0.2, 3


def test_two_rounds_are_algorithm_one() -> None:
    """Lines 7 to 17 written out for two clients of full batches; clients weigh by their examples."""
    spec = Spec.of(nn.Linear(3, 2).double())
    data = {"a": rows(6, 3, classes=2, dtype=torch.float64), "b": rows(9, 3, classes=2, seed=1, dtype=torch.float64)}
    local = LocalSettings(epochs=STEPS, batch_size=9, optimizer={"lr": RATE})
    start = ServerState(0, Single(spec, Posterior(drawn(spec))))
    engine, bench = InProcess(Population.of(data)), Bench(population=2, classes=2, local=local)
    records = list(run(find_method("scaffold").recipe(), engine, bench, None, start, RunPlan(2)))

    w = drawn(spec)
    zero = {n: torch.zeros_like(t) for n, t in w.items()}
    c, own = dict(zero), {k: dict(zero) for k in data}
    for _ in range(2):
        ends, deltas = {}, {}
        for k, part in data.items():
            y = {n: t.clone().requires_grad_() for n, t in w.items()}
            for _ in range(STEPS):
                loss = F.cross_entropy(part.x @ y["weight"].T + y["bias"], part.y)
                for n, g in zip(y, torch.autograd.grad(loss, list(y.values())), strict=True):
                    y[n] = (y[n].detach() - RATE * (g - own[k][n] + c[n])).requires_grad_()
            ends[k] = {n: t.detach() for n, t in y.items()}
            new = {n: own[k][n] - c[n] + (w[n] - ends[k][n]) / (STEPS * RATE) for n in w}
            deltas[k] = {n: new[n] - own[k][n] for n in w}
            own[k] = new
        w = {n: (6 * ends["a"][n] + 9 * ends["b"][n]) / 15 for n in w}
        c = {n: c[n] + (deltas["a"][n] + deltas["b"][n]) / 2 for n in w}
    found = records[-1].state
    torch.testing.assert_close(dict(found.single.posterior.mean), w, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(dict(found.memory), with_kind("control", c), rtol=1e-9, atol=1e-9)


def test_the_page_on_adding_a_method_quotes_this_file() -> None:
    page = Path(__file__).parents[2] / "docs" / "add-a-method.md"
    quoted = re.findall(r"^```py\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(quoted) >= 3
    assert all(text in inspect.getsource(scaffold) for text in quoted)


# The linear term of the clients' loss

NET = Spec("mlp", {"inputs": 4, "hidden": [32], "classes": 3})
BATCH = (torch.randn(6, 4, generator=torch.Generator().manual_seed(7)), torch.arange(6) % 3)


def at_work(memory: dict[str, Tensor] | None = None, told: dict[str, Tensor] | None = None) -> Local:
    """A client that was given drawn(NET, 0) and is now at drawn(NET, 1)."""
    module = NET.build()
    module.load_state_dict(drawn(NET, 1))
    brief = Brief(1, NET, drawn(NET, 0), told or {}, classes=3)
    return Local("a", brief, Rows(*BATCH), LocalSettings(), module, memory or {}, seed=0)


def gradient(objective: Objective, local: Local) -> dict[str, Tensor]:
    grads = torch.autograd.grad(objective(local, BATCH), list(local.live.values()))
    return dict(zip(local.live, grads, strict=True))


def test_the_control_term_adds_exactly_the_gap_between_the_variates() -> None:
    theirs, mine = drawn(NET, 2), drawn(NET, 3)
    local = at_work(with_kind("control", mine), with_kind("control", theirs))
    with_term, without = gradient(Controlled(), local), gradient(TaskLoss(), at_work())
    for n in with_term:
        assert torch.allclose(with_term[n] - without[n], theirs[n] - mine[n], atol=1e-6)


@pytest.mark.parametrize("missing", ["mine", "theirs"])
def test_a_variate_that_is_not_there_yet_is_zero(missing: str) -> None:
    variate = with_kind("control", drawn(NET, 2))
    local = at_work({}, variate) if missing == "mine" else at_work(variate, {})
    sign = 1 if missing == "mine" else -1
    with_term, without = gradient(Controlled(), local), gradient(TaskLoss(), at_work())
    for n in with_term:
        assert torch.allclose(with_term[n] - without[n], sign * drawn(NET, 2)[n], atol=1e-6)


def test_without_variates_the_controlled_loss_is_the_base_bit_for_bit() -> None:
    a, b = gradient(Controlled(), at_work()), gradient(TaskLoss(), at_work())
    assert all(a[n].equal(b[n]) for n in a)


# The change a client sends, and what it keeps

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


# The server's step

STEP_SPEC = Spec("mlp")


def deltas_of(*deltas: float) -> Cohort:
    none: Posterior = Posterior({})
    return Cohort(
        tuple(
            ClientUpdate(
                f"c{i}", none, 7.0 * i + 1, 1, STEP_SPEC, {"control/w": torch.tensor([d]), "counts/x": torch.ones(1)}
            )
            for i, d in enumerate(deltas)
        )
    )


def test_the_variate_moves_by_the_sum_over_everybody_asked_or_not() -> None:
    """c ← c + (1/N) Σ Δc: ten clients, two of them answered; num_examples do not matter."""
    state = ServerState(1, Single(STEP_SPEC, Posterior({})), {"other/w": torch.ones(1)})
    once = ControlStep()(state, deltas_of(1.0, 4.0), Bench(population=10))
    assert once.memory["control/w"].item() == 0.5
    twice = ControlStep()(once, deltas_of(-2.0), Bench(population=10))
    assert torch.allclose(twice.memory["control/w"], torch.tensor([0.3]))
    assert set(twice.memory) == {"control/w", "other/w"}


def test_a_population_that_nobody_told_is_the_deltas_of() -> None:
    state = ServerState(1, Single(STEP_SPEC, Posterior({})))
    assert ControlStep()(state, deltas_of(1.0, 3.0), Bench()).memory["control/w"].item() == 2.0
