"""A mixture: several networks and the rule by which they answer together.

`Mixture` comes first, then the rules, the calibration of members' logits, and the regions of their features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args, runtime_checkable

import torch
from torch import Tensor

from fedfuse.core.model import Single, outputs
from fedfuse.core.params import Params
from fedfuse.core.spec import Spec
from fedfuse.core.state import entries_of, with_kind
from fedfuse.errors import ConfigError, NotConverged
from fedfuse.linalg.psd import add_diagonal, cholesky, symmetrize
from fedfuse.linalg.ridge import Sums
from fedfuse.nets.forward import (
    AtLayer,
    Count,
    Nearest,
    Route,
    Stack,
    check_count,
    cost_of,
    find_layer,
    largest,
    layer_input,
    layer_output,
)
from fedfuse.nets.head import linear_layer
from fedfuse.tasks import CLASSIFICATION, task_named

MEMORY = 64 * 2**20  # bytes a mixture may take for what happens between its inputs and its answer
_BYTES = 8  # per number alive: its own four, and as many again for what products and convolutions pack
_ROWS = 1000  # inputs at a time: enough for a wide product, few enough that its result stays in cache


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


class _Group(NamedTuple):
    """Members of one network: their indices, and all of them as one wide network where that can be."""

    spec: Spec
    indices: tuple[int, ...]
    stack: Stack | None


@dataclass(frozen=True, slots=True)
class Mixture:
    """Several networks that answer together; they may differ in all but their inputs and classes.

    Fully connected members of one architecture run as one wide network; others, and those of which there is only one,
    run one after another.

    Attributes:
        members: the networks, in client order.
        weights: how much each counts, for rules that weigh members.
        combine: the rule by which they answer.
        memory: about how many bytes an answer may take on its way; inputs come in chunks to keep within it.
        regions: where each member's rows lie in its own features, for the rule that asks it.
        held: which classes each member's client has rows of, where clients have sent that.
    """

    members: tuple[Single, ...]
    weights: Tensor
    combine: Combine
    memory: int = field(default=MEMORY, compare=False)
    regions: tuple[FeatureRegion, ...] = ()
    held: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    _groups: list[_Group] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.members:
            raise ConfigError("a mixture of no networks has no answer; give it at least one member")
        if self.weights.shape != (len(self.members),):
            raise ConfigError(f"{self.weights.numel()} weights were given for {len(self.members)} members; one each")
        if isinstance(self.combine, Nearest) and len(self.regions) != len(self.members):
            raise ConfigError(
                f"{len(self.regions)} regions of features were given for {len(self.members)} members that are to be "
                "chosen by them; one each"
            )
        classes = {n for m in self.members if (n := outputs(m)) is not None}
        if len(classes) > 1:
            raise ConfigError(
                f"the members of a mixture tell {' and '.join(map(str, sorted(classes)))} classes apart; "
                "all must have the same ones to answer together"
            )

    def logits(self, x: Tensor) -> Tensor:
        """The combined answer."""
        parts = x.split(self.chunk(x)) if len(x) else [x]
        rule = self.combine
        if x.requires_grad and isinstance(rule, TopLogit) and rule.k != "all":
            return torch.cat([self._differentiable_answer(part, rule) for part in parts])
        return torch.cat([self.at_once(part) for part in parts])

    def at_once(self, x: Tensor) -> Tensor:
        """The combined answer to all inputs in one go, whatever memory it takes."""
        if not isinstance(self.combine, Route):
            return self.combine(self.weights, self.answers(x))
        return self._combine_chosen(x, self.combine.choose(self.confidence(x)))

    def _differentiable_answer(self, x: Tensor, rule: TopLogit) -> Tensor:
        """The combined answer where its slope is wanted too: networks that are not chosen have none, so need none."""
        with torch.no_grad():
            every = self.answers(x)
        return self._combine_chosen(x, rule.choose_members(every), every)

    def _combine_chosen(self, x: Tensor, chosen: Tensor, every: Tensor | None = None) -> Tensor:
        """The combined answer of the chosen networks' logits; the others' are given, or zeros."""
        mine = [m.logits(x[rows]) for m, rows in zip(self.members, chosen, strict=True)]
        others = mine[0].new_zeros(len(mine), len(x), mine[0].shape[-1]) if every is None else every
        return self.combine(self.weights, others.index_put(torch.nonzero(chosen, as_tuple=True), torch.cat(mine)))

    def who_answers(self, x: Tensor) -> Tensor:
        """Which members' answers count for which inputs, true or false (members, n)."""
        return torch.cat([self._choose(part) for part in x.split(self.chunk(x))], 1)

    def _choose(self, x: Tensor) -> Tensor:
        if isinstance(self.combine, Route):
            return self.combine.choose(self.confidence(x))
        if isinstance(self.combine, Choosing):
            return self.combine.choose_members(self.answers(x))
        return torch.ones(len(self.members), len(x), dtype=torch.bool)

    def answers(self, x: Tensor) -> Tensor:
        """Every member's own logits (members, n, classes)."""
        found: dict[int, Tensor] = {}
        for group in self._member_groups():
            if group.stack is None or not group.stack.fits(x):
                found |= {index: self.members[index].logits(x) for index in group.indices}
            elif len(group.indices) == len(self.members):
                return group.stack(x)
            else:
                found |= dict(zip(group.indices, group.stack(x), strict=True))
        if len({z.shape for z in found.values()}) > 1:
            counts = sorted({z.shape[-1] for z in found.values()})
            raise ConfigError(f"the members of a mixture give {counts} logits; all must tell the same classes apart")
        return torch.stack([found[index] for index in range(len(self.members))])

    def confidence(self, x: Tensor) -> Tensor:
        """How sure every member is of every input before it has answered, as the rule asks it (members, n)."""
        if isinstance(self.combine, Nearest):
            return torch.stack([-region.distance(self._features(i, x)) for i, region in enumerate(self.regions)])
        which = self.combine.layer if isinstance(self.combine, AtLayer) else "first"
        found: dict[int, Tensor] = {}
        for group in self._member_groups():
            first = find_layer(group.spec, which) == group.spec.layout.layers[0]
            if first and group.stack is not None and group.stack.fits(x):
                found |= dict(zip(group.indices, group.stack.first(x).amax(1), strict=True))
            else:
                mine = {i: self.members[i].posterior.mean for i in group.indices}
                found |= {i: layer_output(group.spec, w, x, which).flatten(1).amax(1) for i, w in mine.items()}
        return torch.stack([found[index] for index in range(len(self.members))])

    def _features(self, index: int, x: Tensor) -> Tensor:
        """What a member's last linear layer reads."""
        member = self.members[index]
        return layer_input(member.spec, member.posterior.mean, x, linear_layer(member.spec.layout))

    def to(self, device: str) -> Mixture:
        """The same mixture with its weights elsewhere."""
        return replace(self, members=tuple(m.to(device) for m in self.members))

    def chunk(self, x: Tensor) -> int:
        """How many inputs go through at a time: what a stack keeps of all members at once must fit the memory."""
        floats = 1
        for group in self._member_groups():
            cost = cost_of(group.spec, tuple(x.shape[1:]))
            alive = group.stack.floats if group.stack is not None and group.stack.fits(x) else cost.floats
            floats = max(floats, alive + cost.outputs * len(self.members))
        return max(1, min(_ROWS, self.memory // (_BYTES * floats)))

    def _member_groups(self) -> list[_Group]:
        """Members by network; made at the first use, for stacking copies their weights."""
        if not self._groups:
            indices: dict[Spec, list[int]] = {}
            for index, member in enumerate(self.members):
                indices.setdefault(member.spec, []).append(index)
            self._groups.extend(_Group(s, tuple(p), self._stack(s, p)) for s, p in indices.items())
        return self._groups

    def _stack(self, spec: Spec, indices: list[int]) -> Stack | None:
        weights = [self.members[p].posterior.mean for p in indices]
        size = sum(t.numel() * t.element_size() for w in weights for t in w.values())
        return Stack.of(spec, weights) if len(indices) > 1 and size <= self.memory else None


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


Counts: TypeAlias = tuple[tuple[float, ...], ...]
_LEAST_SHARE = 1e-12  # of a class whose rows a member has never seen: its logarithm stays finite


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


Score: TypeAlias = Literal["logit", "energy", "margin", "softmax"]


@dataclass(frozen=True, slots=True)
class TopLogit:
    """AMS: the members with the largest logits answer, by the sum of their logits (eqs. 8 and 9).

    m_j(x) = max_c z_jc(x); the k members with the largest m_j(x) are taken, ties going to the lowest client, and their
    logit vectors are added. k = 1 is AMS-top1, k = "all" is AMS-full, the output of the concatenated networks. With
    `shift` and `scale`, one number each per member, z_j stands for (z_j − shift_j) / scale_j throughout; with `counts`,
    log s_jc is added, s_jc being member j's share of the rows of class c (see `ClassShares`). Another `score` of
    confidence than the largest logit changes who is chosen, not what they answer. `standardized` answers have mean 0
    and deviation 1 over classes, input by input: no member is louder than √(classes − 1), whatever its weights.

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


Calibration: TypeAlias = Literal["temperature", "zscore"]
_COLD, _HOT = 1e-3, 1e3  # temperatures beyond these say that the network does not respond to its inputs


class Affine(NamedTuple):
    """z ↦ (z − shift) / scale."""

    shift: float
    scale: float


def calibration(kind: Calibration, logits: Tensor, labels: Tensor) -> Affine:
    """The map that makes a network's logits comparable with those of others, from its answers on some rows.

    "temperature" divides by the temperature of `fit_temperature`; "zscore" standardizes the network's confidence
    m(x) = max_c z_c(x): it becomes the number of standard deviations from its mean over these rows.

    Example:
        >>> calibration("zscore", torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1]))
        Affine(shift=2.0, scale=1.0)
    """
    if kind == "temperature":
        return Affine(0.0, fit_temperature(logits, labels))
    confidence = logits.double().amax(-1)
    std = float(confidence.std(correction=0))
    return Affine(float(confidence.mean()), std if std > _COLD else 1.0)


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


KIND = "region"
DAMPING = 1e-2
"""The share of the mean variance that is added to every direction: features that never vary would count without end."""


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRegion:
    """The classes' means and the within-class covariance of a network's features φ (Lee et al., NeurIPS 2018).

    d(x) = min_c (φ − μ_c)ᵀ Σ⁻¹ (φ − μ_c) / dim φ, over the classes the network has seen, with
    Σ = Σ_c Σ_{i in c} (φ_i − μ_c)(φ_i − μ_c)ᵀ / n + λ (mean variance) I. Divided by the number of features it is about
    1 for a row like those seen, whatever the width, so that networks can be compared.

    Attributes:
        means: μ, one row per class seen.
        root: the lower triangular L of Σ = L Lᵀ.
    """

    means: Tensor
    root: Tensor

    @classmethod
    def of(cls, sums: Sums, damping: float = DAMPING) -> FeatureRegion:
        """The region of one client's sums (evidence `moments`), whose last feature is the constant 1.

        Example:
            >>> phi = torch.tensor([[0.0, 1.0], [2.0, 1.0], [9.0, 1.0], [11.0, 1.0]])
            >>> sums = Sums.of(phi, torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1]]))
            >>> region = FeatureRegion.of(sums, damping=0.0)
            >>> region.means.flatten().tolist(), region.distance(torch.tensor([[4.0]])).item()
            ([1.0, 10.0], 9.0)
        """
        counts = sums.cross[-1]
        seen = counts > 0
        if not bool(seen.any()):
            raise ConfigError("a client's moments count no row of any class, so its features have no region")
        totals = sums.cross[:-1, seen]
        means = totals / counts[seen]
        within = symmetrize(sums.gram[:-1, :-1] - totals @ means.mT) / float(counts.sum())
        shift = damping * max(float(within.diagonal().mean()), torch.finfo(within.dtype).tiny ** 0.5)
        return cls(means.mT.contiguous(), cholesky(add_diagonal(within, shift), what="the covariance of features"))

    def distance(self, features: Tensor) -> Tensor:
        """D of every row of features (n,)."""
        phi, root = features.double(), self.root.to(features.device)
        white, centres = (
            torch.linalg.solve_triangular(root, rows.mT, upper=False).mT
            for rows in (phi, self.means.to(features.device))
        )
        apart = torch.cdist(white, centres, compute_mode="donot_use_mm_for_euclid_dist")  # which keeps small ones exact
        return apart.square().amin(1) / max(1, len(root))

    def to_notes(self) -> dict[str, Tensor]:
        """As tensors for a file."""
        return with_kind(KIND, {"means": self.means, "root": self.root})

    @classmethod
    def from_notes(cls, notes: Params) -> FeatureRegion | None:
        """What a file holds, if it holds one.

        Raises:
            ConfigError: if it does not fit together.
        """
        found = entries_of(dict(notes), KIND)
        if not found:
            return None
        means, root = found.get("means"), found.get("root")
        if means is None or root is None or means.ndim != 2 or root.shape != (means.shape[1],) * 2:
            raise ConfigError("the file's regions of features do not fit together; fuse it anew")
        return cls(means.double(), root.double())
