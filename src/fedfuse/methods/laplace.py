"""Liu et al., A Bayesian Federated Learning Framework with Online Laplace Approximation, 2021."""

from __future__ import annotations

from pydantic import PositiveFloat

from fedfuse.client.fisher import Fisher, FisherDiagonal
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.charts import RKLB, MeanIn
from fedfuse.server.aggregate.natural import Shares


@method("laplace", paper="arXiv:2102.01936", family="posterior")
def laplace(damping: PositiveFloat = 1e-3, fisher: Fisher = "empirical", shares: Shares = "examples") -> Recipe:
    """Fuse diagonal Laplace posteriors: every weight is averaged by the clients' Fisher information about it.

    w = Σ f_k (F_k + λ) w_k / Σ f_k (F_k + λ), weight by weight: FedLPA without the correlations within a layer.

    Args:
        damping: λ added to every client's Fisher information.
        fisher: empirical (the rows' own labels) or sampled (labels drawn from the network).
        shares: f_k by examples, or uniform.
    """
    return Recipe(
        evidence=(FisherDiagonal(fisher),),
        aggregate=MeanIn(RKLB, source="fisher", damping=damping, keep=False, uniform=shares == "uniform"),
    )
