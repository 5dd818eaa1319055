"""Ozer et al., How to Combine Variational Bayesian Networks in Federated Learning, 2022."""

from __future__ import annotations

from pydantic import NonNegativeInt

from fedfuse.client.elbo import USUAL, Variational
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.charts import GAA, MeanIn


@method("gaa", paper="arXiv:2206.10897")
def gaa(last: NonNegativeInt = 1, uniform: bool = False, how: Variational = USUAL) -> Recipe:
    """Gaussian arithmetic aggregation: the distribution of the weighted sum of independent draws, v = Σ f_k² v_k.

    The network's last layers are Bayesian; the others take the plain mean.
    Variances shrink about as 1/clients in every round, so that the network soon is a deterministic one.

    Args:
        last: how many layers, counted from the end, are Bayesian; 0 is FedAvg.
        uniform: weigh every client alike, whatever its number of examples.
        how: how Bayesian layers are made, learned and asked.
    """
    return how.recipe(last, MeanIn(GAA, uniform=uniform))
