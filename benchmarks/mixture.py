"""How fast does a mixture answer, and in how much memory? Against a loop over its members.

Run `python benchmarks/mixture.py [--json FILE] [--members N] [--rows N] [--threads N]`. Members answer 10,000 MNIST
test images where those are found (else noise); the mixture and the loop take turns, and the best processor time of
each counts. Twenty stacked MLPs of width 100 may take at most 60 % of the loop's time, and no network more than the
loop: wide MLPs are bound by their products, which stacking cannot lessen, and convolutions run member by member.
Memory is the growth of a process's peak while it answers, at several limits; the loop runs on all images at once.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedfuse.core.model import Single
from fedfuse.core.rng import seeded
from fedfuse.core.spec import Spec
from fedfuse.data import find, load
from fedfuse.nets.mixture import MEMORY, Mixture, TopLogit

SPECS = {
    "mlp 784-100-10": Spec("mlp"),
    "mlp 784-100-100-10": Spec("mlp", {"hidden": [100, 100]}),
    "mlp 784-200-200-200-10": Spec("mlp", {"hidden": [200, 200, 200]}),
    "lenet": Spec("lenet"),
}
LIMITS = (16 * 2**20, MEMORY, 256 * 2**20)


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds for all images, and the ratio that must not be too large."""

    network: str
    members: int
    rows: int
    loop_ms: float
    mixture_ms: float
    ratio: float
    allowed: float


@dataclass(frozen=True, slots=True)
class Peak:
    """How much a process grew while a mixture answered."""

    network: str
    way: str
    limit_mib: int
    grown_mib: float


def images(rows: int) -> Tensor:
    return load("mnist").test.x[:rows] if find("mnist") is not None else noise(rows)


def noise(rows: int) -> Tensor:
    return torch.rand(rows, 1, 28, 28, generator=torch.Generator().manual_seed(0))


def mixture(spec: Spec, members: int, memory: int = MEMORY) -> Mixture:
    with seeded(0, "members"):
        made = tuple(Single.of(spec.build(), spec) for _ in range(members))
    return Mixture(made, torch.full((members,), 1 / members, dtype=torch.float64), TopLogit(1), memory)


def one_by_one(model: Mixture, x: Tensor) -> Tensor:
    return model.combine(model.weights, torch.stack([m.logits(x) for m in model.members]))


def best_times(ways: list[Callable[[], Tensor]], repeats: int) -> list[float]:
    """The best processor time of each, taken in turns so that a busy neighbour disturbs all alike."""
    best = [float("inf")] * len(ways)
    for _ in range(repeats):
        for place, way in enumerate(ways):
            began = time.process_time()
            way()
            best[place] = min(best[place], time.process_time() - began)
    return best


def speed(name: str, members: int, x: Tensor, repeats: int) -> Row:
    model = mixture(SPECS[name], members)
    with torch.no_grad():
        assert torch.allclose(model.logits(x[:500]), one_by_one(model, x[:500]), atol=1e-4)
        loop, mixed = best_times([lambda: one_by_one(model, x), lambda: model.logits(x)], repeats)
    allowed = 0.6 if name.startswith("mlp 784-100") else 1.0
    return Row(name, members, len(x), 1e3 * loop, 1e3 * mixed, mixed / loop, allowed)


def grown(name: str, way: str, limit: int, members: int, rows: int) -> float:
    """Mebibytes that this process's peak grows by while all images are answered."""
    x, model = noise(rows), mixture(SPECS[name], members, limit)  # reading files has a peak of its own
    with torch.no_grad():
        model.logits(x[:2])  # whatever is made once is made now
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        model.logits(x) if way == "mixture" else one_by_one(model, x)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def in_a_process(name: str, way: str, limit: int, members: int, rows: int) -> Peak:
    call = f"from mixture import grown; print(grown({name!r}, {way!r}, {limit}, {members}, {rows}))"
    here = str(Path(__file__).resolve().parent)
    command = [
        sys.executable,
        "-c",
        f"import sys, torch; torch.set_num_threads(1); sys.path.insert(0, {here!r}); {call}",
    ]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Peak(name, way, limit // 2**20, float(out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--members", type=int, default=20)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    x = images(args.rows)
    rows, peaks = [], []
    for name in SPECS:
        rows.append(row := speed(name, args.members, x, repeats=5 if name.startswith("mlp") else 2))
        said = "ok" if row.ratio <= row.allowed else f"above {row.allowed:.0%}"
        print(
            f"{row.network:24} loop {row.loop_ms:7.0f} ms   mixture {row.mixture_ms:7.0f} ms   {row.ratio:4.0%}  {said}"
        )
    for name in ("mlp 784-200-200-200-10", "lenet"):
        peaks.append(in_a_process(name, "loop", MEMORY, args.members, args.rows))
        peaks += [in_a_process(name, "mixture", limit, args.members, args.rows) for limit in LIMITS]
        for peak in peaks[-1 - len(LIMITS) :]:
            limit = f"{peak.limit_mib:4} MiB" if peak.way == "mixture" else "no limit"
            print(f"{peak.network:24} {peak.way:8} {limit:9} grew by {peak.grown_mib:6.0f} MiB")
    if args.json:
        args.json.write_text(
            json.dumps({"speed": [asdict(r) for r in rows], "memory": [asdict(p) for p in peaks]}, indent=2)
        )


if __name__ == "__main__":
    main()
