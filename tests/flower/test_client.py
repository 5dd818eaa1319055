"""A ClientApp of the user's own that trains with `fedfuse.flower`: its network, its settings, its memory, its words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

pytest.importorskip("flwr")

from fake_grid import Gathering, spoilt
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from builders import rows
from fedfuse.client.objectives import Proximal
from fedfuse.core.model import Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines.local import InProcess, Population
from fedfuse.errors import QuorumLost
from fedfuse.flower import FuseStrategy, evaluate, train
from fedfuse.flower.parts import Network
from fedfuse.flower.records import FAILED, MEMORY, PARAMS, REPLY
from fedfuse.server.judge import accuracy_and_loss
from fedfuse.server.loop import RunPlan, run

PEOPLE = Population.of({f"client-{i}": rows(n, 1, 8, 8, seed=i) for i, n in enumerate((14, 9, 22))})
SERVER_ROWS = rows(20, 1, 8, 8, seed=9)
LOCAL = {"lr": 0.1, "momentum": 0.5, "batch_size": 8}
SEED = 4


class Net(nn.Module):
    """A network of the user's own, whose class needs an argument that no message carries."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm, self.top = nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.Linear(width * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(torch.relu(self.norm(self.conv(x))).flatten(1))


class Other(Net):
    """Another class with the same layers."""


def make() -> nn.Module:
    return Net(4)


def start() -> nn.Module:
    torch.manual_seed(3)
    return Net(4)


def grid_of(network: Network, recipe: Recipe | None = None, **settings: Any) -> Gathering:
    def app(message: Message, context: Context) -> Message:
        own = PEOPLE.rows_of(str(context.node_config["site"]))
        if message.metadata.message_type == "train":
            return train(message, context, network, own, recipe=recipe, **settings)
        return evaluate(message, context, network, (own.x, own.y), recipe=recipe)

    grid = Gathering()
    for client in PEOPLE.clients:
        grid.add(app, client, site=client)
    return grid


def strategy(method: Any, network: Network | None = None, **more: Any) -> FuseStrategy:
    bench = Bench(SERVER_ROWS, None, classes=3, seed=SEED)
    return FuseStrategy(method, network or start(), clients="fedfuse", **{"bench": bench, **more})


def begun() -> ArrayRecord:
    return ArrayRecord(start().state_dict())


def in_process(recipe: Recipe, rounds: int) -> Mapping[str, Tensor]:
    local = LocalSettings(batch_size=8, optimizer={"lr": 0.1, "momentum": 0.5})
    bench = Bench(SERVER_ROWS, None, 3, 3, local, SEED)
    spec = Spec.of(start())
    state = ServerState(0, Single.of(start(), spec))
    *_, last = run(recipe, InProcess(PEOPLE, SEED), bench, None, state, RunPlan(rounds))
    return last.state.single.posterior.mean


def ask(fuses: FuseStrategy, round_: int = 1, grid: Gathering | None = None) -> Message:
    """What the first node is sent."""
    return next(iter(fuses.configure_train(round_, begun(), ConfigRecord(), grid or grid_of(Net))))


def context() -> Context:
    return Context(1, 1, {}, RecordDict(), {})


def reason(reply: Message) -> str:
    return str(reply.content.config_records[FAILED]["why"])


