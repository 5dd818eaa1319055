"""RegMean++: each layer against the regression on activations computed by hand behind the layers already fused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fedfuse
from fedfuse.core.messages import Cohort, Envelope
from fedfuse.core.model import Single
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.experiment.config import MethodConfig
from fedfuse.methods.fedavg import fedavg
from fedfuse.methods.refit import LayerAnswers, refit
from fedfuse.nets.head import count_turns
from fedfuse.server.admission.admit import admit_all
from fedfuse.training.round import client_round

SPEC = Spec("mlp", {"inputs": 3, "hidden": [4, 5], "classes": 2})
LOCAL = LocalSettings(epochs=3, batch_size=5, optimizer={"lr": 0.2})
NAMES = ("a", "b", "c")


def rows(k: int) -> Rows:
    draw = torch.Generator().manual_seed(k)
    return Rows(torch.randn(20 + 5 * k, 3, generator=draw) + k, torch.randint(2, (20 + 5 * k,), generator=draw))


def exchange(recipe: Recipe, state: ServerState, memories: dict[str, Params]) -> tuple[Cohort, ServerState]:
    """One round of everybody through the door; clients keep what the recipe has them keep."""
    brief = state.brief(recipe.publishes, 2)
    sent = []
    for k, name in enumerate(NAMES):
        answer = client_round(recipe.work(LOCAL), brief, name, rows(k), memory=memories.get(name))
        memories[name] = answer.memory
        sent.append(Envelope(name, answer.payload))
    admission = admit_all(sent, brief, recipe.evidence, NAMES, trains=recipe.trains)
    assert not admission.refused
    after = recipe.aggregate(admission.cohort, state, Bench(classes=2))
    return admission.cohort, replace(after, round=state.round + 1)


def chain(alpha: float = 0.9) -> Recipe:
    return fedavg().ending(1, refit(layers=True, alpha=alpha))


@pytest.fixture(scope="module")
def trained() -> tuple[Cohort, ServerState, dict[str, Params]]:
    torch.manual_seed(0)
    memories: dict[str, Params] = {}
    cohort, state = exchange(chain().at(0), ServerState(0, Single.of(SPEC.build(), SPEC)), memories)
    return cohort, state, memories


def reads(params: Params, x: Tensor, layer: int) -> Tensor:
    """What a layer of the network reads, with a 1 appended, in float64."""
    h = x.double()
    for below in range(1, layer):
        h = torch.relu(h @ params[f"fc{below}.weight"].double().mT + params[f"fc{below}.bias"].double())
    return torch.cat([h, torch.ones(len(h), 1, dtype=torch.float64)], 1)


def test_each_layer_is_the_regression_behind_the_layers_already_fused(
    trained: tuple[Cohort, ServerState, dict[str, Params]],
) -> None:
    alpha = 0.7
    cohort, state, memories = trained
    own = [dict(u.posterior.mean) for u in cohort]
    fused = {n: t.clone() for n, t in state.single.posterior.mean.items()}
    kept, recipe = dict(memories), chain(alpha)
    for layer in (1, 2):
        _, state = exchange(recipe.at(state.round), state, kept)
        left, right = 0.0, 0.0
        for k, mine in enumerate(own):
            A = reads(fused, rows(k).x, layer)
            A = A.mT @ A
            A = alpha * A + (1 - alpha) * A.diagonal().diag()
            M = torch.cat([mine[f"fc{layer}.weight"], mine[f"fc{layer}.bias"][:, None]], 1).double()
            left, right = left + A, right + M @ A
        wanted = right @ torch.linalg.inv(left)
        fused |= {f"fc{layer}.weight": wanted[:, :-1].float(), f"fc{layer}.bias": wanted[:, -1].float()}
        found = state.single.posterior.mean
        assert all(torch.allclose(found[n], fused[n], atol=2e-4) for n in found)
        assert state.facts["layer"] == f"fc{layer}"


def test_the_head_comes_last_as_refit_fits_it(trained: tuple[Cohort, ServerState, dict[str, Params]]) -> None:
    _, state, memories = trained
    kept, recipe = dict(memories), chain()
    for _ in range(2):
        _, state = exchange(recipe.at(state.round), state, kept)
    _, by_layers = exchange(recipe.at(state.round), state, kept)
    _, by_head = exchange(refit(), state, kept)
    a, b = by_layers.single.posterior.mean, by_head.single.posterior.mean
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_clients_that_did_not_train_leave_every_layer_as_it_is() -> None:
    torch.manual_seed(1)
    before = ServerState(0, Single.of(SPEC.build(), SPEC))
    _, after = exchange(refit(layers=True), before, {})
    first, second = before.single.posterior.mean, after.single.posterior.mean
    assert all(torch.allclose(first[n], second[n], atol=1e-6) for n in first)


def test_it_takes_one_exchange_for_every_layer() -> None:
    assert count_turns(Spec("lenet")) == 5
    assert chain().exchanges(1, SPEC) == 4
    assert fedavg().ending(1, refit()).exchanges(1, SPEC) == 2
    assert MethodConfig(name="fedavg", refit="layers").recipe(1).exchanges(1, SPEC) == 4


def test_only_sums_are_read_and_clients_keep_their_weights() -> None:
    recipe = chain()
    assert recipe.later is not None
    assert recipe.later[1].only_sums
    assert recipe.memory == LayerAnswers.recalls


def test_a_run_refits_every_layer(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(2, (120,), generator=draw)
    x = torch.randn(120, 3, generator=draw) + 2 * y[:, None]
    methods = [{"name": "fedavg", "refit": what} for what in ("layers", "head")]
    fedfuse.run(
        {
            "rounds": 1,
            "data": {"clients": 3, "partition": {"kind": "dirichlet", "alpha": 1.0}},
            "model": {"name": "mlp", "inputs": 3, "hidden": [4, 5]},
            "methods": methods,
        },
        data=(x, y, x, y),
        workers=0,
        out=tmp_path / "run",
        progress=False,
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    assert sum(line["label"] == "fedavg+refit" for line in lines) == 2
    layered = [line["facts"].get("layer") for line in lines if line["label"] != "fedavg+refit"]
    assert layered == [None, "fc1", "fc2", None]
    assert "penalty" in lines[3]["facts"]
