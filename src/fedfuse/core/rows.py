"""Rows: inputs and targets in memory, the only form in which data meets a model, and how a user's data become them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fedfuse.core.rng import seeded
from fedfuse.errors import ConfigError, error_text


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Inputs with their targets.

    Attributes:
        x: inputs, one per row, as the network reads them: (n, channels, height, width), (n, features), …
        y: int64 labels, one per row; floating numbers, one or several per row; or int64 tokens, several per row. What
            they mean is the task's to say.

    Example:
        >>> rows = Rows(torch.zeros(3, 2), torch.tensor([0, 1, 1]))
        >>> len(rows), rows.take([2, 0]).y.tolist(), rows.counts(2).tolist()
        (3, [1, 0], [1, 2])
    """

    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        known = self.y.is_floating_point() or self.y.dtype == torch.int64
        if not known or self.y.ndim not in (1, 2) or len(self.y) != len(self.x):
            raise ConfigError(
                f"rows: y is {describe(self.y)}, expected int64 of shape ({len(self.x)},); "
                "give one whole number per row, float32 numbers for regression and several labels, or a row of tokens"
            )

    def __len__(self) -> int:
        return len(self.y)

    def take(self, index: Tensor | Sequence[int]) -> Rows:
        """The rows at these positions, in this order."""
        where = torch.as_tensor(index, dtype=torch.int64)
        return Rows(self.x.index_select(0, where), self.y.index_select(0, where))  # thrice as fast as x[where]

    def counts(self, classes: int) -> Tensor:
        """How many rows each class has."""
        return torch.bincount(self.y, minlength=classes)


def is_channels_last(shape: Sequence[int]) -> bool:
    """Whether a row of this shape looks like a picture with its 1, 3 or 4 channels last; networks read them first.

    Example:
        >>> [is_channels_last(shape) for shape in ((28, 28, 1), (1, 28, 28), (32, 48, 4), (64, 4, 4), (9, 128, 1))]
        [True, False, True, False, False]
    """
    if len(shape) != 3 or shape[2] not in (1, 3, 4) or shape[0] in (1, 3, 4):
        return False
    low, high = sorted(shape[:2])
    return low > shape[2] and high <= 4 * low  # no picture is wider than that; signals over time may be


def describe(tensor: Tensor) -> str:
    """A tensor's dtype and shape in words.

    Example:
        >>> describe(torch.zeros(2, 3))
        'float32 of shape (2, 3)'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


RowSource: TypeAlias = "Rows | tuple[Tensor, Tensor] | Dataset[Any] | DataLoader[Any] | Sequence[Any]"
"""What a user may give as rows."""

_GIVE = "give inputs and targets as two tensors, or a Dataset of such pairs with a len()"


def as_rows(data: RowSource) -> Rows:
    """The rows in whatever a user gives: all such data are read here.

    A `Dataset`, or another sequence of pairs of input and target, is read by its `len()`, for many know no other end. A
    `DataLoader` is read once, with all that its sampler gives; one that shuffles gives the same order every time.

    Args:
        data: rows; inputs and targets as two tensors or arrays; or what has a length and gives pairs of them.

    Raises:
        ConfigError: naming the first row that does not fit, or what has no length, such as a stream.

    Example:
        >>> as_rows([(torch.zeros(2), 1), (torch.ones(2), 0)]).y.tolist()
        [1, 0]
    """
    if isinstance(data, Rows):
        return data
    if isinstance(data, tuple) or (isinstance(data, list) and len(data) == 2 and all(map(_is_array, data))):
        return Rows(*_read_pair("rows", data, "inputs", "targets"))
    try:
        count = len(data)  # type: ignore[arg-type]  # a Dataset need not have one
    except (TypeError, AttributeError, RuntimeError) as why:
        raise ConfigError(f"rows are {_kind(data)}, which has no length and might never end; {_GIVE}") from why
    if not count:
        raise ConfigError(f"rows are {_kind(data)} and there are no rows in it, expected at least one; {_GIVE}")
    batched = isinstance(data, DataLoader) and data.batch_sampler is not None
    xs, ys = list[Tensor](), list[Tensor]()
    with seeded(0, "rows"):  # a loader that shuffles draws from the global generator
        for where, pair in _items(data, count, "batch" if batched else "row"):
            for what, one, others in zip(("input", "target"), _read_pair(where, pair), (xs, ys), strict=True):
                begin = 1 if batched else 0  # batches may be of several lengths
                if others and (one.dtype, one.shape[begin:]) != (others[0].dtype, others[0].shape[begin:]):
                    raise ConfigError(
                        f"{where}'s {what} is {describe(one)}, expected {describe(others[0])} as the first; "
                        "bring all to one shape and type"
                    )
                others.append(one)
    return Rows(torch.cat(xs), torch.cat(ys)) if batched else Rows(torch.stack(xs), torch.stack(ys))


def _items(data: Any, count: int, unit: str) -> Iterator[tuple[str, Any]]:
    """As many items as there are said to be, each with its place in words."""
    by_index = hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)
    items = map(data.__getitem__, range(count)) if by_index else iter(data)
    for place in range(count + 1):
        where = f"rows: {unit} {place}"
        try:
            item = next(items)
        except StopIteration:
            if place == count:
                return
            raise ConfigError(f"rows: {_kind(data)} ends before {unit} {place} and says that it has {count}") from None
        except Exception as why:
            raise ConfigError(f"{where} cannot be read ({error_text(why)}); mend it or leave it out") from why
        if place == count:
            raise ConfigError(f"rows: {_kind(data)} goes on at {unit} {place} and says that it has {count}")
        yield where, item


def _read_pair(where: str, pair: Any, *names: str) -> tuple[Tensor, Tensor]:
    """An input and its target, or all of them, as tensors."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ConfigError(f"{where} is {_kind(pair)}, expected a pair of input and target; {_GIVE}")
    tensors = []
    for what, given in zip(names or ("input", "target"), pair, strict=True):
        if not (_is_array(given) or isinstance(given, int | float)):
            raise ConfigError(f"{where}: found {_kind(given)} as {what}, expected a tensor, an array or a number")
        try:
            tensor = torch.as_tensor(given).detach()
        except (TypeError, ValueError, RuntimeError) as why:  # such as an array of words
            raise ConfigError(f"{where}: {what} cannot be a tensor ({error_text(why)}); give numbers") from why
        if not isinstance(given, Tensor):  # numpy's default is not a network's
            wide = torch.float32 if tensor.is_floating_point() else torch.int64
            tensor = tensor.to(wide) if tensor.dtype == torch.float64 or what.startswith("target") else tensor
        tensors.append(tensor)
    return tensors[0], tensors[1]


def _is_array(value: object) -> bool:
    return isinstance(value, Tensor) or type(value).__module__ == "numpy"


def _kind(value: object) -> str:
    """What something is, in words.

    Example:
        >>> _kind((1, 2, 3)), _kind({})
        ('a tuple of 3', 'a dict')
    """
    words = f"a {type(value).__name__}"
    return f"{words} of {len(value)}" if isinstance(value, tuple | list) else words
