"""Jamoussi et al., BA-BFL: Barycentric Aggregation for Bayesian Federated Learning, 2024."""

from __future__ import annotations

from pydantic import NonNegativeInt

from fedfuse.client.elbo import USUAL, Variational
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.charts import FKLB, MeanIn


@method("fklb", paper="arXiv:2412.11646")
def fklb(last: NonNegativeInt = 1, uniform: bool = False, how: Variational = USUAL) -> Recipe:
    """The KL barycenter of the posteriors: the moments of their mixture, v = Σ f_k (v_k + (μ_k − μ)²).

    The network's last layers are Bayesian; the others take the plain mean.
    Where clients disagree about a weight the fused posterior is wide.

    Args:
        last: how many layers, counted from the end, are Bayesian; 0 is FedAvg.
        uniform: weigh every client alike, whatever its number of examples.
        how: how Bayesian layers are made, learned and asked.
    """
    return how.recipe(last, MeanIn(FKLB, uniform=uniform))
