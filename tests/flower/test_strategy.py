"""FuseStrategy in an app that is not ours: plain clients, Flower's own loop, and the ways to spoil a FedAvg."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from fake_grid import Gathering, through_bytes
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.server import ServerAppComponents, ServerConfig
from flwr.serverapp import ServerApp
from torch import nn

from fedfuse.core.messages import Cohort
from fedfuse.core.registry import all_methods, find_method
from fedfuse.core.rows import Rows
from fedfuse.core.seams import ServerPart
from fedfuse.core.settings import Bounds, LocalSettings
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, MethodFault, QuorumLost, RecipeError
from fedfuse.flower import FuseStrategy
from fedfuse.server.round import fuse_round
from fedfuse.server.steps.prune import Prune

App = Callable[[Message, Context], Message]
LOCAL = {"lr": 0.1, "momentum": 0.9, "epochs": 1}
NET = nn.Linear(2, 2)
NAMELESS = replace(find_method("fedavg").recipe(), objective=lambda *_: None)  # no message can say which


def moved(array: Array, shift: float) -> Array:
    """Every number plus the shift; whole numbers move by whole steps."""
    step = shift if array.dtype.startswith("float") else int(np.nan_to_num(shift))
    return Array(np.asarray(array.numpy() + step, dtype=array.dtype))


def client(shift: float, examples: float, steps: float | None = 2, **odd: Array) -> App:
    """Somebody's own ClientApp: it adds a number to every weight."""

    def answer(message: Message, _: Context) -> Message:
        arrays = {n: moved(a, shift) for n, a in message.content["arrays"].items()}
        metrics = MetricRecord({"num-examples": examples, "loss": shift})
        if steps is not None:
            metrics["num-steps"] = steps
        return Message(RecordDict({"mine": ArrayRecord({**arrays, **odd}), "metrics": metrics}), reply_to=message)

    return answer


def fails(message: Message, _: Context) -> Message:
    return Message(Error(code=1, reason="out of\nmemory"), reply_to=message)


def fails_until(round_: int, app: App) -> App:
    def answer(message: Message, context: Context) -> Message:
        late = message.content["config"]["server-round"] >= round_
        return app(message, context) if late else fails(message, context)

    return answer


def grid_with(*apps: App) -> Gathering:
    grid = Gathering()
    for app in apps:
        grid.add(app)
    return grid


def start() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros((2, 2), np.float32)), "bn.num_batches_tracked": Array(np.array(3))})


def fused(strategy: FuseStrategy, grid: Gathering, rounds: int = 1) -> dict[str, np.ndarray]:
    result = strategy.start(grid, start(), num_rounds=rounds)
    return {name: array.numpy() for name, array in result.arrays.items()}


def test_it_is_a_weighted_mean_in_flowers_own_loop() -> None:
    strategy = FuseStrategy("fedavg")
    got = fused(strategy, grid_with(client(1.0, 10), client(4.0, 30)), rounds=2)
    assert got["w"].dtype == np.float32
    assert got["w"] == pytest.approx(np.full((2, 2), 2 * (0.25 * 1 + 0.75 * 4)))
    assert got["bn.num_batches_tracked"] == 3 + 4 + 4  # a counter takes the maximum
    assert got["bn.num_batches_tracked"].dtype == np.int64
    assert strategy.fused.state_dict()["w"].numpy() == pytest.approx(got["w"])


def test_server_memory_lives_on_between_rounds_and_not_between_runs() -> None:
    strategy = FuseStrategy("fedavgm")
    apps = client(1.0, 10), client(1.0, 10)
    one, three = fused(strategy, grid_with(*apps)), fused(strategy, grid_with(*apps), rounds=3)
    assert three["w"][0, 0] > 3 * one["w"][0, 0]  # momentum
    assert fused(strategy, grid_with(*apps))["w"] == pytest.approx(one["w"])


