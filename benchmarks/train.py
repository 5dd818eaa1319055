"""How fast clients train for one epoch: both kernels of ours against a plain DataLoader loop and peers.

The plain loop is what most people write (DataLoader, zero_grad, backward, torch.optim.SGD). Flower, where it is
installed, is the same loop between its records, and its aggregation, without its transport. pfl-research trains
user-written networks in an environment of its own (`--pfl peers/bin/python`, see requirements-peers.txt) right after
the others. All ways are measured in turns, so that a busy machine is unfair to none, and medians of ratios within a
turn are shown. "Per core" is processor time of two of ten clients, one after the other in this process, where
neighbours hardly matter; "pool" is time on the clock of all ten with worker processes, against the better of one and
two threads for the plain loop.
`--json FILE` writes the numbers with machine and date; `--quick` takes a tenth of the images;
`python benchmarks/performance.py` makes the page's tables.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedfuse.client.objectives import Proximal
from fedfuse.core.messages import Brief
from fedfuse.core.params import Params
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings, Optimizer
from fedfuse.core.spec import Spec
from fedfuse.core.state import with_kind
from fedfuse.engines.local import InProcess, LocalEngine, Population
from fedfuse.engines.pool import Pool
from fedfuse.kernels import chain_for
from fedfuse.methods.scaffold import Controlled
from machine import here
from networks import own_lenet, own_mlp, plain_lenet

LR, MOMENTUM, BATCH = 0.01, 0.9, 64
CLIENTS, FEW = 10, 2  # of the federation, and of those that one core trains
PEERS = ("flower", "pfl")
Speeds = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    """A network, the images it sees, and how many of the most it trains on here."""

    spec: Spec
    shape: tuple[int, int, int] = (1, 28, 28)
    part: float = 1.0
    own: str = ""  # what `networks.py` calls it


CASES = {
    "lenet": Case(Spec("lenet")),
    "lenet, user-written": Case(Spec.of(plain_lenet()), own="plain_lenet"),
    "lenet with padding, user-written": Case(Spec.of(own_lenet()), own="own_lenet"),
    "mlp 784-100-10": Case(Spec("mlp", {"inputs": 784, "hidden": [100]})),
    "mlp, user-written": Case(Spec.of(own_mlp()), own="own_mlp"),
    "convnet_ams": Case(Spec("convnet_ams"), (3, 32, 32), 0.1),
    "vgg11, a quarter as wide": Case(Spec("vgg11", {"widths": 0.25}), (3, 32, 32), 0.1),
    "resnet18, a quarter as wide": Case(Spec("resnet18", {"widths": 0.25}), (3, 32, 32), 0.05),
}


def images(count: int, shape: tuple[int, int, int]) -> Rows:
    """MNIST where the data folder has it, else random images: the work is the same."""
    if shape == (1, 28, 28) and os.environ.get("FEDFUSE_DATA"):
        from fedfuse.data import load

        return load("mnist", train_limit=count).train
    draw = torch.Generator().manual_seed(0)
    return Rows(torch.rand(count, *shape, generator=draw), torch.randint(0, 10, (count,), generator=draw))


def plain(spec: Spec, start: Params, population: Population, threads: int) -> None:
    """Clients, one after another, as a textbook trains them."""
    torch.set_num_threads(threads)
    for client in population.clients:
        train_plainly(spec, start, population.rows_of(client))


def train_plainly(spec: Spec, start: Params, rows: Rows) -> nn.Module:
    """One client's epoch as a textbook has it."""
    loader = DataLoader(TensorDataset(rows.x, rows.y), batch_size=BATCH, shuffle=True)
    model, loss_of = spec.build().train(), nn.CrossEntropyLoss()
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
    return model


def flower(spec: Spec, start: Params, population: Population) -> None:
    """The same between Flower's records, then Flower's own mean."""
    from flwr.app import ArrayRecord, MetricRecord, RecordDict
    from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

    sent, replies = ArrayRecord(dict(start)), []
    for client in population.clients:
        rows = population.rows_of(client)
        model = train_plainly(spec, sent.to_torch_state_dict(), rows)
        told = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(rows)})}
        replies.append(RecordDict(told))
    aggregate_arrayrecords(replies, "num-examples")


