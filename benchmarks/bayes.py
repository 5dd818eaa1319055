"""What do Bayesian layers cost? A step against torch's deterministic one, and each barycenter against the mean.

Run `python benchmarks/bayes.py [--json FILE] [--repeats N] [--threads N]`. Ratios come from runs taken in turn, in
processor time of one thread, so that they mean something on a busy machine. Eleven million weights are also fused by
all threads, on the clock, as a server does it: there memory is what they wait for. The barycenter of a network is held
against the plain mean of all its tensors, which are twice the deterministic network's.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from fedfuse.client.elbo import Elbo
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.rng import seeded
from fedfuse.core.rows import Rows
from fedfuse.core.seams import TaskLoss, Work
from fedfuse.core.settings import LocalSettings, Optimizer
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, Local, ServerState
from fedfuse.core.torch_utils import one_thread
from fedfuse.kernels import why_not
from fedfuse.methods.barycenters import AlphaDivergence
from fedfuse.models.bayes import BayesianLayers
from fedfuse.server.aggregate.charts import CHARTS, MeanIn
from fedfuse.server.aggregate.mean import Mean
from fedfuse.training.round import train
from fedfuse.wire.codec import decode, encode
from machine import here

STEPS, CLIENTS = 20, 10
LENET, WIDE = Spec("lenet"), Spec("mlp", {"hidden": [1000, 500]})
LARGE = Spec("mlp", {"hidden": [2600, 3400]})  # eleven million weights


@dataclass(frozen=True, slots=True)
class Row:
    """One thing measured, and how many times as long as its reference it takes."""

    what: str
    network: str
    milliseconds: float
    ratio: float
    limit: float | None


def taken(
    jobs: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """The least time of each job, in seconds, all run in turn."""
    best = dict.fromkeys(jobs, float("inf"))
    for _ in range(repeats + 1):  # the first time warms up
        for name, job in jobs.items():
            began = clock()
            job()
            best[name] = min(best[name], clock() - began)
    return best


def start(spec: Spec, last: int) -> Single:
    with seeded(0, "benchmark"):
        plain = Single.of(spec.build(), spec)
    return BayesianLayers(last=last)(plain, 10, seed=0) if last else plain


def steps(last: int, kernel: Literal["torch", "compiled"]) -> Callable[[], None]:
    """Some training steps of LeNet with so many Bayesian layers."""
    draw = torch.Generator().manual_seed(0)
    rows = Rows(torch.randn(64 * STEPS, 1, 28, 28, generator=draw), torch.randint(10, (64 * STEPS,), generator=draw))
    work = Work(LocalSettings(optimizer=Optimizer(momentum=0.9), kernel=kernel), Elbo() if last else TaskLoss())
    first = start(LENET, last)
    module = first.spec.build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    brief = ServerState(0, first).brief((), 10)
    return partial(_train, Local("a", brief, rows, work.settings, module, {}, 0), work)


def _train(local: Local, work: Work) -> None:
    local.steps = 0
    with seeded(0, "noise"):
        train(local, work)


def training(repeats: int) -> list[Row]:
    kernels: tuple[Literal["torch", "compiled"], ...] = ("torch",) if why_not() else ("torch", "compiled")
    cases = [(kernel, last) for kernel in kernels for last in (0, 1, 2, 3)]
    times = taken({f"{kernel} {last}": steps(last, kernel) for kernel, last in cases}, repeats)
    rows = []
    for kernel, last in cases:
        taken_now, limit = times[f"{kernel} {last}"], 1.15 if (kernel, last) == (kernels[-1], 3) else None
        name = f"{kernel} step, {last} Bayesian layers"
        rows.append(Row(name, "lenet", 1e3 * taken_now / STEPS, taken_now / times["torch 0"], limit))
    return rows


def fusing(spec: Spec, network: str, repeats: int, clock: Callable[[], float] = time.process_time) -> list[Row]:
    first, draw, updates = start(spec, 3), torch.Generator().manual_seed(0), []
    for place in range(CLIENTS):
        params = {n: t + 0.1 * torch.randn(t.shape, generator=draw) for n, t in first.posterior.mean.items()}
        held = decode(encode(params, {})).tensors
        updates.append(ClientUpdate(f"c{place}", Posterior(held), 10.0 + place, 1, first.spec))
    cohort, state, bench = Cohort.of(updates), ServerState(0, first), Bench()
    rules = {"mean": Mean(), **{name: MeanIn(chart) for name, chart in CHARTS.items()}}
    times = taken({name: partial(rule, cohort, state, bench) for name, rule in rules.items()}, repeats, clock)
    small = {"α = 0.5": partial(MeanIn(AlphaDivergence(0.5)), cohort, state, bench)} if spec is LENET else {}
    slow = taken(small, 1)  # it searches, weight by weight
    limits = dict.fromkeys(CHARTS, 1.3)
    return [Row(name, network, 1e3 * t, t / times["mean"], limits.get(name)) for name, t in {**times, **slow}.items()]


def show(row: Row) -> str:
    limit = "" if row.limit is None else f"  (at most {row.limit:g})"
    return f"{row.network:<20} {row.what:<26} {row.milliseconds:>9.2f} ms {row.ratio:>7.2f}×{limit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the large one (default: all)")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with one_thread():
        rows = training(asked.repeats) + fusing(LENET, "lenet", asked.repeats) + fusing(WIDE, "mlp", asked.repeats)
        rows += fusing(LARGE, "mlp, 11M", min(5, asked.repeats))
    if asked.threads > 1:
        rows += fusing(LARGE, f"mlp, 11M, {asked.threads} threads", asked.repeats, time.perf_counter)
    print(*map(show, rows), sep="\n")
    if asked.json:
        asked.json.write_text(json.dumps({**here(), "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
