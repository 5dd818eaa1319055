"""What scoring costs: SWA's mean of a ResNet-18 of ten clients beside the plain mean of the same updates.

All cases are timed in turn, again and again, and each keeps its best time, so that a busy machine troubles all alike.
The ratio is of the processor's own seconds, which busy neighbours trouble least. Scoring alone is what is above one.

    python benchmarks/swa.py [--clients 10] [--repeats 7] [--model resnet50] [--all] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.methods.swa import NonGaussianMean, Renyi
from fedfuse.server.aggregate.mean import Mean
from fedfuse.wire.codec import decode, encode, read
from machine import here

LIMIT = 2.5
"""Averaging and scoring, whose sums may take one and a half of it, may cost so many plain means."""


def main() -> None:
    said = arguments()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        memory, files = updates(said.model, said.clients, Path(folder))
        times = measured(cases(memory, files, said.all), said.repeats)
    plain = {"files" in name: both for name, both in times.items() if name.startswith("plain")}
    rows = [
        {"case": name, "seconds": seconds, "cpu_seconds": cpu, "ratio": cpu / plain["files" in name][1]}
        for name, (seconds, cpu) in times.items()
    ]
    setting = {"model": said.model, "clients": said.clients, "limit": LIMIT}
    if said.json:
        said.json.write_text(json.dumps({**here(), **setting, "rows": rows}, indent=1) + "\n")
    print(f"{said.model}, {said.clients} clients, best of {said.repeats}; at most {LIMIT:g} plain means wanted")
    print(f"{'':28} {'seconds':>8} {'CPU':>8} {'plain means':>12}")
    for row in rows:
        print(f"{row['case']:28} {row['seconds']:8.3f} {row['cpu_seconds']:8.3f} {row['ratio']:12.2f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--all", action="store_true", help="also one weight per filter, and Rényi scores")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    return parser.parse_args()


def updates(model: str, clients: int, folder: Path) -> tuple[Cohort, Cohort]:
    """The same updates twice: as messages in memory and as files."""
    spec, draw = Spec(model, {"classes": 100}), torch.Generator().manual_seed(0)
    start = Single.of(spec.build(), spec).posterior.mean
    here, there = [], []
    for place in range(clients):
        moved = {n: _moved(t, draw) for n, t in start.items()}
        message = encode(moved, {})
        path = folder / f"{place}.safetensors"
        path.write_bytes(message)
        update = ClientUpdate(f"client-{place}", Posterior(decode(message).tensors), 1.0 + place, 1, spec)
        here.append(update)
        there.append(replace(update, posterior=Posterior(read(path).tensors)))
    return Cohort.of(here), Cohort.of(there)


def _moved(tensor: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor + 0.01 * torch.randn(tensor.shape, generator=draw)


def cases(memory: Cohort, files: Cohort, all_of_them: bool) -> dict[str, Callable[[], object]]:
    spec = memory.updates[0].spec
    state, bench = ServerState(0, Single(spec, Posterior({}))), Bench()
    chosen: dict[str, Callable[[], object]] = {
        "plain mean": lambda: Mean()(memory, state, bench),
        "swa": lambda: NonGaussianMean()(memory, state, bench),
        "plain mean, from files": lambda: Mean()(files, state, bench),
        "swa, from files": lambda: NonGaussianMean()(files, state, bench),
    }
    if all_of_them:
        chosen["swa, a weight per filter"] = lambda: NonGaussianMean(level="filter")(memory, state, bench)
        chosen["swa, Rényi 1 by histogram"] = lambda: NonGaussianMean(Renyi())(memory, state, bench)
    return chosen


def measured(chosen: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, tuple[float, float]]:
    """The best seconds of each case, by the clock and of the processor, all cases in turn."""
    best = dict.fromkeys(chosen, (float("inf"), float("inf")))
    for _ in range(repeats):
        for name, case in chosen.items():
            began = time.perf_counter(), time.process_time()
            case()
            spent = time.perf_counter() - began[0], time.process_time() - began[1]
            best[name] = min(best[name][0], spent[0]), min(best[name][1], spent[1])
    return best


if __name__ == "__main__":
    main()
