"""Rows."""

from __future__ import annotations

import pytest
import torch

from fedfuse.core.rows import Rows
from fedfuse.errors import ConfigError


def test_rows_keep_inputs_and_labels_together() -> None:
    rows = Rows(torch.arange(6.0).view(3, 2), torch.tensor([2, 0, 2]))
    taken = rows.take(torch.tensor([2, 2, 1]))
    assert taken.x.tolist() == [[4.0, 5.0], [4.0, 5.0], [2.0, 3.0]]
    assert taken.y.tolist() == [2, 2, 0]
    assert rows.counts(4).tolist() == [1, 0, 2, 0]
    assert len(rows.take([])) == 0


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (torch.zeros(3, 2), torch.zeros(3, dtype=torch.int32)),
        (torch.zeros(3, 2), torch.zeros(3, 1, 1)),
        (torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(3, 2), torch.zeros(3, 1, 1, dtype=torch.int64)),
    ],
)
def test_labels_that_do_not_fit_are_refused_in_one_sentence(x: torch.Tensor, y: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="rows: y is"):
        Rows(x, y)
