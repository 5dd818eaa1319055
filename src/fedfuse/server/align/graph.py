"""Matching all networks at once: graduated assignment over their graphs of units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedfuse.core.state import Bench
from fedfuse.errors import ConfigError
from fedfuse.linalg.assign import sinkhorn
from fedfuse.nets.channels import Group
from fedfuse.server.align.nets import Coupling, Moves, Net, blend_units, diagonal_blocks
from fedfuse.server.align.weights import PAIRWISE_LAWS, ByWeights, WeightMatching, best_order, wiring


@dataclass(frozen=True, slots=True)
class ByGraph:
    """Order the units of all networks jointly, so that every network agrees with every other (GAMF, Liu et al. 2022).

    Units are nodes, weights are edges. Over the orders P_k of all networks the score

        Σ_{k<l} Σ_t ⟨(P_k network_k)_t, (P_l network_l)_t⟩ = (‖Σ_k P_k network_k‖² − Σ_k ‖network_k‖²) / 2

    is raised by graduated assignment: soft orders, doubly stochastic, follow its gradient while a temperature falls,
    and end as permutations by the Hungarian algorithm; then single groups of single networks move while that raises
    the score. The orders of pairwise matching to the reference are raised in the same way, and the better end is
    taken, so the score never falls below pairwise matching's.

    Attributes:
        hot: temperature to begin with, as a share of the largest gain.
        cold: temperature at which soft orders become permutations.
        cooling: factor from one temperature to the next.
        sweeps: passes over all networks and groups before the climb stops.
    """

    hot: float = 0.5
    cold: float = 0.02
    cooling: float = 0.5
    sweeps: int = 20
    any_width: ClassVar[bool] = False
    laws: ClassVar[frozenset[str]] = PAIRWISE_LAWS

    def __post_init__(self) -> None:
        if not (0 < self.cold <= self.hot and 0 < self.cooling < 1):
            raise ConfigError(
                f"graph matching: got temperatures from {self.hot} to {self.cold} by {self.cooling}, expected "
                "0 < cold ≤ hot and a cooling between 0 and 1"
            )

    def __call__(self, nets: Sequence[Net], reference: Net, bench: Bench) -> list[Moves]:
        """An order for every group of every network; the reference stays where it is."""
        pairwise = ByWeights(self.sweeps)(nets, reference, bench)
        ends = [self._climb(nets, reference, start) for start in (pairwise, self._anneal(nets, reference))]
        return max(ends, key=lambda moves: joint_score([*nets, reference], [*moves, {}]))

    def _climb(self, nets: Sequence[Net], reference: Net, moves: Sequence[Moves]) -> list[Moves]:
        """Single networks move towards the sum of all others until none gains."""
        current = [_apply_moves(net, move) for net, move in zip(nets, moves, strict=True)]
        total = _sum([*current, reference.matched_tensors()])
        found = [dict(move) for move in moves]
        for _ in range(self.sweeps):
            converged = True
            for k, net in enumerate(nets):
                # ⟨network, Σ of the others⟩ is all of the joint score that moves with this network
                others = {n: t - current[k][n] for n, t in total.items()}
                matching = WeightMatching.of(others, [current[k]], net.groups)
                matching.climb(self.sweeps)
                orders = {name: order[0] for name, order in matching.orders.items()}
                if any(not order.equal(torch.arange(len(order))) for order in orders.values()):
                    converged = False
                    found[k] = {name: found[k][name][order] for name, order in orders.items()}  # type: ignore[index]
                    current[k] = {n: t[0] for n, t in matching.tensors(others).items()}
                    total = {n: t + current[k][n] for n, t in others.items()}
            if converged:
                break
        return list(found)

    def _anneal(self, nets: Sequence[Net], reference: Net) -> list[Moves]:
        """Soft orders that harden as the temperature falls."""
        groups = reference.groups
        every = [net.matched_tensors() for net in nets]
        even = {g.name: torch.block_diag(*[_evenly(g.size // g.sections)] * g.sections) for g in groups}
        soft = [{name: Coupling(share, share) for name, share in even.items()} for _ in nets]
        temperature = self.hot
        while temperature >= self.cold:
            for group in groups:
                for k, net in enumerate(nets):
                    gain = self._gain(k, group, every, soft, reference)
                    soft[k][group.name] = _soften(gain, group, temperature, net.client)
            temperature *= self.cooling
        return [{g.name: best_order(soft[k][g.name].make, g.sections) for g in groups} for k in range(len(nets))]

    def _gain(
        self,
        k: int,
        group: Group,
        every: Sequence[Mapping[str, Tensor]],
        soft: Sequence[Mapping[str, Coupling]],
        reference: Net,
    ) -> Tensor:
        """The gradient of the score in one network's soft order of one group."""
        names = {place.tensor for place in group.locations}
        adjacent = [g for g in reference.groups if names & {p.tensor for p in g.locations}]
        others = [g for g in adjacent if g.name != group.name]
        target = {n: t for n, t in reference.matched_tensors().items() if n in names}
        for j, tensors in enumerate(every):
            if j != k:
                moved = blend_units(_select(tensors, names), adjacent, soft[j])
                target = {n: t + moved[n] for n, t in target.items()}
        mine = blend_units(_select(every[k], names), others, soft[k])
        total = torch.zeros(group.size, group.size)
        for place in wiring(reference.groups)[group.name]:
            if place.tensor in mine:
                total += place.rows(target, group.size) @ place.rows(mine, group.size).mT
        return total


def joint_score(nets: Sequence[Net], moves: Sequence[Moves]) -> float:
    """Σ_{k<l} Σ_t ⟨(P_k network_k)_t, (P_l network_l)_t⟩, how far all networks agree after these moves."""
    every = [_apply_moves(net, move) for net, move in zip(nets, moves, strict=True)]

    def square(tensors: Mapping[str, Tensor]) -> float:
        return sum(float(t.double().square().sum()) for t in tensors.values())

    return (square(_sum(every)) - sum(square(tensors) for tensors in every)) / 2


def _apply_moves(net: Net, move: Moves) -> dict[str, Tensor]:
    return blend_units(net.matched_tensors(), net.groups, move)


def _sum(every: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {n: torch.stack([tensors[n] for tensors in every]).sum(0) for n in every[0]}


def _select(tensors: Mapping[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    return {n: t for n, t in tensors.items() if n in names}


def _evenly(size: int) -> Tensor:
    return torch.full((size, size), 1 / size)


def _soften(gain: Tensor, group: Group, temperature: float, client: str) -> Coupling:
    """The doubly stochastic matrix that follows a gain at a temperature, section by section."""
    plans = []
    for block in diagonal_blocks(gain, group.sections):
        scale = float(block.max() - block.min())  # so that a temperature means the same in every layer
        if scale <= 0:
            plans.append(_evenly(len(block)))
            continue
        what = f"graph matching of {group.name} of {client}"
        plans.append(len(block) * sinkhorn(-block / scale, reg=temperature, tol=0.05, what=what).plan.float())
    soft = torch.block_diag(*plans)
    return Coupling(soft, soft)
