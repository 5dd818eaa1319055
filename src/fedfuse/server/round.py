"""The centre of a round: align → guard → aggregate → steps. The only place where a cohort becomes a model.

A run, the fusion of files and a Flower strategy all come here, so the same recipe gives the same bytes through every
door.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fedfuse.core.clock import Clock
from fedfuse.core.effort import DiagnosticStep
from fedfuse.core.messages import Cohort
from fedfuse.core.recipe import Recipe
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError
from fedfuse.nets.adapters import PARTS
from fedfuse.server.accounting import account_rows


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
    for step in recipe.steps:
        with clock.counting("diagnostics" if isinstance(step, DiagnosticStep) else "server"):
            after = step(after, cohort, bench)
    after = account_rows(recipe, cohort, after)
    if recipe.guard is not None:
        after = recipe.guard.drawn_by(bench).account(cohort, after)
    return replace(after, round=state.round + 1)


def filter_cohort(recipe: Recipe, cohort: Cohort, state: ServerState, bench: Bench) -> tuple[Cohort, Mapping[str, Any]]:
    """The cohort that is fused, aligned and guarded as the recipe says, and what a reader should know of that."""
    facts: dict[str, Any] = {}
    if recipe.align is not None:
        cohort, moved = recipe.align(cohort, bench)
        facts |= moved
    if recipe.guard is not None:
        _check_comparable(cohort, recipe)
        guarded = recipe.guard.drawn_by(bench)(cohort, state)
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
