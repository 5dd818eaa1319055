"""How fast is the weighted mean? Against reading the same bytes once, and against Flower's own aggregation.

Run `python benchmarks/mean.py [--json FILE] [--threads N] [--small]`. All columns of a row come from one run on one
machine, so their ratios mean something even where the numbers do not.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.posterior import Posterior
from fedfuse.core.spec import Spec
from fedfuse.core.torch_utils import one_thread
from fedfuse.server.aggregate import mean as means
from fedfuse.server.aggregate.mean import mean_of
from fedfuse.wire.codec import decode, encode, read
from machine import here

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Case:
    """A model's shapes and how many clients send it."""

    name: str
    shapes: Shapes
    clients: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured in one case."""

    case: str
    parameters: int
    clients: int
    ours_gb_s: float
    limit_gb_s: float
    torch_gb_s: float
    files_gb_s: float
    files_limit_gb_s: float
    flower_gb_s: float | None
    times_flower: float | None
    share_of_limit: float
    share_of_files_limit: float
    relative_error: float
    extra_models: float
    time_per_client: float


def shapes_of(spec: Spec) -> Shapes:
    return {n: tuple(t.shape) for n, t in spec.skeleton().state_dict().items() if t.is_floating_point()}


def encoder_shapes() -> Shapes:
    """A 12-layer text encoder, 768 wide: 109 million parameters."""
    shapes: dict[str, tuple[int, ...]] = {"words": (30_522, 768), "places": (512, 768)}
    for layer in range(12):
        for part in ("query", "key", "value", "out"):
            shapes |= {f"{layer}.{part}.weight": (768, 768), f"{layer}.{part}.bias": (768,)}
        shapes |= {f"{layer}.up.weight": (3072, 768), f"{layer}.up.bias": (3072,)}
        shapes |= {f"{layer}.down.weight": (768, 3072), f"{layer}.down.bias": (768,)}
        shapes |= {f"{layer}.norm{i}.{leaf}": (768,) for i in (1, 2) for leaf in ("weight", "bias")}
    return shapes


def cases(small: bool) -> list[Case]:
    few = [
        Case("62k x 100", shapes_of(Spec("lenet", {"channels": 3, "size": 32})), 100, 15),
        Case("11.2M x 10", shapes_of(Spec("resnet18")), 10, 5),
    ]
    return few if small else [*few, Case("109M x 5", encoder_shapes(), 5, 3)]


def state(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=draw) for n, s in shapes.items()}


def messages(case: Case) -> list[bytes]:
    return [encode(state(case.shapes, seed), {}) for seed in range(case.clients)]


def cohort(payloads: Sequence[bytes | Path]) -> Cohort:
    """Updates as the door leaves them: views of the bytes that came, or files they wait in."""
    found = ((decode(p) if isinstance(p, bytes) else read(p)).tensors for p in payloads)
    return Cohort(tuple(ClientUpdate(f"c{i}", Posterior(m), 1.0 + i, 1, Spec("mlp")) for i, m in enumerate(found)))


def flower_replies(payloads: list[bytes]) -> Callable[[], object] | None:
    """Flower's aggregation of the same updates, or None where Flower is not installed."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    try:
        from flwr.app import ArrayRecord, MetricRecord, RecordDict
        from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
    except ImportError:
        return None
    replies = []
    for place, payload in enumerate(payloads):
        arrays = ArrayRecord({n: t.clone() for n, t in decode(payload).tensors.items()})
        replies.append(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1 + place})}))
    return lambda: aggregate_arrayrecords(replies, "num-examples")


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def best_of_each(repeats: int, *works: Callable[[], object]) -> list[float]:
    """The best time of each, taken in turns, so that a busy moment strikes all alike."""
    times = [[seconds(work) for work in works] for _ in range(repeats)]
    return [min(column) for column in zip(*times, strict=True)]


def read_once(payloads: list[bytes]) -> Callable[[], object]:
    """The limit: as many bytes as all clients sent are looked at once, in one long run for every thread."""
    whole = torch.zeros(sum(map(len, payloads)) // 4)
    parts = whole.chunk(torch.get_num_threads())

    def read_all() -> None:
        with one_thread():
            if len(parts) == 1:
                whole.sum()
                return
            with ThreadPoolExecutor(len(parts)) as pool:
                list(pool.map(torch.sum, parts))

    return read_all


def read_files(paths: list[Path]) -> Callable[[], object]:
    """The limit of files: their bytes are copied into memory once, a megabyte at a time."""

    def read_one(path: Path) -> None:
        room = bytearray(1 << 20)
        with path.open("rb", buffering=0) as file:
            while file.readinto(room):
                pass

    def read_all() -> None:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(read_one, paths))

    return read_all


