"""The fused model is checked, and whoever breaks a fusion is found and left out.

A reply can pass the door and still make a solver diverge or the fused model overflow. Then the clients without whom
the fusion is sound are found by halving, refused by name, and the round goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedfuse.core.clock import Clock
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import FuseError, MethodFault, NotConverged, Refused
from fedfuse.server.door.admit import Admission
from fedfuse.server.door.values import is_finite
from fedfuse.server.round import fuse_round

_FAILURES = (FuseError, ArithmeticError, RuntimeError, LookupError, ValueError)


def fuse_admitted(
    recipe: Recipe, admission: Admission, state: ServerState, bench: Bench, clock: Clock | None = None
) -> ServerState:
    """The state after a round whose fused model is sound; a minority that breaks it is moved to `admission.refused`.

    Args:
        recipe: the recipe in force in this round.
        admission: the admitted updates; its cohort loses whom the fusion could not bear.
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
    except MethodFault:  # whoever is left out, the method is at fault
        raise
    except _FAILURES as why:
        broken = why
    found = fusion.find_culprits(admission.cohort.updates) if len(admission.cohort) > 1 else []
    rest = Cohort(tuple(u for u in admission.cohort if u not in found))
    try:  # of two who do not fit each other, nobody can say who is wrong
        after = fusion.run(rest) if len(rest) > len(found) else None
    except _FAILURES:
        after = None
    if after is None:
        raise _ours(recipe, broken) from broken
    words = f"one with which {recipe.name or 'the method'} can fuse"
    admission.refused += [Refused(u.client, "update", str(broken), words).facts() for u in found]
    admission.cohort = rest
    return after


def _ours(recipe: Recipe, broken: Exception) -> FuseError:
    if isinstance(broken, FuseError):
        return broken
    return FuseError(
        f"method {recipe.name!r} could not fuse these updates: {type(broken).__name__}: {broken}; try another method, "
        "or a guard before this one"
    )


@dataclass(frozen=True, slots=True)
class _Fusion:
    recipe: Recipe
    state: ServerState
    bench: Bench
    clock: Clock | None

    def run(self, cohort: Cohort) -> ServerState:
        """Fuse, and look at what came out."""
        after = fuse_round(self.recipe, cohort, self.state, self.bench, self.clock)
        for params in (after.memory, *(member.posterior.mean for member in after.model.members)):
            if (name := _first_odd(params)) is not None:
                raise NotConverged(f"the fused {name} is not finite")
        return after

    def is_sound(self, updates: Sequence[ClientUpdate]) -> bool:
        """Whether these can be fused."""
        try:
            self.run(Cohort.of(list(updates)))
        except _FAILURES:
            return False
        return True

    def find_culprits(
        self, suspects: Sequence[ClientUpdate], others: Sequence[ClientUpdate] = ()
    ) -> list[ClientUpdate]:
        """Those of the suspects with whom the others cannot be fused: some log₂ n fusions for each."""
        if len(suspects) == 1:
            return list(suspects)
        left, right = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        if self.is_sound([*others, *left]):
            return self.find_culprits(right, [*others, *left])
        if self.is_sound([*others, *right]):
            return self.find_culprits(left, [*others, *right])
        return self.find_culprits(left, others) + self.find_culprits(right, others)


def _first_odd(params: Params) -> str | None:
    """The first tensor that has a number which is none."""
    return next((name for name in params if not is_finite(params[name])), None)