@pytest.mark.parametrize(
    "method",
    [
        *("scaffold", "moon", "fedlpa", "eaa", "fednova", "qfedavg", "feddu"),  # some must know how clients trained
        {"name": "fedprox", "mu": 0.3},
        {"name": "hrank", "at": 1, "rate": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("network", [make, start()], ids=["a function", "a module"])
def test_a_network_of_ones_own_trains_as_it_would_in_process(method: Any, network: Network) -> None:
    fuses = strategy(method, local=LOCAL)
    fuses.start(grid_of(network, **LOCAL), begun(), num_rounds=2)
    ours, theirs = in_process(fuses.recipe, 2), fuses.fused.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(theirs[name].equal(tensor) for name, tensor in ours.items())


def test_what_a_client_remembers_stays_in_flowers_state() -> None:
    grid = grid_of(make, **LOCAL)
    strategy("scaffold").start(grid, begun(), num_rounds=1)
    for node in grid.nodes.values():
        memory = node.context.state.array_records[MEMORY]
        assert memory
        assert any(array.numpy().any() for array in memory.values())


def test_the_server_says_how_to_train_or_leaves_it_to_the_client() -> None:
    told = strategy("fedavg", local=LOCAL)
    told.start(grid_of(make), begun(), num_rounds=1)
    own = strategy("fedavg")
    own.start(grid_of(make, **LOCAL), begun(), num_rounds=1)
    agreed = strategy("fedavg", local=LOCAL)
    agreed.start(grid_of(make, lr=0.1, batch_size=8, device="cpu"), begun(), num_rounds=1)
    first = told.fused.state_dict()
    for fuses in (own, agreed):
        assert all(fuses.fused.state_dict()[name].equal(tensor) for name, tensor in first.items())
    with pytest.raises(QuorumLost, match=" lr "):
        strategy("fedavg", local=LOCAL).start(grid_of(make, lr=0.2), begun(), num_rounds=1)
    with pytest.raises(QuorumLost, match=" epochs "):
        strategy("fedavg", local=LOCAL).start(grid_of(make, epochs=2), begun(), num_rounds=1)


def test_a_client_that_was_told_how_to_train_and_says_otherwise_is_refused() -> None:
    def lie(content: RecordDict) -> None:
        tables = content.config_records[f"{REPLY}.tables"]
        tables["training"] = json.dumps({**json.loads(str(tables["training"])), "epochs": 9})

    grid = grid_of(make)
    spoilt(grid, 1000, lie)
    fuses = strategy("qfedavg", local=LOCAL)
    fuses.start(grid, begun(), num_rounds=1)
    assert fuses.admission is not None
    assert [(r["client"], r["field"]) for r in fuses.admission.refused] == [("client-0", "training.epochs")]


def test_a_recipe_of_ones_own_must_be_on_both_sides() -> None:
    own = replace(find_method("fedprox").recipe(), name="mine", objective=Proximal(0.7))
    with pytest.raises(QuorumLost, match="recipe="):
        strategy(own).start(grid_of(make, **LOCAL), begun(), num_rounds=1)
    fuses = strategy(own)
    fuses.start(grid_of(make, own, **LOCAL), begun(), num_rounds=1)
    assert fuses.rounds_fused == 1
    other = replace(own, objective=Proximal(0.1))
    with pytest.raises(QuorumLost, match="the same fedfuse"):
        strategy(own).start(grid_of(make, other, **LOCAL), begun(), num_rounds=1)


def test_a_recipe_that_asks_of_clients_what_the_method_does_goes_by_its_name() -> None:
    fuses = strategy(find_method("fedlpa").recipe(damping=0.1))  # the damping is the server's business
    fuses.start(grid_of(make, **LOCAL), begun(), num_rounds=1)
    assert fuses.rounds_fused == 1
    assert json.loads(ask(fuses).content["brief"]["method"]) == {"name": "fedlpa"}


@pytest.mark.parametrize("message_type", ["train", "evaluate"])
def test_another_network_than_the_clients_own_is_not_built(message_type: str) -> None:
    fuses = strategy("fedavg")
    if message_type == "train":
        answer = train(ask(fuses), context(), lambda: Other(4), PEOPLE.rows_of("client-0"))
    else:
        ask(fuses)
        message = next(iter(fuses.configure_evaluate(1, begun(), ConfigRecord(), grid_of(make))))
        answer = evaluate(message, context(), lambda: Other(4), PEOPLE.rows_of("client-0"))
    assert "Net'" in reason(answer)
    assert "Other'" in reason(answer)


def test_a_server_cannot_make_a_client_import_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    message = ask(strategy("eaa"))
    said = json.loads(str(message.content["brief"]["spec"]))
    said["options"]["of"]["factory"] = "os:getcwd"
    message.content["brief"]["spec"] = json.dumps(said)
    monkeypatch.setattr("importlib.import_module", lambda name: pytest.fail(f"{name} was imported"))
    assert "'bayesian in os:getcwd'" in reason(train(message, context(), make, PEOPLE.rows_of("client-0")))


def test_labels_beyond_the_classes_are_told() -> None:
    odd = Rows(PEOPLE.rows_of("client-0").x, torch.full((14,), 7))
    assert "7 to 7, expected 0 to 2" in reason(train(ask(strategy("fedavg")), context(), make, odd))


def test_a_plain_server_is_told_to_brief() -> None:
    message = next(iter(FuseStrategy().configure_train(1, begun(), ConfigRecord(), grid_of(make))))
    answer = train(message, context(), make, PEOPLE.rows_of("client-0"))
    assert "clients='fedfuse'" in reason(answer)


def test_a_plain_answer_to_a_brief_is_dropped_by_name() -> None:
    grid = grid_of(make, **LOCAL)
    grid.nodes[1000].app = lambda message, _: Message(RecordDict({"arrays": begun()}), reply_to=message)
    fuses = strategy("fedavg")
    fuses.start(grid, begun(), num_rounds=1)
    assert fuses.admission is not None
    assert fuses.admission.dropped[0]["client"] == "client-0"
    assert "malformed" in fuses.admission.dropped[0]["reason"]


def test_a_reply_that_was_spoilt_is_refused_at_the_door() -> None:
    grid = grid_of(make, **LOCAL)
    spoilt(grid, 1000, lambda content: content[f"{REPLY}.numbers"].update(num_examples=-1.0))
    fuses = strategy("scaffold")
    fuses.start(grid, begun(), num_rounds=1)
    assert fuses.admission is not None
    assert [(r["client"], r["field"]) for r in fuses.admission.refused] == [("client-0", "num_examples")]


@pytest.mark.parametrize("method", ["fedavg", "eaa", {"name": "hrank", "at": 1, "rate": 0.5}], ids=str)
def test_clients_score_the_very_model_that_was_fused(method: Any) -> None:
    fuses = strategy(method)
    result = fuses.start(grid_of(make, **LOCAL), begun(), num_rounds=1)
    model = fuses.fused.model
    assert isinstance(model, Single)
    sizes = PEOPLE.sizes()
    scores = {client: accuracy_and_loss(model, PEOPLE.rows_of(client)) for client in sizes}
    metrics = result.evaluate_metrics_clientapp[1]
    for place, name in enumerate(("accuracy", "loss")):
        mean = sum(sizes[client] * scores[client][place] for client in sizes) / sum(sizes.values())
        assert metrics[name] == pytest.approx(mean)


def test_plain_models_are_scored_too() -> None:
    grid = grid_of(make)
    fuses = FuseStrategy()
    message = next(iter(fuses.configure_evaluate(1, begun(), ConfigRecord(), grid)))
    own = PEOPLE.rows_of("client-0")
    metrics = evaluate(message, context(), make, own).content.metric_records["metrics"]
    accuracy, loss = accuracy_and_loss(Single.of(start(), Spec.of(start())), own)
    assert (metrics["num-examples"], metrics["accuracy"], metrics["loss"]) == (14, accuracy, pytest.approx(loss))


def test_losing_a_prepared_round_keeps_the_prepared_network() -> None:
    grid = grid_of(make, **LOCAL)
    for node in list(grid.nodes.values())[:2]:
        node.silent = True
    fuses = strategy("eaa", quorum=0.9)
    message = ask(fuses, grid=grid)
    arrays, metrics = fuses.aggregate_train(1, [])
    assert metrics is not None
    assert metrics["quorum-lost"] == 1
    assert arrays is not None
    assert set(arrays) == set(begun())
    again = next(iter(fuses.configure_train(2, arrays, ConfigRecord(), grid)))
    assert again.content["brief"]["round"] == 1
    for name, array in message.content.array_records[PARAMS].items():
        assert (again.content.array_records[PARAMS][name].numpy() == array.numpy()).all()


class Files(Dataset[tuple[Tensor, int]]):
    """A data set that takes any index, and one of whose rows may be odd."""

    def __init__(self, own: Rows, odd: int = -1) -> None:
        self.own, self.odd = own, odd

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = self.own.x[index % len(self.own)]
        return (x[:, 1:] if index == self.odd else x), int(self.own.y[index % len(self.own)])


def test_a_data_set_is_read_by_its_length_and_an_odd_row_is_the_servers_to_know() -> None:
    def app(message: Message, context: Context) -> Message:
        name = str(context.node_config["site"])
        data = Files(PEOPLE.rows_of(name), odd=3 if name == "client-1" else -1)
        answer = train if message.metadata.message_type == "train" else evaluate
        return answer(message, context, make, data, **(LOCAL if answer is train else {}))

    grid = Gathering()
    for name in PEOPLE.clients:
        grid.add(app, name, site=name)
    fuses = strategy("fedavg")
    result = fuses.start(grid, begun(), num_rounds=1)
    (dropped,) = fuses.ledger[0]["dropped"]
    assert dropped["client"] == "client-1"
    assert "row 3" in dropped["reason"]
    assert fuses.ledger[0]["clients"].keys() == {"client-0", "client-2"}
    assert result.evaluate_metrics_clientapp[1]["left-out"] == 1


@pytest.mark.parametrize("method", ["rklb", "eaa", "pvi"])
def test_bayesian_rounds_come_back_under_the_users_names_with_variances_apart(method: str) -> None:
    fuses, seen = strategy(method), list[set[str]]()
    result = fuses.start(
        grid_of(make, **LOCAL), begun(), num_rounds=2, evaluate_fn=lambda _, arrays: seen.append(set(arrays))
    )
    start().load_state_dict(result.arrays.to_torch_state_dict())
    assert all(names == set(begun()) for names in seen)
    assert fuses.variances is not None
    assert set(fuses.variances) == {"top.weight"}
    inside = fuses.fused.state_dict()
    assert torch.from_numpy(result.arrays["top.weight"].numpy().copy()).equal(inside["net.top.weight"])
    variance = torch.from_numpy(fuses.variances["top.weight"].numpy().copy())
    assert variance.allclose(inside["net.top.log_variance"].exp())
    assert strategy("fedavg").variances is None


def test_a_changed_mean_under_the_users_names_goes_into_the_next_bayesian_round() -> None:
    grid, fuses = grid_of(make, **LOCAL), strategy("eaa")
    arrays, _ = fuses.aggregate_train(
        1, grid.send_and_receive([*fuses.configure_train(1, begun(), ConfigRecord(), grid)])
    )
    assert arrays is not None
    inside = fuses.fused.state_dict()
    changed = ArrayRecord({name: tensor + 1 for name, tensor in arrays.to_torch_state_dict().items()})
    sent = next(iter(fuses.configure_train(2, changed, ConfigRecord(), grid))).content.array_records[PARAMS]
    assert torch.from_numpy(sent["net.top.weight"].numpy().copy()).equal(inside["net.top.weight"] + 1)
    assert torch.from_numpy(sent["net.top.log_variance"].numpy().copy()).equal(inside["net.top.log_variance"])
