"""Inputs for distillation: the server's own rows, inputs without labels, and what made inputs must look like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from fedfuse.core.inputs import InputForm, own_form, reads_tokens, shape_read
from fedfuse.core.model import Answering
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench
from fedfuse.errors import RecipeError

Teacher: TypeAlias = Answering


class DistillationInputs(Protocol):
    """Where a student's inputs come from; their answers come from the teacher."""

    @property
    def needs(self) -> frozenset[str]:
        """As for an aggregator."""
        ...

    def __call__(self, epoch: int, teacher: Teacher, student: nn.Module, bench: Bench) -> Tensor:
        """The inputs that join the pool before an epoch; there may be none."""
        ...


@dataclass(frozen=True, slots=True)
class ServerInputs:
    """The inputs of the server's own rows; their labels are not looked at."""

    needs: ClassVar[frozenset[str]] = frozenset({"server_rows"})

    def __call__(self, epoch: int, teacher: Teacher, student: nn.Module, bench: Bench) -> Tensor:  # noqa: ARG002
        """All of them, before the first epoch."""
        x = bench.need_rows("distillation").x
        return x if epoch == 0 else x[:0]


@dataclass(frozen=True, slots=True)
class UnlabelledInputs:
    """Inputs without labels that the server holds."""

    needs: ClassVar[frozenset[str]] = frozenset({"unlabelled"})

    def __call__(self, epoch: int, teacher: Teacher, student: nn.Module, bench: Bench) -> Tensor:  # noqa: ARG002
        """All of them, before the first epoch."""
        x = bench.need_unlabelled("distillation")
        return x if epoch == 0 else x[:0]


def input_form(bench: Bench, spec: Spec) -> InputForm:
    """What an input of a network looks like: as the bench says, else as its rows do, else as the network's options do.

    Example:
        >>> input_form(Bench(), Spec("lenet", {"size": 32, "channels": 3})).shape
        (3, 32, 32)
    """
    found = _known_form(bench) or own_form(spec)
    if found is None:
        raise RecipeError(
            f"model {spec.factory!r} does not say what its inputs look like, so none can be made; give the server rows"
        )
    shape = shape_read(spec, found.shape)
    return found if shape == found.shape else InputForm(shape, (min(found.low),), (max(found.high),))


def common_form(bench: Bench, specs: Sequence[Spec]) -> InputForm:
    """What an input of several networks looks like, whoever of them comes first.

    Where only they can tell, it is the form with the most axes: a fully connected network flattens pictures.

    Raises:
        RecipeError: if nobody tells, or they read inputs of unequal size.

    Example:
        >>> common_form(Bench(), [Spec("mlp"), Spec("lenet")]).shape
        (1, 28, 28)
    """
    if (known := _known_form(bench)) is not None:
        return known
    forms = [form for spec in specs if (form := own_form(spec)) is not None]
    if not forms:
        return input_form(bench, specs[0])
    if len({math.prod(form.shape) for form in forms}) > 1:
        shapes = " and ".join(sorted({"×".join(map(str, form.shape)) for form in forms}))
        raise RecipeError(f"networks that read inputs of {shapes} have none in common; fuse those that read the same")
    return max(forms, key=lambda form: (len(form.shape), form.shape))


def synthetic_form(bench: Bench, specs: Sequence[Spec]) -> InputForm:
    """What an input looks like that is to be made for several networks.

    Raises:
        RecipeError: also if one of them reads whole numbers, which cannot be found by following a slope.
    """
    form = common_form(bench, specs)
    if tokens := [spec for spec in specs if reads_tokens(spec, form.shape)]:
        raise RecipeError(
            f"model {tokens[0].factory!r} reads whole numbers, so no inputs can be made for it; "
            "learn on the server's rows or on inputs without labels"
        )
    return form


def _known_form(bench: Bench) -> InputForm | None:
    """What the bench knows of inputs."""
    if bench.inputs is not None:
        return bench.inputs
    inputs = bench.rows.x if bench.rows is not None else bench.unlabelled
    return None if inputs is None else InputForm(tuple(inputs.shape[1:]))


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
