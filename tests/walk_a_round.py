"""One round of FedAvg of two clients in this process: which of our files it passes, and how many calls return."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import fedfuse
from fedfuse.core.model import Single
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines.local import InProcess, Population
from fedfuse.server.loop import RunPlan, run

HOME = f"{Path(fedfuse.__file__).parent}/"
SPEC = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 3})


def one_round() -> None:
    torch.manual_seed(0)
    rows = Rows(torch.randn(16, 4), torch.arange(16) % 3)
    engine = InProcess(Population.of({"a": rows, "b": rows}))
    bench = Bench(population=2, classes=3, local=LocalSettings(kernel="torch"))
    start = ServerState(0, Single.of(SPEC.build(), SPEC))
    list(run(find_method("fedavg").recipe(), engine, bench, None, start, RunPlan(1)))


def main() -> None:
    files: dict[str, int] = {}

    def watch(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "return" and name.startswith(HOME):
            files[name.removeprefix(HOME)] = files.get(name.removeprefix(HOME), 0) + 1

    one_round()  # what is built once per process is built before anything is counted
    sys.setprofile(watch)
    one_round()
    sys.setprofile(None)
    print(json.dumps({"files": len(files), "returns": sum(files.values()), "by_file": files}))


if __name__ == "__main__":
    main()
