"""How far one goes through our code: files passed, calls that return, and changes from one package to another.

`python tests/walk_a_round.py` prints a round of FedAvg of two clients in this process; with `--all`, also a site's
update, fusions of two files and of two plain state dicts, and a whole run of one round.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
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
RUN = """
name = "walk"
rounds = 1
[data]
source = "digits"
clients = 2
[model]
name = "mlp"
[[methods]]
name = "fedavg"
"""


def rows() -> Rows:
    return Rows(torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3)


def one_round() -> None:
    torch.manual_seed(0)
    engine = InProcess(Population.of({"a": rows(), "b": rows()}))
    bench = Bench(population=2, classes=3, local=LocalSettings(kernel="torch"))
    start = ServerState(0, Single.of(SPEC.build(), SPEC))
    list(run(find_method("fedavg").recipe(), engine, bench, None, start, RunPlan(1)))


def an_update(path: Path) -> None:
    update = fedfuse.local_update(SPEC, rows(), "fedavg", client=path.stem, start=START, lr=0.1, kernel="torch")
    update.save(path)


START = {name: tensor.clone() for name, tensor in SPEC.build().state_dict().items()}


def walks(folder: Path) -> dict[str, Callable[[], Any]]:
    files = [folder / "north.safetensors", folder / "south.safetensors"]
    for path in files:
        an_update(path)
    (folder / "walk.toml").write_text(RUN)
    runs = count()
    return {
        "a round of two clients": one_round,
        "local_update and save": lambda: an_update(folder / "east.safetensors"),
        "fuse two update files": lambda: fedfuse.fuse(files, "fedavg"),
        "fuse two state dicts": lambda: fedfuse.fuse([START, START], "fedavg"),
        "a run of one round": lambda: fedfuse.run(
            folder / "walk.toml", out=folder / f"run-{next(runs)}", workers=0, memo=False, progress=False
        ),
    }


def walk(what: Callable[[], Any]) -> dict[str, Any]:
    what()  # what is built once per process is built before anything is counted
    files: dict[str, int] = {}
    packages = [""]

    def watch(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if not name.startswith(HOME):
            return
        if event == "return":
            files[name.removeprefix(HOME)] = files.get(name.removeprefix(HOME), 0) + 1
        elif event == "call" and (package := name.removeprefix(HOME).partition("/")[0]) != packages[-1]:
            packages.append(package)

    sys.setprofile(watch)
    what()
    sys.setprofile(None)
    return {"files": len(files), "returns": sum(files.values()), "switches": len(packages) - 1, "by_file": files}


def main() -> None:
    if "--all" not in sys.argv:
        print(json.dumps(walk(one_round)))
        return
    with TemporaryDirectory() as folder:
        for name, what in walks(Path(folder)).items():
            found = walk(what)
            print(f"{name:24} {found['returns']:6,} calls {found['files']:4} files {found['switches']:5} switches")


if __name__ == "__main__":
    main()
