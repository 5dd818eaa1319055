"""Liu et al., FedLPA: One-shot Federated Learning with Layer-Wise Posterior Aggregation, NeurIPS 2024."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from fedfuse.client.curvature import PosteriorPull
from fedfuse.client.evidence.kfac import KroneckerFactors, Sharing
from fedfuse.client.evidence.variance import Fisher
from fedfuse.client.memory import KeepFactors
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import Aggregator, TaskLoss
from fedfuse.errors import RecipeError
from fedfuse.linalg.kron import Solver
from fedfuse.nets.blocks import Which
from fedfuse.server.aggregate.early import Begin, BestStep, Early, EarlyStopped
from fedfuse.server.aggregate.natural import Balance, Damping, NaturalKron, Scale, ShareFactors, Shares


@method("fedlpa", paper="arXiv:2310.00339", family="posterior")
def fedlpa(
    damping: PositiveFloat | Literal["evidence"] | None = None,
    scale: Scale | None = None,
    pi: Balance | None = None,
    solver: Solver | Early = "exact",
    fisher: Fisher = "empirical",
    shares: Shares = "examples",
    rank: PositiveInt | None = None,
    half: bool = False,
    sharing: Sharing = "expand",
    layers: Which = "all",
    centred: bool = False,
    min_rows: PositiveInt | None = None,
    eta: NonNegativeFloat = 0.0,
    tol: PositiveFloat = 1e-8,
    max_iters: PositiveInt | None = None,
    begin: Begin = "mean",
    block_width: PositiveInt | None = None,
) -> Recipe:
    """Fuse layer-wise Laplace posteriors: each client's weights count most where its own rows determine them.

    Clients send the Kronecker factors of their Fisher information; the server solves
    Σ f_k B_k M A_k = Σ f_k B_k M_k A_k for every layer M = [W | b] that has factors. Everything else is averaged.

    Args:
        damping: λ added to the factors, after they are scaled; or "evidence": each client sends the one its own rows
            prefer. By default 1e-1, and 1e-3 for factors as they are.
        scale: how factors are scaled before they are damped: root, client, layer, or none (as published). By default
            root, and none where clients choose the damping.
        pi: how λ is split between the factors: one, trace, frobenius, or evidence; by default trace, and evidence
            where the damping is.
        solver: exact (conjugate gradients), expectation (the closed approximation), gradient (the released steps),
            early (MaTS: conjugate gradients that stop early) or adam (FedFisher: the best step on the server's rows).
        fisher: empirical (the rows' own labels) or sampled (labels drawn from the network).
        shares: a client counts by its examples (as released), or uniform (as the paper's equations have it).
        rank: send so many leading eigenpairs of each factor and one number for the rest, instead of all of it.
        half: send eigenvectors in half precision.
        sharing: positions that share a weight are further examples (expand), or one example's (reduce).
        layers: all that have factors, or plain: linear layers and convolutions alone (as published).
        centred: take input factors of inputs less their mean, which is told otherwise.
        min_rows: a client with fewer rows sends no directions, only sizes; by default twice the batch it trains with.
        eta: from the second round on, the weight of the pull towards the common posterior.
        tol: relative residual the exact solver must reach.
        max_iters: its limit (1000), or the number of steps: 10000 of gradient, 100 of early, 2000 of adam.
        begin: where early and adam begin: mean, regmean (the same equation with B = I) or tasks (task arithmetic).
        block_width: of factors with more rows, send blocks of at most so many along their diagonals.
    """
    by_rows, pulled = damping == "evidence", eta > 0
    equation = replace(_equation(damping, scale, pi), tol=tol, max_iters=max_iters, shares=shares)
    factors = KroneckerFactors(fisher, by_rows, sharing=sharing, layers=layers, centred=centred, min_rows=min_rows)
    evidence = _with_size(factors, rank, half, block_width)
    return Recipe(
        objective=PosteriorPull(eta) if pulled else TaskLoss(),
        evidence=(evidence,),
        memory=(KeepFactors(),) if pulled else (),
        aggregate=_solver(solver, begin, equation),
        steps=(ShareFactors(),) if pulled else (),
        publishes=("kron",) if pulled else (),
    )


def _with_size(factors: KroneckerFactors, rank: int | None, half: bool, block_width: int | None) -> KroneckerFactors:
    """The evidence in the form in which it travels."""
    if half and rank is None:
        raise RecipeError("fedlpa: half stores eigenvectors in half precision and there are none; set rank, say to 8")
    if rank is not None and block_width is not None:
        raise RecipeError("fedlpa: rank and block_width are two ways to make factors small; set one of them")
    return replace(factors, rank=rank, half=half, width=block_width)


def _equation(damping: Damping | None, scale: Scale | None, pi: Balance | None) -> NaturalKron:
    by_rows = damping == "evidence"
    scaled: Scale = scale or ("none" if by_rows else "root")
    lam = damping if damping is not None else 1e-3 if scaled == "none" else 1e-1
    return NaturalKron(lam, pi or ("evidence" if by_rows else "trace"), scale=scaled)


def _solver(solver: Solver | Early, begin: Begin, equation: NaturalKron) -> Aggregator:
    if solver == "early":
        return EarlyStopped(equation, begin, equation.max_iters or 100)
    if solver == "adam":
        return BestStep(equation, begin, equation.max_iters or 2000)
    if begin != "mean":
        raise RecipeError(
            f"fedlpa: begin is {begin!r}, and the solver {solver!r} ends at the same weights wherever it begins; set "
            "solver to early or adam"
        )
    return replace(equation, solver=solver)