def test_what_an_own_part_keeps_on_itself_does_not_live_on_between_runs() -> None:
    class Counts(ServerPart):
        seen = 0

        def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
            self.seen += 1
            return state.fused({n: t * self.seen for n, t in state.single.posterior.mean.items()})

    strategy = FuseStrategy(replace(find_method("fedavg").recipe(), name="mine", steps=(Counts(),)))
    first, again = (fused(strategy, grid_with(client(1.0, 1), client(1.0, 1)), rounds=2) for _ in range(2))
    assert again["w"] == pytest.approx(first["w"])


def test_metrics_are_averaged_by_examples() -> None:
    result = FuseStrategy().start(grid_with(client(1.0, 10), client(4.0, 30), fails), start(), num_rounds=1)
    metrics = result.train_metrics_clientapp[1]
    assert metrics["loss"] == pytest.approx(0.25 * 1 + 0.75 * 4)
    assert metrics["left-out"] == 1
    assert "quorum-lost" not in metrics


@pytest.mark.parametrize(
    ("odd", "field"),
    [
        (client(float("nan"), 20), "w"),
        (client(1.0, 20, w=Array(np.ones((1, 2), np.float32))), "w"),
        (client(1.0, 20, more=Array(np.ones(1))), "more"),
        (client(1.0, -19), "num_examples"),
        (client(1.0, 1e13), "num_examples"),
        (client(1.0, 1e9), "num_examples"),
        (client(1.0, float("nan")), "num_examples"),
        (client(1.0, 20, 1e8), "steps"),
        (client(1.0, 20, float("nan")), None),
        (client(1.0, 20, float("inf")), None),
        (client(1.0, 20, w=Array("float32", (2, 2), "numpy.ndarray", b"\x80\x04a pickle")), None),
        (fails, None),
    ],
)
def test_one_bad_client_neither_spoils_nor_ends_a_round(odd: App, field: str | None) -> None:
    strategy = FuseStrategy("fedavg")
    got = fused(strategy, grid_with(client(1.0, 20), odd, client(3.0, 20)))
    assert got["w"] == pytest.approx(np.full((2, 2), 2.0))
    assert strategy.admission is not None
    assert [r["field"] for r in strategy.admission.refused] == ([field] if field else [])
    assert len(strategy.admission.dropped) == (field is None)


def test_below_the_quorum_the_model_stays_and_later_rounds_go_on(caplog: pytest.LogCaptureFixture) -> None:
    strategy = FuseStrategy("fedavg", quorum=0.9)
    grid = grid_with(client(1.0, 20), fails_until(2, client(3.0, 20)))
    with caplog.at_level(logging.ERROR, "flwr"):
        result = strategy.start(grid, start(), num_rounds=2)
    assert result.train_metrics_clientapp[1] == {"quorum-lost": 1, "left-out": 1, "fuse-refused": 0, "fuse-clipped": 0}
    assert result.train_metrics_clientapp[2]["left-out"] == 0
    assert result.arrays["w"].numpy() == pytest.approx(np.full((2, 2), 2.0))  # one fused round, from the start
    assert (strategy.rounds_fused, strategy.rounds_lost) == (1, 1)
    assert "1 of 2" in caplog.text
    assert "90%" in caplog.text


def test_a_round_lost_after_others_leaves_their_model() -> None:
    seen: list[float] = []

    def flaky(message: Message, context: Context) -> Message:
        seen.append(float(message.content["arrays"]["w"].numpy()[0, 0]))
        return (fails if message.content["config"]["server-round"] > 1 else client(3.0, 20))(message, context)

    strategy = FuseStrategy("fedavg", quorum=0.9, fraction_evaluate=0)
    result = strategy.start(grid_with(client(1.0, 20), flaky), start(), num_rounds=3)
    assert seen == [0.0, 2.0, 2.0]
    assert result.arrays["w"].numpy() == pytest.approx(np.full((2, 2), 2.0))
    assert strategy.rounds_lost == 2


def test_a_run_without_one_fused_round_is_no_run() -> None:
    with pytest.raises(QuorumLost, match="none of 2 rounds .*; round 2: 1 of 2 .* out of memory"):
        FuseStrategy("fedavg", quorum=0.9).start(grid_with(client(1.0, 20), fails), start(), num_rounds=2)


