"""What does the door cost? Admitting an update against averaging it.

Run `python benchmarks/door.py [--json FILE] [--threads N]`. Replies come as bytes, as from a transport; both times
are per update and taken in turns. A round may spend at most as much on judging updates as on averaging them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedfuse.core.messages import Brief, Cohort, Envelope
from fedfuse.core.seams import Evidence
from fedfuse.core.spec import Spec
from fedfuse.methods.scaffold import ControlDelta
from fedfuse.server.admission.admit import Admission, admit_all
from fedfuse.server.aggregate.mean import mean_of, weighted_mean
from fedfuse.wire.messages import encode_reply


@dataclass(frozen=True, slots=True)
class Case:
    """A network, how many clients send it, and what else they send."""

    name: str
    spec: Spec
    clients: int
    evidence: tuple[Evidence, ...] = ()
    repeats: int = 7


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds per update, and their ratio."""

    case: str
    clients: int
    megabytes: float
    admit_us: float
    mean_us: float
    ratio: float


LENET = Spec("lenet", {"channels": 3, "size": 32})
CASES = [
    Case("62k x 100", LENET, 100),
    Case("62k x 100, with control variates", LENET, 100, (ControlDelta(),)),
    Case("11.2M x 10", Spec("resnet18"), 10),
    Case("23.5M x 5", Spec("resnet50"), 5),
]


def reply(brief: Brief, evidence: tuple[Evidence, ...], seed: int) -> bytes:
    draw = torch.Generator().manual_seed(seed)

    def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.rand(shape, generator=draw) if dtype.is_floating_point else torch.ones(shape, dtype=dtype)

    mean = {n: drawn(tuple(t.shape), t.dtype) for n, t in brief.params.items()}
    notes = {n: drawn(*form) for kind in evidence for n, form in kind.expects(brief).items()}
    return encode_reply(brief, mean, notes, num_examples=1.0 + seed, steps=1, facts={"loss": 1.0})


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def averaged(cohort: Cohort) -> list[Tensor]:
    """The mean of everything that came: the weights, and what came beside them."""
    means, notes = mean_of(cohort), [u.notes for u in cohort]
    return [*means.values(), *(weighted_mean(notes, cohort.weights, name) for name in notes[0])]


def measure(case: Case) -> Row:
    brief = Brief(0, case.spec, case.spec.skeleton().state_dict(), classes=10)
    envelopes = [Envelope(f"c{i}", reply(brief, case.evidence, i)) for i in range(case.clients)]
    asked = [e.client for e in envelopes]

    def admit() -> Admission:
        return admit_all(envelopes, brief, case.evidence, asked)

    cohort = admit().cohort
    times = [(seconds(admit), seconds(lambda: averaged(cohort))) for _ in range(case.repeats)]
    door, mean = (min(column) / case.clients * 1e6 for column in zip(*times, strict=True))
    size = len(envelopes[0].payload or b"") / 1e6  # type: ignore[arg-type]
    return Row(case.name, case.clients, size, door, mean, door / mean)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads (default: all)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'case':<34}{'MB':>8}{'admit µs':>12}{'mean µs':>12}{'ratio':>8}")
    rows = []
    for case in CASES:
        row = measure(case)
        rows.append(asdict(row))
        print(
            f"{row.case:<34}{row.megabytes:>8.2f}{row.admit_us:>12.0f}{row.mean_us:>12.0f}{row.ratio:>8.2f}", flush=True
        )
    if options.json:
        options.json.write_text(json.dumps({"threads": options.threads, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
