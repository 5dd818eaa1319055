"""How much memory does fusing files take? Peak resident memory of `fedfuse fuse`, a process of its own per case.

Run `python benchmarks/fuse_files.py [--json FILE] [--files N] [--folder DIR]`. Files of 110 million parameters are
written one tensor at a time (2.2 GB for five), fused by FedAvg, and deleted. They come as plain safetensors without a
network, in BERT's shapes and with given num_examples; as updates of a network that fedfuse can build; and as one single
tensor. Five of them must fit in 1.5 GB.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedfuse.core.messages import Brief, Form
from fedfuse.core.spec import Spec
from fedfuse.wire.codec import LazyParams, write
from fedfuse.wire.messages import reply_header

Shapes = Mapping[str, tuple[int, ...]]
LIMIT_MB = 1500


@dataclass(frozen=True, slots=True)
class Case:
    """What the files hold."""

    name: str
    shapes: Shapes
    spec: Spec | None = None
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """What fusing took."""

    case: str
    files: int
    parameters: int
    seconds: float
    peak_mb: float
    limit_mb: int = LIMIT_MB


def drawn(shapes: Shapes, seed: int) -> LazyParams:
    """Random tensors, each made when it is asked for."""
    places = {name: place for place, name in enumerate(shapes)}

    def draw(name: str, begin: int, end: int) -> Tensor:
        return torch.randn(end - begin, generator=torch.Generator().manual_seed(1000 * seed + places[name]))

    return LazyParams({n: Form(shape, torch.float32) for n, shape in shapes.items()}, draw)


def bert() -> Shapes:
    """The tensors of BERT-base: 109,482,240 parameters."""
    shapes: dict[str, tuple[int, ...]] = {"words": (30_522, 768), "places": (512, 768), "kinds": (2, 768)}
    for block in range(12):
        for part in ("query", "key", "value", "output"):
            shapes |= {f"{block}.{part}.weight": (768, 768), f"{block}.{part}.bias": (768,)}
        shapes |= {f"{block}.up.weight": (3072, 768), f"{block}.up.bias": (3072,)}
        shapes |= {f"{block}.down.weight": (768, 3072), f"{block}.down.bias": (768,)}
        shapes |= {f"{block}.norm{i}.{side}": (768,) for i in (1, 2) for side in ("weight", "bias")}
    pooler: Shapes = {"pooler.weight": (768, 768), "pooler.bias": (768,)}
    return shapes | {"norm.weight": (768,), "norm.bias": (768,)} | pooler


def cases(files: int) -> list[Case]:
    wide = Spec("mlp", {"inputs": 4096, "hidden": [4096] * 6 + [2048], "classes": 10})
    with torch.device("meta"):
        built = {n: tuple(t.shape) for n, t in wide.build().state_dict().items()}
    num_examples = tuple(word for k in range(files) for word in ("--num-examples", str(k + 1)))
    return [
        Case("plain tensors, BERT's shapes", bert(), words=num_examples),
        Case("updates of an MLP", built, wide),
        Case("one tensor", {"all": (110_000_000,)}),
    ]


def made(case: Case, folder: Path, files: int) -> list[Path]:
    paths = [folder / f"site-{k}.safetensors" for k in range(files)]
    for k, path in enumerate(paths):
        header: dict[str, Any] = {}
        if case.spec is not None:
            brief = Brief(0, case.spec, {}, classes=10)
            header = reply_header(brief, num_examples=100.0 + k, steps=10, facts={})
        write(path, drawn(case.shapes, k), header)
    return paths


class Used(NamedTuple):
    """What one process took, start to end; processor time is what others on a busy machine do not change much."""

    seconds: float
    peak_mb: float
    processor_seconds: float


# A process's peak counts that of whoever started it, which here has loaded torch: a small one stands between.
_LAUNCH = """
import json, os, subprocess, sys, time
began = time.perf_counter()
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(child.pid, 0)
used = time.perf_counter() - began, usage.ru_maxrss, usage.ru_utime + usage.ru_stime
print(json.dumps([os.waitstatus_to_exitcode(status), *used]))
"""


def use_of(command: list[str]) -> Used:
    """Seconds, peak resident megabytes and processor seconds of one process."""
    launcher = [sys.executable, "-S", "-c", _LAUNCH, *command]
    told = subprocess.run(launcher, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True)
    code, seconds, peak, worked = json.loads(told.stdout)
    if code:
        raise SystemExit(f"{' '.join(command)} ended with code {code}")
    return Used(seconds, peak * (1 if sys.platform == "darwin" else 1024) / 1e6, worked)


def measure(case: Case, folder: Path, files: int) -> Row:
    paths = made(case, folder, files)
    fused = folder / "global.safetensors"
    try:
        fedfuse = (sys.executable, "-c", "from fedfuse.cli import main; main()")
        command = [*fedfuse, "fuse", *map(str, paths), "-o", str(fused), *case.words]
        used = use_of(command)
    finally:
        for path in (*paths, fused):
            path.unlink(missing_ok=True)
    return Row(case.name, files, sum(math.prod(s) for s in case.shapes.values()), used.seconds, used.peak_mb)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--files", type=int, default=5, help="how many files are fused (default: 5)")
    parser.add_argument("--folder", type=Path, help="where to put the files (default: a temporary folder)")
    options = parser.parse_args()
    print(f"{'case':<32}{'files':>6}{'parameters':>14}{'seconds':>10}{'peak MB':>10}{'limit':>8}")
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as home:
        for case in cases(options.files):
            row = measure(case, Path(home), options.files)
            rows.append(asdict(row))
            print(
                f"{row.case:<32}{row.files:>6}{row.parameters:>14,}{row.seconds:>10.1f}{row.peak_mb:>10.0f}"
                f"{row.limit_mb:>8}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
