"""The centre of a round: align → guard → aggregate → steps. The only place where a cohort becomes a model.

A run, the fusion of files and a Flower strategy all come here, so the same recipe gives the same bytes through each of
them. `fuse_round` is the round itself; `fuse_admitted` runs it and, where admitted updates break it, finds them and
goes on without them; `PartedRound` runs it tensor by tensor, for models larger than memory.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedfuse.core.messages import ClientUpdate, Cohort, Form
from fedfuse.core.model import Single
from fedfuse.core.params import Layout, Params
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.seams import DiagnosticStep
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState, entries_of, with_kind
from fedfuse.errors import ConfigError, FuseError, MethodFault, NotConverged, RecipeError, Refused
from fedfuse.linalg.privacy import release_of, released_epsilon
from fedfuse.models.adapted import PARTS
from fedfuse.server.admission.admit import Admission
from fedfuse.server.admission.opened import first_difference
from fedfuse.server.admission.values import is_finite
from fedfuse.wire.codec import LazyParams, forms_of


@dataclass(slots=True)
class Clock:
    """Adds up the seconds of each kind of work.

    Example:
        >>> clock = Clock()
        >>> with clock.counting("server"):
        ...     pass
        >>> clock.seconds["server"] >= 0, clock.seconds.get("diagnostics", 0.0)
        (True, 0.0)
    """

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def counting(self, what: str) -> Iterator[None]:
        """Count the seconds inside under a name."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - began


def fuse_round(
    recipe: Recipe, cohort: Cohort, state: ServerState, bench: Bench, clock: Clock | None = None
) -> ServerState:
    """The state after a round: the cohort fused, the server's steps taken.

    Steps see the cohort that was fused: after alignment, and without the clients that a guard dropped.

    Args:
        recipe: the recipe in force in this round.
        cohort: the admitted updates.
        state: what the round began with.
        bench: what the server may touch.
        clock: counts the seconds of fusing as "server", those of steps that only note something as "diagnostics".

    Raises:
        MethodFault: if a part of the recipe returns something else than a state whose model fits its network.

    Example:
        >>> import torch
        >>> from fedfuse.core.messages import ClientUpdate
        >>> from fedfuse.core.model import Single
        >>> from fedfuse.core.posterior import Posterior
        >>> from fedfuse.core.registry import find_method
        >>> from fedfuse.core.spec import Spec
        >>> spec = Spec("mlp", {"inputs": 1, "hidden": [], "classes": 2})
        >>> start = Single.of(spec.build(), spec)
        >>> moved = [{n: torch.full_like(t, v) for n, t in start.posterior.mean.items()} for v in (0.0, 4.0)]
        >>> cohort = Cohort.of([ClientUpdate(c, Posterior(m), 1.0, 1, spec) for c, m in zip("ab", moved)])
        >>> after = fuse_round(find_method("fedavg").recipe(), cohort, ServerState(0, start), Bench())
        >>> after.round, after.single.posterior.mean["classifier.bias"]
        (1, tensor([2., 2.]))
    """
    clock = clock or Clock()
    with clock.counting("server"):
        if not recipe.aggregate.knows_adapters:
            refuse_adapters(cohort.names, recipe.name)
        cohort, facts = filter_cohort(recipe, cohort, state, bench)
        after = recipe.aggregate(cohort, replace(state, facts=facts), bench)
        check_fused(recipe, recipe.aggregate, after, cohort)
    for step in recipe.steps:
        with clock.counting("diagnostics" if isinstance(step, DiagnosticStep) else "server"):
            after = step(after, cohort, bench)
            check_fused(recipe, step, after, cohort)
    after = account_rows(recipe, cohort, after)
    if recipe.guard is not None:
        after = recipe.guard.drawn_by(bench).account(cohort, after)
    return replace(after, round=state.round + 1)


def filter_cohort(recipe: Recipe, cohort: Cohort, state: ServerState, bench: Bench) -> tuple[Cohort, Mapping[str, Any]]:
    """The cohort that is fused, aligned and guarded as the recipe says, and what a reader should know of that."""
    facts: dict[str, Any] = {}
    if recipe.align is not None:
        aligned: object = recipe.align(cohort, bench)
        if not isinstance(aligned, tuple):
            raise MethodFault(
                f"{_who(recipe, recipe.align)} returned {_kind(aligned)}, expected a cohort and its facts"
            )
        cohort, moved = aligned
        facts |= moved
    if recipe.guard is not None:
        _check_comparable(cohort, recipe)
        guarded: object = recipe.guard.drawn_by(bench)(cohort, state)
        if not isinstance(guarded, Cohort):
            raise MethodFault(f"{_who(recipe, recipe.guard)} returned {_kind(guarded)}, expected a Cohort")
        dropped = [client for client in cohort.clients if client not in guarded.clients]
        cohort, facts = guarded, facts | {"guard": repr(recipe.guard), "guard_dropped": dropped}
    return cohort, facts


