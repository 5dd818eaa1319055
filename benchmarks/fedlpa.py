"""What does FedLPA cost? The solve against the released one, the factors against training, and growth with clients.

Run `python benchmarks/fedlpa.py [--json FILE] [--steps N] [--rows N]`. One process, one thread. Ten clients train
LeNet on MNIST where it is found (else on random rows), bring their factors through the door, and are fused.

- solve: exact (conjugate gradients to a relative residual of 1e-8) must be at least 100 times faster than the released
  10,000 gradient steps and end at a residual at least 1,000 times smaller. With fewer `--steps` their time is scaled
  to 10,000; the residual is the one reached.
- factors: bringing them may take at most the time of 1.1 local epochs of torch's; both are timed in turns. Compiled
  training is several times as fast and is told beside it.
- clients: what each further client adds to the time and the memory of one layer's solve; both must stay flat.
- resnet: ten clients of ResNet-18 whose factors are eight leading eigenpairs each (drawn at random, for the solve does
  not care): at most 1.3 times the weights on the wire, and under a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fedfuse.client.kfac import KroneckerFactors, kronecker_factors
from fedfuse.core.messages import ClientUpdate, Cohort, Envelope, Form
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.rng import seeded
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, Local, ServerState
from fedfuse.data import Dirichlet, find, load, partition
from fedfuse.linalg.kron import natural_mean
from fedfuse.linalg.psd import pack
from fedfuse.nets.kronecker import Block, Packing, blocks_of
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.aggregate.natural import NaturalKron
from fedfuse.training.round import client_round, train
from machine import here

CLIENTS, RELEASED_STEPS = 10, 10_000
SPEC = Spec("lenet", {"channels": 1, "size": 28, "classes": 10})
SETTINGS = LocalSettings(epochs=3, optimizer={"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-5})


@dataclass(frozen=True, slots=True)
class Solve:
    """One solver on the same ten updates."""

    solver: str
    pi: str
    seconds: float
    iterations: int
    residual: float


@dataclass(frozen=True, slots=True)
class Growth:
    """One layer's solve with so many clients, to the same number of iterations."""

    clients: int
    seconds: float
    peak_mb: float


def digits(limit: int) -> Rows:
    if find("mnist"):
        return load("mnist", train_limit=limit).train
    draw = torch.Generator().manual_seed(0)
    return Rows(torch.rand(limit, 1, 28, 28, generator=draw), torch.randint(10, (limit,), generator=draw))