def by_torch(work: Callable[[], object]) -> Callable[[], object]:
    """The same mean without compiled code."""

    def slower() -> None:
        means.MIN_COMPILED, before = 1 << 62, means.MIN_COMPILED
        try:
            work()
        finally:
            means.MIN_COMPILED = before

    return slower


def relative_error(means: Mapping[str, Tensor], updates: Cohort) -> float:
    """The largest error of any element against float64, relative to the sizes that were averaged: Σ w |x|."""
    worst = 0.0
    for name, mean in means.items():
        exact, size = torch.zeros(2, *mean.shape, dtype=torch.float64)
        for update, weight in zip(updates, updates.weights.tolist(), strict=True):
            term = update.posterior.mean[name].double() * weight
            exact += term
            size += term.abs()
        worst = max(worst, float(((mean.double() - exact).abs() / size).max()))
    return worst


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes tensors took at once while working in one thread, the result included."""
    with (
        one_thread(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen,
    ):
        work()
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(change for _, change in changes))


def measure(case: Case, folder: Path) -> Row:
    payloads = messages(case)
    paths = [folder / f"{case.clients}-{k}" for k in range(case.clients)]
    for path, payload in zip(paths, payloads, strict=True):
        path.write_bytes(payload)
    whole, half = cohort(payloads), cohort(payloads[: case.clients // 2])
    mean, stored = partial(mean_of, whole), partial(mean_of, cohort(paths))
    works = [mean, partial(mean_of, half), read_once(payloads), by_torch(mean), stored, read_files(paths)]
    flower = flower_replies(payloads)
    best_of_each(1, *works)  # compiled code is loaded, and files are in the system's cache
    ours, fewer, limit, torchs, files, files_limit, *theirs = best_of_each(
        case.repeats, *works, *([flower] if flower else [])
    )
    for path in paths:
        path.unlink()
    model = sum(torch.Size(s).numel() for s in case.shapes.values())
    gigabytes = 4e-9 * model * case.clients
    return Row(
        case=case.name,
        parameters=model,
        clients=case.clients,
        ours_gb_s=gigabytes / ours,
        limit_gb_s=gigabytes / limit,
        torch_gb_s=gigabytes / torchs,
        files_gb_s=gigabytes / files,
        files_limit_gb_s=gigabytes / files_limit,
        flower_gb_s=gigabytes / theirs[0] if theirs else None,
        times_flower=theirs[0] / ours if theirs else None,
        share_of_limit=limit / ours,
        share_of_files_limit=files_limit / files,
        relative_error=relative_error(mean_of(whole), whole),
        extra_models=peak_bytes(partial(mean_of, whole)) / (4 * model),
        time_per_client=(ours / case.clients) / (fewer / (case.clients // 2)),
    )


COLUMNS: list[tuple[str, str, str]] = [
    ("case", "case", "<12"),
    ("ours_gb_s", "ours GB/s", ">11.2f"),
    ("limit_gb_s", "limit GB/s", ">12.2f"),
    ("torch_gb_s", "by torch", ">10.2f"),
    ("files_gb_s", "files GB/s", ">12.2f"),
    ("share_of_files_limit", "of limit", ">10.2f"),
    ("flower_gb_s", "Flower GB/s", ">13.2f"),
    ("times_flower", "x Flower", ">10.1f"),
    ("share_of_limit", "of limit", ">10.2f"),
    ("relative_error", "rel. error", ">12.1e"),
    ("extra_models", "memory", ">9.2f"),
    ("time_per_client", "linear", ">8.2f"),
]


def shown(row: Mapping[str, Any]) -> str:
    width = {name: fmt.split(".")[0] for name, _, fmt in COLUMNS}
    return "".join(format("-", width[n]) if row[n] is None else format(row[n], fmt) for n, _, fmt in COLUMNS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads (default: all)")
    parser.add_argument("--small", action="store_true", help="leave out the case that takes several gigabytes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("".join(format(title, fmt.split(".")[0]) for _, title, fmt in COLUMNS))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(options.small):
            rows.append(asdict(measure(case, Path(folder))))
            print(shown(rows[-1]), flush=True)
    print("memory: the most in use at once, in models, the result included")
    print("linear: time per client with all clients over that with half of them; 1.00 is linear")
    if options.json:
        options.json.write_text(json.dumps({**here(), "threads": options.threads, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
