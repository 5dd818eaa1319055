"""How a mixture's members answer together; each rule is data, so a mixture can be saved and loaded.

A rule treats every input by itself, so a mixture may answer in chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

import torch
from torch import Tensor

from fedfuse.errors import ConfigError
from fedfuse.nets.routes import AtLayer, Count, Nearest, check_count, largest
from fedfuse.tasks import CLASSIFICATION, task_named

Score: TypeAlias = Literal["logit", "energy", "margin", "softmax"]
Counts: TypeAlias = tuple[tuple[float, ...], ...]

_LEAST_SHARE = 1e-12  # of a class whose rows a member has never seen: its logarithm stays finite


class Combine(Protocol):
    """How a mixture turns its members' logits into one answer."""

    def __call__(self, weights: Tensor, logits: Tensor) -> Tensor:
        """Weights (k,) and member logits (k, n, classes) to logits (n, classes)."""
        ...


@runtime_checkable
class Choosing(Protocol):
    """A rule that lets some members answer and others not, by their logits."""

    def choose_members(self, logits: Tensor) -> Tensor:
        """Which members answer which inputs, true or false (k, n)."""
        ...


@dataclass(frozen=True, slots=True)
class MeanProbability:
    """The weighted mean of softmax outputs: log Σ_k w_k softmax(z_k).

    Example:
        >>> z = torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]])
        >>> MeanProbability()(torch.tensor([0.5, 0.5]), z).exp()
        tensor([[0.5000, 0.5000]])
    """

    def __call__(self, weights: Tensor, logits: Tensor) -> Tensor:
        """Mean in log space, so that a vanishing probability does not become −∞."""
        return CLASSIFICATION.average(logits, weights)


@dataclass(frozen=True, slots=True)
class MeanPrediction:
    """The weighted mean of what members predict, for tasks without classes: of numbers, or of probabilities of "yes".

    Example:
        >>> MeanPrediction("regression")(torch.tensor([0.5, 0.5]), torch.tensor([[[1.0]], [[3.0]]]))
        tensor([[2.]])
    """

    task: str

    def __post_init__(self) -> None:
        task_named(self.task)

    def __call__(self, weights: Tensor, logits: Tensor) -> Tensor:
        """Outputs that predict the mean."""
        return task_named(self.task).average(logits, weights)


@dataclass(frozen=True, slots=True)
class MeanLogit:
    """The weighted mean of logits: Σ_k w_k z_k, DENSE's teacher.

    Example:
        >>> MeanLogit()(torch.tensor([0.5, 0.5]), torch.tensor([[[2.0, 0.0]], [[0.0, 4.0]]]))
        tensor([[1., 2.]])
    """

    def __call__(self, weights: Tensor, logits: Tensor) -> Tensor:
        """Mean over members."""
        return torch.einsum("k,knc->nc", weights.to(logits), logits)


@dataclass(frozen=True, slots=True)
class ClassShares:
    """Each member speaks for the classes it has seen: p(c|x) ∝ Σ_j s_jc p_j(c|x) with s_jc = n_jc / Σ_k n_kc.

    A member trained on label-skewed rows answers with its own classes' frequencies; weighing its vote for a class by
    its share of that class's rows takes them out.

    Attributes:
        counts: n_jc, how many rows of class c member j has seen, or an estimate of it up to a factor of each class.

    Example:
        >>> z = torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]])
        >>> ClassShares(((9.0, 0.0), (1.0, 5.0)))(torch.ones(2), z).exp()
        tensor([[0.4774, 0.5226]])
    """

    counts: Counts

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", _table("counts", self.counts))

    def __call__(self, weights: Tensor, logits: Tensor) -> Tensor:  # noqa: ARG002 - members count by class
        """Log of the normalized vote."""
        votes = logits.log_softmax(-1) + log_shares(self.counts, logits)
        return torch.logsumexp(votes, 0).log_softmax(-1)


def log_shares(counts: Counts, logits: Tensor) -> Tensor:
    """Log s_jc of members' class counts, (k, 1, classes) as logits of this shape take them.

    Example:
        >>> log_shares(((1.0, 2.0), (3.0, 0.0)), torch.zeros(2, 1, 2)).exp()[:, 0]
        tensor([[2.5000e-01, 1.0000e+00],
                [7.5000e-01, 1.0000e-12]])
    """
    table = logits.new_tensor(counts, dtype=torch.float64)
    if table.shape != (len(logits), logits.shape[-1]):
        raise ConfigError(
            f"class counts were given for {' × '.join(map(str, table.shape))} members and classes, "
            f"expected {len(logits)} × {logits.shape[-1]}"
        )
    shares = table / table.sum(0).clamp(min=_LEAST_SHARE)
    return shares.clamp(min=_LEAST_SHARE).log().to(logits)[:, None]