def _check_comparable(cohort: Cohort, recipe: Recipe) -> None:
    """A guard measures distances between weights, so there must be one network."""
    first = cohort.updates[0]
    for update in cohort:
        if update.spec != first.spec:
            raise ConfigError(
                f"method {recipe.name!r} behind {recipe.guard}: a guard compares weights, and {update.client} has "
                f"another network than {first.client}; leave the guard out or fuse networks of one kind"
            )


def refuse_adapters(names: Iterable[str], method: str) -> None:
    """Refuse low-rank adapters: the mean of B_k A_k is not the product of the means of B_k and A_k.

    Raises:
        ConfigError: naming the first tensor of an adapter.

    Example:
        >>> refuse_adapters(["fc.lora_A.weight"], "fedavg")
        Traceback (most recent call last):
        ...
        fedfuse.errors.ConfigError: 'fc.lora_A.weight' belongs to a low-rank adapter and method 'fedavg' ...
    """
    for name in names:
        if not PARTS.isdisjoint(name.split(".")):
            raise ConfigError(
                f"{name!r} belongs to a low-rank adapter and method {method!r} would fuse its factors apart, which is "
                "not the mean of their products; fuse by flora or flexlora, or merge adapters into their base (--base)"
            )


def check_fused(recipe: Recipe, part: object, after: object, cohort: Cohort) -> None:
    """Refuse what an aggregator or a step returned if it is no state whose model has the tensors of its network.

    Methods are extensions: a wrong shape would otherwise surface rounds later, or be saved.

    Args:
        recipe: whose part it is.
        part: the aggregator or the step.
        after: what it returned.
        cohort: what was fused; a network known only by its tensors has those that clients brought.

    Raises:
        MethodFault: naming the method, its part and the first tensor that is missing, unknown or of another form.
    """
    who = _who(recipe, part)
    if not isinstance(after, ServerState):
        raise MethodFault(
            f"{who} returned {_kind(after)}, expected a ServerState; end it with `return state.fused(mean)`"
        )
    fused = [(member.spec, member.posterior.mean) for member in after.model.members]
    for spec, mean in (*fused, *after.starts.values()):
        if not isinstance(mean, Mapping):
            raise MethodFault(f"{who} fused {_kind(mean)}, expected a mapping from tensors' names to tensors")
        if odd := _first_misfit(mean, _expected_forms(spec, cohort)):
            name, found, expected = odd
            raise MethodFault(
                f"{who} returned a model that does not fit the network {spec.factory!r}: {name} is {found}, expected "
                f"{expected}; return every tensor of the cohort in its own shape and dtype, or pass `state.fused` the "
                "changed network as `spec`"
            )


def _who(recipe: Recipe, part: object) -> str:
    return f"method {recipe.label or recipe.name!r}: {type(part).__name__}"


def _kind(value: object) -> str:
    return "nothing (None)" if value is None else f"a {type(value).__name__}"


def _expected_forms(spec: Spec, cohort: Cohort) -> Mapping[str, Form]:
    """The tensors a network has: as its clients brought them, else as it is built."""
    if (typical := next((u for u in cohort if u.spec == spec), None)) is not None:
        return forms_of(typical.posterior.mean)
    return forms_of(spec.skeleton().state_dict()) if spec.can_run else {}


def _first_misfit(mean: Params, expected: Mapping[str, Form]) -> tuple[str, str, str] | None:
    """The first tensor that should not be there or be otherwise, what it is and what it should be, in words."""
    if not isinstance(mean, LazyParams):
        for name, value in dict[str, object](mean).items():
            if not isinstance(value, Tensor):
                return name, _kind(value), "a tensor"
    got = forms_of(mean)
    free = {n: got[n] for n in got.keys() & expected.keys() if not PARTS.isdisjoint(n.split("."))}  # of any rank
    odd = first_difference(got, {**expected, **free}) if expected else None
    return (*odd[:2], "no such tensor") if odd and odd[0] not in expected else odd


SPENT = "privacy"  # the kind of server memory that holds each client's Σ μ² about rows