def test_a_share_of_the_nodes_is_asked_by_the_seed() -> None:
    grid = grid_with(*(client(1.0, 10) for _ in range(6)))

    def asked(seed: int, round_: int, share: float = 0.5) -> list[int]:
        strategy = FuseStrategy(fraction_train=share, min_available_nodes=6, bench=Bench(seed=seed))
        messages = strategy.configure_train(round_, start(), ConfigRecord(), grid)
        return [message.metadata.dst_node_id for message in messages]

    assert len(asked(0, 1)) == 3
    assert len(asked(0, 1, 0.01)) == 1
    assert asked(0, 1) == asked(0, 1)
    assert any(asked(0, 1) != asked(0, round_) for round_ in range(2, 6))


def test_a_round_waits_for_the_nodes_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = grid_with(client(1.0, 10))
    monkeypatch.setattr("fedfuse.flower.strategy.time.sleep", lambda _: grid.add(client(3.0, 10)))
    assert fused(FuseStrategy(min_available_nodes=3), grid)["w"][0, 0] == pytest.approx(7 / 3)


def test_every_node_evaluates_unless_told_otherwise() -> None:
    apps = client(1.0, 10), client(4.0, 30)
    result = FuseStrategy().start(grid_with(*apps), start(), num_rounds=1)
    assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(3.25)
    result = FuseStrategy(fraction_evaluate=0).start(grid_with(*apps), start(), num_rounds=1)
    assert not result.evaluate_metrics_clientapp


def test_a_client_that_cannot_evaluate_is_told_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def trains_only(message: Message, context: Context) -> Message:
        return (client(1.0, 10) if message.metadata.message_type == "train" else fails)(message, context)

    result = FuseStrategy().start(grid_with(client(1.0, 10), trains_only), start(), num_rounds=1)
    assert result.evaluate_metrics_clientapp[1]["left-out"] == 1
    (line,) = (line for line in caplog.text.splitlines() if "node-1007" in line)
    assert line.endswith("error 1: out of memory")


def test_a_client_is_called_as_its_node_was_registered() -> None:
    grid = Gathering()
    grid.add(client(1.0, 10), name="north")
    grid.add(client(float("nan"), 10), name="south")
    grid.add(client(1.0, 10), name="north")  # nobody can be two
    strategy = FuseStrategy()
    fused(strategy, grid)
    assert strategy.admission is not None
    assert strategy.admission.cohort.clients == ("node-1014", "north")
    assert strategy.admission.refused[0]["client"] == "south"


def test_a_reply_of_somebody_who_was_not_asked_is_refused() -> None:
    grid = grid_with(client(1.0, 10), client(1.0, 10))
    strategy = FuseStrategy()
    messages = [through_bytes(m) for m in strategy.configure_train(1, start(), ConfigRecord(), grid)]
    replies = [grid.nodes[m.metadata.dst_node_id].app(m, Context(1, 1, {}, RecordDict(), {})) for m in messages]
    stranger = client(9.0, 10)(through_bytes(messages[0]), Context(1, 1, {}, RecordDict(), {}))
    stranger.metadata.__dict__["_src_node_id"] = 5
    arrays, _ = strategy.aggregate_train(1, [*replies, stranger])
    assert arrays is not None
    assert arrays["w"].numpy()[0, 0] == pytest.approx(1.0)
    assert strategy.admission is not None
    assert strategy.admission.refused[0]["client"] == "node-5"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("fedprox", "Proximal"),
        ("moon", "Contrastive"),
        ("scaffold", "Controlled"),
        ("fedlpa", "KroneckerFactors"),
        ("qfedavg", "StartLoss"),
        ("prunefl", "Masked"),
        ("eaa", "Elbo"),
        ("hrank", "Prune"),
    ],
)
def test_what_a_plain_client_cannot_do_is_refused_at_once(name: str, part: str) -> None:
    with pytest.raises(RecipeError, match=f"'{name}' .*{part}.*clients='fedfuse'"):
        FuseStrategy(name, local=LOCAL)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ensemble", "mixture .*--app"),
        ("local", "apart.*--app"),
        ("hybrid_fl", "WithServer.*--app"),
        ("data_sharing", "ShareServerRows.*fedfuse run"),
    ],
)
@pytest.mark.parametrize("clients", ["plain", "fedfuse"])
def test_what_no_strategy_can_do_is_refused_with_any_clients(name: str, why: str, clients: Any) -> None:
    with pytest.raises(RecipeError, match=f"'{name}' .*{why}"):
        FuseStrategy(name, nn.Linear(2, 2), clients=clients)


