"""The straight line between two networks: how much worse the middle is than the ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.model import Single
from fedfuse.core.params import Params
from fedfuse.core.posterior import Posterior
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError
from fedfuse.server.steps.repair import RestateNorms

_BATCH = 500


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """What networks on a straight line do.

    Attributes:
        positions: from 0, the first network, to 1, the second.
        loss: mean cross entropy at each place.
        accuracy: at each place.
    """

    positions: Tensor
    loss: Tensor
    accuracy: Tensor

    @property
    def barrier(self) -> float:
        """max_t  loss(t) − ((1 − t) loss(0) + t loss(1)): how far the line rises above its ends."""
        chord = torch.lerp(self.loss[0], self.loss[-1], self.positions)
        return float((self.loss - chord).max())


def straight_line(spec: Spec, a: Params, b: Params, rows: Rows, points: int = 11, norms: Rows | None = None) -> Line:
    """Loss and accuracy of (1 − t) a + t b, for t from 0 to 1.

    Args:
        spec: the network.
        a: the weights at 0.
        b: the weights at 1.
        rows: the rows they are judged on.
        points: how many places, ends included.
        norms: rows on which BatchNorm's statistics are estimated anew at every place, if they should be.

    Example:
        >>> rows = Rows(torch.eye(2), torch.tensor([0, 1]))
        >>> spec = Spec("mlp", {"inputs": 2, "hidden": [], "classes": 2})
        >>> a, b = ({"classifier.weight": s * torch.eye(2), "classifier.bias": torch.zeros(2)} for s in (1.0, 3.0))
        >>> straight_line(spec, a, b, rows, points=3).accuracy.tolist()
        [1.0, 1.0, 1.0]
    """
    if points < 2:
        raise ConfigError(f"a line of {points} points has no two ends; ask for at least 2")
    positions = torch.linspace(0, 1, points, dtype=torch.float64)
    found = [_evaluate(Single(spec, Posterior(_between(a, b, float(t)))), rows, norms) for t in positions]
    loss, accuracy = (torch.tensor(column, dtype=torch.float64) for column in zip(*found, strict=True))
    return Line(positions, loss, accuracy)


def _between(a: Params, b: Params, t: float) -> dict[str, Tensor]:
    return {n: torch.lerp(v, b[n], t) if v.is_floating_point() else v for n, v in a.items()}


@torch.no_grad()
def _evaluate(model: Single, rows: Rows, norms: Rows | None) -> tuple[float, float]:
    if norms is not None:
        model = RestateNorms()(ServerState(0, model), Cohort(()), Bench(norms)).single
    logits = torch.cat([model.logits(x) for x in rows.x.split(_BATCH)])
    return float(F.cross_entropy(logits, rows.y)), float((logits.argmax(1) == rows.y).double().mean())
