"""Does a simulation of many clients hold its memory, and does it spend its time on training?

Run `python benchmarks/scale.py [--json FILE] [--workers N] [--method NAME] [--clients N ...]`. FedAvg on an MLP,
50 clients a round, 20 rounds, each client with 60 rows, batches of 10 and 10 epochs (10,000 clients share MNIST's
60,000 rows, 6 each). Everything a run does is in it: the door, the ledger, checkpoints, scores. Rows are MNIST's where
it is found, else random ones of that shape. Every case is a process of its own, so that its memory is its own.

With `--stream N` it sends N small replies (sums of five rows each) through the door instead, a thousand at a time, adds
every thousand up to a region's sum and the regions to one, and prints seconds and the peak of memory on the way (a
reply's milliseconds are the processor's). Seconds should be linear and memory flat, whatever N is.

- training: seconds in which a worker trains, over the seconds of all rounds (times the number of workers).
- memory: the peak of round 20 over that of round 5, workers included; 1.00 is flat.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from fedfuse.experiment.callbacks import Callback

ROUNDS, EARLY = 20, 5


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured with so many clients."""

    clients: int
    asked: int
    rows: int
    seconds: float
    training: float
    early_mib: float
    late_mib: float
    memory: float
    whole_seconds: float


@dataclass
class Meter(Callback):
    """A run's watcher that looks at the clock and at memory after every round."""

    began: float = 0.0
    ended: float = 0.0
    trained: float = 0.0
    peaks: list[int] = field(default_factory=list)

    def method_started(self, label: str, seed: int, done: int, rounds: int, clients: int) -> None:
        """Start the clock."""
        del label, seed, done, rounds, clients
        self.began = time.perf_counter()

    def client_done(self, client: str, seconds: float, remembered: bool) -> None:
        """Add the client's own seconds."""
        del client, remembered
        self.trained += seconds

    def round_done(self, label: str, seed: int, round_: int, scores: Mapping[str, Any]) -> None:
        """Note when the round ended, and how much memory it took."""
        del label, seed, round_, scores
        self.ended = time.perf_counter()
        self.peaks.append(sum(peak_and_forget(p) for p in family()))


def family() -> list[psutil.Process]:
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def peak_and_forget(process: psutil.Process) -> int:
    """The most memory a process has held since we last asked; where that cannot be told, what it holds now."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
    except (OSError, StopIteration):
        return int(process.memory_info().rss) if process.is_running() else 0


def synthetic() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Random rows in MNIST's shape."""
    draw = np.random.default_rng(0)
    train, test = [(draw.random((n, 1, 28, 28), np.float32), draw.integers(0, 10, n)) for n in (60_000, 10_000)]
    return *train, *test


def measure(clients: int, workers: int, method: str, memo: bool) -> Row:
    from fedfuse.data import find
    from fedfuse.experiment.config import Experiment
    from fedfuse.experiment.run import execute

    rows, asked = min(60 * clients, 60_000), min(50, clients)
    source = "mnist" if find("mnist") else f"{Path(__file__).stem}:synthetic"
    experiment = Experiment(
        rounds=ROUNDS,
        clients_per_round=asked,
        data={"source": source, "clients": clients, "train_limit": rows},
        model={"name": "mlp", "hidden": [200]},
        local={"epochs": 10, "batch_size": 10, "optimizer": {"lr": 0.05}},
        methods=[{"name": method}],
    )
    meter, began = Meter(), time.perf_counter()
    with tempfile.TemporaryDirectory() as home:
        store = Path(home) / "memo" if memo else None
        execute(experiment, Path(home) / "run", workers=workers, memo=store, watch=meter)
    seconds, (early, late) = meter.ended - meter.began, (meter.peaks[EARLY - 1], meter.peaks[ROUNDS - 1])
    return Row(
        clients=clients,
        asked=asked,
        rows=rows,
        seconds=seconds,
        training=meter.trained / (seconds * max(1, workers)),
        early_mib=early / 2**20,
        late_mib=late / 2**20,
        memory=late / early,
        whole_seconds=time.perf_counter() - began,
    )


COLUMNS: list[tuple[str, str, str]] = [
    ("clients", "clients", ">8d"),
    ("asked", "a round", ">9d"),
    ("rows", "rows", ">8d"),
    ("seconds", "rounds, s", ">11.1f"),
    ("training", "training", ">10.0%"),
    ("early_mib", "round 5, MiB", ">14.0f"),
    ("late_mib", "round 20, MiB", ">15.0f"),
    ("memory", "memory", ">8.2f"),
    ("whole_seconds", "with set-up, s", ">16.1f"),
]


def shown(row: Mapping[str, Any]) -> str:
    return "".join(format(row[name], form) for name, _, form in COLUMNS)


def in_a_process_of_its_own(clients: int, options: argparse.Namespace) -> dict[str, Any]:
    words = ["--clients", str(clients), "--workers", str(options.workers), "--method", options.method, "--one"]
    command = [sys.executable, __file__, *words, *(["--memo"] if options.memo else [])]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=alone, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


def show_stream(count: int, path: Path | None) -> None:
    from stream import stream

    print(f"{'replies':>10}{'seconds':>10}{'processor, s':>14}{'a reply, ms':>14}{'peak, MiB':>12}")
    marks, arrived = stream(count)
    for mark in marks:
        told = f"{mark.replies:>10d}{mark.seconds:>10.1f}{mark.busy_seconds:>14.1f}"
        print(f"{told}{1000 * mark.busy_seconds / mark.replies:>14.3f}{mark.peak_mib:>12.0f}", flush=True)
    print(f"{arrived:.0f} rows arrived, {marks[-1].peak_mib / marks[0].peak_mib:.2f} of the first mark's memory")
    if path:
        path.write_text(json.dumps([asdict(mark) for mark in marks], indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--workers", type=int, default=0, help="worker processes (default: train in one process)")
    parser.add_argument("--method", default="fedavg", help="the method to run (default: fedavg)")
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1_000, 10_000], help="how many there are")
    parser.add_argument("--memo", action="store_true", help="keep trained updates, as `fedfuse run` does")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stream", type=int, metavar="N", help="send N small replies through the door instead")
    options = parser.parse_args()
    if options.stream:
        show_stream(options.stream, options.json)
        return
    if options.one:
        print(json.dumps(asdict(measure(options.clients[0], options.workers, options.method, options.memo))))
        return
    print("".join(format(title, form.rstrip("df%").split(".")[0]) for _, title, form in COLUMNS))
    rows = []
    for clients in options.clients:
        rows.append(in_a_process_of_its_own(clients, options))
        print(shown(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