@pytest.mark.parametrize("name", sorted(all_methods()))
def test_plain_clients_serve_exactly_the_methods_that_ask_nothing_of_them(name: str) -> None:
    recipe, plain = all_methods()[name].recipe(), find_method("fedavg").recipe()
    trains_alike = recipe.work(LocalSettings()) == plain.work(LocalSettings())
    same = all(
        getattr(recipe, p) == getattr(plain, p)
        for p in ("publishes", "memory", "prepare_model", "before_first_round", "roster", "result")
    )
    if trains_alike and same and not any(isinstance(step, Prune) for step in recipe.steps):
        assert FuseStrategy(name, nn.Linear(2, 2), local=LOCAL).recipe.name == name
    else:
        with pytest.raises(RecipeError, match=f"'{name}'"):
            FuseStrategy(name, nn.Linear(2, 2), local=LOCAL)


def test_what_comes_later_is_checked_too() -> None:
    with pytest.raises(RecipeError, match="'fedprox'"):
        FuseStrategy(find_method("fedavg").recipe().then(5, find_method("fedprox").recipe()))
    with pytest.raises(RecipeError, match="'fednova'"):
        FuseStrategy(find_method("fedavg").recipe().then(5, find_method("fednova").recipe()))


@pytest.mark.parametrize(("name", "clients"), [("fednova", "plain"), ("prunefl", "fedfuse")])
def test_a_server_that_must_know_how_clients_train_asks_for_it(name: str, clients: Any) -> None:
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    with pytest.raises(RecipeError, match=f"'{name}' .*local="):
        FuseStrategy(name, network, clients=clients)
    assert FuseStrategy(name, network, clients=clients, local=LOCAL).bench.local.optimizer.lr == 0.1
    assert FuseStrategy(name, network, clients=clients, bench=Bench(local=LocalSettings(epochs=3))).local is not None


def test_momentum_is_what_the_user_says_and_never_assumed() -> None:
    apps = client(1.0, 10, 1), client(4.0, 10, 9)
    none, much = (
        fused(FuseStrategy("fednova", local={"momentum": rho}), grid_with(*apps))["w"][0, 0] for rho in (0.0, 0.9)
    )
    assert none == pytest.approx(5 * (0.5 * 1 / 1 + 0.5 * 4 / 9))  # τ_eff = 5, a_k = τ_k
    assert much != pytest.approx(none)
    told = {"name": "fednova", "momentum": 0.9}  # the method's own option says it too
    assert fused(FuseStrategy(told), grid_with(*apps))["w"][0, 0] == pytest.approx(much)


def test_steps_that_nobody_said_follow_from_how_clients_train_and_are_never_guessed() -> None:
    silent, told = (client(1.0, 10, None), client(4.0, 90, None)), (client(1.0, 10, 3), client(4.0, 90, 27))
    local = {"epochs": 3, "batch_size": 10}
    by_settings, by_word = (fused(FuseStrategy("fednova", local=local), grid_with(*c))["w"] for c in (silent, told))
    assert by_settings == pytest.approx(by_word)
    assert by_word[0, 0] != pytest.approx(0.1 * 1 + 0.9 * 4)  # FedAvg
    with pytest.raises(QuorumLost, match="steps is 0"):
        fused(FuseStrategy({"name": "fednova", "momentum": 0.0}), grid_with(*silent))
    assert fused(FuseStrategy("fedavg"), grid_with(*silent))["w"][0, 0] == pytest.approx(0.1 * 1 + 0.9 * 4)


