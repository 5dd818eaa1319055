"""Ozer et al., How to Combine Variational Bayesian Networks in Federated Learning, 2022."""

from __future__ import annotations

from pydantic import NonNegativeInt

from fedfuse.client.elbo import USUAL, Variational
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.charts import AALV, MeanIn


@method("aalv", paper="arXiv:2206.10897")
def aalv(last: NonNegativeInt = 1, uniform: bool = False, how: Variational = USUAL) -> Recipe:
    """Arithmetic aggregation of log-variances: the mean of means and the geometric mean of variances.

    The network's last layers are Bayesian; the others take the plain mean.

    Args:
        last: how many layers, counted from the end, are Bayesian; 0 is FedAvg.
        uniform: weigh every client alike, whatever its number of examples.
        how: how Bayesian layers are made, learned and asked.
    """
    return how.recipe(last, MeanIn(AALV, uniform=uniform))
