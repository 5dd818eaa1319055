"""Fusing predictions: the result is the clients' networks, and a rule by which they answer together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Answering, Single
from fedfuse.core.seams import Result, ServerPart
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.nets.cost import layer_costs
from fedfuse.nets.forward import AtLayer, Nearest, Route, cost_of, find_layer
from fedfuse.nets.head import linear_layer, sums_in
from fedfuse.nets.mixture import (
    Affine,
    Calibration,
    ClassShares,
    Combine,
    Counts,
    FeatureRegion,
    MeanPrediction,
    MeanProbability,
    Mixture,
    OpenSetVote,
    TopLogit,
    calibration,
    rule_for_members,
)
from fedfuse.server.aggregate.mean import ALL_LAWS
from fedfuse.server.inputs import input_form
from fedfuse.server.steps.disturb import probe_inputs
from fedfuse.tasks import Classification

Shares: TypeAlias = Literal["none", "counts", "biases"]


@dataclass(frozen=True, slots=True)
class KeepAll(ServerPart):
    """Keep the clients' networks, of whatever architecture, and let them answer together by a rule.

    Attributes:
        combine: the rule.
        weights: whether a member counts alike or by its number of examples, where the rule weighs members.
        cover: which members to leave out because others cover them; None keeps all.
        calibrate: how logits are made comparable, for AMS; None leaves them as they are.
        fitted: where the calibration is found: by each client on its own rows, or by the server on its own.
        shares: whether members vote for a class by their share of its rows: by the "counts" that clients send, or by
            what their networks' output "biases" let guess of them.
    """

    combine: Combine = field(default_factory=MeanProbability)
    weights: Literal["uniform", "examples"] = "uniform"
    cover: Cover | None = None
    calibrate: Calibration | None = None
    fitted: Literal["clients", "server"] = "clients"
    shares: Shares = "none"
    result: ClassVar[Result] = "mixture"
    mixes_networks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.shares != "none" and not isinstance(self.combine, TopLogit | MeanProbability):
            raise RecipeError(
                f"class shares weigh probabilities or logits, and {type(self.combine).__name__} takes neither as they "
                "are; leave them out, average probabilities or choose by the largest logit"
            )
        if self.calibrate is not None and not isinstance(self.combine, TopLogit):
            raise RecipeError(
                f"calibration is of logits that are compared, and {type(self.combine).__name__} compares none; "
                "leave it out or choose by the largest logit"
            )

    @property
    def needs_classes(self) -> bool:
        """Largest logits and votes are of classes; a mean prediction is there for every task."""
        return self.cover is not None or isinstance(self.combine, TopLogit | AtLayer | Nearest | OpenSetVote)

    @property
    def laws(self) -> frozenset[str]:
        """All but what the rule takes away: a sum of equal answers is not that answer, nor is a calibrated one."""
        rule, several = self.combine, isinstance(self.combine, TopLogit | AtLayer | Nearest) and self.combine.k != 1
        changed = self.calibrate is not None or self.shares != "none" or isinstance(rule, OpenSetVote)
        changed |= isinstance(rule, TopLogit) and rule.standardized
        return ALL_LAWS - ({"one", "agree"} if changed else {"agree"} if several else set())

    @property
    def needs(self) -> frozenset[str]:
        """What choosing and calibrating need, and networks that can answer."""
        needs = {"network"} | (self.cover.needs if self.cover is not None else set())
        needs |= {"counts"} if self.shares == "counts" else set()
        needs |= {"moments"} if isinstance(self.combine, Nearest) else set()
        if self.calibrate is not None:
            needs |= {"logit_scale" if self.fitted == "clients" else "server_rows"}
        return frozenset(needs)

    def check_network(self, networks: Mapping[str, Spec], bench: Bench, rounds: int) -> None:  # noqa: ARG002
        """Say before training if a network lacks the layer at which it would be chosen.

        Raises:
            ConfigError: in one sentence.
        """
        for spec in networks.values():
            if isinstance(self.combine, AtLayer):
                find_layer(spec, self.combine.layer)
            elif isinstance(self.combine, Nearest):
                linear_layer(spec.layout)

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        """The mixture of the cohort's networks, in client order; clients would still begin where they began."""
        whole = self._mixture(cohort, bench)
        mixture, facts = whole, dict[str, Any]()
        if self.cover is not None:
            selection = self.cover(cohort, whole, bench)
            fewer = Cohort(tuple(cohort.updates[i] for i in selection.indices))
            mixture = self._mixture(fewer, bench)
            facts = {"kept": list(fewer.clients), "covered": selection.covered}
        facts |= inference_costs(mixture, [u.spec for u in cohort], bench)
        return replace(state, model=mixture, starts={"": state.start}).noting(**facts)

    def _mixture(self, cohort: Cohort, bench: Bench) -> Mixture:
        equal = torch.full((len(cohort),), 1 / len(cohort), dtype=torch.float64)
        weights = cohort.weights if self.weights == "examples" else equal
        nearest = isinstance(self.combine, Nearest)  # where every client's rows lie in its own network's features
        regions = tuple(FeatureRegion.of(sums_in(u.notes)) for u in cohort) if nearest else ()
        rule = self._rule(cohort, bench)
        return Mixture(members_of(cohort), weights, rule, regions=regions, held=held_classes(cohort))

    def _rule(self, cohort: Cohort, bench: Bench) -> Combine:
        if not isinstance(bench.task, Classification) and self.shares != "none":
            raise ConfigError(f"class shares are of classes, and a {bench.task.name} has none; leave shares out")
        if isinstance(self.combine, MeanProbability) and not isinstance(bench.task, Classification):
            return MeanPrediction(bench.task.name)
        rule = self.combine
        if self.calibrate is not None and isinstance(rule, TopLogit):
            maps = self._maps(cohort, bench)
            rule = replace(rule, shift=tuple(m.shift for m in maps), scale=tuple(m.scale for m in maps))
        if self.shares == "none":
            return rule
        counts = sent_counts(cohort) if self.shares == "counts" else counts_by_biases(cohort)
        return replace(rule, counts=counts) if isinstance(rule, TopLogit) else ClassShares(counts)

    def _maps(self, cohort: Cohort, bench: Bench) -> list[Affine]:
        """The calibration of every client's logits: as sent, or found on the server's rows."""
        if self.fitted == "clients":
            return [Affine(*(float(u.notes[f"logit_scale/{n}"]) for n in Affine._fields)) for u in cohort]
        assert self.calibrate is not None
        rows = bench.need_rows("calibration on the server")
        found = []
        for update in cohort:
            with torch.no_grad():
                parts = [Single(update.spec, update.posterior).logits(x) for x in rows.x.split(1000)]
            found.append(calibration(self.calibrate, torch.cat(parts), rows.y))
        return found


