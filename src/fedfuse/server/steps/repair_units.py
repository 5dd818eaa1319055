"""REPAIR without rows at the server: clients say what hidden units give in their own networks and in the merged one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.params import Layer
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError
from fedfuse.nets.units import (
    TURN,
    UnitStatistics,
    layers_in_turn,
    mean_statistics,
    repairable_layers,
    rescalable_layers,
    rescale_units,
    turn_memory,
)

GOAL = "unit_goal"  # the kind of server memory that has the parents' means and deviations, one below the other


@dataclass(frozen=True, slots=True)
class KeepUnitGoals(ServerPart):
    """Remember μ* = Σ_k w_k μ_k and σ* = Σ_k w_k σ_k of every hidden unit, as the parents have them on their own rows.

    Attributes:
        round: the round, counted from 0, whose cohort are the parents.
    """

    round: int = 0
    needs: ClassVar[frozenset[str]] = frozenset({"unit_mean", "unit_std", "network"})

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        """The model stays as it is."""
        if state.round != self.round:
            return state
        layers = _in_running_order(state, bench)
        goals = {f"{GOAL}/{layer.bias}": torch.stack(_mean_over_clients(cohort, layer)) for layer in layers}
        return replace(state, memory={**state.memory, **goals, **turn_memory(state.single.spec, layers)})


@dataclass(frozen=True, slots=True)
class RepairUnits(ServerPart):
    """Rescale the units of the layer whose turn it is to the parents' statistics (Jordan et al., "REPAIR", ICLR 2023).

    Client k says what a unit gives on its rows: μ_k and σ_k in its own network, kept by `KeepUnitGoals`, and m_k and
    s_k in the merged one. With r = Σ w_k σ_k / Σ w_k s_k the unit's weights become r W and its bias
    r (b − Σ w_k m_k) + Σ w_k μ_k, so that both averages are the parents' afterwards. Own and merged network are
    compared on the same rows: clients that agree leave the model as it is, however their rows differ, and clients with
    the same rows give what `Repair` does on those.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"unit_mean", "unit_std"})
    only_sums: ClassVar[bool] = True

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:  # noqa: ARG002
        """One layer, and the turn goes to the next."""
        single = state.single
        if f"{TURN}/layers" not in state.memory:
            raise ConfigError(
                "nobody knows what the parents' hidden units gave, so none can be repaired; "
                'let clients train in the rounds before, by refit = "units" behind a method'
            )
        layers = layers_in_turn(single.spec, state.memory)
        if not layers:
            return state
        goal = UnitStatistics(*state.memory[f"{GOAL}/{layers[0].bias}"])
        now = _mean_over_clients(cohort, layers[0])
        params = {**single.posterior.mean, **rescale_units(layers[0], single.posterior.mean, now, goal)}
        fused = state.fused(params, single.posterior.geometry, single.spec).noting(layer=layers[0].name)
        return replace(fused, memory={**fused.memory, **turn_memory(single.spec, layers[1:])})


def _mean_over_clients(cohort: Cohort, layer: Layer) -> UnitStatistics:
    """Σ w_k μ_k and Σ w_k σ_k of a layer, by the clients' examples."""
    return mean_statistics([_units_of(update, layer) for update in cohort], cohort.weights)


def _units_of(update: ClientUpdate, layer: Layer) -> UnitStatistics:
    names = [f"unit_{what}/{layer.bias}" for what in ("mean", "std")]
    if missing := [name for name in names if name not in update.notes]:
        raise ConfigError(
            f"{update.client} brings no {missing[0]}: units that are blended have no statistics of their own; "
            "align by weights, activations or exact transport between equal widths"
        )
    return UnitStatistics(*(update.notes[name] for name in names))


def _in_running_order(state: ServerState, bench: Bench) -> list[Layer]:
    """Layers behind others come later: in the order in which they run, where it is known what an input looks like."""
    spec = state.single.spec
    return rescalable_layers(spec) if bench.inputs is None else repairable_layers(spec, bench.inputs.shape)[0]
