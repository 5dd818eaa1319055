"""Liu et al., FedLPA: One-shot Federated Learning with Layer-Wise Posterior Aggregation, NeurIPS 2024."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from fedfuse.client.curvature import PosteriorPull
from fedfuse.client.evidence.kfac import Fisher, KroneckerFactors
from fedfuse.client.memory import KeepFactors
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import CrossEntropy
from fedfuse.linalg.kron import Solver
from fedfuse.server.aggregate.natural import Balance, NaturalKron, ShareFactors


@method("fedlpa", paper="arXiv:2310.00339")
def fedlpa(
    damping: PositiveFloat | Literal["evidence"] = 1e-3,
    pi: Balance | None = None,
    solver: Solver = "exact",
    fisher: Fisher = "empirical",
    eta: NonNegativeFloat = 0.0,
    tol: PositiveFloat = 1e-8,
    max_iters: PositiveInt | None = None,
) -> Recipe:
    """Fuse layer-wise Laplace posteriors: each client's weights count most where its own rows determine them.

    Clients send the Kronecker factors of their Fisher information; the server solves
    Σ f_k B_k M A_k = Σ f_k B_k M_k A_k for every linear and convolution layer M = [W | b]. Everything else is averaged.

    Args:
        damping: λ added to the factors, or "evidence": each client sends the one its own rows prefer.
        pi: how λ is split between the factors: one, trace, frobenius, or evidence; by default trace, and evidence
            where the damping is.
        solver: exact (conjugate gradients), expectation (the closed approximation) or gradient (the released steps).
        fisher: empirical (the rows' own labels) or sampled (labels drawn from the network).
        eta: from the second round on, the weight of the pull towards the common posterior (1 in the released code).
        tol: relative residual the exact solver must reach.
        max_iters: its limit (1000), or the gradient's number of steps (10000).
    """
    by_rows = damping == "evidence"
    split: Balance = pi or ("evidence" if by_rows else "trace")
    pulled = eta > 0
    return Recipe(
        objective=PosteriorPull(eta) if pulled else CrossEntropy(),
        evidence=(KroneckerFactors(fisher, choose=by_rows),),
        memory=(KeepFactors(),) if pulled else (),
        aggregate=NaturalKron(damping, split, solver, tol, max_iters),
        steps=(ShareFactors(),) if pulled else (),
        publishes=("kron",) if pulled else (),
    )