def account_rows(recipe: Recipe, cohort: Cohort, state: ServerState) -> ServerState:
    """The state with this exchange added to what its clients have spent, where sums left them with noise.

    Signals add in squares, so a client that was asked in four rounds at μ has spent 2μ. What clients told without
    noise, before or after, is not in it.
    """
    release = release_of(recipe.evidence, recipe.trains)
    if release is None:
        return state
    before = entries_of(state.memory, SPENT)
    now = {c: float(before.get(c, torch.zeros(()))) + release.signal**2 for c in cohort.clients}
    spent = with_kind(SPENT, {**before, **{c: torch.tensor(s, dtype=torch.float64) for c, s in now.items()}})
    by_client = {client: released_epsilon(square, release.delta) for client, square in now.items()}
    facts = {"of": "a row", "epsilon": max(by_client.values()), "delta": release.delta, "by_client": by_client}
    return replace(state, memory={**state.memory, **spent}).noting(privacy=facts)


# What a method's arithmetic may end in when an update breaks it. Anything else (TypeError, AttributeError, …) is a bug
# of the method, which leaving clients out would only hide.
_FAILURES = (FuseError, ArithmeticError, RuntimeError, LookupError, ValueError)


def fuse_admitted(
    recipe: Recipe, admission: Admission, state: ServerState, bench: Bench, clock: Clock | None = None
) -> ServerState:
    """The state after a round whose fused model is finite; a minority that breaks it is moved to `admission.refused`.

    Args:
        recipe: the recipe in force in this round.
        admission: the admitted updates; its cohort loses those that the fusion could not bear.
        state: what the round began with.
        bench: what the server may touch.
        clock: see `fuse_round`.

    Raises:
        FuseError: the fusion's own, where the absence of no minority would mend it.
        MethodFault: at once, if a part of the method returns no model of its network.
    """
    fusion = _Fusion(recipe, state, bench, clock)
    try:
        return fusion.run(admission.cohort)
    except MethodFault:  # the method is at fault, whichever clients are left out
        raise
    except _FAILURES as why:
        broken = why
    found = fusion.find_culprits(admission.cohort.updates) if len(admission.cohort) > 1 else []
    rest = Cohort(tuple(u for u in admission.cohort if u not in found))
    try:  # those left must be more than those blamed: of two that do not fit each other, either may be wrong
        after = fusion.run(rest) if len(rest) > len(found) else None
    except _FAILURES:
        after = None
    if after is None and isinstance(broken, FuseError):
        raise broken
    if after is None:
        raise FuseError(
            f"method {recipe.name!r} could not fuse these updates: {type(broken).__name__}: {broken}; try another "
            "method, or a guard before this one"
        ) from broken
    words = f"one with which {recipe.name or 'the method'} can fuse"
    admission.refused += [Refused(u.client, "update", str(broken), words).facts() for u in found]
    admission.cohort = rest
    return after


@dataclass(frozen=True, slots=True)
class _Fusion:
    recipe: Recipe
    state: ServerState
    bench: Bench
    clock: Clock | None

    def run(self, cohort: Cohort) -> ServerState:
        """Fuse, and look at what came out."""
        after = fuse_round(self.recipe, cohort, self.state, self.bench, self.clock)
        for params in (after.memory, *[member.posterior.mean for member in after.model.members]):
            for name in params:
                if not is_finite(params[name]):
                    raise NotConverged(f"the fused {name} is not finite")
        return after

    def succeeds(self, updates: Sequence[ClientUpdate]) -> bool:
        """Whether these can be fused."""
        try:
            self.run(Cohort.of(list(updates)))
        except _FAILURES:
            return False
        return True

    def find_culprits(
        self, suspects: Sequence[ClientUpdate], others: Sequence[ClientUpdate] = ()
    ) -> list[ClientUpdate]:
        """Those of the suspects with which the others cannot be fused: some log₂ n fusions for each.

        Halving takes it that a part of what can be fused can be fused too. A rule need not keep to that (solvers,
        robust choices); then too many may be blamed, which is why `fuse_admitted` lets only a minority be.
        """
        if len(suspects) == 1:
            return list(suspects)
        left, right = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        if self.succeeds([*others, *left]):
            return self.find_culprits(right, [*others, *left])
        if self.succeeds([*others, *right]):
            return self.find_culprits(left, [*others, *right])
        return self.find_culprits(left, others) + self.find_culprits(right, others)


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
        """The fused model, whose tensors are fused each time they are asked for."""
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
