"""A round in parts: where a rule looks at one tensor or layer at a time, so does the round, when that is asked for.

The fused model is then a table of tensors none of which exists yet. Whoever writes it asks for one after the other, so
memory holds one tensor of every client, or one layer with its evidence, however large the model is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    """A round of a recipe that looks at tensors or layers, part by part, with the bytes of the whole round.

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
    _waiting: dict[str, Tensor] = field(default_factory=dict, repr=False)  # of the last layer, not asked for yet

    def __post_init__(self) -> None:
        if not self.recipe.layerwise:
            raise RecipeError(f"method {self.recipe.label or self.recipe.name!r} looks at the whole network at once")

    def result(self) -> Single:
        """The fused model, whose tensors are fused when they are asked for, every time anew."""
        spec, mean = self.cohort.updates[0].spec, self.cohort.updates[0].posterior.mean
        first = {name: names[0] for names in spec.layout.tied for name in names[1:]}
        layers = {} if self.recipe.tensorwise else _layers_of(spec.layout)

        def fetch(name: str, begin: int, end: int) -> Tensor:
            known = first.get(name, name)
            whole = self.fuse(known, layers.get(known, (known,)))
            flat = whole.reshape(-1)
            return flat if end - begin == len(flat) else flat[begin:end].clone()

        return Single(spec, Posterior(LazyParams(dict(forms_of(mean)), fetch)))

    def fuse(self, name: str, part: Collection[str]) -> Tensor:
        """One tensor of the fused model; the others of its part wait until they are asked for, or another part is.

        Args:
            name: the tensor.
            part: the names of what is fused together, this one among them.

        Raises:
            NotConverged: if it is not finite.
        """
        if name not in self._waiting:
            self._waiting.clear()
            self._waiting.update(self._fuse_part(part))
        tensor = self._waiting.pop(name)
        if not is_finite(tensor):
            raise NotConverged(f"the fused {name} is not finite; write it in a wider dtype, or scale the moves less")
        return tensor

    def _fuse_part(self, part: Collection[str]) -> Mapping[str, Tensor]:
        spec = Spec("state-dict", description=_part_of_layout(self.cohort.updates[0].spec.layout, part))
        start = Single(spec, Posterior(_only(self.state.single.posterior.mean, part)))
        cohort = Cohort(tuple(_part_of(update, spec, part) for update in self.cohort))
        after = fuse_round(self.recipe, cohort, replace(self.state, model=start, starts={}), self.bench)
        merge_facts(self.facts, after.facts)
        return dict(after.single.posterior.mean)


def _layers_of(layout: Layout) -> dict[str, tuple[str, ...]]:
    """The weight and bias of every layer whose weights are its own, under both names."""
    own = frozenset(layout.roles).difference(*layout.tied)
    pairs = [(layer.weight, layer.bias) for layer in layout.layers if layer.bias is not None]
    return {name: pair for pair in pairs if own.issuperset(pair) for name in pair}


def _part_of_layout(layout: Layout, part: Collection[str]) -> Layout:
    """What a layout says of some tensors; what is tied stays known to be."""
    layers = [layer for layer in layout.layers if layer.weight in part and layer.bias in (None, *part)]
    return Layout(
        {name: role for name, role in layout.roles.items() if name in part},
        tuple(replace(layer, followers=(), log_variances=()) for layer in layers),
        tuple(names for names in layout.tied if names[0] in part),
        layout.frozen.intersection(part),
    )


def _part_of(update: ClientUpdate, spec: Spec, part: Collection[str]) -> ClientUpdate:
    mean = _only(update.posterior.mean, part)
    return replace(update, spec=spec, posterior=replace(update.posterior, mean=mean))


def _only(params: Params, part: Collection[str]) -> Params:
    return params.only(part) if isinstance(params, LazyParams) else {n: params[n] for n in part}


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
