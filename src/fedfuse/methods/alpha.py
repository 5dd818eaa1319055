"""The barycenters of the α-divergences that BA-BFL (Jamoussi et al., 2024) leaves for later."""

from __future__ import annotations

from pydantic import NonNegativeInt

from fedfuse.client.elbo import USUAL, Variational
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.barycenters import AlphaDivergence
from fedfuse.server.aggregate.charts import MeanIn


@method("alpha", paper="arXiv:2412.11646")
def alpha(alpha: float = 0.5, last: NonNegativeInt = 1, uniform: bool = False, how: Variational = USUAL) -> Recipe:
    """The Gaussian nearest to the posteriors in α-divergence: from reverse KL (α = 0) over Hellinger (½) to KL (1).

    The network's last layers are Bayesian; the others take the plain mean. The barycenter is found by iteration.

    Args:
        alpha: the order of the divergence; beyond [0, 1] not every set of posteriors has a barycenter.
        last: how many layers, counted from the end, are Bayesian; 0 is FedAvg.
        uniform: weigh every client alike, whatever its number of examples.
        how: how Bayesian layers are made, learned and asked.
    """
    return how.recipe(last, MeanIn(AlphaDivergence(alpha), uniform=uniform))
