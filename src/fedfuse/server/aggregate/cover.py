"""Client selection before networks answer together: leave out those that others cover."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.state import Bench
from fedfuse.nets.combine import rule_for_members
from fedfuse.nets.mixture import Mixture
from fedfuse.nets.routes import Route
from fedfuse.server.steps.disturb import probe_inputs


class Selection(NamedTuple):
    """The indices of those kept, in client order, and how well the first 1, 2, … chosen cover everybody."""

    indices: list[int]
    covered: list[float]


class Cover(Protocol):
    """Chooses members so that those left out are covered by those kept."""

    @property
    def needs(self) -> frozenset[str]:
        """As for an aggregator."""
        ...

    def __call__(self, cohort: Cohort, everybody: Mixture, bench: Bench) -> Selection:
        """Whom to keep."""
        ...


@dataclass(frozen=True, slots=True)
class CoverClasses:
    """Keep clients until their classes cover everybody's.

    A set S covers a class by its best holder, max_{j in S} n_jc / max_j n_jc, and covers everybody by the mean over
    the classes somebody holds; clients are added greedily until that is `share`.
    """

    share: float = 0.95
    needs: ClassVar[frozenset[str]] = frozenset({"counts"})

    def __call__(self, cohort: Cohort, everybody: Mixture, bench: Bench) -> Selection:  # noqa: ARG002 - the seam's signature
        """Greedy cover by the label counts that clients sent."""
        counts = torch.stack([u.notes["counts/labels"].double() for u in cohort])
        held_counts = counts[:, counts.amax(0) > 0]
        parts = held_counts / held_counts.amax(0)
        return select_greedily(len(cohort), lambda chosen: float(parts[chosen].amax(0).mean()), self.share)


@dataclass(frozen=True, slots=True)
class CoverAnswers:
    """Keep clients until together they answer as everybody together would.

    A set covers everybody by the share of inputs on which its answer is everybody's; clients are added greedily until
    that is `share`. The inputs are the server's own or, failing that, inputs the networks themselves know.
    """

    share: float = 0.95
    count: int = 500
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, cohort: Cohort, everybody: Mixture, bench: Bench) -> Selection:
        """Greedy cover by answers; labels are not looked at."""
        answers = _MemberAnswers.of(everybody, probe_inputs(everybody, self.count, bench)[0])
        whole = answers.answer(range(len(cohort)))
        return select_greedily(
            len(cohort), lambda chosen: float((answers.answer(chosen) == whole).double().mean()), self.share
        )


@dataclass(frozen=True, slots=True)
class _MemberAnswers:
    """Every member's logits for some inputs, so that any subset can be combined without running it again."""

    mixture: Mixture
    logits: Tensor
    confidence: Tensor | None

    @classmethod
    def of(cls, mixture: Mixture, x: Tensor) -> _MemberAnswers:
        parts, early = x.split(1000), isinstance(mixture.combine, Route)
        with torch.no_grad():
            logits = torch.cat([mixture.answers(part) for part in parts], 1)
            confidence = torch.cat([mixture.confidence(part) for part in parts], 1) if early else None
        return cls(mixture, logits, confidence)

    def answer(self, chosen: Sequence[int]) -> Tensor:
        """The class these members would give each input together."""
        rule, indices = self.mixture.combine, list(chosen)
        z = self.logits[indices]
        if self.confidence is not None and isinstance(rule, Route):
            z = z * rule.choose(self.confidence[indices])[..., None]
        return rule_for_members(rule, indices)(self.mixture.weights[indices], z).argmax(-1)


def select_greedily(count: int, score: Callable[[list[int]], float], enough: float) -> Selection:
    """Add whoever raises the score most, the first of equals, until it is enough or nobody is left.

    Example:
        >>> sets = [{1, 2}, {2, 3}, {3}]
        >>> select_greedily(3, lambda chosen: len(set().union(*(sets[i] for i in chosen))) / 3, 1.0)
        Selection(indices=[0, 1], covered=[0.666..., 1.0])
    """
    chosen, covered = list[int](), list[float]()
    while len(chosen) < count and (not covered or covered[-1] < enough):
        scores = {i: score(sorted([*chosen, i])) for i in range(count) if i not in chosen}
        best = max(scores, key=lambda i: (scores[i], -i))
        chosen.append(best)
        covered.append(scores[best])
    return Selection(sorted(chosen), covered)
