"""Robust filters that can stand before any aggregator: each turns a cohort into a safer one.

A filter keeps every client's geometry and evidence, so "Krum before FedLPA" is one recipe. Filters that name one
robust centre (median, trimmed mean) hand it to every client: an aggregator that keeps agreeing clients unchanged
returns exactly that centre.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedfuse.core.messages import Cohort
from fedfuse.core.params import squared_distance
from fedfuse.core.seams import Guard, ServerPart
from fedfuse.core.state import ServerState
from fedfuse.errors import RecipeError
from fedfuse.server.aggregate.mean import BLOCK, mean_by_examples
from fedfuse.server.brought import brought_moves, tells_precision
from fedfuse.server.client_noise import ClientNoise
from fedfuse.server.shorten import shorten_move

# What still holds behind a filter: one client may be moved, and examples no longer weigh as they did.
_LAWS = frozenset({"order", "agree", "pure", "dtype", "finite", "repeat"})
_NOTHING: frozenset[str] = frozenset()
_FAR = 1e300  # where a distance overflows
_EVIDENCE_COUNTS = 2.0  # distances of evidence beyond twice the median are alike: honest ones differ by decades


@dataclass(frozen=True, slots=True)
class NormClip(ServerPart):
    """No client may move further than `limit`, or than `ratio` times the median move: w_k ← w₀ + s_k (w_k − w₀)."""

    limit: float | None = None
    ratio: float = 1.0
    needs: ClassVar[frozenset[str]] = frozenset({"start"})
    laws: ClassVar[frozenset[str]] = _LAWS

    def __call__(self, cohort: Cohort, state: ServerState) -> Cohort:
        """Shorten the long moves; weights are rescaled as they are read, so nothing is copied."""
        start = state.single.posterior.mean
        moves = [math.sqrt(squared_distance(u.posterior.mean, start)) for u in cohort]
        limit = self.limit if self.limit is not None else self.ratio * float(torch.tensor(moves).median())
        factors = [min(1.0, limit / move) if move > 0 else 1.0 for move in moves]
        return Cohort(tuple(shorten_move(u, start, f) if f < 1 else u for u, f in zip(cohort, factors, strict=True)))


@dataclass(frozen=True, slots=True)
class Krum(ServerPart):
    """Keep the `keep` clients whose n − f − 2 nearest neighbours are nearest (Blanchard et al. 2017; Multi-Krum).

    Distances are taken in the space that is fused in: between moves, each counted by how sure its client says it is
    (`brought_moves`), and, in units of its own, between what else came with them (controls, losses, …). So whoever
    claims to be very sure where it moved stands as far away as who moved far, and whoever is unlike the others in its
    evidence alone does not.
    """

    byzantine: int = 1
    keep: int | None = None
    needs: ClassVar[frozenset[str]] = _NOTHING
    laws: ClassVar[frozenset[str]] = _LAWS

    def __call__(self, cohort: Cohort, state: ServerState) -> Cohort:  # noqa: ARG002 - the seam's signature
        """Drop whoever stands far from everybody."""
        n, near = len(cohort), len(cohort) - self.byzantine - 2
        if near < 1:
            raise RecipeError(
                f"Krum with {self.byzantine} byzantine clients needs at least {self.byzantine + 3} updates, got {n}"
            )
        distances = _pairwise(cohort).sort(1).values[:, 1 : near + 1].sum(1)
        keep = min(self.keep or n - self.byzantine, n)
        best = sorted(distances.argsort(stable=True)[:keep].tolist())
        return Cohort(tuple(cohort.updates[i] for i in best))


@dataclass(frozen=True, slots=True)
class CoordinateMedian(ServerPart):
    """Every coordinate is the median over clients (Yin et al. 2018)."""

    needs: ClassVar[frozenset[str]] = _NOTHING
    tensorwise: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = _LAWS

    def __call__(self, cohort: Cohort, state: ServerState) -> Cohort:  # noqa: ARG002 - the seam's signature
        """Hand the median to everybody."""
        return _with_common_mean(cohort, lambda values: torch.quantile(values, 0.5, dim=0))


@dataclass(frozen=True, slots=True)
class TrimmedMean(ServerPart):
    """Every coordinate is the mean over clients without the `trim` share of largest and of smallest values."""

    trim: float = 0.1
    needs: ClassVar[frozenset[str]] = _NOTHING
    tensorwise: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = _LAWS

    def __call__(self, cohort: Cohort, state: ServerState) -> Cohort:  # noqa: ARG002 - the seam's signature
        """Hand the trimmed mean to everybody."""
        num_trimmed = int(self.trim * len(cohort))
        if not 0 <= self.trim < 0.5:
            raise RecipeError(f"the trimmed mean cuts a share in [0, 0.5) from each side, got {self.trim}")
        return _with_common_mean(
            cohort, lambda values: values.sort(0).values[num_trimmed : len(values) - num_trimmed].mean(0)
        )


GUARDS: Mapping[str, type[Guard]] = {
    "clip": NormClip,
    "krum": Krum,
    "median": CoordinateMedian,
    "trimmed": TrimmedMean,
    "private": ClientNoise,
}


def _pairwise(cohort: Cohort) -> Tensor:
    """Squared distances between what clients bring to the fusion, and between other evidence in units of its median.

    Such evidence adds two units at most: without that limit an honest client whose evidence is unusual would stand
    further away than one with poisoned weights, who then stayed.
    """
    parts = [_in_units(sum((_distances(moves) for _, moves in brought_moves(cohort)), _no_distance(cohort)))]
    kinds = dict.fromkeys(name.partition("/")[0] for update in cohort for name in update.notes)
    parts += [_in_units(_evidence_distances(cohort, kind)).clamp(max=_EVIDENCE_COUNTS) for kind in kinds]
    return sum(parts, _no_distance(cohort))


def _evidence_distances(cohort: Cohort, kind: str) -> Tensor:
    """Squared distances between what clients sent as one kind of evidence, each tensor by its median length.

    What tells how sure they are of their weights has been counted with those.
    """
    total, first, geometry = _no_distance(cohort), cohort.updates[0].notes, cohort.updates[0].posterior.geometry
    for name in (name for name in first if name.partition("/")[0] == kind and not tells_precision(geometry, name)):
        each = [update.notes.get(name) for update in cohort]
        if not all(t is not None and t.shape == first[name].shape and t.is_floating_point() for t in each):
            continue  # ranks may differ, and who lacks a layer's evidence has no say in it
        stack = torch.stack([t.double() for t in each if t is not None])
        lengths = torch.linalg.vector_norm(_rows(stack), dim=1)
        total += _distances(stack / max(float(lengths.median()), 1e-300))
    return total


def _distances(stack: Tensor) -> Tensor:
    rows = _rows(stack).double()
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()


def _rows(stack: Tensor) -> Tensor:
    """One row per client; a single number, such as a loss, is a row of one."""
    return stack.reshape(len(stack), -1)


def _no_distance(cohort: Cohort) -> Tensor:
    return torch.zeros(len(cohort), len(cohort), dtype=torch.float64)


def _in_units(distances: Tensor) -> Tensor:
    """Distances divided by the median of those between two clients, so that kinds of evidence can be added."""
    finite = distances.nan_to_num(nan=_FAR, posinf=_FAR)
    between = finite[torch.ones_like(finite).triu(1).bool()]
    unit = float(between.median()) or float(between.max())  # the first is nothing where most agree
    return finite / unit if unit > 0 else finite


def _with_common_mean(cohort: Cohort, centre: Any) -> Cohort:
    common = {}
    for name in cohort.names:
        stack = cohort.stack(name)
        if not stack.is_floating_point():
            common[name] = mean_by_examples(cohort, name)
            continue
        flat, out = stack.flatten(1), torch.empty_like(stack[0]).flatten()
        for begin in range(0, flat.shape[1], BLOCK):
            part = flat[:, begin : begin + BLOCK].double()
            out[begin : begin + part.shape[1]] = centre(part)
        common[name] = out.view(stack.shape[1:])
    return Cohort(tuple(replace(u, posterior=replace(u.posterior, mean=common)) for u in cohort))
