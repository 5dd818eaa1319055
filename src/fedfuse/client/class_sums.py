"""Sums over a client's rows: how many of each class, and the moments that a layer fitted in closed form needs.

`LabelCounts` and `Moments` send them as they are, `PrivateMoments` with the noise of differential privacy.
"""

from __future__ import annotations

import copy
import math
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias

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
from fedfuse.linalg.privacy import Release, gaussian_sigma
from fedfuse.linalg.psd import is_psd, pack, unpack
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
        """The mean square of a feature: a client with larger features determines more of the solution.

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
        features = read.double()
        if how.clip is not None:
            features = features * (how.clip / features.norm(dim=1, keepdim=True).clamp(min=how.clip))
        features = torch.cat([features, features.new_ones(len(features), 1)], 1)
        y = rows.y[begin : begin + len(read)]
        part = Sums.of(features, y.reshape(len(y), targets) if numbers else F.one_hot(y, targets))
        total, begin = part if total is None else total + part, begin + len(read)
    if total is None:
        raise ConfigError("there are no rows to sum over")
    return total


def _read_by_torch(module: nn.Module, path: str, rows: Rows, how: Moments) -> Iterator[Tensor]:
    """What the layer reads, one vector per row, batch by batch."""
    module = copy.deepcopy(module).double() if how.precision == "float64" else module
    seen: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["input"])

    with forward_hooks([(module.get_submodule(path), note)], before=True, with_kwargs=True):
        for begin in range(0, len(rows), how.batch):
            x = rows.x[begin : begin + how.batch]
            seen.clear()
            module(as_floats_of(module.parameters(), x))
            if len(seen) != 1 or seen[0].ndim != 2 or len(seen[0]) != len(x):
                shape = f"a tensor of shape {tuple(seen[0].shape)} for {len(x)} rows" if len(seen) == 1 else ""
                raise ConfigError(
                    f"layer {path or 'of the network'!r} must read one vector per row to be fitted in closed form, and "
                    f"it is given {shape or f'{len(seen)} times'}; name another linear layer"
                )
            yield seen[0]


Counts: TypeAlias = Literal["noised", "public"]

# How far replacing one row moves the release, squared, for features of length up to 1. The triangle of φφᵀ moves by up
# to 2; with another class the table and the counts move by up to 2 each. Within a class, with c the cosine of the old
# and the new row, triangle and table together move by 2 − 2c² + 2 − 2c, which is largest at c = −½.
_SQUARED_SENSITIVITY: dict[Counts, float] = {"noised": 6.0, "public": 4.5}
_FAR = 8.0  # n normal numbers are longer than √n + 8 with a probability below e⁻³², about 1e-14


@dataclass(frozen=True, slots=True)
class PrivateMoments(PlainEvidence):
    """`Moments` of clipped rows with Gaussian noise: (ε, δ)-differentially private in any one row of the client.

    Every row's features are shortened to the length `clip` and measured in it, so that ‖φ‖ ≤ 1. What is released is
    the triangle of Σ φφᵀ, the table Σ φtᵀ, and the class counts, with noise of the analytic Gaussian mechanism; the
    constant's sums follow from the table, and the number of rows is sent as it is. Neighbours therefore are clients
    with as many rows of which one is another. It changes the release by at most √6: two each by the triangle, the
    table and the counts, squared. Where counts are public by agreement, the other row has the same class: √4.5.

    Attributes:
        epsilon: ε of one exchange.
        delta: its δ.
        clip: the length that rows' features are shortened to; a public number.
        counts: class counts are "noised", or "public" by agreement.
        reproducible: draw the noise from the run's seed. For simulations alone: with the seed the noise can be
            subtracted again. Otherwise it comes from the operating system.
        of: which layer, and how it is run.
    """

    epsilon: float
    delta: float = 1e-5
    clip: float = 1.0
    counts: Counts = "noised"
    reproducible: bool = False
    of: Moments = field(default_factory=Moments)
    name: ClassVar[str] = KIND
    needs_classes: ClassVar[bool] = True

    @property
    def sigma(self) -> float:
        """The standard deviation of the noise, for features measured in units of the clip."""
        return gaussian_sigma(self.epsilon, self.delta, self.sensitivity)

    @property
    def sensitivity(self) -> float:
        """How far one row can move the release."""
        return math.sqrt(_SQUARED_SENSITIVITY[self.counts])

    @property
    def release(self) -> Release:
        """What one exchange tells of any one row."""
        return Release(self.sensitivity / self.sigma, self.delta)

    @property
    def reveals(self) -> str:
        """What the sums tell, and how surely they do not tell of one row."""
        known = "the number of rows" if self.counts == "noised" else "the number of rows of each class"
        return (
            f"{known}, exactly; class means of the features and their second moments with Gaussian noise, "
            f"differentially private in one row replaced: ε = {self.epsilon:g}, δ = {self.delta:g} for this exchange "
            f"(features clipped to {self.clip:g})"
        )

    def __call__(self, local: Local) -> Params:
        """The sums at the weights the client has, with noise."""
        own = sums_in(replace(self.of, clip=self.clip)(local))
        draw = local.stream("privacy") if self.reproducible else torch.Generator().manual_seed(secrets.randbits(63))
        return moment_notes(add_noise(own, self.sigma, self.clip, self.counts, draw))

    def passes(self, effort: Effort) -> float:
        """As many as without noise."""
        return self.of.passes(effort)

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """As without noise."""
        return self.of.expects(brief)

    def check(self, notes: Params, num_examples: float) -> Flaw | None:
        """What noise leaves true: the number of rows, counts that add up to it, and how long sums of short rows can be.

        n rows of length up to `clip` have ‖Σφφᵀ‖ ≤ n clip² and ‖Σφtᵀ‖ ≤ n clip; noise is hardly longer than √entries.
        """
        sums = sums_in(notes)
        counts = sums.cross[-1]
        if sums.count != num_examples:
            return Flaw(f"{KIND}/gram", f"a count of {sums.count:g}", f"the num_examples {num_examples:g}")
        if bool((counts < 0).any()) or abs(float(counts.sum()) - num_examples) > _SLACK * num_examples:
            return Flaw(f"{KIND}/cross", "other class counts", f"counts ≥ 0 that sum to {num_examples:g}")
        inner, table = sums.gram[:-1, :-1], sums.cross[:-1]
        noise = {
            # mirroring the triangle's d (d + 1) / 2 entries makes their noise at most √2 times as long
            "gram": math.sqrt(len(inner) * (len(inner) + 1)) + _FAR * math.sqrt(2),
            "cross": math.sqrt(table.numel()) + _FAR,
        }
        for what, part, unit in (("gram", inner, self.clip**2), ("cross", table, self.clip)):
            most = unit * (num_examples + self.sigma * noise[what])
            if (length := float(part.norm())) > most * (1 + _SLACK):
                return Flaw(
                    f"{KIND}/{what}", f"{length:.4g} long", f"at most {most:.4g}, for rows clipped to {self.clip:g}"
                )
        return None

    def influence(self, notes: Params) -> Mapping[str, float]:
        """The mean square of a feature, as without noise; noise can bring it below zero, which counts as zero."""
        return {name: max(0.0, value) for name, value in self.of.influence(notes).items()}


def add_noise(sums: Sums, sigma: float, clip: float, counts: Counts, draw: torch.Generator) -> Sums:
    """Sums of rows of length up to `clip`, with noise of σ clip² on Σφφᵀ, σ clip on Σφtᵀ, and σ on class counts.

    Noise on the triangle is mirrored, so that G stays symmetric. Counts are brought back to what counts can be: none
    below zero, all together the number of rows. The constant's column is the sum of the table over classes.

    Example:
        >>> exact = Sums.of(torch.tensor([[0.5, 1.0], [1.0, 1.0]]), torch.eye(2))
        >>> add_noise(exact, 0.0, 1.0, "noised", torch.Generator()).gram.tolist()
        [[1.25, 1.5], [1.5, 2.0]]
    """

    def noise(like: Tensor, scale: float) -> Tensor:
        return like + sigma * scale * torch.randn(like.shape, generator=draw, dtype=torch.float64).to(like)

    size = len(sums.gram) - 1
    inner = unpack(noise(pack(sums.gram[:-1, :-1]), clip**2), size)
    table = noise(sums.cross[:-1], clip)
    told = sums.cross[-1] if counts == "public" else _as_counts(noise(sums.cross[-1], 1.0), sums.count)
    column = table.sum(1, keepdim=True)
    corner = torch.full((1, 1), sums.count, dtype=torch.float64)
    gram = torch.cat([torch.cat([inner, column], 1), torch.cat([column.mT, corner], 1)])
    return Sums(gram, torch.cat([table, told[None]]), told.clone(), sums.count)


def _as_counts(noised: Tensor, total: float) -> Tensor:
    above = noised.clamp(min=0)
    return above * (total / float(above.sum())) if bool(above.any()) else torch.full_like(above, total / len(above))
