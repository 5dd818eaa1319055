"""What do sums cost? Bringing them beside a local epoch, and fusing very many of them.

Run `python benchmarks/moments.py [--json FILE] [--clients N] [--features D]`.

- bringing: seconds of one client's exchange without training (moments of LeNet's last layer) over those of one local
  epoch of the same rows by torch and by compiled kernels; wanted at most a third.
- fusing: seconds to add the sums of so many clients and to solve, each client's sums in a file; wanted below 5 s for
  1,000 clients of 1,000 features.
- memory: the peak with all clients over that with a tenth of them; 1.00 is flat.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.linalg.ridge import Sums
from fedfuse.methods.fedavg import fedavg
from fedfuse.methods.refit import refit
from fedfuse.nets.head import moment_notes
from fedfuse.training.round import client_round
from fedfuse.wire.codec import encode, read
from machine import here
from scale import peak_and_forget


@dataclass(frozen=True, slots=True)
class Result:
    """What was measured."""

    rows: int
    torch_epoch_seconds: float
    compiled_epoch_seconds: float
    moments_seconds: float
    share_of_torch: float
    share_of_compiled: float
    clients: int
    features: int
    fuse_seconds: float
    peak_mib: float
    memory: float


def time_bringing(rows: int, repeats: int = 5) -> list[float]:
    """The least seconds of a local epoch by torch, of a compiled one, and of bringing moments, over the same rows."""
    spec = Spec("lenet")
    draw = torch.Generator().manual_seed(0)
    own = Rows(torch.rand(rows, 1, 28, 28, generator=draw), torch.randint(10, (rows,), generator=draw))
    brief = ServerState(0, Single.of(spec.build(), spec)).brief((), 10)
    by_torch, best_way = (LocalSettings(epochs=1, batch_size=64, kernel=kernel) for kernel in ("torch", "auto"))
    works = [fedavg().work(by_torch), fedavg().work(best_way), refit().work(best_way)]
    best = [float("inf")] * len(works)
    for _ in range(repeats):
        for place, work in enumerate(works):
            began = time.perf_counter()
            client_round(work, brief, "a", own)
            best[place] = min(best[place], time.perf_counter() - began)
    return best


def write_sums(path: Path, features: int, classes: int = 10) -> None:
    """One client's sums in a file."""
    draw = torch.Generator().manual_seed(0)
    phi = torch.cat([torch.randn(2 * features, features - 1, generator=draw), torch.ones(2 * features, 1)], 1)
    labels = torch.nn.functional.one_hot(torch.randint(classes, (2 * features,), generator=draw), classes)
    path.write_bytes(encode(moment_notes(Sums.of(phi, labels)), {}))


def updates(path: Path, clients: int, spec: Spec) -> Iterator[ClientUpdate]:
    """So many clients whose sums lie in a file and are read when asked for."""
    start = Posterior(dict(spec.build().state_dict()))
    for k in range(clients):
        yield ClientUpdate(f"client-{k}", start, 1000.0, 0, spec, notes=read(path).tensors)


def time_fusing(path: Path, clients: int, features: int) -> tuple[float, int]:
    """Seconds of the fusion and the peak of memory during it."""
    spec = Spec("mlp", {"inputs": features - 1, "hidden": [], "classes": 10})
    cohort = Cohort(tuple(updates(path, clients, spec)))
    peak_and_forget(psutil.Process())
    began = time.perf_counter()
    refit().aggregate(cohort, ServerState(0, Single.of(spec.build(), spec)), Bench(classes=10))
    return time.perf_counter() - began, peak_and_forget(psutil.Process())


def measure(rows: int, clients: int, features: int) -> Result:
    torch_epoch, compiled, moments = time_bringing(rows)
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "sums.safetensors"
        write_sums(path, features)
        time_fusing(path, 2, features)  # whatever is loaded once
        _, few = time_fusing(path, max(1, clients // 10), features)
        seconds, many = time_fusing(path, clients, features)
    shares = moments / torch_epoch, moments / compiled
    bringing = (torch_epoch, compiled, moments, *shares)
    return Result(rows, *bringing, clients, features, seconds, many / 2**20, many / few)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--rows", type=int, default=2000, help="of the client (default: 2000)")
    parser.add_argument("--clients", type=int, default=1000, help="whose sums are fused (default: 1000)")
    parser.add_argument("--features", type=int, default=1000, help="with the constant (default: 1000)")
    options = parser.parse_args()
    found = measure(options.rows, options.clients, options.features)
    print(
        f"a local epoch of LeNet, {found.rows} rows: {found.torch_epoch_seconds:.3f} s by torch, "
        f"{found.compiled_epoch_seconds:.3f} s compiled; its moments: {found.moments_seconds:.3f} s, "
        f"{found.share_of_torch:.2f} and {found.share_of_compiled:.2f} of it"
    )
    print(
        f"{found.clients} clients of {found.features} features: {found.fuse_seconds:.2f} s, peak {found.peak_mib:.0f} "
        f"MiB, {found.memory:.2f} of that with a tenth of the clients"
    )
    if options.json:
        options.json.write_text(json.dumps({**here(), **asdict(found)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
