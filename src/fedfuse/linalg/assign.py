"""Matching rows with columns: exact assignments, and entropic transport between sides of unequal size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedfuse.errors import ConfigError, NotConverged

# Sweeps at each temperature above the last: enough to start the next one warm.
_WARM_SWEEPS = 10


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Pairs (rows[i], cols[i]), no row and no column twice, rows ascending.

    Attributes:
        rows: the matched rows.
        cols: the column of each.
        total: the sum of the matched entries.
    """

    rows: Tensor
    cols: Tensor
    total: float


def match(cost: Tensor, *, maximize: bool = False) -> Assignment:
    """Pair rows with columns so that the sum of the matched entries is least, or largest.

    The rectangular assignment problem, solved exactly (Crouse 2016); all of the shorter side is matched.

    Example:
        >>> found = match(torch.tensor([[4.0, 1.0, 3.0], [2.0, 0.0, 5.0]]))
        >>> found.cols.tolist(), found.total
        ([1, 0], 3.0)
    """
    from scipy.optimize import linear_sum_assignment  # late: most commands match nothing, and it is long to load

    if cost.ndim != 2 or not bool(torch.isfinite(cost).all()):
        raise ConfigError(f"match: got a tensor of shape {tuple(cost.shape)}, expected a matrix of finite numbers")
    table = cost.detach().double().cpu().numpy()  # scipy would convert it anyway; so the total is summed in float64 too
    rows, cols = linear_sum_assignment(table, maximize=maximize)
    total = float(table[rows, cols].sum())
    return Assignment(torch.as_tensor(rows).to(cost.device), torch.as_tensor(cols).to(cost.device), total)


def match_each(gains: Tensor) -> Tensor:
    """For each of several square matrices, the column of every row that makes the sum of matched entries largest.

    The same as `match` with `maximize` for one after another, checked and converted once.

    Example:
        >>> match_each(torch.tensor([[[0.0, 2.0], [1.0, 0.0]], [[2.0, 0.0], [0.0, 1.0]]]))
        tensor([[1, 0],
                [0, 1]])
    """
    if gains.ndim != 3 or gains.shape[1] != gains.shape[2] or not bool(gains.sum().isfinite()):
        raise ConfigError(
            f"match_each: got a tensor of shape {tuple(gains.shape)}, expected square matrices of finite numbers"
        )
    table = gains.detach().double().cpu().numpy()
    # one after another: scipy has no batch, and the solver's own time dwarfs the loop
    from scipy.optimize import linear_sum_assignment

    found = [linear_sum_assignment(square, maximize=True)[1] for square in table]
    columns = torch.from_numpy(np.stack(found)) if found else torch.empty(gains.shape[:2], dtype=torch.int64)
    return columns.to(gains.device)


@dataclass(frozen=True, slots=True, eq=False)
class Transport:
    """A soft assignment.

    Attributes:
        plan: how much of each row goes to each column, float64.
        iterations: sweeps over rows and columns.
        error: Σ |row sums − row masses|; column sums are exact.
    """

    plan: Tensor
    iterations: int
    error: float


def sinkhorn(
    cost: Tensor,
    rows: Tensor | None = None,
    cols: Tensor | None = None,
    *,
    reg: float = 0.05,
    tol: float = 1e-9,
    max_iters: int = 10_000,
    what: str = "sinkhorn",
) -> Transport:
    """Transport row masses to column masses at least cost plus `reg` times the plan's negative entropy.

    The plan is exp((f_i + g_j − C_ij) / reg) with potentials f, g found by alternating row and column
    scalings (Cuturi 2013), in the log domain and from a high temperature down, so that a small `reg`
    neither underflows nor starts cold.

    Args:
        cost: C, (rows × columns).
        rows: mass of each row; uniform, summing to one, if absent.
        cols: mass of each column, with the same sum; uniform if absent.
        reg: the temperature, in units of the cost.
        tol: largest Σ |row sums − row masses|, relative to the total mass.
        max_iters: sweeps before giving up.
        what: the caller's name for the problem, for errors.

    Example:
        >>> sinkhorn(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), reg=0.02).plan
        tensor([[5.0000e-01, 9.6437e-23],
                [9.6437e-23, 5.0000e-01]], dtype=torch.float64)
    """
    C = cost.detach().double()
    if C.ndim != 2 or not bool(torch.isfinite(C).all()) or not reg > 0:
        raise ConfigError(
            f"{what}: got a cost of shape {tuple(C.shape)} and reg {reg}, expected a matrix of finite numbers "
            "and a positive reg"
        )
    a, b = _masses(rows, C, 0, what), _masses(cols, C, 1, what)
    mass = float(a.sum())
    if not math.isclose(mass, float(b.sum()), rel_tol=1e-9):
        raise ConfigError(f"{what}: rows weigh {mass:g} and columns {float(b.sum()):g}, expected equal masses")
    f, g, done, error = torch.zeros_like(a), torch.zeros_like(b), 0, math.inf
    # potentials are kept in units of the cost, not of the temperature: so those of one heat begin the next
    for heat in _annealing_schedule(float(C.max() - C.min()), reg):
        sweeps = max_iters - done if heat == reg else min(_WARM_SWEEPS, max_iters - done)
        u, v, spent, error = _scale(C / heat, a, b, g / heat, sweeps, tol * mass)
        f, g, done = u * heat, v * heat, done + spent
    if not error <= tol * mass:
        raise NotConverged(
            f"{what}: row masses are off by {error:.1e} after {done} sweeps, expected {tol * mass:.1e}; "
            "raise reg or allow more sweeps"
        )
    return Transport(torch.exp((f[:, None] + g - C) / reg), done, error)


def _masses(given: Tensor | None, C: Tensor, dim: int, what: str) -> Tensor:
    """The masses of one side, or uniform ones."""
    size = C.shape[dim]
    if given is None:
        return C.new_full((size,), 1 / size)
    masses = given.to(C)
    if masses.shape != (size,) or not bool(((masses >= 0) & masses.isfinite()).all()) or not bool(masses.sum() > 0):
        raise ConfigError(
            f"{what}: got masses of shape {tuple(given.shape)}, expected {size} finite numbers of at least 0, not all 0"
        )
    return masses


def _annealing_schedule(cost_range: float, reg: float) -> Iterator[float]:
    """Temperatures from the cost's range down to `reg`, each half of the one before."""
    halvings = max(0, math.ceil(math.log2(cost_range / reg))) if cost_range > 0 else 0
    return (reg * 2.0**k for k in range(halvings, -1, -1))


def _scale(K: Tensor, a: Tensor, b: Tensor, v: Tensor, sweeps: int, tol: float) -> tuple[Tensor, Tensor, int, float]:
    """Alternate u = log a − log Σ_j exp(v_j − K_ij) and its twin for columns until the rows weigh a."""
    log_a, log_b = a.log(), b.log()
    # the outflow that tells the error of this sweep is what the next sweep divides by: it is computed once
    u, outflow = torch.zeros_like(a), torch.logsumexp(v - K, dim=1)
    done, error = 0, math.inf
    while error > tol and done < sweeps:
        u = log_a - outflow
        v = log_b - torch.logsumexp(u[:, None] - K, dim=0)
        outflow = torch.logsumexp(v - K, dim=1)
        error = float((torch.exp(u + outflow) - a).abs().sum())
        done += 1
    return u, v, done, error
