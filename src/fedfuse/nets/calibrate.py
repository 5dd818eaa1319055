"""Making the logits of networks that were trained apart comparable: one shift and one scale per network."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedfuse.errors import NotConverged

Calibration: TypeAlias = Literal["temperature", "zscore"]

_COLD, _HOT = 1e-3, 1e3  # temperatures beyond these say that the network does not respond to its inputs


class Affine(NamedTuple):
    """z ↦ (z − shift) / scale."""

    shift: float
    scale: float


def calibration(kind: Calibration, logits: Tensor, labels: Tensor) -> Affine:
    """The map that makes a network's logits comparable with those of others, from its answers on some rows.

    "temperature" divides by the temperature of `fit_temperature`; "zscore" standardises the network's confidence
    m(x) = max_c z_c(x): it becomes the number of standard deviations from its mean over these rows.

    Example:
        >>> calibration("zscore", torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1]))
        Affine(shift=2.0, scale=1.0)
    """
    if kind == "temperature":
        return Affine(0.0, fit_temperature(logits, labels))
    confidence = logits.double().amax(-1)
    spread = float(confidence.std(correction=0))
    return Affine(float(confidence.mean()), spread if spread > _COLD else 1.0)


def fit_temperature(logits: Tensor, labels: Tensor, tolerance: float = 1e-10) -> float:
    """The T for which softmax(z / T) fits the labels best, by maximum likelihood.

    The targets are Platt's: the label has (n + 1)/(n + C) instead of 1 and every other class 1/(n + C), so that rows
    which the network gets all right, as its own training rows may be, still have a finite best T. The likelihood is
    concave in 1/T, and Newton's method finds its one maximum.

    Raises:
        NotConverged: if it does not, which only logits without bounds could cause.

    Example:
        >>> z = torch.tensor([[2.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 0.0]])
        >>> round(fit_temperature(z, torch.tensor([0, 0, 1, 1])), 3)
        2.885
    """
    z = logits.double() - logits.double().amax(-1, keepdim=True)
    n, classes = z.shape
    target = torch.full_like(z, 1 / (n + classes)).scatter_(1, labels[:, None], (n + 1) / (n + classes))
    wanted = (target * z).sum(-1).mean()
    beta = 1.0
    for _ in range(200):
        p = (beta * z).softmax(-1)
        mean = (p * z).sum(-1)
        slope = float(wanted - mean.mean())  # of the log likelihood, in beta = 1/T
        bend = float(((p * z * z).sum(-1) - mean.square()).mean())
        step = slope / bend if bend > 0 else 0.0
        # at most a factor of two at a time: far from the maximum the parabola is a poor picture
        new = min(max(beta + step, beta / 2), beta * 2)
        new = min(max(new, 1 / _HOT), 1 / _COLD)
        if abs(new - beta) <= tolerance * beta:
            return 1 / new
        beta = new
    raise NotConverged(f"the temperature of a network did not settle within 200 steps; its logits reach {z.min():g}")
