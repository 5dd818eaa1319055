"""FedLPA's fusion: the mode of the product of layer-wise Gaussian beliefs, found by solving for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import tee
from operator import itemgetter
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.posterior import Kron
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.linalg.cg import Solution
from fedfuse.linalg.kron import Solver, Split, damp, natural_mean
from fedfuse.linalg.psd import pack
from fedfuse.nets.blocks import Block, Factors, blocks_of
from fedfuse.server.aggregate.mean import ALL_LAWS, mean_by_examples

Damping = float | Literal["evidence"]
Balance = Split | Literal["evidence"]


@dataclass(frozen=True, slots=True)
class NaturalKron(ServerPart):
    """Solve Σ f_k B_k M A_k = Σ f_k B_k M_k A_k for every layer M = [W | b], f_k being the share of examples.

    This is the mode of Π_k N(M_k, (A_k ⊗ B_k)⁻¹)^f_k (arXiv:2310.00339, eqs. 7 and 11–14), with damped factors
    A_k + π √λ I and B_k + √λ / π I (eq. 30). One layer is held across clients at a time. Tensors without factors, and
    layers that no client's factors inform, take the weighted mean and are named in the facts.

    Attributes:
        damping: λ, or "evidence" for the one each client's own rows prefer.
        pi: how λ is split between the factors: "one", "trace", "frobenius", or "evidence" for each client's choice.
        solver: "exact" (conjugate gradients), "expectation" (one Kronecker product for the sum of them) or
            "gradient" (the released 10,000 steps).
        tol: relative residual the exact solver must reach.
        max_iters: the exact solver's limit, or the gradient's number of steps; by default 1,000 and 10,000.
    """

    damping: Damping = 1e-3
    pi: Balance = "trace"
    solver: Solver = "exact"
    tol: float = 1e-8
    max_iters: int | None = None
    needs: ClassVar[frozenset[str]] = frozenset({"kron"})
    laws: ClassVar[frozenset[str]] = ALL_LAWS

    def __post_init__(self) -> None:
        if self.pi == "evidence" and self.damping != "evidence":
            raise RecipeError(
                f"fusing by Kronecker factors: pi is 'evidence' with the damping {self.damping}; clients choose both "
                "together, so set damping to 'evidence' too, or pi to one, trace or frobenius"
            )

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Solve layer by layer; the facts say how many iterations each took and what residual is left."""
        spec = cohort.updates[0].spec
        sources = [u.posterior.mean for u in cohort]
        mean: dict[str, Tensor] = {}
        solutions: dict[str, list[Solution]] = {}
        for block in blocks_of(spec):
            if any(_informs(u, block) for u in cohort):
                found = [self._solve(cohort, block, group) for group in range(block.groups)]
                matrix = torch.cat([s.x for s in found])
                like = {n: sources[0][n] for n in (block.layer.weight, block.layer.bias) if n is not None}
                mean |= block.layer.split(matrix, like)
                solutions[block.layer.name] = found
        averaged = [n for n in cohort.names if n not in mean]
        mean |= {n: mean_by_examples(cohort, n) for n in averaged}
        fused = state.fused({n: mean[n] for n in cohort.names}, spec=spec)
        return fused.noting(averaged=averaged, **self._chosen(cohort), **_account(solutions))

    def _solve(self, cohort: Cohort, block: Block, group: int) -> Solution:
        clients = (self._belief(u, block, group) for u in cohort)
        Ms, As, Bs = (map(itemgetter(i), copy) for i, copy in enumerate(tee(clients, 3)))
        return natural_mean(
            Ms,
            As,
            Bs,
            cohort.weights,
            solver=self.solver,
            tol=self.tol,
            max_iters=self.max_iters,
            what=f"layer {block.layer.name}" + (f", group {group}" if block.groups > 1 else ""),
        )

    def _belief(self, update: ClientUpdate, block: Block, group: int) -> tuple[Tensor, Tensor, Tensor]:
        """One client's layer and its damped factors."""
        A, B = (_stacked(factor)[group].double() for factor in factors_of(update, block))
        return block.matrices(update.posterior.mean)[group], *damp(A, B, *self._damping_of(update))

    def _damping_of(self, update: ClientUpdate) -> tuple[float, Split]:
        """λ and its split for one client."""
        splits: tuple[Split, ...] = get_args(Split)
        if self.damping != "evidence":
            return self.damping, self.pi  # type: ignore[return-value]  # both "evidence" or neither
        best = int(update.notes["kron/evidence"].argmax()) if self.pi == "evidence" else splits.index(self.pi)
        return float(update.notes["kron/damping"][best]), splits[best]

    def _chosen(self, cohort: Cohort) -> dict[str, dict[str, float | str]]:
        """What clients chose, where they did."""
        if self.damping != "evidence":
            return {}
        chosen = {u.client: self._damping_of(u) for u in cohort}
        return {"damping": {c: lam for c, (lam, _) in chosen.items()}, "pi": {c: pi for c, (_, pi) in chosen.items()}}


@dataclass(frozen=True, slots=True)
class ShareFactors(ServerPart):
    """Keep the cohort's mean factors Σ f_k A_k and Σ f_k B_k in server memory, for `PosteriorPull` to read."""

    needs: ClassVar[frozenset[str]] = frozenset({"kron"})

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:  # noqa: ARG002
        """Average the factors as the cohort has them now: an alignment has moved them, not what was sent."""
        means = {}
        for block in blocks_of(cohort.updates[0].spec):
            pairs = [factors_of(u, block) for u in cohort]
            for side, factors in zip(("in", "out"), zip(*pairs, strict=True), strict=True):
                mean = sum(w * pack(f).double() for w, f in zip(cohort.weights.tolist(), factors, strict=True))
                means[f"kron/{block.layer.name}/{side}"] = torch.as_tensor(mean).float()
        return replace(state, memory={**state.memory, **means})


def factors_of(update: ClientUpdate, block: Block) -> Factors:
    """A client's raw factors of one layer."""
    geometry = update.posterior.geometry
    if not isinstance(geometry, Kron) or block.layer.name not in geometry.factors:
        raise ConfigError(
            f"{update.client} has no Kronecker factors for layer {block.layer.name}; "
            "give the recipe the evidence KroneckerFactors"
        )
    return geometry.factors[block.layer.name]


def _stacked(factor: Tensor) -> Tensor:
    return factor.unsqueeze(0) if factor.ndim == 2 else factor


def _informs(update: ClientUpdate, block: Block) -> bool:
    """Whether the factors of a layer say anything at all; those of a layer that was never used do not."""
    return any(bool(factor.any()) for factor in factors_of(update, block))


def _account(solutions: dict[str, list[Solution]]) -> dict[str, dict[str, float]]:
    """Iterations and the largest residual by layer."""
    return {
        "iterations": {layer: sum(s.iterations for s in found) for layer, found in solutions.items()},
        "residual": {layer: max(s.residual for s in found) for layer, found in solutions.items()},
    }
