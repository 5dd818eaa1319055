"""Jamoussi et al., BA-BFL: Barycentric Aggregation for Bayesian Federated Learning, 2024."""

from __future__ import annotations

from pydantic import NonNegativeInt

from fedfuse.client.elbo import USUAL, Variational
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.charts import RKLB, MeanIn


@method("rklb", paper="arXiv:2412.11646")
def rklb(last: NonNegativeInt = 1, uniform: bool = False, how: Variational = USUAL) -> Recipe:
    """The reverse-KL barycenter of the posteriors: 1/v = Σ f_k / v_k and μ = v Σ f_k μ_k / v_k.

    The network's last layers are Bayesian; the others take the plain mean.
    A client's say about a weight grows with how sure it is of it.

    Args:
        last: how many layers, counted from the end, are Bayesian; 0 is FedAvg.
        uniform: weigh every client alike, whatever its number of examples.
        how: how Bayesian layers are made, learned and asked.
    """
    return how.recipe(last, MeanIn(RKLB, uniform=uniform))
