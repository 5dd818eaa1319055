"""Ozer et al., How to Combine Variational Bayesian Networks in Federated Learning, 2022."""

from __future__ import annotations

from pydantic import NonNegativeInt

from fedfuse.client.elbo import USUAL, Variational
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.charts import EAA, MeanIn


@method("eaa", paper="arXiv:2206.10897")
def eaa(last: NonNegativeInt = 1, uniform: bool = False, how: Variational = USUAL) -> Recipe:
    """Empirical arithmetic aggregation: the mean of means and of variances, v = Σ f_k v_k.

    The network's last layers are Bayesian; the others take the plain mean.

    Args:
        last: how many layers, counted from the end, are Bayesian; 0 is FedAvg.
        uniform: weigh every client alike, whatever its number of examples.
        how: how Bayesian layers are made, learned and asked.
    """
    return how.recipe(last, MeanIn(EAA, uniform=uniform))
