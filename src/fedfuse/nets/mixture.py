"""A mixture: several networks and the rule by which they answer together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedfuse.core.model import Single, outputs
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.nets.combine import Choosing, Combine, TopLogit
from fedfuse.nets.head import linear_layer
from fedfuse.nets.partial import find_layer, layer_input, layer_output
from fedfuse.nets.regions import FeatureRegion
from fedfuse.nets.routes import AtLayer, Nearest, Route
from fedfuse.nets.stack import Stack, cost_of

MEMORY = 64 * 2**20  # bytes a mixture may take for what happens between its inputs and its answer


_BYTES = 8  # per number alive: its own four, and as many again for what products and convolutions pack


_ROWS = 1000  # inputs at a time: enough for a wide product, few enough that its result stays in cache


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
        held: which classes each member's client has rows of, where clients told it.
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
