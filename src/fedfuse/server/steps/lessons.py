"""Inputs on which a server may question the networks it holds: its own, or some it has to make."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from fedfuse.core.inputs import InputForm
from fedfuse.core.model import Mixture, Single
from fedfuse.core.spec import Spec, factory_of
from fedfuse.core.state import Bench
from fedfuse.errors import RecipeError

Teacher: TypeAlias = Single | Mixture


class Lessons(Protocol):
    """Where a student's inputs come from; their answers come from the teacher."""

    @property
    def needs(self) -> frozenset[str]:
        """As for an aggregator."""
        ...

    def __call__(self, epoch: int, teacher: Teacher, student: nn.Module, bench: Bench) -> Tensor:
        """The inputs that join the pool before an epoch; there may be none."""
        ...


@dataclass(frozen=True, slots=True)
class ServerRows:
    """The inputs of the server's own rows; their labels are not looked at."""

    needs: ClassVar[frozenset[str]] = frozenset({"server_rows"})

    def __call__(self, epoch: int, teacher: Teacher, student: nn.Module, bench: Bench) -> Tensor:  # noqa: ARG002
        """All of them, before the first epoch."""
        x = bench.need_rows("distillation").x
        return x if epoch == 0 else x[:0]


@dataclass(frozen=True, slots=True)
class Unlabelled:
    """Inputs without labels that the server holds."""

    needs: ClassVar[frozenset[str]] = frozenset({"unlabelled"})

    def __call__(self, epoch: int, teacher: Teacher, student: nn.Module, bench: Bench) -> Tensor:  # noqa: ARG002
        """All of them, before the first epoch."""
        x = bench.need_unlabelled("distillation")
        return x if epoch == 0 else x[:0]


def input_form(bench: Bench, spec: Spec) -> InputForm:
    """What an input looks like: as the bench says, else as its rows do, else as the network's options do.

    Example:
        >>> input_form(Bench(), Spec("lenet", {"size": 32, "channels": 3})).shape
        (3, 32, 32)
    """
    if bench.inputs is not None:
        return bench.inputs
    seen = bench.rows.x if bench.rows is not None else bench.unlabelled
    if seen is not None:
        return InputForm(tuple(seen.shape[1:]))
    if spec.prototype is None and spec.can_run:  # else its factory is a word from a file, and nothing to import
        parameters = inspect.signature(factory_of(spec.factory)).parameters.values()
        said = {p.name: p.default for p in parameters if isinstance(p.default, int)} | dict(spec.options)
        if "channels" in said and "size" in said:
            return InputForm((said["channels"], said["size"], said["size"]))
        if "inputs" in said:
            return InputForm((said["inputs"],))
    raise RecipeError(
        f"model {spec.factory!r} does not say what its inputs look like, so none can be made; give the server rows"
    )


def held_inputs(bench: Bench, count: int, *purpose: str | int) -> tuple[Tensor, Literal["server", "unlabelled"]] | None:
    """Up to `count` inputs that the server holds, drawn at random, and where they are from; None if it has none."""
    if bench.rows is not None and len(bench.rows):
        return _some(bench.rows.x, count, bench.stream(*purpose)), "server"
    if bench.unlabelled is not None and len(bench.unlabelled):
        return _some(bench.unlabelled, count, bench.stream(*purpose)), "unlabelled"
    return None


def _some(x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return x if len(x) <= count else x[torch.randperm(len(x), generator=generator)[:count]]
