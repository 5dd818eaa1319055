"""Sums over a client's rows: how many of each class, and the moments that a closed-form layer needs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Effort, PlainEvidence
from fedfuse.core.state import Local
from fedfuse.core.torch_utils import as_floats_of, forward_hooks
from fedfuse.errors import ConfigError
from fedfuse.kernels import inputs_of_head
from fedfuse.linalg.psd import is_psd
from fedfuse.linalg.ridge import Sums
from fedfuse.nets.cost import layer_costs
from fedfuse.nets.head import KIND, NUMBERS, are_numbers, linear_layer, moment_forms, moment_notes, sums_in
from fedfuse.tasks import Binary, Classification, Task


@dataclass(frozen=True, slots=True)
class LabelCounts(PlainEvidence):
    """The client's label histogram, as whole numbers that sum to its num_examples."""

    name: ClassVar[str] = "counts"
    needs_classes: ClassVar[bool] = True
    reveals: ClassVar[str] = "how many rows of each class the client has"

    def __call__(self, local: Local) -> Params:
        """Rows per class."""
        return {"counts/labels": local.rows.counts(local.brief.classes).cpu()}

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """One whole number per class."""
        return {"counts/labels": Form((brief.classes,), torch.int64)}

    def check(self, notes: Params, num_examples: float) -> Flaw | None:
        """Counts are not negative and sum to the num_examples."""
        counts = notes["counts/labels"]
        if (counts < 0).any():
            return Flaw("counts/labels", int(counts.min()), "whole numbers ≥ 0")
        total = sum(counts.tolist())  # Python's whole numbers do not wrap around
        if total != num_examples:
            return Flaw("counts/labels", f"a sum of {total}", f"the num_examples {num_examples:g}")
        return None


Precision = Literal["network", "float64"]

_MOST = 1e12  # far above the mean square of any honest feature, far below where sums of products overflow
_SLACK = 1e-6  # of rounding, in what must hold exactly


@dataclass(frozen=True, slots=True)
class Moments(PlainEvidence):
    """G = Σ φφᵀ, H = Σ φtᵀ, Σ t² and n, where φ is what a linear layer reads with a 1 appended and t the one-hot label.

    One pass over the rows, memory free of their number. Sums are kept and sent in float64, so that clients' sums add up
    to the sums of all rows to fifteen digits. What a float32 network gives can differ in its seventh digit with the
    batch a row stands in; in precision "float64" the network itself runs in float64, and the sums of any split of the
    rows agree to twelve digits.

    Attributes:
        layer: a linear layer's name; by default the last one.
        precision: "network" runs the network as it is, by compiled kernels where they know it; "float64" in float64, by
            torch, at several times the time.
        batch: rows per pass.
        clip: shorten features to this length, row by row; by default they are taken as they are.
    """

    layer: str = ""
    precision: Precision = "network"
    batch: int = 256
    clip: float | None = None
    name: ClassVar[str] = KIND
    needs_one_target: ClassVar[bool] = True
    reveals: ClassVar[str] = (
        "how many rows of each class the client has, the class means of the features its layer reads, and their "
        "second moments, summed over the client's rows; of labels and numbers their sums and squares, and their "
        "products with the features"
    )

    def __call__(self, local: Local) -> Params:
        """The sums at the weights the client has."""
        brief = local.brief
        layer = linear_layer(brief.spec.layout, self.layer)
        path = layer.weight.rpartition(".")[0]
        compiled = None
        if self.precision == "network":
            compiled = inputs_of_head(local.module, local.rows, local.settings.kernel, path)
        sums = collect_sums(local.module, path, local.rows, _outputs(brief, self.layer), self, compiled)
        return moment_notes(sums, _has_numbers(brief.task))

    def passes(self, effort: Effort) -> float:
        """A pass forward, and the product φφᵀ."""
        costs = layer_costs(effort.spec, effort.shape)
        layer = linear_layer(effort.spec.layout, self.layer)
        width: int = effort.spec.skeleton().state_dict()[layer.weight].shape[1] + 1
        return 1 + float(width**2) / max(1, sum(cost.products for cost in costs.values()))

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """A triangle, a table and a vector."""
        weight = brief.params[linear_layer(brief.spec.layout, self.layer).weight]
        return moment_forms(weight.shape[1], _outputs(brief, self.layer), _has_numbers(brief.task))

    def check(self, notes: Params, num_examples: float) -> Flaw | None:
        """What sums of real rows satisfy: counts that add up, no negative eigenvalue, |Σφt|² ≤ Σφ² Σt²."""
        sums, numbers = sums_in(notes), are_numbers(notes)
        counts = sums.cross[-1]
        if sums.count != num_examples:
            return Flaw(f"{KIND}/gram", f"a count of {sums.count:g}", f"the num_examples {num_examples:g}")
        off = not counts.equal(sums.squares) or bool((counts < 0).any()) or float(counts.sum()) != num_examples
        if off and not numbers:
            return Flaw(f"{KIND}/cross", "other class counts", f"counts ≥ 0 that sum to {num_examples:g}")
        if (most := float(sums.gram.diagonal().max())) > _MOST * num_examples:
            return Flaw(f"{KIND}/gram", f"a mean square of {most / num_examples:.3g}", f"at most {_MOST:g}")
        if not is_psd(sums.gram):
            return Flaw(f"{KIND}/gram", "not positive semi-definite", "a matrix without negative eigenvalues")
        if bool((sums.squares < 0).any()):
            return Flaw(f"{KIND}/{NUMBERS}", "below zero", "sums of squares")
        bound = sums.gram.diagonal().clamp(min=0)[:, None] * sums.squares
        if bool((sums.cross.square() > bound * (1 + _SLACK) + _SLACK).any()):
            return Flaw(f"{KIND}/cross", "target sums beyond the second moments", "sums of the same rows")
        return None

    def influence(self, notes: Params) -> Mapping[str, float]:
        """The mean square of a feature: whoever's features are larger determines more of the solution.

        Of labels and numbers also their mean product with the features, which no count of classes bounds.
        """
        sums = sums_in(notes)
        rows = max(sums.count, 1.0)
        told = {f"{KIND}/gram": sums.scale / rows}
        return told | ({f"{KIND}/cross": float(sums.cross.norm()) / rows} if are_numbers(notes) else {})