def trained(rows: Rows) -> tuple[Cohort, ServerState]:
    """Ten clients' updates from one start, as the door lets them in."""
    with seeded(0, "start"):
        state = ServerState(0, Single.of(SPEC.build(), SPEC))
    brief, evidence = state.brief((), 10), KroneckerFactors(min_rows=1)
    work = Work(SETTINGS, evidence=(evidence,))
    shares = partition(rows.y, Dirichlet(alpha=0.1), CLIENTS, 0).clients
    replies = [Envelope(c, client_round(work, brief, c, rows.take(index)).payload) for c, index in shares.items()]
    return admit_all(replies, brief, (evidence,), list(shares)).cohort, state


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the processor, which a busy machine troubles least."""
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def solves(cohort: Cohort, state: ServerState, steps: int) -> list[Solve]:
    rows = []
    ways = (("exact", "one"), ("exact", "trace"), ("exact", "root"), ("expectation", "trace"), ("gradient", "one"))
    for solver, pi in ways:
        limit = steps if solver == "gradient" else None
        aggregate = NaturalKron(1e-3, pi, solver, max_iters=limit)  # type: ignore[arg-type]
        if pi == "root":  # the recipe's own choice: factors scaled, and a damping that is a share of them
            aggregate = NaturalKron(1e-1, "trace", solver, max_iters=limit, scale="root")  # type: ignore[arg-type]
        fuse = partial(aggregate, cohort, state, Bench())
        best, after = timed(fuse)
        for _ in range(0 if solver == "gradient" else 2):
            best = min(best, timed(fuse)[0])
        scale = RELEASED_STEPS / steps if solver == "gradient" else 1.0
        iterations, residual = sum(after.facts["iterations"].values()), max(after.facts["residual"].values())
        rows.append(Solve(solver, pi, best * scale, iterations, residual))
    return rows


def factors_per_epoch(rows: Rows, repeats: int = 7) -> tuple[float, float, float]:
    """Seconds of one local epoch by torch and by compiled kernels, and of the factors, the best of several turns."""
    with seeded(0, "start"):
        module = SPEC.build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    brief = ServerState(0, Single.of(module, SPEC)).brief((), 10)
    works = [Work(SETTINGS.model_copy(update={"epochs": 1, "kernel": kernel})) for kernel in ("torch", "auto")]
    locals_ = [Local("site", brief, rows, work.settings, module, {}, 0) for work in works]
    turns = []
    for _ in range(repeats + 1):  # the first compiles, or loads what was compiled
        epochs = [timed(partial(train, local, work))[0] for local, work in zip(locals_, works, strict=True)]
        module.eval()
        turns.append((*epochs, timed(lambda: kronecker_factors(module, blocks_of(SPEC), rows, kernel="auto"))[0]))
    torchs, compiled, factors = (min(column) for column in zip(*turns[1:], strict=True))
    return torchs, compiled, factors


def one_layer(clients: int, out: int = 128, inn: int = 512, iterations: int = 20) -> float:
    """Seconds for so many iterations of a layer's system."""
    draw = torch.Generator().manual_seed(0)

    def factor(d: int) -> torch.Tensor:
        X = torch.randn(d, d + 9, generator=draw)
        return X @ X.mT / d + torch.eye(d)

    As, Bs = ([factor(d) for _ in range(clients)] for d in (inn, out))
    Ms = torch.randn(clients, out, inn, generator=draw)
    solve = partial(natural_mean, Ms, As, Bs, [1.0] * clients, solver="gradient", max_iters=iterations // 2)
    solve()
    return min(timed(solve)[0] for _ in range(3))


def resnet(rank: int = 8) -> tuple[float, float, int]:
    """What such factors add to the weights on the wire, and seconds and iterations of their fusion."""
    spec, draw, packing = (
        Spec("resnet18", {"classes": 10, "channels": 3}),
        torch.Generator().manual_seed(0),
        Packing(rank),
    )
    state = ServerState(0, Single.of(spec.build(), spec))
    start, blocks = state.single.posterior.mean, blocks_of(spec)
    forms = {n: Form.of(t) for n, t in start.items()}

    def notes(block: Block) -> dict[str, torch.Tensor]:
        """Orthonormal directions whose eigenvalues fall by a thousand, above a rest; everything else uniform."""
        found = {}
        for name, form in packing.forms(block, forms).items():
            drawn = torch.rand(form.shape, generator=draw)
            if name.endswith("/vectors"):
                drawn = torch.linalg.qr(drawn - 0.5).Q
            elif name.endswith("/values"):
                drawn = torch.cat([torch.logspace(0, -3, rank), torch.tensor([1e-4])])
            elif not name.endswith("/diagonal"):
                size = block.sizes(forms)[name.endswith("/out")]
                rows = torch.randn(size, 2 * size, generator=draw)
                drawn = pack(rows @ rows.mT)
            found[name] = drawn
        return found

    def update(client: int) -> ClientUpdate:
        moved = {
            n: t + 0.05 * torch.randn(t.shape, generator=draw) if t.is_floating_point() else t for n, t in start.items()
        }
        told = {name: t for block in blocks for name, t in notes(block).items()}
        geometry = KroneckerFactors(rank=rank).geometry(told)
        assert geometry is not None
        return ClientUpdate(f"site-{client}", Posterior(moved, geometry), 100.0, 1, spec)

    cohort = Cohort.of([update(k) for k in range(CLIENTS)])
    sent = sum(Form.blank(form).numel() for block in blocks for form in packing.forms(block, forms).values())
    seconds, after = timed(partial(NaturalKron(1e-1, scale="root"), cohort, state, Bench()))
    return 1 + sent / sum(t.numel() for t in start.values()), seconds, sum(after.facts["iterations"].values())


def growth(clients: int) -> Growth:
    """The same in a process of its own, so that its memory is its own."""
    command = [sys.executable, __file__, "--one", str(clients)]
    child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    seconds = float(child.stdout.read())
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return Growth(clients, seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--steps", type=int, default=200, help="gradient steps to take (default: 200)")
    parser.add_argument("--rows", type=int, default=10_000, help="training rows of all clients (default: 10000)")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        print(one_layer(options.one))
        return
    rows = digits(options.rows)
    cohort, state = trained(rows)
    print(f"{'solver':<14}{'π':<8}{'seconds':>10}{'iterations':>12}{'residual':>12}")
    table = solves(cohort, state, options.steps)
    for s in table:
        print(f"{s.solver:<14}{s.pi:<8}{s.seconds:>10.3f}{s.iterations:>12}{s.residual:>12.1e}", flush=True)
    released = table[-1]
    for s in table[:3]:
        faster, closer = released.seconds / s.seconds, released.residual / s.residual
        print(f"exact, π = {s.pi}: {faster:,.0f} times faster, a residual {closer:,.0f} times smaller")
    epoch, compiled, factors = factors_per_epoch(rows.take(range(min(1500, len(rows)))))
    print(f"factors: {factors / epoch:.2f} local epochs of torch's ({factors:.3f} s against {epoch:.3f} s), ", end="")
    print(f"{factors / compiled:.2f} of compiled ones")
    grown = [growth(k) for k in (20, 40, 80, 160)]
    for before, g in pairwise(grown):
        more = g.clients - before.clients
        seconds, memory = (g.seconds - before.seconds) / more, (g.peak_mb - before.peak_mb) / more
        print(f"from {before.clients} to {g.clients} clients: {seconds * 1e3:.2f} ms and {memory:.2f} MB for each")
    ratio, seconds, iterations = resnet()
    print(
        f"ResNet-18, rank 8: {ratio:.2f} times the weights, {seconds:.1f} s and {iterations} iterations for ten clients"
    )
    if options.json:
        told = {"solve": table, "growth": grown}
        plain = {name: [asdict(row) for row in part] for name, part in told.items()}
        numbers = {
            "epoch_seconds": epoch,
            "compiled_epoch_seconds": compiled,
            "factor_seconds": factors,
            "steps": options.steps,
        }
        numbers |= {"resnet_wire_ratio": ratio, "resnet_seconds": seconds, "resnet_iterations": iterations}
        options.json.write_text(json.dumps({**here(), **plain, **numbers}, indent=2) + "\n")


if __name__ == "__main__":
    main()
