"""Refitting: layers from the bottom up (RegMean++), and hidden units to their own statistics (REPAIR)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedfuse
from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import ClientUpdate, Cohort, Envelope, Start
from fedfuse.core.model import Single
from fedfuse.core.params import Params
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.experiment.config import MethodConfig
from fedfuse.methods.fedavg import fedavg
from fedfuse.methods.refit import LayerAnswers, refit
from fedfuse.models import lenet, mlp
from fedfuse.nets.head import count_turns
from fedfuse.nets.units import layers_in_turn, rescalable_layers, unit_statistics
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.round import fuse_round
from fedfuse.server.steps.repair import Repair
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


LOCAL_UNITS = LocalSettings(epochs=2, batch_size=5, optimizer={"lr": 0.02})


class Backwards(nn.Module):
    """A network that names its layers in another order than it runs them, one of them without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(7, 5)
        self.bare = nn.Linear(5, 5, bias=False)
        self.first = nn.Linear(6, 7)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.second(torch.relu(self.first(x))))
        return self.out(torch.relu(self.bare(h)))


SPECS = {
    "mlp": (Spec.of(mlp(inputs=6, hidden=[8, 7], classes=3).double()), (6,)),
    "lenet": (Spec.of(lenet(channels=1, size=16).double()), (1, 16, 16)),
    "backwards": (Spec.of(Backwards().double()), (6,)),
}


def rows_of(k: int, shape: tuple[int, ...], same: bool = False) -> Rows:
    draw = torch.Generator().manual_seed(0 if same else k)
    count = 30 if same else 20 + 10 * k
    x = torch.randn(count, *shape, generator=draw, dtype=torch.float64) + (0 if same else 0.3 * k)
    return Rows(x, torch.randint(3, (count,), generator=draw))


def begin(spec: Spec, separate: bool = True) -> ServerState:
    """The state before the first round, with weights of their own for all clients."""
    torch.manual_seed(3)
    drawn = [{n: t.std() * torch.randn_like(t) for n, t in spec.build().state_dict().items()} for _ in NAMES]
    starts = {name: Start(spec, own) for name, own in zip(NAMES, drawn, strict=True)} if separate else {}
    return ServerState(0, Single(spec, Posterior(drawn[0])), starts=starts)


def exchange_units(
    recipe: Recipe, state: ServerState, shape: tuple[int, ...], same: bool = False
) -> tuple[Cohort, ServerState]:
    """One round of everybody through the door."""
    brief, sent = state.brief(recipe.publishes, 3), []
    for k, name in enumerate(NAMES):
        answer = client_round(recipe.work(LOCAL_UNITS), brief.to(name), name, rows_of(k, shape, same))
        sent.append(Envelope(name, answer.payload))
    admission = admit_all(sent, brief, recipe.evidence, NAMES, trains=recipe.trains)
    assert not admission.refused
    assert not admission.clipped
    bench = Bench(classes=3, inputs=InputForm(shape))
    return admission.cohort, fuse_round(recipe, admission.cohort, state, bench)


def repaired(
    name: str, method: dict[str, Any], same: bool = False
) -> tuple[Spec, tuple[int, ...], Cohort, list[ServerState]]:
    """The parents, and the states after the merge and after each exchange of the repair."""
    spec, shape = SPECS[name]
    recipe = MethodConfig.model_validate({**method, "refit": "units"}).recipe(1)
    cohort, state = exchange_units(recipe.at(0), begin(spec), shape, same)
    states = [state]
    while state.round < recipe.exchanges(1, spec):
        states.append(state := exchange_units(recipe.at(state.round), state, shape, same)[1])
    return spec, shape, cohort, states


def averages(spec: Spec, nets: list[Params], shape: tuple[int, ...], layer: str) -> tuple[Tensor, Tensor]:
    """Means and deviations by a hook, each network on its own client's rows, averaged by the numbers of rows."""
    found, sizes = list[tuple[Tensor, Tensor]](), list[int]()
    for k, params in enumerate(nets):
        net, seen, mine = spec.build().double(), list[Tensor](), rows_of(k, shape)
        net.load_state_dict(dict(params))
        net.get_submodule(layer).register_forward_hook(lambda _, __, out, seen=seen: seen.append(out.detach()))
        net(mine.x)
        units = seen[0].transpose(0, 1).flatten(1)
        found.append((units.mean(1), units.std(1, correction=0)))
        sizes.append(len(mine))
    shares = torch.tensor(sizes).double() / sum(sizes)
    mean, std = (shares @ torch.stack(each) for each in zip(*found, strict=True))
    return mean, std


@pytest.mark.parametrize("name", SPECS)
def test_the_averages_over_clients_are_the_parents_afterwards(name: str) -> None:
    spec, shape, cohort, states = repaired(name, {"name": "fedavg"})
    merged, after = states[0].single.posterior.mean, states[-1].single.posterior.mean
    parents = [u.posterior.mean for u in cohort]
    layers = [state.facts["layer"] for state in states[1:]]
    assert layers == {"backwards": ["first", "second"]}.get(name, [layer.name for layer in rescalable_layers(spec)])
    for layer in layers:
        goal = averages(spec, parents, shape, layer)
        for found, wanted in zip(averages(spec, [after] * 3, shape, layer), goal, strict=True):
            assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-10)
        assert not torch.allclose(averages(spec, [merged] * 3, shape, layer)[1], goal[1], rtol=1e-2)
    head = {"backwards": ("out.weight", "bare.weight")}.get(name, ("classifier.weight",))
    assert all(torch.allclose(after[n], merged[n], rtol=1e-14) for n in head)  # a mean of equals