def test_a_guard_and_an_alignment_stand_before_the_aggregator() -> None:
    apps = client(1.0, 10), client(1.2, 10), client(50.0, 10)
    assert fused(FuseStrategy(guard="median"), grid_with(*apps))["w"][0, 0] == pytest.approx(1.2)
    krum = FuseStrategy(guard={"name": "krum", "byzantine": 1})
    assert fused(krum, grid_with(*apps, client(1.1, 10)))["w"][0, 0] < 1.3
    network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    assert FuseStrategy(model=network, align="weights").recipe.align is not None
    with pytest.raises(ConfigError, match="'mediann'"):
        FuseStrategy(guard="mediann")


def test_an_aligned_round_is_the_one_files_get() -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    strategy = FuseStrategy(model=network, align="weights")
    result = strategy.start(
        grid_with(client(0.5, 10), client(-0.5, 30)), ArrayRecord(network.state_dict()), num_rounds=1
    )
    assert strategy.admission is not None
    cohort: Cohort = strategy.admission.cohort
    again = fuse_round(strategy.recipe, cohort, ServerState(0, strategy.fused.model), Bench())
    for name, tensor in again.single.posterior.mean.items():
        assert torch.from_numpy(result.arrays[name].numpy().copy()).equal(tensor)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"clients": "ours"}, "clients is 'ours'"),
        ({"clients": "fedfuse"}, "FuseStrategy"),
        ({"fraction_train": 0}, "fraction_train is 0, .*above 0 up to 1"),
        ({"fraction_evaluate": -1}, "fraction_evaluate is -1, .*from 0 up to 1"),
        ({"quorum": 2}, "quorum is 2, .*from 0 up to 1"),
        ({"local": {"epoch": 1}}, "'epoch'.*'epochs'"),
        ({"recipe": {"mu": 0.1}}, "mu"),
        ({"model": NET, "clients": "fedfuse", "local": LocalSettings(augment=print)}, "local.augment"),
        ({"recipe": NAMELESS, "model": NET, "clients": "fedfuse"}, "lambda"),
        ({"bounds": {"ration": 3}}, "bounds.ration"),
        ({"bounds": {"share": 0.3}}, "bounds.share .* enrol="),
        ({"enrol": {"north": 0}}, "enrol .* 'north' .* 0"),
    ],
)
def test_arguments_that_cannot_be_are_one_sentence(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FuseStrategy(**arguments)


def test_there_is_no_model_before_the_first_round() -> None:
    with pytest.raises(ConfigError, match="start"):
        _ = FuseStrategy().fused


def test_arrays_of_another_network_are_told_before_the_first_round() -> None:
    with pytest.raises(ConfigError, match="'torch.*Linear': "):
        FuseStrategy(model=nn.Linear(2, 3)).start(grid_with(client(1.0, 1)), start())


def test_missing_server_rows_are_told_before_the_first_round() -> None:
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    strategy = FuseStrategy("feddu", network, clients="fedfuse", local=LOCAL)
    with pytest.raises(RecipeError, match="'feddu' .*rows"):
        strategy.start(grid_with(fails, fails), ArrayRecord(network.state_dict()))


def test_a_step_that_changes_shapes_under_plain_clients_is_stopped() -> None:
    class Widen(ServerPart):
        def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
            wide = {n: torch.cat([t, t]) for n, t in state.single.posterior.mean.items()}
            return state.fused(wide, spec=state.single.spec.with_shapes_of(wide) if network else None)

    own = replace(find_method("fedavg").recipe(), name="mine", steps=(Widen(),))
    apps, network = (client(1.0, 1), client(1.0, 1)), nn.Linear(2, 2)
    with pytest.raises(RecipeError, match="'mine' .*shape"):
        FuseStrategy(own, network).start(grid_with(*apps), ArrayRecord(network.state_dict()))
    network = None
    with pytest.raises(MethodFault, match="'fedavg': Widen .* w is 4 float64, expected 2 float64"):
        FuseStrategy(own).start(grid_with(*apps), ArrayRecord({"w": Array(np.zeros(2))}))


def test_arrays_that_somebody_changed_between_rounds_are_the_ones_that_count() -> None:
    grid, strategy = grid_with(client(1.0, 10), client(1.0, 10)), FuseStrategy("fedavgm")
    arrays, sent = start(), []
    for round_ in (1, 2):
        messages = list(strategy.configure_train(round_, arrays, ConfigRecord(), grid))
        sent.append(float(messages[0].content["arrays"]["w"].numpy()[0, 0]))
        got, _ = strategy.aggregate_train(round_, grid.send_and_receive(messages))
        assert got is not None
        arrays = ArrayRecord({name: moved(array, 5.0) for name, array in got.items()})
    assert sent == [0.0, 6.0]
    assert got["w"].numpy()[0, 0] > 7.0  # and the momentum is still there


@pytest.mark.parametrize("how", ["server_fn", "strategy"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flowers_older_server_is_told_what_to_use_instead(how: str) -> None:
    class Grid(Gathering):
        run = type("Run", (), {"run_id": 1})()

    def server_fn(_: Context) -> ServerAppComponents:
        return ServerAppComponents(strategy=FuseStrategy(), config=ServerConfig(num_rounds=1))  # type: ignore[arg-type]

    app = ServerApp(server_fn=server_fn) if how == "server_fn" else ServerApp(strategy=FuseStrategy())  # type: ignore
    with pytest.raises(ConfigError, match=r"strategy\.start"):
        app(Grid(), Context(1, 1, {}, RecordDict(), {}))


def test_a_network_and_server_rows_serve_methods_that_need_them() -> None:
    network = nn.Sequential(nn.Linear(3, 2))
    bench = Bench(Rows(torch.randn(12, 3), torch.randint(2, (12,))), classes=2)
    strategy = FuseStrategy("swa", network, bench=bench)
    result = strategy.start(
        grid_with(client(1.0, 10), client(1.0, 30)), ArrayRecord(network.state_dict()), num_rounds=1
    )
    for name, tensor in network.state_dict().items():
        assert torch.from_numpy(result.arrays[name].numpy().copy()).allclose(tensor + 1)


def walker(scale: float, examples: float, seed: int) -> App:
    """A client that moves every weight by a small draw of its own, times a scale."""

    def answer(message: Message, _: Context) -> Message:
        draw = np.random.default_rng(seed)
        arrays = message.content["arrays"].items()
        moves = {n: np.asarray(a.numpy() + scale * draw.normal(size=a.shape), dtype=a.dtype) for n, a in arrays}
        record = ArrayRecord({name: Array(move) for name, move in moves.items()})
        metrics = MetricRecord({"num-examples": examples})
        return Message(RecordDict({"mine": record, "metrics": metrics}), reply_to=message)

    return answer


@pytest.mark.parametrize(("scale", "what"), [(500.0, "clipped"), (1e9, "refused")])
def test_who_was_clipped_or_refused_stands_in_the_log_the_metrics_and_the_ledger(
    scale: float, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    grid = grid_with(*(walker(scale if i == 4 else 1.0, 100, i) for i in range(5)))
    strategy = FuseStrategy("fedavg")
    result = strategy.start(grid, ArrayRecord(nn.Linear(6, 4).state_dict()), num_rounds=1)
    metrics, (line,) = result.train_metrics_clientapp[1], strategy.ledger
    assert (metrics["fuse-clipped"], metrics["fuse-refused"]) == ((1, 0) if what == "clipped" else (0, 1))
    assert metrics["left-out"] == metrics["fuse-refused"]
    assert line["round"] == 1
    assert {entry["client"] for entry in line[what]} == {"node-1028"}
    assert all(entry.keys() == {"client", "field", "got", "expected"} for entry in line[what])
    told = [r for r in caplog.records if r.name == "flwr" and r.levelno == logging.WARNING]
    assert len(told) == 1, "one line per client, however many layers were weakened"
    assert all(text in told[0].getMessage() for text in ("node-1028", line[what][0]["field"], line[what][0]["got"]))


class Breaks(ServerPart):
    """An aggregator that cannot bear one client."""

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        if any(update.num_examples == 13 for update in cohort):
            raise ConfigError("13 is too many")
        return state


def test_whom_the_fusion_could_not_bear_is_told_like_any_refused(caplog: pytest.LogCaptureFixture) -> None:
    own = replace(find_method("fedavg").recipe(), name="mine", steps=(Breaks(),))
    strategy = FuseStrategy(own)
    result = strategy.start(grid_with(*(client(1.0, n) for n in (10, 13, 11, 12))), start(), num_rounds=1)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["fuse-refused"], metrics["left-out"]) == (1, 1)
    assert strategy.ledger[0]["refused"][0]["client"] == "node-1007"
    assert "13 is too many" in caplog.text


SIZES = 300, 450, 500, 800, 9000


def plain_mean(sizes: tuple[int, ...]) -> float:
    return sum(i * n for i, n in enumerate(sizes)) / sum(sizes)


@pytest.mark.parametrize("sizes", [SIZES, SIZES[2:], SIZES[3:], (1, 1, 1, 1, 100_000)])
def test_numbers_of_examples_are_believed_as_by_flowers_fedavg(sizes: tuple[int, ...]) -> None:
    strategy = FuseStrategy("fedavg")
    result = strategy.start(
        grid_with(*(client(1.0 + i / 10, n, 1) for i, n in enumerate(sizes))), start(), num_rounds=1
    )
    assert strategy.ledger[0]["refused"] == strategy.ledger[0]["clipped"] == []
    assert result.arrays["w"].numpy() == pytest.approx(np.full((2, 2), 1 + plain_mean(sizes) / 10))


@pytest.mark.parametrize("count", [3, 5])
def test_an_absurd_number_of_examples_is_believed_of_no_client(count: int) -> None:
    strategy = FuseStrategy("fedavg")
    fused(strategy, grid_with(client(5.0, 3e9), *(client(1.0, 1000) for _ in range(count - 1))))
    assert [(r["client"], r["field"]) for r in strategy.ledger[0]["refused"]] == [("node-1000", "num_examples")]


def test_who_vouches_for_some_clients_believes_only_those() -> None:
    def outcome(enrol: dict[str, int]) -> tuple[set[str], set[str]]:
        strategy = FuseStrategy("fedavg", enrol=enrol)
        fused(strategy, grid_with(*(client(1.0, n) for n in SIZES)))
        line = strategy.ledger[0]
        return {r["client"] for r in line["refused"]}, {c["client"] for c in line["clipped"]}

    assert outcome({}) == ({"node-1028"}, set())
    assert outcome({"node-1028": 9000}) == (set(), set())
    assert outcome({"node-1028": 9000, "node-1000": 200}) == ({"node-1000"}, set()), "more than it enrolled with"


def test_bounds_are_the_operators() -> None:
    def clipped(bounds: Any) -> bool:
        strategy = FuseStrategy("fedavg", bounds=bounds)
        fused(strategy, grid_with(*(client(1.0, 10) for _ in range(4)), client(9.0, 10)))
        return bool(strategy.ledger[0]["clipped"])

    assert clipped(None)
    assert not clipped({"ratio": 10.0})
    assert not clipped(Bounds(over="off"))


def test_one_clients_nan_takes_no_metric_from_the_others() -> None:
    result = FuseStrategy().start(grid_with(*map(reports, (1.0, 2.0, float("nan")))), start(), num_rounds=1)
    for metrics in (result.train_metrics_clientapp[1], result.evaluate_metrics_clientapp[1]):
        assert metrics["loss"] == pytest.approx(1.5)


def reports(loss: float) -> App:
    """A client that leaves the weights as they are."""

    def answer(message: Message, _: Context) -> Message:
        metrics = MetricRecord({"num-examples": 10, "loss": loss})
        return Message(RecordDict({"mine": message.content["arrays"], "metrics": metrics}), reply_to=message)

    return answer
