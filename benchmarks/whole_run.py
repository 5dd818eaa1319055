"""What does a whole run take, from the command to its page? Three rounds of ten LeNet clients with two workers.

Run `python benchmarks/whole_run.py [--json FILE] [--workers N] [--turns N]`. Each client has 6,000 rows of
Fashion-MNIST where it is found, else random ones of its shape; nothing is remembered from run to run. Time is that of
whole processes, imports and scores included, after a run that is not counted. Memory is the peak of a run of its own:
all processes are stopped for a moment, several times a second, and their proportional shares (PSS) added up, for
sums over processes that go on would count what they hand each other twice.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from machine import here
from scale import synthetic  # noqa: F401 - named in the experiment where Fashion-MNIST is missing

EXPERIMENT = """
name = "whole"
rounds = 3
data = {{ source = "{source}", clients = 10, partition = {{ kind = "iid" }} }}
model = {{ name = "lenet" }}
local = {{ batch_size = 64, optimizer = {{ lr = 0.01, momentum = 0.9 }} }}
methods = [{{ name = "fedavg" }}]
"""
PAUSE = 0.15


@contextmanager
def command(workers: int) -> Iterator[list[str]]:
    """The command, with files that go when it is done."""
    from fedfuse.data import find

    source = "fashion-mnist" if find("fashion-mnist") else f"{Path(__file__).stem}:synthetic"
    with tempfile.TemporaryDirectory() as home:
        file = Path(home) / "whole.toml"
        file.write_text(EXPERIMENT.format(source=source))
        out = ["--out", str(Path(home) / "run"), "--workers", str(workers), "--no-memo"]
        yield [sys.executable, "-m", "fedfuse", "run", str(file), *out]


def quietly(words: list[str]) -> psutil.Popen:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return psutil.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": path}
    )


def ended(process: psutil.Popen) -> None:
    if process.wait():
        raise SystemExit(f"the run ended with code {process.returncode}")


def seconds(workers: int) -> float:
    """How long a run takes on the clock."""
    with command(workers) as words:
        began = time.perf_counter()
        ended(quietly(words))
        return time.perf_counter() - began


def peak(workers: int) -> float:
    """The most MiB that all processes of a run held together."""
    most = 0
    with command(workers) as words:
        process = quietly(words)
        while process.poll() is None:
            most = max(most, held(process))
            time.sleep(PAUSE)
        ended(process)
    return most / 2**20


def held(process: psutil.Popen) -> int:
    """The bytes of a process and of all that it started, at one moment."""
    total, stopped = 0, []
    with suppress(psutil.Error):
        for one in (process, *process.children(recursive=True)):
            one.suspend()
            stopped.append(one)
        total = sum(one.memory_full_info().pss for one in stopped)
    for one in stopped:
        with suppress(psutil.Error):
            one.resume()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    seconds(options.workers)  # warms up
    taken = [seconds(options.workers) for _ in range(options.turns)]
    found = {"seconds": statistics.median(taken), "peak_mib": peak(options.workers)}
    print("  ".join(f"{name} {value:,.1f}" for name, value in found.items()))
    if options.json:
        options.json.write_text(json.dumps({**here(), "workers": options.workers, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