def test_behind_an_alignment_the_statistics_move_with_their_units() -> None:
    spec, shape, _, states = repaired("lenet", {"name": "fedavg", "align": "weights"})
    plain = MethodConfig.model_validate({"name": "fedavg", "align": "weights"}).recipe(1)
    cohort, _ = exchange_units(plain, begin(spec), shape)
    assert plain.align is not None
    aligned, facts = plain.align(cohort, Bench(inputs=InputForm(shape)))
    assert max(facts["moved"]["conv2"].values()) > 0.5
    after = states[-1].single.posterior.mean
    for layer in rescalable_layers(spec):
        goal = averages(spec, [u.posterior.mean for u in aligned], shape, layer.name)
        for found, wanted in zip(averages(spec, [after] * 3, shape, layer.name), goal, strict=True):
            assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-10)


def test_clients_with_the_same_rows_give_what_a_server_with_these_rows_does() -> None:
    _, shape, cohort, states = repaired("lenet", {"name": "fedavg"}, same=True)
    bench = Bench(rows_of(0, shape, same=True))
    theirs = Repair()(states[0], cohort, bench).single.posterior.mean
    for name, tensor in states[-1].single.posterior.mean.items():
        assert torch.allclose(tensor, theirs[name], rtol=1e-9, atol=1e-11)


def test_clients_that_agree_leave_the_model_as_it_is_however_their_rows_differ() -> None:
    spec, shape = SPECS["mlp"]
    recipe = MethodConfig(name="fedavg", refit="units").recipe(1)
    state = begin(spec, separate=False)
    own = state.single.posterior.mean
    with_statistics = replace(recipe.at(0), trains=False)
    _, state = exchange_units(with_statistics, state, shape)
    while state.round < recipe.exchanges(1, spec):
        _, state = exchange_units(recipe.at(state.round), state, shape)
    assert all(torch.allclose(t, own[n], rtol=1e-12, atol=1e-13) for n, t in state.single.posterior.mean.items())


def test_statistics_come_once_in_the_last_round_of_training() -> None:
    spec, shape = SPECS["mlp"]
    recipe = MethodConfig(name="fedavg", refit="units").recipe(2)
    assert recipe.exchanges(2, spec) == 4
    first, state = exchange_units(recipe.at(0), begin(spec, separate=False), shape)
    assert not first.updates[0].notes
    assert not layers_in_turn(spec, state.memory)
    second, state = exchange_units(recipe.at(1), state, shape)
    assert set(second.updates[0].notes) == {f"unit_{what}/fc{i}.bias" for what in ("mean", "std") for i in (1, 2)}
    assert [layer.name for layer in layers_in_turn(spec, state.memory)] == ["fc1", "fc2"]
    third, _ = exchange_units(recipe.at(2), state, shape)
    assert set(third.updates[0].notes) == {"unit_mean/fc1.bias", "unit_std/fc1.bias"}


def test_a_unit_that_runs_in_batches_has_the_statistics_of_all_rows() -> None:
    spec, _ = SPECS["mlp"]
    params, x = begin(spec).start.params, torch.randn(1203, 6, dtype=torch.float64) + 5
    found = unit_statistics(spec, params, rescalable_layers(spec), x)["fc1"]
    out = x @ params["fc1.weight"].mT + params["fc1.bias"]
    assert torch.allclose(found.mean, out.mean(0), rtol=1e-12)
    assert torch.allclose(found.std, out.std(0, correction=0), rtol=1e-12)


def test_what_cannot_be_repaired_is_said() -> None:
    spec, shape = SPECS["mlp"]
    with pytest.raises(ConfigError, match="nobody knows what the parents' hidden units gave"):
        exchange_units(refit(units=True), begin(spec, separate=False), shape)
    with pytest.raises(RecipeError, match="units are rescaled and no layer is fitted"):
        refit(units=True, layers=True)
    narrow = Spec.of(mlp(inputs=6, hidden=[5, 7], classes=3).double())
    recipe = MethodConfig(name="otfusion", refit="units").recipe(1)
    notes = {f"unit_{what}/fc{i}.bias": torch.ones(w) for what in ("mean", "std") for i, w in ((1, 5), (2, 7))}
    wide = {f"unit_{what}/fc{i}.bias": torch.ones(w) for what in ("mean", "std") for i, w in ((1, 8), (2, 7))}
    updates = [
        ClientUpdate(c, Posterior(s.build().state_dict()), 5.0, 1, s, notes=n)
        for c, s, n in (("a", spec, wide), ("b", narrow, notes))
    ]
    bench = Bench(inputs=InputForm(shape))
    with pytest.raises(ConfigError, match="b brings no unit_mean/fc1.bias: units that are blended"):
        fuse_round(recipe.at(0), Cohort.of(updates), begin(spec), bench)


def test_an_experiment_repairs_a_network_from_starts_of_their_own(tmp_path: Path) -> None:
    aligned = {"name": "fedavg", "align": "weights"}
    fedfuse.run(
        {
            "rounds": 1,
            "start": "separate",
            "local": {"epochs": 5},
            "data": {"source": "digits", "train_limit": 400, "clients": 3},
            "model": {"name": "mlp", "hidden": [20, 20]},
            "methods": [aligned, {**aligned, "refit": "units"}],
        },
        workers=0,
        out=tmp_path / "run",
        progress=False,
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    assert [(line["label"], line["facts"].get("layer")) for line in lines] == [
        ("fedavg+weights", None),
        ("fedavg+weights+repair", None),
        ("fedavg+weights+repair", "fc1"),
        ("fedavg+weights+repair", "fc2"),
    ]
    assert lines[1]["accuracy"] == lines[0]["accuracy"] != lines[3]["accuracy"]
    assert "the mean of every hidden unit over the client's rows" in lines[2]["reveals"]
    assert lines[3]["bytes_up"] < lines[0]["bytes_up"] / 2
