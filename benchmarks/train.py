"""How fast ten clients train for one epoch: our worker pool against a plain single-process DataLoader loop.

The plain loop is what most people write (DataLoader, zero_grad, backward, torch.optim.SGD), with the better of one and
two threads, found on a tenth of the images. Both ways are then measured in turns, so that a busy machine is unfair to
neither; medians are shown. "Per core" compares processor time of one client, where neighbours hardly matter.
`--json FILE` writes the numbers, `--quick` takes a tenth of the images.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedfuse.core.messages import Brief
from fedfuse.core.params import Params
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings, Optimizer
from fedfuse.core.spec import Spec
from fedfuse.engines.base import InProcess, LocalEngine, Population
from fedfuse.engines.pool import Pool

MODELS = {"lenet": Spec("lenet"), "mlp 784-100-10": Spec("mlp", {"inputs": 784, "hidden": [100]})}
TARGETS = {"lenet": 1.7, "mlp 784-100-10": 2.0}
LR, MOMENTUM, BATCH = 0.01, 0.9, 64


def images(count: int) -> Rows:
    """MNIST where the data folder has it, else random images: the work is the same."""
    if os.environ.get("FEDFUSE_DATA"):
        from fedfuse.data import load

        return load("mnist", train_limit=count).train
    draw = torch.Generator().manual_seed(0)
    return Rows(torch.rand(count, 1, 28, 28, generator=draw), torch.randint(0, 10, (count,), generator=draw))


def plain(spec: Spec, start: Params, population: Population, threads: int) -> None:
    """Ten clients, one after another, as a textbook trains them."""
    torch.set_num_threads(threads)
    loss_of = nn.CrossEntropyLoss()
    for client in population.clients:
        rows = population.rows_of(client)
        loader = DataLoader(TensorDataset(rows.x, rows.y), batch_size=BATCH, shuffle=True)
        model = spec.build().train()
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()


def ours(brief: Brief, engine: LocalEngine) -> None:
    """The same training by an engine."""
    work = Work(LocalSettings(batch_size=BATCH, optimizer=Optimizer(lr=LR, momentum=MOMENTUM)))
    failed = [e.dropped for e in engine.exchange(brief, work, engine.clients) if e.payload is None]
    if failed:
        raise SystemExit(failed[0])


def in_turns(
    ways: Mapping[str, Callable[[], None]], samples: int, turns: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Samples per second of each way, once per turn; a turn before the first warms up."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
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
    one, two = in_turns(ways, len(few.rows), turns=3).values()
    return 1 if ratio(one, two) > 1 else 2


def measure(name: str, rows: Rows, pool: Pool, turns: int) -> dict[str, float | str]:
    spec, population, few = MODELS[name], shared(rows), shared(rows.take(range(len(rows) // 10)))
    start = spec.build().state_dict()
    brief, engine, alone = Brief(0, spec, start, classes=10), pool.engine(population), InProcess(few)
    threads = better_threads(spec, start, few)
    ways = {"plain": partial(plain, spec, start, population, threads), "pool": partial(ours, brief, engine)}
    speeds = in_turns(ways, len(rows), turns)
    per_core = in_turns(
        {"plain": partial(plain, spec, start, few, 1), "ours": partial(ours, brief, alone)},
        len(few.rows),
        turns,
        time.process_time,
    )
    return {
        "model": name,
        "plain_threads": threads,
        "plain": statistics.median(speeds["plain"]),
        "pool_workers": pool.workers,
        "pool": statistics.median(speeds["pool"]),
        "ratio": ratio(speeds["pool"], speeds["plain"]),
        "target": TARGETS[name],
        "per_core": ratio(per_core["ours"], per_core["plain"]),
    }


def shared(rows: Rows) -> Population:
    return Population(rows, {f"client-{i}": torch.arange(i, len(rows), 10) for i in range(10)})


def show(results: list[dict[str, float | str]]) -> None:
    columns = ("plain", "plain_threads", "pool", "pool_workers", "ratio", "target", "per_core")
    print(f"{'samples/s':16}" + "".join(f"{name.replace('_', ' '):>15}" for name in columns))
    for result in results:
        cells = [f"{result[c]:,.0f}" if c in ("plain", "pool") else f"{result[c]:.3g}" for c in columns]
        print(f"{result['model']:16}" + "".join(f"{cell:>15}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description="Training speed of the worker pool.")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="6,000 images instead of 60,000")
    options = parser.parse_args()
    rows = images(6_000 if options.quick else 60_000)
    with Pool(options.workers) as pool:
        results = [measure(name, rows, pool, options.turns) for name in MODELS]
    show(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
