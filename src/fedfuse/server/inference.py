"""Statistics of a fitted linear layer from sums alone: standard errors, intervals, p-values, heterogeneity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedfuse.nets.glm import Family, NewtonSums, solve_symmetric

_RATIO = {"bernoulli": "odds_ratio", "multinomial": "odds_ratio", "poisson": "rate_ratio"}


def coefficient_table(
    weights: Tensor,
    sums: NewtonSums,
    free: Tensor,
    family: Family,
    num_examples: float,
    names: Sequence[str] = (),
    classes: Sequence[str] = (),
    level: float = 0.95,
) -> list[dict[str, Any]]:
    """Each free coefficient with its standard error, test and interval.

    The covariance is the inverse of the Hessian at the fit; for numbers times the residual variance RSS/(n − p), with
    Student's t in place of the normal.

    Args:
        weights: outputs × features.
        sums: of all rows, at the weights.
        free: which coefficients were estimated.
        family: of the likelihood.
        num_examples: n.
        names: of the features, the constant aside.
        classes: of the outputs.
        level: of the intervals.
    """
    covariance = torch.linalg.pinv(_free(sums.hessian, free), hermitian=True)
    freedom = num_examples - covariance.shape[0]
    if family == "gaussian":
        covariance = covariance * (2 * float(sums.loss) / max(freedom, 1.0) / len(weights))
    from scipy import stats  # late: it takes as long to load as a small fusion lasts

    spread = stats.t(max(freedom, 1.0)) if family == "gaussian" else stats.norm()
    errors = covariance.diagonal().clamp(min=0).sqrt()
    width = float(spread.ppf((1 + level) / 2))
    places = free.nonzero().tolist()
    labels = [_label(output, feature, weights, names, classes) for output, feature in places]
    estimates = [float(weights[output, feature]) for output, feature in places]
    return [
        _line(label, b, float(se), width, 2 * float(spread.sf(abs(b) / float(se))) if se > 0 else math.nan, family)
        for label, b, se in zip(labels, estimates, errors, strict=True)
    ]


def heterogeneity(each: Sequence[NewtonSums], moves: Sequence[Tensor], free: Tensor) -> dict[str, float]:
    """Cochran's Q = Σ_k d_kᵀ H_k d_k with d_k = w_k − w, its degrees of freedom, p-value and I² = max(0, (Q − df)/Q).

    Args:
        each: every site's sums.
        moves: how far each site's own fit is from the common one, outputs × features.
        free: which coefficients were estimated.
    """
    hessians = [_free(s.hessian, free) for s in each]
    ranks = [int(torch.linalg.matrix_rank(h, hermitian=True)) for h in hessians]
    away = [d.flatten()[free.flatten()] for d in moves]
    q = sum(float(d @ h @ d) for d, h in zip(away, hessians, strict=True))
    freedom = max(sum(ranks) - int(free.sum()), 0)
    from scipy import stats

    chance = float(stats.chi2.sf(q, freedom)) if freedom else math.nan
    return {"Q": q, "df": freedom, "p": chance, "I2": max(0.0, (q - freedom) / q) if q > 0 else 0.0}


def one_step_moves(each: Sequence[NewtonSums], free: Tensor) -> list[Tensor]:
    """Where a Newton step alone would take each site from the common fit: the score form of its own fit."""
    chosen = free.flatten()
    moves = []
    for sums in each:
        step = torch.zeros(free.numel(), dtype=sums.hessian.dtype)
        step[chosen] = -solve_symmetric(_free(sums.hessian, free), sums.gradient.flatten()[chosen])
        moves.append(step.view_as(free))
    return moves


def _free(hessian: Tensor, free: Tensor) -> Tensor:
    chosen = free.flatten()
    return hessian[chosen][:, chosen]


def _label(output: int, feature: int, weights: Tensor, names: Sequence[str], classes: Sequence[str]) -> str:
    known = [*names, "constant"] if len(names) == weights.shape[1] - 1 else list(names)
    name = known[feature] if len(known) == weights.shape[1] else f"x{feature}"
    if feature == weights.shape[1] - 1 and len(known) != weights.shape[1]:
        name = "constant"
    if len(weights) == 1:
        return name
    return f"{classes[output] if len(classes) == len(weights) else output}: {name}"


def _line(name: str, b: float, se: float, width: float, p: float, family: Family) -> dict[str, Any]:
    low, high = b - width * se, b + width * se
    line = {"name": name, "estimate": b, "standard_error": se, "p": p, "low": low, "high": high}
    if family not in _RATIO:
        return line
    ratio, least, most = (math.exp(min(v, 700.0)) for v in (b, low, high))
    return line | {_RATIO[family]: ratio, "ratio_low": least, "ratio_high": most}