def _outputs(brief: Brief, layer: str) -> int:
    """How many targets there are: one per class, or per output of the layer where classes are not told."""
    return brief.classes or len(brief.params[linear_layer(brief.spec.layout, layer).weight])


def _has_numbers(task: Task) -> bool:
    """Whether targets are columns of labels or numbers, and not one class per row."""
    return not isinstance(task, Classification | Binary)


@torch.no_grad()
def collect_sums(
    module: nn.Module,
    path: str,
    rows: Rows,
    targets: int,
    how: Moments | None = None,
    inputs: Iterator[Tensor] | None = None,
) -> Sums:
    """The sums over some rows, in one pass.

    Args:
        module: the network, in evaluation mode.
        path: the linear layer's path in it.
        rows: the examples.
        targets: how many classes, labels or numbers.
        how: its batch and precision.
        inputs: what the layer reads, batch by batch, where something else than torch has passed the rows on to it.

    Raises:
        ConfigError: if the layer does not read one vector per row, or a label is not among the targets.

    Example:
        >>> rows = Rows(torch.tensor([[2.0], [3.0]]), torch.tensor([0, 1]))
        >>> collect_sums(nn.Linear(1, 2), "", rows, 2).gram.tolist()
        [[13.0, 5.0], [5.0, 2.0]]
    """
    how = how or Moments()
    numbers = rows.y.is_floating_point()
    if not numbers and len(rows) and int(rows.y.max()) >= targets:
        raise ConfigError(f"a row has the label {int(rows.y.max())} and there are {targets} classes, counted from 0")
    total: Sums | None = None
    begin = 0
    for read in inputs or _read_by_torch(module, path, rows, how):
        features = _with_constant(_shorten(read, how.clip))
        y = rows.y[begin : begin + len(read)]
        part = Sums.of(features, y.reshape(len(y), targets) if numbers else F.one_hot(y, targets))
        total, begin = part if total is None else total + part, begin + len(read)
    if total is None:
        raise ConfigError("there are no rows to sum over")
    return total


def _read_by_torch(module: nn.Module, path: str, rows: Rows, how: Moments) -> Iterator[Tensor]:
    """What the layer reads, one vector per row, batch by batch."""
    module = copy.deepcopy(module).double() if how.precision == "float64" else module
    with _watch_inputs(module.get_submodule(path)) as seen:
        for begin in range(0, len(rows), how.batch):
            x = rows.x[begin : begin + how.batch]
            module(as_floats_of(module.parameters(), x))
            yield _one_vector_per_row(seen, len(x), path)
            seen.clear()


@contextmanager
def _watch_inputs(layer: nn.Module) -> Iterator[list[Tensor]]:
    """The list into which everything the layer reads is written."""
    seen: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["input"])

    with forward_hooks([(layer, note)], before=True, with_kwargs=True):
        yield seen


def _one_vector_per_row(seen: list[Tensor], count: int, path: str) -> Tensor:
    if len(seen) != 1 or seen[0].ndim != 2 or len(seen[0]) != count:
        came = f"{len(seen)} times" if len(seen) != 1 else f"a tensor of shape {tuple(seen[0].shape)} for {count} rows"
        raise ConfigError(
            f"layer {path or 'of the network'!r} must read one vector per row to be fitted in closed form, and it is "
            f"given {came}; name another linear layer"
        )
    return seen[0]


def _shorten(features: Tensor, clip: float | None) -> Tensor:
    """Rows no longer than `clip`."""
    wide = features.double()
    return wide if clip is None else wide * (clip / wide.norm(dim=1, keepdim=True).clamp(min=clip))


def _with_constant(features: Tensor) -> Tensor:
    return torch.cat([features.double(), features.new_ones(len(features), 1, dtype=torch.float64)], 1)
