"""Inputs for distillation: the server's own rows, and inputs without labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from fedfuse.core.model import Answering
from fedfuse.core.state import Bench

Teacher: TypeAlias = Answering


class DistillationInputs(Protocol):
    """Where a student's inputs come from; their answers come from the teacher."""

    @property
    def needs(self) -> frozenset[str]:
        """As for an aggregator."""
        ...

    @property
    def needs_numbers(self) -> bool:
        """Whether inputs are made by following a slope, which tokens have not."""
        ...

    def __call__(self, epoch: int, teacher: Teacher, student: nn.Module, bench: Bench) -> Tensor:
        """The inputs that join the pool before an epoch; there may be none."""
        ...

    def workload(self, epochs: int, members: int, bench: Bench) -> tuple[float, float]:
        """About how many examples pass a network to make the inputs, and how many pass the student in all epochs."""
        ...

    def seconds(self, epochs: int, bench: Bench) -> float:
        """About how long making the inputs takes beside that, by a short trial on this machine."""
        ...


@dataclass(frozen=True, slots=True)
class ServerInputs:
    """The inputs of the server's own rows; their labels are not looked at."""

    needs: ClassVar[frozenset[str]] = frozenset({"server_rows"})
    needs_numbers: ClassVar[bool] = False

    def __call__(self, epoch: int, teacher: Teacher, student: nn.Module, bench: Bench) -> Tensor:  # noqa: ARG002
        """All of them, before the first epoch."""
        x = bench.need_rows("distillation").x
        return x if epoch == 0 else x[:0]

    def workload(self, epochs: int, members: int, bench: Bench) -> tuple[float, float]:  # noqa: ARG002
        """Nothing is made; the student sees all of them in every epoch."""
        return 0.0, float(epochs * len(bench.need_rows("distillation")))

    def seconds(self, epochs: int, bench: Bench) -> float:  # noqa: ARG002
        """None: they are there."""
        return 0.0


@dataclass(frozen=True, slots=True)
class UnlabelledInputs:
    """Inputs without labels that the server holds."""

    needs: ClassVar[frozenset[str]] = frozenset({"unlabelled"})
    needs_numbers: ClassVar[bool] = False

    def __call__(self, epoch: int, teacher: Teacher, student: nn.Module, bench: Bench) -> Tensor:  # noqa: ARG002
        """All of them, before the first epoch."""
        x = bench.need_unlabelled("distillation")
        return x if epoch == 0 else x[:0]

    def workload(self, epochs: int, members: int, bench: Bench) -> tuple[float, float]:  # noqa: ARG002
        """Nothing is made; the student sees all of them in every epoch."""
        return 0.0, float(epochs * len(bench.need_unlabelled("distillation")))

    def seconds(self, epochs: int, bench: Bench) -> float:  # noqa: ARG002
        """None: they are there."""
        return 0.0


def server_inputs(
    bench: Bench, count: int, *purpose: str | int
) -> tuple[Tensor, Literal["server", "unlabelled"]] | None:
    """Up to `count` inputs that the server holds, drawn at random, and where they are from; None if it has none."""
    if bench.rows is not None and len(bench.rows):
        return _sample(bench.rows.x, count, bench.stream(*purpose)), "server"
    if bench.unlabelled is not None and len(bench.unlabelled):
        return _sample(bench.unlabelled, count, bench.stream(*purpose)), "unlabelled"
    return None


def _sample(x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return x if len(x) <= count else x[torch.randperm(len(x), generator=generator)[:count]]
