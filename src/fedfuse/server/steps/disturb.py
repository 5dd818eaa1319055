"""How much networks would disturb each other, were their logits added."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.model import Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.seams import DiagnosticStep
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import RecipeError
from fedfuse.nets.mixture import Mixture, TopLogit, find_disturbed
from fedfuse.server.steps.synthesize import Impressions, server_inputs


@dataclass(frozen=True, slots=True)
class Disturbance(DiagnosticStep):
    """Note how often the sum of the clients' logits changes the most confident client's answer.

    It changes nothing and works for any set of updates. The inputs are the server's own rows or inputs without labels,
    if it has any; else every client's network is made to show what it knows: each brings its share of `Impressions`,
    inputs it is sure of, as stand-ins for its own data. Test rows are never touched.

    Attributes:
        count: how many inputs.
    """

    count: int = 300
    needs: ClassVar[frozenset[str]] = frozenset({"network"})
    needs_classes: ClassVar[bool] = True

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        """The state with the score and what it was measured on; unchanged where no input can be had or made."""
        members = tuple(Single(u.spec, u.posterior) for u in cohort)
        mixture = Mixture(members, cohort.weights, TopLogit("all"))
        try:
            x, source = probe_inputs(mixture, self.count, bench)
        except RecipeError:
            return state
        with torch.no_grad():
            score = torch.cat([find_disturbed(mixture.answers(part)) for part in x.split(1000)])
        return state.noting(disturbance=float(score.double().mean()), disturbance_inputs=source)


def with_disturbance(recipe: Recipe) -> Recipe:
    """The recipe, noting the score of its updates every round; one that does so already is left as it is.

    Example:
        >>> from fedfuse.core.registry import find_method
        >>> with_disturbance(find_method("fedavg").recipe()).steps
        (Disturbance(count=300),)
    """
    later = None if recipe.later is None else (recipe.later[0], with_disturbance(recipe.later[1]))
    has_step = any(isinstance(step, Disturbance) for step in recipe.steps)
    return replace(recipe, steps=recipe.steps if has_step else (*recipe.steps, Disturbance()), later=later)


def probe_inputs(mixture: Mixture, count: int, bench: Bench) -> tuple[Tensor, str]:
    """Inputs the server holds, or such as the networks themselves know; and which of these they are."""
    found = server_inputs(bench, count, "probe")
    if found is not None:
        return found
    return Impressions(count, steps=30)(0, mixture, None, bench), "impressions"
