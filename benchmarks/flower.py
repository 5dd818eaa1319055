"""What does fedfuse cost on Flower: bytes, seconds per round, and the server's memory?

Run `python benchmarks/flower.py [memory] [simulation] [deployment] [--json FILE]`; without words, all three.

- memory: the server's peak, above what it holds before, in models of that size: ten replies of 25M float32 parameters,
  and one of 100M, inflated from Flower's objects as its HTTP grid does it. The limit for ten is five: three models and
  two replies. Each case is a process of its own.
- simulation, deployment: seconds per round of FedAvg with ten (three) clients that train an MLP on their rows, run by
  our loop and as a plain Flower strategy, one after the other in the same run; the first round is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from fedfuse.experiment.callbacks import Callback
from fedfuse.flower.version import need_flower

need_flower()

ROUNDS = 6
HERE = Path(__file__).resolve().parents[1]
FILE = """
name = "speed"
rounds = {rounds}
[data]
source = "digits"
clients = {clients}
[model]
name = "mlp"
hidden = [256]
[local]
epochs = 2
batch_size = 32
optimizer = {{ lr = 0.1 }}
[judge]
clients = "never"
[[methods]]
name = "fedavg"
"""


@dataclass(frozen=True, slots=True)
class Memory:
    """A server's peak while it admits and fuses."""

    parameters: int
    clients: int
    bytes_up: int
    seconds: float
    models: float  # the peak above the start, in models of this size


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds per round of both ways."""

    where: str
    clients: int
    ours: float
    plain: float
    ratio: float


def wide(parameters: int) -> nn.Module:
    """A network of about so many parameters in four layers."""
    width = int((parameters / 4) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))


@dataclass
class DiskGrid:
    """Replies wait on disk as Flower's objects, as in a SuperLink; each is inflated when it is pulled."""

    folder: Path
    clients: int
    sent: dict[str, int] = field(default_factory=dict)

    def get_nodes(self) -> list[Any]:
        """Every site, by its registered name."""
        from flwr.proto.node_pb2 import NodeInfo

        return [NodeInfo(node_id=i + 1, name=f"site-{i}") for i in range(self.clients)]

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        """Deflate what is sent, as the HTTP grid does."""
        from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = key = f"{message.metadata.dst_node_id}"
            for name, thing in get_all_nested_objects(message).items():  # what is sent is deflated piece by piece
                if not (self.folder / "down" / name).exists():
                    (self.folder / "down" / name).write_bytes(thing.deflate())
            ids.append(key)
            self.sent[key] = message.metadata.dst_node_id
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        """Inflate the reply from its objects."""
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        for key in message_ids:
            del self.sent[key]
        contents = {path.name: path.read_bytes() for path in (self.folder / "up").iterdir()}
        return [inflate_object_from_contents((self.folder / "id").read_text(), contents)]


def prepare_replies(folder: Path, parameters: int) -> None:
    """One reply as Flower's objects on disk; every site sends the same."""
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    brief, module = a_brief(parameters)
    from fedfuse.flower.records import reply_content
    from fedfuse.wire.codec import decode
    from fedfuse.wire.messages import encode_reply

    payload = encode_reply(brief, module.state_dict(), {}, num_examples=10.0, steps=1, facts={})
    message = Message(reply_content(decode(payload), 1.0), 1, "train")
    for name in ("up", "down"):
        (folder / name).mkdir()
    for name, thing in get_all_nested_objects(message).items():
        (folder / "up" / name).write_bytes(thing.deflate())
    (folder / "id").write_text(message.object_id)


def a_brief(parameters: int) -> tuple[Any, nn.Module]:
    from flwr.supercore.task_identity import TaskIdentity

    from fedfuse.core.messages import Brief
    from fedfuse.core.spec import Spec

    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    torch.manual_seed(0)
    module = wide(parameters)
    return Brief(0, Spec("flower_bench:wide", {"parameters": parameters}), module.state_dict(), classes=2), module


