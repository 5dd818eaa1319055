"""FedLPA's fusion: the mode of the product of layer-wise Gaussian beliefs, found by solving for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.posterior import Kron
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.linalg.cg import Solution
from fedfuse.linalg.factor import Factor, as_stack
from fedfuse.linalg.kron import Solver, Split, damp, mean_eigenvalue, natural_mean
from fedfuse.linalg.subspace import solve_blockwise
from fedfuse.nets.kronecker import Block, Factors, Packing, blocks_of, mean_factor
from fedfuse.server.aggregate.mean import ALL_LAWS, mean_by_examples
from fedfuse.wire.codec import forms_of

Damping: TypeAlias = float | Literal["evidence"]
Balance: TypeAlias = Split | Literal["evidence"]
Scale: TypeAlias = Literal["root", "client", "layer", "none"]
Shares: TypeAlias = Literal["examples", "uniform"]
_POWERS: dict[Scale, float] = {"layer": 1.0, "root": 0.5, "client": 0.0}


@dataclass(frozen=True, slots=True)
class NaturalKron(ServerPart):
    """Solve Σ f_k B_k M A_k = Σ f_k B_k M_k A_k for every layer M = [W | b], f_k being the share of examples.

    This is the mode of Π_k N(M_k, (A_k ⊗ B_k)⁻¹)^f_k (arXiv:2310.00339, eqs. 7 and 11–14), with damped factors
    A_k + π √λ I and B_k + √λ / π I (eq. 30). One layer is held across clients at a time. Tensors without factors, and
    layers that no client's factors inform, take the weighted mean and are named in the facts.

    Before they are damped, factors are scaled, layer by layer. The better a client fits its rows, the smaller its
    gradients and B_k: a λ that suits briefly trained clients drowns those trained to the end, and a client that has
    fitted its rows counts for nothing against one that has not. With s_k the mean eigenvalue of A_k ⊗ B_k, client k's
    product is scaled to s_k^p / Σ f_j s_j^p, so that λ is a share of the layer's mean eigenvalue, and

    - `layer`, p = 1, weighs clients by their precision;
    - `root`, p = ½, by its root: inverse standard deviations for inverse variances;
    - `client`, p = 0, weighs all alike: factors give directions, and only f_k how much a client counts.

    Attributes:
        damping: λ, or "evidence" for the one each client's own rows prefer.
        pi: how λ is split between the factors: "one", "trace", "frobenius", or "evidence" for each client's choice.
        solver: "exact" (conjugate gradients), "expectation" (one Kronecker product for the sum of them) or
            "gradient" (the released 10,000 steps).
        tol: relative residual the exact solver must reach.
        max_iters: the exact solver's limit, or the gradient's number of steps; by default 1,000 and 10,000.
        scale: "layer", "root", "client", or "none" (as published).
        shares: f_k by "examples" (as released), or "uniform" (as the paper's equations have it).
    """

    damping: Damping = 1e-3
    pi: Balance = "trace"
    solver: Solver = "exact"
    tol: float = 1e-8
    max_iters: int | None = None
    scale: Scale = "none"
    shares: Shares = "examples"
    needs: ClassVar[frozenset[str]] = frozenset({"kron"})
    layerwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.pi == "evidence" and self.damping != "evidence":
            raise RecipeError(
                f"fusing by Kronecker factors: pi is 'evidence' with the damping {self.damping}; clients choose both "
                "together, so set damping to 'evidence' too, or pi to one, trace or frobenius"
            )
        if self.damping == "evidence" and self.scale != "none":
            raise RecipeError(
                f"fusing by Kronecker factors: the scale is {self.scale!r} with a damping that clients chose for "
                "factors as they are; set scale to 'none', or damping to a number"
            )

    @property
    def laws(self) -> frozenset[str]:
        """All; with uniform shares, numbers of examples are not looked at, so two equal clients are not one of both."""
        return ALL_LAWS

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Solve layer by layer; the facts say how many iterations each took and what residual is left."""
        solutions: dict[str, list[Solution]] = {}
        mean: dict[str, Tensor] = {}
        for block in informed_blocks(cohort):
            solutions[block.name] = [self._solve(cohort, block, group) for group in range(block.groups)]
            mean |= split_solutions(cohort, block, [s.x for s in solutions[block.name]])
        return with_the_rest_averaged(cohort, state, mean).noting(**self.facts(cohort, solutions))

    def facts(self, cohort: Cohort, solutions: Mapping[str, Sequence[Solution]]) -> dict[str, Any]:
        """By layer iterations and the largest residual; by client the damping, where clients chose it."""
        facts: dict[str, Any] = {}
        if self.damping == "evidence":
            chosen = {u.client: self._damping_of(u) for u in cohort}
            facts["damping"] = {client: damping for client, (damping, _) in chosen.items()}
            facts["pi"] = {client: pi for client, (_, pi) in chosen.items()}
        facts["iterations"] = {layer: sum(s.iterations for s in found) for layer, found in solutions.items()}
        facts["residual"] = {layer: max(s.residual for s in found) for layer, found in solutions.items()}
        return facts

    def equation(self, cohort: Cohort, block: Block, group: int) -> Equation:
        """One layer's equation, its factors scaled and damped."""
        weights = shares_of(cohort, self.shares)
        beliefs = self._scale_factors([_belief(u, block, group) for u in cohort], weights.tolist())
        damped = [damp(b.A, b.B, *self._damping_of(b.update)) for b in beliefs]
        what = f"layer {block.name}" + (f", group {group}" if block.groups > 1 else "")
        return Equation([b.M for b in beliefs], [A for A, _ in damped], [B for _, B in damped], weights, what)

    def _solve(self, cohort: Cohort, block: Block, group: int) -> Solution:
        layers, inputs, outputs, weights, what = self.equation(cohort, block, group)
        options: dict[str, Any] = {"solver": self.solver, "tol": self.tol, "max_iters": self.max_iters, "what": what}
        return solve_blockwise(layers, inputs, outputs, lambda Ms, As, Bs: natural_mean(Ms, As, Bs, weights, **options))

    def _scale_factors(self, beliefs: Sequence[_Belief], shares: Sequence[float]) -> list[_Belief]:
        """The beliefs with their factors scaled; what is zero stays zero."""
        if self.scale == "none":
            return list(beliefs)
        powers = [b.scale ** _POWERS[self.scale] if b.scale > 0 else 0.0 for b in beliefs]
        total = sum(f * power for f, power in zip(shares, powers, strict=True)) or 1.0
        return [b.scaled_to(power / total) for b, power in zip(beliefs, powers, strict=True)]

    def _damping_of(self, update: ClientUpdate) -> tuple[float, Split]:
        """λ and its split for one client."""
        splits: tuple[Split, ...] = get_args(Split)
        if self.damping != "evidence":
            return self.damping, self.pi  # type: ignore[return-value]  # both "evidence" or neither
        best = int(update.notes["kron/evidence"].argmax()) if self.pi == "evidence" else splits.index(self.pi)
        return float(update.notes["kron/damping"][best]), splits[best]


class Equation(NamedTuple):
    """Σ f_k B_k (M − M_k) A_k = 0 for one layer.

    Attributes:
        layers: the clients' M_k.
        inputs: their A_k, damped.
        outputs: their B_k, damped.
        shares: their f_k.
        what: the layer's name, for errors.
    """

    layers: list[Tensor]
    inputs: list[Factor]
    outputs: list[Factor]
    shares: Tensor
    what: str


class _Belief(NamedTuple):
    """One client's layer and factors."""

    update: ClientUpdate
    M: Tensor
    A: Factor
    B: Factor

    @property
    def scale(self) -> float:
        """The mean eigenvalue of A ⊗ B."""
        return mean_eigenvalue(self.A) * mean_eigenvalue(self.B)

    def scaled_to(self, scale: float) -> _Belief:
        """The belief with that mean eigenvalue instead, each factor with its root; one without information as it is."""
        if self.scale == 0:
            return self
        root = math.sqrt(scale)
        return self._replace(A=self.A * (root / mean_eigenvalue(self.A)), B=self.B * (root / mean_eigenvalue(self.B)))


def _belief(update: ClientUpdate, block: Block, group: int) -> _Belief:
    A, B = (as_stack(factor)[group].double() for factor in factors_of(update, block))
    return _Belief(update, block.matrices(update.posterior.mean)[group], A, B)


@dataclass(frozen=True, slots=True)
class ShareFactors(ServerPart):
    """Keep the cohort's mean factors Σ f_k A_k and Σ f_k B_k in server memory, for `PosteriorPull` to read."""

    needs: ClassVar[frozenset[str]] = frozenset({"kron"})

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:  # noqa: ARG002
        """Average the factors as the cohort has them now: an alignment has moved them, not what was sent."""
        means: dict[str, Tensor] = {}
        for block in blocks_of(cohort.updates[0].spec):
            pairs = [factors_of(u, block) for u in cohort]
            A, B = (mean_factor(list(side), cohort.weights.tolist()) for side in zip(*pairs, strict=True))
            means |= Packing().notes(block, (as_stack(A), as_stack(B)))
        return replace(state, memory={**state.memory, **means})


def shares_of(cohort: Cohort, shares: Shares) -> Tensor:
    """How much every client counts, float64."""
    return cohort.weights if shares == "examples" else torch.full_like(cohort.weights, 1 / len(cohort))


def known_blocks(cohort: Cohort) -> Sequence[Block]:
    """The blocks that factors were asked for; where no client sent any, all of them."""
    everything = blocks_of(cohort.updates[0].spec)
    sent = {name for u in cohort if isinstance(u.posterior.geometry, Kron) for name in u.posterior.geometry.factors}
    return [block for block in everything if block.name in sent] if sent else everything


def informed_blocks(cohort: Cohort) -> Iterator[Block]:
    """The blocks of which some client's factors are not zero; those of a layer that was never used are."""
    for block in known_blocks(cohort):
        if any(bool(factor.any()) for update in cohort for factor in factors_of(update, block)):
            yield block


def factors_of(update: ClientUpdate, block: Block) -> Factors:
    """A client's raw factors of one layer."""
    geometry = update.posterior.geometry
    if not isinstance(geometry, Kron) or block.name not in geometry.factors:
        raise ConfigError(
            f"{update.client} has no Kronecker factors for layer {block.name}; "
            "give the recipe the evidence KroneckerFactors"
        )
    return geometry.factors[block.name]


def split_solutions(cohort: Cohort, block: Block, found: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensors of a layer whose matrices, one per group, were found."""
    forms = forms_of(cohort.updates[0].posterior.mean)
    whole = torch.stack(list(found)) if len(found) > 1 else found[0][None]  # a stack of one would be a copy
    return block.split(whole, {name: forms[name].blank() for name in block.tensors})


def with_the_rest_averaged(cohort: Cohort, state: ServerState, mean: Mapping[str, Tensor]) -> ServerState:
    """The state fused from some tensors and the weighted mean of all others, which the facts name."""
    averaged = [n for n in cohort.names if n not in mean]
    whole = {**mean, **{n: mean_by_examples(cohort, n) for n in averaged}}
    return state.fused({n: whole[n] for n in cohort.names}, spec=cohort.updates[0].spec).noting(averaged=averaged)
