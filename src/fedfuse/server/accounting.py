"""What all exchanges so far tell of any one row: Gaussian releases add up exactly."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedfuse.core.messages import Cohort
from fedfuse.core.privacy import release_of, released_epsilon
from fedfuse.core.recipe import Recipe
from fedfuse.core.state import ServerState, entries_of, with_kind

SPENT = "privacy"  # the kind of server memory that has everybody's Σ μ² about rows


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