def members_of(updates: Iterable[ClientUpdate]) -> tuple[Single, ...]:
    """The updates' networks with tensors of their own: an update's may live in a file that goes away."""
    return tuple(
        Single(u.spec, replace(u.posterior, mean={n: t.clone() for n, t in u.posterior.mean.items()})) for u in updates
    )


def sent_counts(cohort: Cohort) -> Counts:
    """How many rows of each class every client has told it has."""
    return tuple(tuple(float(n) for n in u.notes["counts/labels"].tolist()) for u in cohort)


def held_classes(cohort: Cohort) -> tuple[tuple[int, ...], ...]:
    """Which classes every client has rows of, where all have told their label counts; nothing otherwise."""
    if not all("counts/labels" in u.notes for u in cohort):
        return ()
    return tuple(tuple(c for c, n in enumerate(counts) if n > 0) for counts in sent_counts(cohort))


def counts_by_biases(cohort: Cohort) -> Counts:
    """How many rows of each class every client has, as far as its output biases tell: n_j softmax(b_j)_c.

    A softmax layer whose inputs say nothing of the class fits b_jc = log π_jc + const to the classes' frequencies π_j;
    the more its inputs say, and the shorter it trained, the nearer the guess is to equal shares.

    Raises:
        ConfigError: if a network has no linear output layer with a bias.
    """
    found = []
    for update in cohort:
        linear = [layer for layer in update.spec.layout.layers if layer.kind == "linear"]
        if not linear or linear[-1].bias is None:
            raise ConfigError(
                f"{update.client}: its network has no output bias to guess class shares from; let clients send label "
                'counts (shares = "counts")'
            )
        prior = update.posterior.mean[linear[-1].bias].double().softmax(0)
        found.append(tuple((update.num_examples * prior).tolist()))
    return tuple(found)