def serve(folder: Path, parameters: int, clients: int) -> Memory:
    """The server's half of a round, with its peak."""
    sys.modules["flower_bench"] = sys.modules["__main__"]  # the network's factory
    from fedfuse.core.model import Single
    from fedfuse.core.posterior import Posterior
    from fedfuse.core.recipe import Recipe
    from fedfuse.core.settings import LocalSettings
    from fedfuse.core.state import Bench, ServerState
    from fedfuse.flower.engine import Federation, FlowerEngine, Member
    from fedfuse.server.aggregate.mean import Mean
    from fedfuse.server.loop import RunPlan, one_round

    torch.set_num_threads(1)
    brief, _ = a_brief(parameters)
    size = sum(t.nbytes for t in brief.params.values())
    members = {f"site-{i}": Member(i + 1, 10) for i in range(clients)}
    federation = Federation(DiskGrid(folder, clients), clients, members=members)  # type: ignore[arg-type]
    recipe, local = Recipe(name="fedavg", aggregate=Mean()), LocalSettings()
    state = ServerState(0, Single(brief.spec, Posterior(brief.params)))
    me = psutil.Process()
    before, began = me.memory_info().rss - size, time.perf_counter()  # the first model is the server's own
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    record = one_round(recipe, FlowerEngine(federation, "fedavg", recipe, local), Bench(), None, state, RunPlan())
    peak = next(int(line.split()[1]) * 1024 for line in status() if line.startswith("VmHWM"))
    assert len(record.facts["clients"]) == clients
    spent = time.perf_counter() - began
    return Memory(size // 4, clients, record.facts["bytes_up"], spent, (peak - before) / size)


def status() -> list[str]:
    return Path("/proc/self/status").read_text().splitlines()


def memory() -> list[Memory]:
    found = []
    for parameters, clients in ((25_000_000, 10), (100_000_000, 1)):
        with tempfile.TemporaryDirectory() as folder:
            for step in ("prepare", "serve"):
                words = [step, folder, str(parameters), str(clients)]
                done = subprocess.run([sys.executable, __file__, "--step", *words], capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(done.stderr)
            found.append(Memory(**json.loads(done.stdout.splitlines()[-1])))
    return found


@dataclass
class Clock(Callback):
    """Told of rounds by either way of running."""

    ends: list[float] = field(default_factory=list)

    def round_done(self, *_: Any) -> None:
        """Note when it ended."""
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        """The median round after the first."""
        return statistics.median(b - a for a, b in zip(self.ends, self.ends[1:], strict=False))


def plain_apps(path: Path, clock: Clock) -> tuple[Any, Any]:
    """The same FedAvg as anybody would write it for Flower: their strategy, our training loop, the same judge."""
    from flwr.app import ArrayRecord, MetricRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    from fedfuse.core.model import Single
    from fedfuse.core.posterior import Posterior
    from fedfuse.experiment.config import load_experiment
    from fedfuse.experiment.prepare import prepare
    from fedfuse.flower.records import to_tensors

    setting = prepare(load_experiment(path)).setting(0)
    start = setting.start.single
    server = ServerApp()

    def judge(_: int, arrays: ArrayRecord) -> MetricRecord:
        scores = setting.judge.evaluate(Single(start.spec, Posterior(to_tensors(arrays))))
        clock.round_done()
        return MetricRecord({"accuracy": scores["accuracy"]})

    @server.main()
    def main(grid: Any, _: Any) -> None:
        arrays = ArrayRecord(dict(start.posterior.mean))
        FedAvg(fraction_evaluate=0.0).start(grid, arrays, num_rounds=ROUNDS, evaluate_fn=judge)

    return server, plain_client(path)


def plain_client(path: Path) -> Any:
    from flwr.clientapp import ClientApp

    app = ClientApp()
    app.train()(PlainTrainer(path))
    return app


@dataclass(frozen=True)
class PlainTrainer:
    """A client that trains as ours does and answers as Flower's tutorial does."""

    path: Path

    def __call__(self, message: Any, context: Any) -> Any:
        """Train and answer."""
        from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

        from fedfuse.core.messages import Brief
        from fedfuse.core.recipe import Work
        from fedfuse.flower.site import _setting
        from fedfuse.training.round import client_round
        from fedfuse.wire.codec import decode

        setting, place = _setting(self.path, 0), int(context.node_config["partition-id"])
        client = setting.population.clients[place]
        params = message.content["arrays"].to_torch_state_dict()
        round_ = int(message.content["config"]["server-round"]) - 1
        brief = Brief(round_, setting.start.single.spec, params, classes=setting.bench.classes)
        reply, _ = client_round(Work(setting.bench.local), brief, client, setting.population.rows_of(client))
        arrays = ArrayRecord({name: t.clone() for name, t in decode(reply).tensors.items()})
        numbers = MetricRecord({"num-examples": len(setting.population.rows_of(client))})
        return Message(RecordDict({"arrays": arrays, "metrics": numbers}), reply_to=message)


def simulation(clients: int = 10) -> Speed:
    from flwr.simulation import run_simulation

    from fedfuse.experiment.config import load_experiment
    from fedfuse.flower.run import simulate

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speed.toml"
        path.write_text(FILE.format(rounds=ROUNDS, clients=clients))
        ours, plain = Clock(), Clock()
        simulate(load_experiment(path), Path(folder) / "run", workers=2, watch=ours)
        server, client = plain_apps(path, plain)
        backend = {"init_args": {"num_cpus": 2}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(server, client, clients, "ray", backend)
    return Speed("simulation", clients, ours.seconds, plain.seconds, ours.seconds / plain.seconds)


PLAIN_SERVER = """
import json, time
from pathlib import Path
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from fedfuse.experiment.config import load_experiment
from fedfuse.experiment.prepare import prepare

app = ServerApp()

@app.main()
def main(grid, context):
    setting = prepare(load_experiment(Path(__file__).with_name("experiment.toml"))).setting(0)
    ends = []
    FedAvg(fraction_evaluate=0.0, min_available_nodes=3, min_train_nodes=3).start(
        grid, ArrayRecord(dict(setting.start.single.posterior.mean)), num_rounds=ROUNDS,
        evaluate_fn=lambda *_: ends.append(time.time()))
    Path(context.run_config["out"]).write_text(json.dumps(ends))
"""
PLAIN_CLIENT = """
from pathlib import Path
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from fedfuse.training.round import client_round
from fedfuse.core.messages import Brief
from fedfuse.core.seams import Work
from fedfuse.data import load
from fedfuse.experiment.config import load_experiment
from fedfuse.experiment.prepare import prepare
from fedfuse.wire.codec import decode

app = ClientApp()

@app.train()
def train(message, context):
    prepared = prepare(load_experiment(Path(__file__).with_name("experiment.toml")))
    rows, params = load(context.node_config["data"]).train, message.content["arrays"].to_torch_state_dict()
    brief = Brief(0, prepared.spec, params, classes=10)
    reply, _ = client_round(Work(prepared.local), brief, "site", rows)
    arrays = ArrayRecord({n: t.clone() for n, t in decode(reply).tensors.items()})
    numbers = MetricRecord({"num-examples": len(rows)})
    return Message(RecordDict({"arrays": arrays, "metrics": numbers}), reply_to=message)
"""


def deployment() -> Speed:
    """Three SuperNodes; both ways on the same SuperLink, ours first."""
    sys.path.insert(0, str(HERE / "examples" / "flower"))
    from deployment import Deployment  # type: ignore[import-not-found]
    from run import write_rows  # type: ignore[import-not-found]

    from fedfuse.experiment.config import load_experiment
    from fedfuse.flower.app import write_app

    with tempfile.TemporaryDirectory() as home:
        folder = Path(home).resolve()
        (folder / "speed.toml").write_text(FILE.format(rounds=ROUNDS, clients=3))
        experiment = load_experiment(folder / "speed.toml")
        for name in ("ours", "plain"):
            write_app(experiment, folder / name)
        for name, text in (("server", PLAIN_SERVER.replace("ROUNDS", str(ROUNDS))), ("client", PLAIN_CLIENT)):
            (folder / "plain" / "federation" / f"{name}_app.py").write_text(text)
        with Deployment(folder) as federation:
            for site, data in write_rows(folder / "rows").items():
                federation.register(site)
                federation.start_node(site, data)
            federation.submit(folder / "ours", out=str(folder / "run"))
            ours = watched(folder / "run" / "ledger.jsonl")
            federation.submit(folder / "plain", out=str(folder / "ends.json"))
            while not (folder / "ends.json").exists():
                time.sleep(0.5)
            ends = json.loads((folder / "ends.json").read_text())[1:]
    plain = statistics.median(b - a for a, b in itertools.pairwise(ends))
    return Speed("deployment", 3, ours, plain, ours / plain)


def watched(ledger: Path) -> float:
    """The median time between two lines of a ledger as it grows."""
    ends = list[float]()
    while len(ends) < ROUNDS:
        count = ledger.read_text().count("\n") if ledger.exists() else 0
        ends += [time.time()] * (count - len(ends))
        time.sleep(0.05)
    return statistics.median(b - a for a, b in itertools.pairwise(ends))


def show(rows: Iterable[Memory | Speed]) -> None:
    for row in rows:
        if isinstance(row, Memory):
            words = f"{row.clients} × {row.parameters / 1e6:.0f}M parameters: {row.bytes_up / 1e6:,.0f} MB up"
            print(f"{words}, {row.seconds:.1f} s, peak {row.models:.2f} models")
        else:
            words = f"{row.where}, {row.clients} clients: ours {row.ours:.2f} s a round, plain Flower {row.plain:.2f} s"
            print(f"{words}, ratio {row.ratio:.2f}")


def step(words: list[str]) -> None:
    kind, folder, parameters, clients = words
    if kind == "prepare":
        prepare_replies(Path(folder), int(parameters))
    else:
        print(json.dumps(asdict(serve(Path(folder), int(parameters), int(clients)))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", help="memory, simulation, deployment; by default all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--step", nargs=4, help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.step:
        step(said.step)
        return
    chosen, found = said.what or ["memory", "simulation", "deployment"], list[Memory | Speed]()
    if "memory" in chosen:
        found += memory()
    found += [way() for name, way in (("simulation", simulation), ("deployment", deployment)) if name in chosen]
    show(found)
    if said.json:
        said.json.write_text(json.dumps([asdict(row) for row in found], indent=1))


if __name__ == "__main__":
    main()