def confidence(score: Score, logits: Tensor) -> Tensor:
    """How sure each member is of each input, (k, n).

    "logit" is the paper's max_c z_c; "energy" log Σ_c exp z_c (Liu et al. 2020); "margin" the distance of the largest
    logit from the next; "softmax" the largest log-probability, z's level taken out.

    Example:
        >>> z = torch.tensor([[[2.0, 0.5, 0.0]]])
        >>> [round(float(confidence(s, z)), 3) for s in ("logit", "energy", "margin", "softmax")]
        [2.0, 2.306, 1.5, -0.306]
    """
    if score == "energy":
        return logits.logsumexp(-1)
    if score == "margin":
        best = logits.topk(min(2, logits.shape[-1]), -1).values
        return best[..., 0] - best[..., -1]
    return (logits.log_softmax(-1) if score == "softmax" else logits).amax(-1)


@dataclass(frozen=True, slots=True)
class TopLogit:
    """AMS: the members with the largest logits answer, by the sum of their logits (eqs. 8 and 9).

    m_j(x) = max_c z_jc(x); the k members with the largest m_j(x) are taken, ties going to the lowest client, and their
    logit vectors are added. k = 1 is AMS-top1, k = "all" is AMS-full, the output of the concatenated networks. With
    `shift` and `scale`, one number each per member, z_j stands for (z_j − shift_j) / scale_j throughout; with `counts`,
    log s_jc is added, s_jc being member j's share of the rows of class c (see `ClassShares`). Another `score` of
    confidence than the largest logit changes who is chosen, not what they answer. `standardized` answers have mean 0
    and deviation 1 over classes, input by input: nobody is louder than √(classes − 1), whatever its weights.

    Example:
        >>> z = torch.tensor([[[5.0, 4.0]], [[0.0, 3.0]]])
        >>> TopLogit()(torch.ones(2), z), TopLogit("all")(torch.ones(2), z)
        (tensor([[5., 4.]]), tensor([[5., 7.]]))
    """

    k: Count = 1
    shift: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    score: Score = "logit"
    counts: Counts = ()
    standardized: bool = False

    def __post_init__(self) -> None:
        check_count("AMS", self.k)
        if self.score not in get_args(Score):
            raise ConfigError(f"AMS: score is {str(self.score)[:40]!r}, expected one of {', '.join(get_args(Score))}")
        object.__setattr__(self, "counts", _table("counts", self.counts))
        for name in ("shift", "scale"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        if not isinstance(self.standardized, bool):
            raise ConfigError(f"AMS: standardized is {str(self.standardized)[:40]!r}, expected true or false")
        if any(s <= 0 for s in self.scale):
            raise ConfigError(f"a member's logits are divided by {min(self.scale):g}, expected scales above 0")

    def __call__(self, weights: Tensor, logits: Tensor) -> Tensor:  # noqa: ARG002 - members count by confidence alone
        """The sum of the chosen members' calibrated logits."""
        z = self._calibrate(logits)
        if self.k == "all" or self.k >= len(z):
            return z.sum(0)
        if self.k == 1:
            best = confidence(self.score, z).argmax(0)  # the first of equals
            return z[best, torch.arange(len(best), device=z.device)]
        return torch.where(largest(confidence(self.score, z), self.k)[..., None], z, 0.0).sum(0)

    def choose_members(self, logits: Tensor) -> Tensor:
        """Which members answer which inputs (k, n)."""
        return largest(confidence(self.score, self._calibrate(logits)), self.k)

    def _calibrate(self, logits: Tensor) -> Tensor:
        for name, numbers in (("shift", self.shift), ("scale", self.scale)):
            if numbers and len(numbers) != len(logits):
                raise ConfigError(f"AMS has a {name} for {len(numbers)} members, expected {len(logits)}")
        z = logits - logits.new_tensor(self.shift)[:, None, None] if self.shift else logits
        z = z / logits.new_tensor(self.scale)[:, None, None] if self.scale else z
        z = standardize_answers(z) if self.standardized else z
        return z + log_shares(self.counts, z) if self.counts else z


def standardize_answers(logits: Tensor) -> Tensor:
    """Every answer with mean 0 and deviation 1 over its classes; one that prefers no class says nothing.

    Example:
        >>> quiet, loud = torch.tensor([0.0, 1.0, 5.0]), torch.tensor([0.0, 1e6, 5e6])
        >>> bool(torch.allclose(standardize_answers(quiet), standardize_answers(loud)))
        True
    """
    wide = logits.double()
    centred = wide - wide.mean(-1, keepdim=True)
    deviation = centred.square().mean(-1, keepdim=True).sqrt()
    return torch.where(deviation > 0, centred / deviation, 0.0).to(logits)


@dataclass(frozen=True, slots=True)
class OpenSetVote:
    """FedOV's vote: members that know an input add their class probabilities; the last output means "unknown".

    The `voters` members with the smallest probability of "unknown" vote, ties going to the lowest client: log of the
    mean over voters of p_jc, for the known classes c. With "all", a member that does not know an input still says
    little, for its probability has gone to "unknown".

    Example:
        >>> z = torch.tensor([[[3.0, 0.0, -9.0]], [[0.0, 0.0, 9.0]]])
        >>> OpenSetVote(voters=1)(torch.ones(2), z).exp()
        tensor([[0.9526, 0.0474]])
    """

    voters: Count = "all"

    def __post_init__(self) -> None:
        check_count("the open-set vote", self.voters)

    def __call__(self, weights: Tensor, logits: Tensor) -> Tensor:  # noqa: ARG002 - votes count by what is known
        """Log of the mean vote for each known class."""
        log_p, votes = logits.log_softmax(-1), self.choose_members(logits)
        known = log_p[..., :-1].masked_fill(~votes[..., None], -math.inf)
        return torch.logsumexp(known, 0) - votes.sum(0)[:, None].to(logits).log()

    def choose_members(self, logits: Tensor) -> Tensor:
        """Who votes: those that know an input best (k, n)."""
        return largest(-logits.log_softmax(-1)[..., -1], self.voters)


def rule_for_members(rule: Combine, indices: Sequence[int]) -> Combine:
    """The rule for some of a mixture's members: what it says of each member follows it.

    Example:
        >>> rule_for_members(TopLogit(1, shift=(1.0, 2.0, 3.0)), [0, 2])
        TopLogit(k=1, shift=(1.0, 3.0), scale=(), score='logit', counts=(), standardized=False)
    """
    if isinstance(rule, ClassShares):
        return ClassShares(tuple(rule.counts[i] for i in indices))
    if not isinstance(rule, TopLogit):
        return rule
    shift, scale = (tuple(numbers[i] for i in indices) if numbers else () for numbers in (rule.shift, rule.scale))
    counts = tuple(rule.counts[i] for i in indices) if rule.counts else ()
    return replace(rule, shift=shift, scale=scale, counts=counts)


def find_disturbed(logits: Tensor) -> Tensor:
    """Where members disturb each other: the sum of logits answers otherwise than the most confident member (n,).

    Example:
        >>> find_disturbed(torch.tensor([[[5.0, 4.0]], [[0.0, 3.0]]]))
        tensor([True])
    """
    most_confident = TopLogit()(torch.ones(len(logits)), logits)
    return logits.sum(0).argmax(-1) != most_confident.argmax(-1)


COMBINES: dict[str, type] = {
    rule.__name__: rule
    for rule in (MeanProbability, MeanPrediction, MeanLogit, ClassShares, TopLogit, AtLayer, Nearest, OpenSetVote)
}


def combine_named(name: str, options: Mapping[str, Any]) -> Combine:
    """A rule by its class name, from a closed table: a file cannot name anything else."""
    if name not in COMBINES:
        raise ConfigError(f"there is no way to combine called {str(name)[:40]!r}; known are {', '.join(COMBINES)}")
    made: Combine = COMBINES[name](**options)
    return made


def _numbers(name: str, values: object) -> tuple[float, ...]:
    """One finite number per member, from a tuple or a file's list."""
    good = isinstance(values, Sequence) and all(isinstance(v, int | float) and math.isfinite(v) for v in values)
    if not good or not isinstance(values, Sequence):
        raise ConfigError(f"AMS: {name} is {str(values)[:40]!r}, expected finite numbers, one per member or class")
    return tuple(float(v) for v in values)


def _table(name: str, rows: object) -> Counts:
    """Numbers from 0 on per member and class, from tuples or a file's lists."""
    good = isinstance(rows, Sequence) and not isinstance(rows, str)
    table = tuple(_numbers(name, row) for row in rows) if good and isinstance(rows, Sequence) else ()
    if not good or len({len(row) for row in table}) > 1 or any(n < 0 for row in table for n in row):
        raise ConfigError(f"a mixture's {name} are {str(rows)[:40]!r}, expected as many numbers ≥ 0 for every member")
    return table
