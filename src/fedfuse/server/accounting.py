"""What all exchanges so far tell of any one row, or of any one client: Gaussian releases add up exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fedfuse.core.messages import Cohort
from fedfuse.core.privacy import release_of, released_epsilon
from fedfuse.core.recipe import Recipe
from fedfuse.core.state import Bench, ServerState, entries_of, with_kind
from fedfuse.server.client_noise import ChartNoise, ClientNoise, noise_of_clients

SPENT = "privacy"  # the kind of server memory that has everybody's Σ μ² about rows
ROUNDS = "privacy_of_clients"  # and the kind that has Σ μ² about whole clients


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


def account_clients(recipe: Recipe, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
    """The state with this round added to what the models so far tell of any one client, behind the guard `private`."""
    if not isinstance(recipe.guard, ClientNoise | ChartNoise):
        return state
    noise = recipe.guard.of if isinstance(recipe.guard, ChartNoise) else recipe.guard
    guard = noise.drawn_by(bench)
    before = entries_of(state.memory, ROUNDS)
    square, rounds = (float(before.get(part, torch.zeros(()))) for part in ("square", "rounds"))
    square, rounds = square + guard.signal(cohort) ** 2, rounds + 1
    told = {"square": torch.tensor(square, dtype=torch.float64), "rounds": torch.tensor(int(rounds))}
    epsilon, delta = guard.epsilon(square, int(rounds))
    facts: dict[str, Any] = {"of": "a client", "epsilon": epsilon, "delta": delta, "rounds": int(rounds)}
    if guard.at == "clients":  # what the server sees of each, and not of the sum
        alone = noise_of_clients(cohort)
        facts["epsilon_at_server"] = released_epsilon(rounds * (alone.clip / alone.sigma) ** 2, guard.delta)
    return replace(state, memory={**state.memory, **with_kind(ROUNDS, told)}).noting(privacy=facts)
