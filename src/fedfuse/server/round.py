"""The centre of a round: align → guard → aggregate → steps. The only place where a cohort becomes a model.

A run, the fusion of files and a Flower strategy all come here, so the same recipe gives the same bytes through every
door.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from fedfuse.core.clock import Clock
from fedfuse.core.effort import DiagnosticStep
from fedfuse.core.messages import Cohort, Form
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, MethodFault
from fedfuse.nets.adapters import PARTS
from fedfuse.server.accounting import account_rows
from fedfuse.server.door.differences import first_difference
from fedfuse.wire.codec import LazyParams, forms_of


def fuse_round(
    recipe: Recipe, cohort: Cohort, state: ServerState, bench: Bench, clock: Clock | None = None
) -> ServerState:
    """The state after a round: the cohort fused, the server's steps taken.

    Steps see the cohort that was fused: aligned, and without whom a guard dropped.

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


def check_fused(recipe: Recipe, part: object, after: object, cohort: Cohort) -> None:
    """Refuse what an aggregator or a step returned if it is no state whose model has the tensors of its network.

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
