"""A round in parts: where a rule looks at one tensor at a time, so does the round, when that tensor is asked for.

The fused model is then a table of tensors none of which exists yet. Whoever writes it asks for one after the other, so
memory holds one tensor of every client, however large the model is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.params import Layout, Params
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import NotConverged, RecipeError
from fedfuse.server.door.values import is_finite
from fedfuse.server.round import fuse_round
from fedfuse.wire.codec import LazyParams, forms_of


@dataclass(frozen=True, slots=True)
class PartedRound:
    """A round of a tensorwise recipe, taken tensor by tensor; each has the bytes that the whole round would give it.

    Attributes:
        recipe: what fuses.
        cohort: the admitted updates.
        state: what the round began with.
        bench: what the server may touch.
        facts: what the rule noted of the tensors that were asked for so far.
    """

    recipe: Recipe
    cohort: Cohort
    state: ServerState
    bench: Bench
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.recipe.tensorwise:
            raise RecipeError(f"method {self.recipe.label or self.recipe.name!r} looks at the whole network at once")

    def result(self) -> Single:
        """The fused model, whose tensors are fused when they are asked for, every time anew."""
        spec, mean = self.cohort.updates[0].spec, self.cohort.updates[0].posterior.mean
        first = {name: names[0] for names in spec.layout.tied for name in names[1:]}

        def fetch(name: str, begin: int, end: int) -> Tensor:
            whole = self.fuse(first.get(name, name))
            return whole.view(-1) if end - begin == math.prod(whole.shape) else whole.view(-1)[begin:end].clone()

        return Single(spec, Posterior(LazyParams(dict(forms_of(mean)), fetch)))

    def fuse(self, name: str) -> Tensor:
        """One tensor of the fused model.

        Raises:
            NotConverged: if it is not finite.
        """
        role = self.state.single.spec.layout.roles.get(name)
        spec = Spec("state-dict", description=Layout({} if role is None else {name: role}, ()))
        start = Single(spec, Posterior(_only(self.state.single.posterior.mean, name)))
        part = Cohort(tuple(_part_of(update, spec, name) for update in self.cohort))
        after = fuse_round(self.recipe, part, replace(self.state, model=start, starts={}), self.bench)
        merge_facts(self.facts, after.facts)
        tensor = after.single.posterior.mean[name]
        if not is_finite(tensor):
            raise NotConverged(f"the fused {name} is not finite; write it in a wider dtype, or scale the moves less")
        return tensor


def _part_of(update: ClientUpdate, spec: Spec, name: str) -> ClientUpdate:
    mean = _only(update.posterior.mean, name)
    return replace(update, spec=spec, posterior=replace(update.posterior, mean=mean))


def _only(params: Params, name: str) -> Params:
    return params.part(lambda n: n == name) if isinstance(params, LazyParams) else {name: params[name]}


def merge_facts(into: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Add what was noted of one tensor to what was noted of others: tables and lists grow, anything else is replaced.

    Example:
        >>> facts = {"ratio": {"a": 1}, "straight_means": ["a"]}
        >>> merge_facts(facts, {"ratio": {"b": 2}, "straight_means": ["b"]})
        >>> facts
        {'ratio': {'a': 1, 'b': 2}, 'straight_means': ['a', 'b']}
    """
    for key, value in facts.items():
        known = into.get(key)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            into[key] = {**known, **value}
        elif isinstance(value, list) and isinstance(known, list):
            into[key] = known + [entry for entry in value if entry not in known]
        else:
            into[key] = value
