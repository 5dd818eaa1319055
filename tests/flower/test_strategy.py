"""FuseStrategy in an app that is not ours: plain clients, Flower's own loop, and the five ways to spoil a FedAvg."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")
sys.path.insert(0, str(Path(__file__).parent / "engines"))

from fake_grid import FakeGrid, through_bytes
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict

from fedfuse.core.rows import Rows
from fedfuse.core.state import Bench
from fedfuse.errors import RecipeError
from fedfuse.flower import FuseStrategy

Reply = Callable[[Message], Message]


@dataclass
class Gathering(FakeGrid):
    """A grid as Flower's own loop uses it: everything is sent, then everything comes back."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        sent = [through_bytes(message) for message in messages]
        return [self.nodes[m.metadata.dst_node_id].app(m, Context(1, 1, {}, RecordDict(), {})) for m in sent]


def moved(array: Array, shift: float) -> Array:
    """Every number plus the shift; whole numbers move by whole steps."""
    step = shift if array.dtype.startswith("float") else int(np.nan_to_num(shift))
    return Array(np.asarray(array.numpy() + step, dtype=array.dtype))


def client(shift: float, examples: float, **odd: Array) -> Callable[[Message, Context], Message]:
    """Somebody's own ClientApp: it adds a number to every weight."""

    def answer(message: Message, _: Context) -> Message:
        arrays = {n: moved(a, shift) for n, a in message.content["arrays"].items()}
        metrics = MetricRecord({"num-examples": examples, "loss": shift, "num-steps": 2})
        return Message(RecordDict({"mine": ArrayRecord({**arrays, **odd}), "metrics": metrics}), reply_to=message)

    return answer


def fails(message: Message, _: Context) -> Message:
    return Message(Error(code=1, reason="out of\nmemory"), reply_to=message)


def grid_with(*apps: Callable[[Message, Context], Message]) -> Gathering:
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


def test_server_memory_lives_on_between_rounds() -> None:
    strategy = FuseStrategy("fedavgm")
    apps = client(1.0, 10), client(1.0, 10)
    one, three = fused(FuseStrategy("fedavgm"), grid_with(*apps)), fused(strategy, grid_with(*apps), rounds=3)
    assert three["w"][0, 0] > 3 * one["w"][0, 0]  # momentum


def test_metrics_are_averaged_by_examples() -> None:
    result = FuseStrategy().start(grid_with(client(1.0, 10), client(4.0, 30), fails), start(), num_rounds=1)
    metrics = result.train_metrics_clientapp[1]
    assert metrics["loss"] == pytest.approx(0.25 * 1 + 0.75 * 4)
    assert metrics["left-out"] == 1


@pytest.mark.parametrize(
    ("odd", "field"),
    [
        (client(float("nan"), 20), "w"),
        (client(1.0, 20, w=Array(np.ones((1, 2), np.float32))), "w"),
        (client(1.0, 20, more=Array(np.ones(1))), "more"),
        (client(1.0, -19), "mass"),
        (client(1.0, 1e13), "mass"),
        (client(1.0, 1e9), "mass"),
        (client(1.0, float("nan")), "mass"),
        (client(1.0, 20, w=Array("float32", (2, 2), "numpy.ndarray", b"\x80\x04a pickle")), None),
        (fails, None),
    ],
)
def test_one_bad_client_neither_spoils_nor_ends_a_round(
    odd: Callable[[Message, Context], Message], field: str | None
) -> None:
    strategy = FuseStrategy("fedavg")
    got = fused(strategy, grid_with(client(1.0, 20), odd, client(3.0, 20)))
    assert got["w"] == pytest.approx(np.full((2, 2), 2.0))
    assert strategy.admission is not None
    assert [r["field"] for r in strategy.admission.refused] == ([field] if field else [])
    assert len(strategy.admission.dropped) == (field is None)


def test_below_the_quorum_the_model_stays() -> None:
    strategy = FuseStrategy("fedavg", quorum=0.9)
    result = strategy.start(grid_with(client(1.0, 20), fails), start(), num_rounds=1)
    assert not result.arrays
    assert not result.train_metrics_clientapp


def test_a_share_of_the_nodes_is_asked_by_the_seed() -> None:
    grid = grid_with(*(client(1.0, 10) for _ in range(6)))

    def asked(seed: int, round_: int) -> list[int]:
        strategy = FuseStrategy(fraction_train=0.5, bench=Bench(seed=seed))
        messages = strategy.configure_train(round_, start(), ConfigRecord(), grid)
        return [message.metadata.dst_node_id for message in messages]

    assert len(asked(0, 1)) == 3
    assert asked(0, 1) == asked(0, 1)
    assert any(asked(0, 1) != asked(0, round_) for round_ in range(2, 6))


def test_nodes_may_evaluate_too() -> None:
    strategy = FuseStrategy(fraction_evaluate=1.0)
    result = strategy.start(grid_with(client(1.0, 10), client(4.0, 30)), start(), num_rounds=1)
    assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(3.25)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ensemble", "ends a round with several networks"),
        ("eaa", "trains layers of its own"),
        ("hybrid_fl", "lets the server train or lend rows"),
    ],
)
def test_a_method_that_is_no_strategy_says_so(name: str, why: str) -> None:
    with pytest.raises(RecipeError, match=f"'{name}' {why}.*; use fedfuse.flower.server_app"):
        FuseStrategy(name)


def test_a_network_and_server_rows_serve_methods_that_need_them() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(3, 2))
    bench = Bench(Rows(torch.randn(12, 3), torch.randint(2, (12,))), classes=2)
    strategy = FuseStrategy("swa", network, bench=bench)
    result = strategy.start(
        grid_with(client(1.0, 10), client(1.0, 30)), ArrayRecord(network.state_dict()), num_rounds=1
    )
    for name, tensor in network.state_dict().items():
        assert torch.from_numpy(result.arrays[name].numpy().copy()).allclose(tensor + 1)
