"""Recipe parts that misbehave, and a network of a user's own, where worker processes can import them."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from builders import as_bytes
from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Batch, Objective, TaskLoss, Work
from fedfuse.core.spec import Spec
from fedfuse.core.state import Local
from fedfuse.engines.local import InProcess, Population
from fedfuse.engines.memo import Memo


@dataclass(frozen=True, slots=True)
class Spoiled:
    """Cross entropy, but one client raises an error."""

    client: str
    error: type[Exception]
    base: Objective = field(default_factory=TaskLoss)

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        if local.client == self.client:
            raise self.error(f"{local.client} will not")
        return self.base(local, batch)


@dataclass(frozen=True, slots=True)
class Deadly:
    """Cross entropy, but one client's process is killed the first few times it tries."""

    client: str
    folder: Path
    times: int

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        if local.client == self.client and local.steps == 1:
            deaths = len(list(self.folder.iterdir()))
            if deaths < self.times:
                (self.folder / f"death-{deaths}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return TaskLoss()(local, batch)


@dataclass(frozen=True, slots=True)
class Slow:
    """Cross entropy that takes its time and says when it began."""

    seconds: float
    began: Path

    def __call__(self, local: Local, batch: Batch) -> Tensor:
        (self.began / local.client).write_text(str(os.getpid()))
        time.sleep(self.seconds)
        return TaskLoss()(local, batch)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Sends the worker's process id."""

    name: ClassVar[str] = "where"
    reveals: ClassVar[str] = "which process trained"

    def __call__(self, local: Local) -> dict[str, Tensor]:
        return {"where/pid": torch.tensor([os.getpid(), torch.get_num_threads()])}


@dataclass(frozen=True, slots=True)
class LastRate:
    """Sends the learning rate that was in force at the end."""

    name: ClassVar[str] = "rate"
    reveals: ClassVar[str] = "nothing"

    def __call__(self, local: Local) -> dict[str, Tensor]:
        return {"rate/last": torch.tensor([local.lr], dtype=torch.float64)}


class Net(nn.Module):
    """A network built with an argument its class name does not tell."""

    def __init__(self, width: int = 4, dropout: float = 0.5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout))
        self.top = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.body(x))


def stillborn(*_: object) -> None:
    """A worker that ends before it begins."""
    os._exit(7)


def share(store: Path, results: Path) -> None:
    """A run of its own on a store that another one uses at the same time."""
    spec = Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2})
    params = {n: torch.linspace(-1, 1, t.numel()).view(t.shape) for n, t in spec.build().state_dict().items()}
    rows = Rows(torch.linspace(0, 1, 400).view(100, 4), torch.arange(100) % 2)
    engine = InProcess(Population(rows, {f"c{i}": torch.arange(i, 100, 5) for i in range(5)}))
    results.mkdir()
    for envelope in Memo(store).wrap(engine).exchange(Brief(0, spec, params, classes=2), Work(), engine.clients):
        (results / envelope.client).write_bytes(as_bytes(envelope.payload))


def process_id(_: object, x: Tensor) -> Tensor:
    """Which process is asked about some inputs, as an answer."""
    return torch.full((1, len(x), 1), float(os.getpid()))
