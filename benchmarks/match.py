"""What alignment costs: ten LeNets beside their plain mean, two ResNet-18, and one layer of growing width.

The time of the assignments themselves is counted apart: it is the solver's, grows with the cube of the width and sets
the limit. Networks that come from a common start need a pass or two over their layers, networks from starts of their
own four to six. All cases are timed in turn, in the processor's own seconds, and each keeps its best time,
so that a busy machine troubles all alike. Following a network to find its units is done once per architecture and
process, and is told on a line of its own.

    python benchmarks/match.py [--clients 10] [--repeats 5] [--widths 64 128 …] [--resnet] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from scipy import optimize

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import NotConverged
from fedfuse.linalg import assign
from fedfuse.nets.channels import channel_groups
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.align.alignment import ALIGNMENTS, AlignUnits
from machine import here

MEANS = 10.0
"""Beside the assignments' own time, aligning LeNets may cost so many plain means."""
SECONDS = 60.0
"""Two ResNet-18 must be aligned within so many seconds on one core."""
REG = 0.02
"""The entropic temperature, as a share of the mean cost, at which transport is compared with the assignment."""


def main() -> None:
    said = arguments()
    torch.set_num_threads(1)
    near = several("lenet", (1, 28, 28), said.clients, said.repeats, list(ALIGNMENTS), common=True)
    apart = several("lenet", (1, 28, 28), said.clients, said.repeats, list(ALIGNMENTS), common=False)
    resnets = several("resnet18", (3, 32, 32), 2, 1, ["weights", "transport"], common=False) if said.resnet else []
    widths = [by_width(width) for width in said.widths]
    if said.json:
        told = {"clients": said.clients, "common": near, "apart": apart, "resnet18": resnets, "widths": widths}
        said.json.write_text(json.dumps({**here(), **told}, indent=1) + "\n")
    for rows, start in ((near, "a common start"), (apart, "starts of their own")):
        print(f"{said.clients} LeNets from {start}; wanted: weights under {MEANS:g} means beside the assignments")
        tell(rows)
        print()
    if resnets:
        print(f"two ResNet-18; wanted: under {SECONDS:g} s")
        tell(resnets)
        print()
    print(f"one layer of n units: seconds of the exact assignment, and of transport at {REG:g} of the mean cost")
    print(f"{'n':>6} {'exact':>10} {'entropic':>10}")
    for row in widths:
        print(f"{row['width']:6d} {row['exact']:10.4f} {row['entropic']:10.4f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--resnet", action="store_true", help="also two ResNet-18, which take a minute")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    return parser.parse_args()


def tell(rows: list[dict[str, Any]]) -> None:
    print(f"{'':28} {'seconds':>9} {'assigning':>10} {'rest in plain means':>20}")
    for row in rows:
        print(f"{row['case']:28} {row['seconds']:9.4f} {row['assigning']:10.4f} {row['means']:20.2f}")


def several(
    model: str, shape: tuple[int, ...], clients: int, repeats: int, ways: list[str], common: bool
) -> list[dict[str, Any]]:
    """The plain mean of some networks, and the same behind alignments."""
    spec = Spec(model)
    began = time.process_time()
    channel_groups(spec, shape)
    traced = time.process_time() - began
    torch.manual_seed(0)
    start = spec.build().state_dict()
    nets = [walked(start) if common else spec.build().state_dict() for _ in range(clients)]
    updates = [ClientUpdate(f"c{k}", Posterior(net), 1.0, 1, spec) for k, net in enumerate(nets)]
    cohort, state, bench = Cohort(tuple(updates)), ServerState(0, Single(spec, updates[0].posterior)), Bench()
    cases: dict[str, Callable[[], object]] = {"plain mean": lambda: Mean()(cohort, state, bench)}
    for way in ways:
        rule = AlignUnits(ALIGNMENTS[way]())
        cases[way] = lambda rule=rule: Mean()(rule(cohort, bench)[0], state, bench)
    best = measured(cases, repeats)
    plain = best["plain mean"][0]
    rows = [
        {"case": name, "seconds": all_, "assigning": own, "means": (all_ - own) / plain}
        for name, (all_, own) in best.items()
    ]
    return [*rows, {"case": "finding units, once", "seconds": traced, "assigning": 0.0, "means": traced / plain}]


def walked(start: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights as far from their start as local training takes them: half as far as they are from zero."""
    return {
        n: t + 0.5 * t.std() * torch.randn_like(t) if t.is_floating_point() and t.numel() > 1 else t
        for n, t in start.items()
    }


def measured(cases: dict[str, Callable[[], object]], repeats: int) -> dict[str, tuple[float, float]]:
    """The best time of each case, and the assignments' part of it, all cases in turn."""
    best = dict.fromkeys(cases, (float("inf"), 0.0))
    for _ in range(repeats):
        for name, case in cases.items():
            with assigning() as own:
                began = time.process_time()
                case()
                spent = time.process_time() - began
            best[name] = min(best[name], (spent, sum(own)))
    return best


@contextmanager
def assigning() -> Iterator[list[float]]:
    """The seconds of every assignment solved meanwhile."""
    seconds: list[float] = []
    solve = optimize.linear_sum_assignment  # which is imported anew for every matching

    def timed(*args: Any, **options: Any) -> Any:
        began = time.process_time()
        try:
            return solve(*args, **options)
        finally:
            seconds.append(time.process_time() - began)

    optimize.linear_sum_assignment = timed
    try:
        yield seconds
    finally:
        optimize.linear_sum_assignment = solve


def by_width(width: int) -> dict[str, float]:
    """Distances between the wirings of two random layers, matched exactly and softly."""
    draw = torch.Generator().manual_seed(width)
    cost = torch.cdist(torch.randn(width, 256, generator=draw), torch.randn(width, 256, generator=draw))
    began = time.process_time()
    assign.match(cost)
    exact = time.process_time() - began
    began = time.process_time()
    try:
        assign.sinkhorn(cost, reg=REG * float(cost.mean()), tol=1e-3)
        entropic = time.process_time() - began
    except NotConverged:
        entropic = float("nan")
    return {"width": width, "exact": exact, "entropic": entropic}


if __name__ == "__main__":
    main()
