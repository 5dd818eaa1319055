"""Jamoussi et al., BA-BFL: Barycentric Aggregation for Bayesian Federated Learning, 2024."""

from __future__ import annotations

from pydantic import NonNegativeInt

from fedfuse.client.elbo import USUAL, Variational
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.charts import WB, MeanIn


@method("wb", paper="arXiv:2412.11646")
def wb(last: NonNegativeInt = 1, uniform: bool = False, how: Variational = USUAL) -> Recipe:
    """The Wasserstein-2 barycenter of the posteriors: standard deviations are averaged, √v = Σ f_k √v_k.

    The network's last layers are Bayesian; the others take the plain mean.

    Args:
        last: how many layers, counted from the end, are Bayesian; 0 is FedAvg.
        uniform: weigh every client alike, whatever its number of examples.
        how: how Bayesian layers are made, learned and asked.
    """
    return how.recipe(last, MeanIn(WB, uniform=uniform))
