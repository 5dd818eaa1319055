"""The k-th largest number, by which TIES trims: always that of a sort, whatever the numbers are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedfuse.server.aggregate.sparse import kth_largest

SIZE = 200_003


def numbers(kind: str) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    normal = torch.randn(SIZE, generator=draw)
    return {
        "normal": normal,
        "wide": normal.double() ** 9,
        "equal": torch.zeros(SIZE),
        "few values": (normal * 2).round(),
        "mostly zero": normal * (torch.rand(SIZE, generator=draw) < 0.01),
        "sorted": normal.sort().values,
        "misleading": normal + 100 * (torch.arange(SIZE) % ((SIZE // (1 << 14)) | 1) == 0),  # what a sample looks at
    }[kind]


@pytest.mark.parametrize("kind", ["normal", "wide", "equal", "few values", "mostly zero", "sorted", "misleading"])
@pytest.mark.parametrize("k", [1, 2, 1000, SIZE // 5, SIZE // 2, SIZE - 1, SIZE])
def test_it_is_that_of_a_sort(kind: str, k: int) -> None:
    values = numbers(kind)
    before = values.clone()
    found = kth_largest(values, k)
    assert found.dtype == values.dtype
    assert found.equal(values.sort(descending=True).values[k - 1])
    assert values.equal(before), "what was given is left as it was"


@pytest.mark.parametrize("size", [1, 2, 50])
def test_few_numbers_are_partitioned(size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    assert [float(kth_largest(values, k)) for k in range(1, size + 1)] == values.sort(descending=True).values.tolist()
