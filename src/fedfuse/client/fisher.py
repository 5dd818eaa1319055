"""The diagonal of the Fisher information: how sharply a client believes each weight, one at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedfuse.client.recording import plain_attention
from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.posterior import Diag, Geometry
from fedfuse.core.rows import Rows
from fedfuse.core.seams import TRAINING_PASSES, CurvatureEvidence, Effort
from fedfuse.core.state import Local, live_names
from fedfuse.core.torch_utils import full_dtype, in_full
from fedfuse.tasks import CLASSIFICATION, Task
from fedfuse.wire.codec import LazyParams, forms_of, piece_of

Fisher: TypeAlias = Literal["empirical", "sampled"]

_GRADIENTS = 1 << 24  # per-row gradients held at a time


@dataclass(frozen=True, slots=True)
class _OneRow:
    """The network's answer to one row, with weights of that row's own."""

    module: nn.Module

    def __call__(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        answer: Tensor = functional_call(self.module, params, (x[None],))[0]
        return answer


def _answers(module: nn.Module, own: dict[str, Tensor], x: Tensor) -> Tensor:
    """Every row's answer by its own weights; one after another where a layer cannot do them all at once."""
    one = _OneRow(module)
    with plain_attention():
        try:
            return vmap(one)(own, x)
        except RuntimeError:  # recurrent layers, and whatever asks a tensor for its numbers
            return torch.stack([one({n: p[row] for n, p in own.items()}, x[row]) for row in range(len(x))])


def diagonal_fisher(
    module: nn.Module,
    rows: Rows,
    *,
    names: Collection[str] | None = None,
    fisher: Fisher = "empirical",
    batch: int | None = None,
    generator: torch.Generator | None = None,
    task: Task = CLASSIFICATION,
) -> dict[str, Tensor]:
    """Mean over rows of the squared gradient of each trainable weight (arXiv:2310.00339, eq. 19), float64.

    Works for every kind of layer; rows are taken a few at a time, fewer the larger the network.

    Args:
        module: the network, in evaluation mode.
        rows: the examples.
        names: which weights; by default all.
        fisher: "empirical" takes the rows' own labels, "sampled" draws labels from the network's answer.
        batch: the most rows per pass; by default as many as gradients fit into memory.
        generator: draws the labels.
        task: what the outputs mean: whose likelihood it is.

    Example:
        >>> net = nn.Linear(1, 2, bias=False)
        >>> nn.init.zeros_(net.weight)
        Parameter containing:
        tensor([[0.],
                [0.]], requires_grad=True)
        >>> diagonal_fisher(net, Rows(torch.tensor([[2.0]]), torch.tensor([0])))["weight"].tolist()
        [[1.0], [1.0]]
    """
    params = {n: p.detach() for n, p in module.named_parameters() if names is None or n in names}
    totals = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in params.items()}
    at_once = min(max(1, _GRADIENTS // sum(p.numel() for p in params.values())), batch or len(rows))
    for x, y in zip(rows.x.split(at_once), rows.y.split(at_once), strict=True):
        # every row sees weights of its own, so the gradient of the summed loss is one gradient per row
        own = {n: p.expand(len(x), *p.shape).requires_grad_() for n, p in params.items()}
        with torch.enable_grad():
            logits = in_full(_answers(module, own, x))
            labels = y if fisher == "empirical" else task.redraw(logits.detach(), y, generator)
            loss = task.loss(logits, labels, "sum")
            gradients = torch.autograd.grad(loss, list(own.values()), materialize_grads=True)
        for name, gradient in zip(own, gradients, strict=True):
            totals[name] += in_full(gradient).square().sum(0)
    return {name: total / len(rows) for name, total in totals.items()}


@dataclass(frozen=True, slots=True)
class FisherDiagonal(CurvatureEvidence):
    """The mean squared gradient of every weight over the client's rows: the precision of its belief per example.

    Attributes:
        fisher: "empirical" takes the rows' own labels, "sampled" draws labels from the network's answer.
    """

    fisher: Fisher = "empirical"
    name: ClassVar[str] = "fisher"
    reveals: ClassVar[str] = "mean squared gradients of every weight over the client's rows"
    weighs: ClassVar[bool] = True

    def __call__(self, local: Local) -> Params:
        """One pass over the rows with the trained weights."""
        draw = local.stream("fisher")
        options: dict[str, Any] = {"fisher": self.fisher, "generator": draw, "task": local.task}
        found = diagonal_fisher(local.module, local.rows, names=local.live, **options)
        return {f"fisher/{n}": value.to(full_dtype(local.live[n].dtype)).cpu() for n, value in found.items()}

    def passes(self, effort: Effort) -> float:  # noqa: ARG002 - the seam's signature
        """A gradient of every row."""
        return TRAINING_PASSES

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """One tensor per trainable weight, of its shape, in float32 at least."""
        forms = forms_of(brief.params)
        return {f"fisher/{n}": Form(forms[n].shape, full_dtype(forms[n].dtype)) for n in live_names(brief)}

    def check(self, notes: Params, num_examples: float) -> Flaw | None:  # noqa: ARG002 - the seam's signature
        """Squares are not negative."""
        for name in notes:
            if name.startswith("fisher/") and float(least := notes[name].min()) < 0:
                return Flaw(name, float(least), "numbers ≥ 0")
        return None

    def geometry(self, notes: Params) -> Geometry | None:
        """Variance 1/F per weight, infinite where the rows say nothing; computed as it is read."""
        forms = {n.removeprefix("fisher/"): f for n, f in forms_of(notes).items() if n.startswith("fisher/")}
        return Diag(LazyParams(forms, _Reciprocal(notes)))

    def influence(self, notes: Params) -> Mapping[str, float]:
        """The mean precision of every tensor."""
        return {n: float(notes[n].double().mean()) for n in notes if n.startswith("fisher/")}


@dataclass(frozen=True, slots=True)
class _Reciprocal:
    """Elements of 1/F."""

    notes: Params

    def __call__(self, name: str, begin: int, end: int) -> Tensor:
        return piece_of(self.notes, f"fisher/{name}", begin, end).reciprocal()
