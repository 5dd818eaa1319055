"""Iso-C: a flat spectrum by whichever way keeps the digits, the same as from the singular values themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fedfuse
from fedfuse.methods.iso import flatten_spectrum


def matrix_with(values: list[float], rows: int, columns: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(n, len(values), generator=draw, dtype=torch.float64))[0] for n in (rows, columns)
    )
    return left * torch.tensor(values, dtype=torch.float64) @ right.mT


def by_singular_values(matrix: Tensor, kept: int) -> Tensor:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    flat: Tensor = values[:kept].mean() * left[:, :kept] @ right[:kept]
    return flat


@pytest.mark.parametrize(("rows", "columns"), [(40, 5), (5, 40), (5, 5)])
@pytest.mark.parametrize(
    "values",
    [[3.0, 2.0, 1.5, 1.0, 0.5], [1.0, 1e-1, 1e-2, 1e-3, 2e-4], [1.0, 1e-2, 1e-4, 1e-6, 1e-8]],
    ids=["near", "four decades", "eight decades"],
)
def test_every_singular_value_becomes_their_mean(rows: int, columns: int, values: list[float]) -> None:
    matrix = matrix_with(values, rows, columns)
    flat = flatten_spectrum(matrix)
    torch.testing.assert_close(flat, by_singular_values(matrix, 5), rtol=0, atol=1e-7)
    torch.testing.assert_close(torch.linalg.svdvals(flat), torch.full((5,), sum(values) / 5, dtype=torch.float64))


@pytest.mark.parametrize(("rows", "columns"), [(40, 6), (6, 40)])
def test_directions_in_which_nobody_moved_stay_out(rows: int, columns: int) -> None:
    matrix = matrix_with([2.0, 1.0], rows, columns)
    torch.testing.assert_close(flatten_spectrum(matrix), by_singular_values(matrix, 2))
    nothing = torch.zeros(rows, columns, dtype=torch.float64)
    assert torch.equal(flatten_spectrum(nothing), nothing)


def test_kernels_and_tables_of_any_shape_are_laid_out_as_matrices() -> None:
    draw = torch.Generator().manual_seed(0)
    start = {"conv": torch.randn(3, 4, 2, 2, generator=draw), "table": torch.randn(9, 2, generator=draw)}
    sites = [{n: t + torch.randn(t.shape, generator=draw) for n, t in start.items()} for _ in range(3)]
    fused = fedfuse.fuse(sites, fedfuse.recipe("iso", scale=0.5), start=start).state_dict()
    for name, before in start.items():
        summed = sum(site[name].double() - before.double() for site in sites)
        flat = by_singular_values(summed.reshape(len(before), -1), min(len(before), before[0].numel()))
        expected = before.double() + 0.5 * flat.reshape(before.shape)
        torch.testing.assert_close(fused[name], expected.float(), rtol=1e-5, atol=1e-6)