class Selection(NamedTuple):
    """The indices of those kept, in client order, and how well the first 1, 2, … chosen cover all."""

    indices: list[int]
    covered: list[float]


class Cover(Protocol):
    """Chooses members so that those left out are covered by those kept."""

    @property
    def needs(self) -> frozenset[str]:
        """As for an aggregator."""
        ...

    def __call__(self, cohort: Cohort, whole: Mixture, bench: Bench) -> Selection:
        """Which members to keep."""
        ...


@dataclass(frozen=True, slots=True)
class CoverClasses:
    """Keep clients until their classes cover those of all.

    A set S covers a class by its best holder, max_{j in S} n_jc / max_j n_jc, and covers all by the mean over the
    classes that any client holds; clients are added greedily until that is `share`.
    """

    share: float = 0.95
    needs: ClassVar[frozenset[str]] = frozenset({"counts"})

    def __call__(self, cohort: Cohort, whole: Mixture, bench: Bench) -> Selection:  # noqa: ARG002 - the seam's signature
        """Greedy cover by the label counts that clients sent."""
        counts = torch.stack([u.notes["counts/labels"].double() for u in cohort])
        held_counts = counts[:, counts.amax(0) > 0]
        parts = held_counts / held_counts.amax(0)
        return select_greedily(len(cohort), lambda chosen: float(parts[chosen].amax(0).mean()), self.share)


@dataclass(frozen=True, slots=True)
class CoverAnswers:
    """Keep clients until together they answer as all together would.

    A set covers all by the share of inputs on which its answer is that of all; clients are added greedily until that is
    `share`. The inputs are the server's own or, failing that, inputs the networks themselves know.
    """

    share: float = 0.95
    count: int = 500
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, cohort: Cohort, whole: Mixture, bench: Bench) -> Selection:
        """Greedy cover by answers; labels are not looked at."""
        answers = _MemberAnswers.of(whole, probe_inputs(whole, self.count, bench)[0])
        common = answers.answer(range(len(cohort)))
        return select_greedily(
            len(cohort), lambda chosen: float((answers.answer(chosen) == common).double().mean()), self.share
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
    """Add the one that raises the score most, the first of equals, until it is enough or none is left.

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


def inference_costs(model: Answering, every_spec: Sequence[Spec], bench: Bench) -> dict[str, Any]:
    """How many networks answer, and what share of the multiplications of all an answer takes."""
    members = model.members
    facts: dict[str, Any] = {"members": len(members), "clients": len(every_spec)}
    try:
        shapes = {spec: input_form(bench, spec).shape for spec in every_spec}  # each reads inputs of its own form
        full, mine = (
            [cost_of(s, shapes.get(s) or input_form(bench, s).shape) for s in specs]
            for specs in (every_spec, [m.spec for m in members])
        )
    except (RecipeError, ConfigError):  # what inputs look like is not known here, so neither is what they cost
        return facts
    products: float = sum(c.products for c in mine)
    rule = model.combine if isinstance(model, Mixture) else None
    if isinstance(rule, AtLayer | Nearest) and rule.k != "all":
        run = min(1.0, rule.k / len(mine))  # the others stop where they are chosen
        products = sum(_products_until(rule, m.spec, bench) for m in members) + run * products
    return facts | {"cost": products / max(1, sum(c.products for c in full))}


def _products_until(rule: AtLayer | Nearest, spec: Spec, bench: Bench) -> int:
    """The multiplications a member does before it is chosen or not."""
    costs, names = layer_costs(spec, input_form(bench, spec).shape), [layer.name for layer in spec.layout.layers]
    last = find_layer(spec, rule.layer).name if isinstance(rule, AtLayer) else linear_layer(spec.layout).name
    before = names[: names.index(last) + isinstance(rule, AtLayer)]
    return sum(costs[name].products for name in before if name in costs)