def has_flower() -> bool:
    """Whether Flower is installed here."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    return importlib.util.find_spec("flwr") is not None


def pfl_speeds(python: Path, case: Case, few: Population, turns: int) -> list[float]:
    """Samples per second of processor time by pfl-research, in a process of that environment."""
    with tempfile.TemporaryDirectory() as folder:
        for client in few.clients:
            rows = few.rows_of(client)
            for name, tensor in (("x", rows.x), ("y", rows.y.long())):
                tensor.contiguous().numpy().tofile(Path(folder) / f"{client}.{name}")
        script = Path(__file__).with_name("train_pfl.py")
        settings = ["--batch", str(BATCH), "--lr", str(LR), "--momentum", str(MOMENTUM), "--rounds", str(turns)]
        command = [str(python), str(script), case.own, folder, *settings]
        alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, env=alone, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pfl-research did not train: {done.stderr.strip().splitlines()[-1]}")
    speeds: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return speeds


def work(kernel: str) -> Work:
    settings = LocalSettings(batch_size=BATCH, optimizer=Optimizer(lr=LR, momentum=MOMENTUM), kernel=kernel)  # type: ignore[arg-type]
    return Work(settings)


def ours(brief: Brief, engine: LocalEngine, what: Work) -> None:
    """The same training by an engine."""
    failed = [e.dropped for e in engine.exchange(brief, what, engine.clients) if e.payload is None]
    if failed:
        raise SystemExit(failed[0])


def in_turns(
    ways: Mapping[str, Callable[[], None]], samples: int, turns: int, clock: Callable[[], float] = time.perf_counter
) -> Speeds:
    """Samples per second of each way, once per turn; a turn before the first warms up."""
    speeds: Speeds = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            began = clock()
            way()
            if turn:
                speeds[name].append(samples / (clock() - began))
    return speeds


def ratio(one: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def better_threads(spec: Spec, start: Params, few: Population) -> int:
    """How many threads serve the plain loop best."""
    ways = {str(n): partial(plain, spec, start, few, n) for n in (1, 2)}
    one, two = in_turns(ways, sum(few.sizes().values()), turns=3).values()
    return 1 if ratio(one, two) > 1 else 2


def covered(spec: Spec, rows: Rows, kernel: str) -> bool:
    """Whether compiled kernels train this network when they are asked so."""
    module = spec.build().train()
    names = {name for name, _ in module.named_parameters()}
    return chain_for(module, rows, LocalSettings(batch_size=BATCH, kernel=kernel), names) is not None  # type: ignore[arg-type]


def per_core(case: Case, few: Population, turns: int) -> Speeds:
    """Processor time of one client after another: plain, by each kernel, and with a method's pull."""
    spec, start = case.spec, case.spec.build().state_dict()
    brief, alone = Brief(0, spec, start, classes=10), InProcess(few)
    pulled = replace(
        brief, memory=with_kind("control", {n: 0.001 * p for n, p in start.items() if p.is_floating_point()})
    )
    ways = {"plain": partial(plain, spec, start, few, 1), "torch": partial(ours, brief, alone, work("torch"))}
    ways["auto"] = partial(ours, brief, alone, work("auto"))
    if has_flower():
        ways["flower"] = partial(flower, spec, start, few)
    if covered(spec, few.rows_of(few.clients[0]), "auto"):
        ways["fedprox"] = partial(ours, brief, alone, replace(work("auto"), objective=Proximal(0.01)))
        ways["scaffold"] = partial(ours, pulled, alone, replace(work("auto"), objective=Controlled()))
    return in_turns(ways, sum(few.sizes().values()), turns, time.process_time)


def in_pool(case: Case, population: Population, few: Population, pool: Pool, turns: int) -> dict[str, Any]:
    """Time on the clock of worker processes and of the plain loop."""
    spec, start = case.spec, case.spec.build().state_dict()
    threads, engine = better_threads(spec, start, few), pool.engine(population)
    brief = Brief(0, spec, start, classes=10)
    ways = {
        "plain": partial(plain, spec, start, population, threads),
        "pool": partial(ours, brief, engine, work("auto")),
    }
    speeds = in_turns(ways, len(population.rows), turns)
    return {
        "clock": {name: statistics.median(values) for name, values in speeds.items()},
        "pool_ratio": ratio(speeds["pool"], speeds["plain"]),
        "plain_threads": threads,
        "pool_workers": pool.workers,
    }


def measure(name: str, most: int, pool: Pool | None, turns: int, pfl: Path | None) -> dict[str, Any]:
    case = CASES[name]
    rows = images(max(640, int(most * case.part)), case.shape)
    everybody = shared(rows)
    few = Population(rows, {client: everybody.index[client] for client in everybody.clients[:FEW]})
    speeds = per_core(case, few, turns)
    if pfl is not None and case.own:
        speeds["pfl"] = pfl_speeds(pfl, case, few, turns)
    result = {
        "model": name,
        "compiled": covered(case.spec, few.rows_of(few.clients[0]), "auto"),
        "per_core": {way: statistics.median(values) for way, values in speeds.items()},
        "over_plain": {way: ratio(values, speeds["plain"]) for way, values in speeds.items()},
        "over_torch": ratio(speeds["auto"], speeds["torch"]),
        "over_fedavg": {way: ratio(speeds[way], speeds["auto"]) for way in ("fedprox", "scaffold") if way in speeds},
    }
    return result | (in_pool(case, everybody, few, pool, max(1, turns // 2)) if pool else {})


def shared(rows: Rows) -> Population:
    return Population(rows, {f"client-{i}": torch.arange(i, len(rows), CLIENTS) for i in range(CLIENTS)})


def show(result: dict[str, Any]) -> None:
    core, times = result["per_core"], result["over_plain"]
    cells = [f"{core['plain']:>9,.0f}", *(f"{core[w]:>9,.0f} ({times[w]:4.2f}x)" for w in ("torch", "auto"))]
    kind = "compiled" if result["compiled"] else "torch"
    pulls = " ".join(f"{way} {share:.2f}" for way, share in result["over_fedavg"].items())
    pulls += " " + " ".join(f"{peer} {core[peer]:,.0f}" for peer in PEERS if peer in core)
    pool = f"pool {result['pool_ratio']:.2f}x" if "pool_ratio" in result else ""
    print(f"{result['model']:34}" + "  ".join(cells), f" auto is {kind:8}", pool, pulls, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="0 leaves the pool out")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), help="these networks alone")
    parser.add_argument("--pfl", type=Path, help="python of an environment that has pfl-research")
    parser.add_argument("--quick", action="store_true", help="6,000 images instead of 60,000")
    options = parser.parse_args()
    print(f"{'samples/s per core':34}{'plain':>9}{'torch':>18}{'auto':>18}")
    rows, most = [], 6_000 if options.quick else 60_000
    with Pool(options.workers) as pool:
        for name in options.only:
            rows.append(measure(name, most, pool if options.workers else None, options.turns, options.pfl))
            show(rows[-1])
    if options.json:
        options.json.write_text(json.dumps({**here(), "batch": BATCH, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
