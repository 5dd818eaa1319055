"""Jamoussi et al., BA-BFL: Barycentric Aggregation for Bayesian Federated Learning, 2024."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field, NonNegativeInt

from fedfuse.client.elbo import USUAL, Variational
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.barycenters import AlphaDivergence
from fedfuse.server.aggregate.charts import AALV, EAA, FKLB, GAA, RKLB, WB, FusionRule, MeanIn
from fedfuse.server.steps.personal import Personalize

Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]


def _fused_in(chart: FusionRule, last: int, uniform: bool, personal: float, how: Variational) -> Recipe:
    """Bayesian layers fused by a rule; with `personal`, a model for each client between the fused one and its own."""
    steps = (Personalize(chart, personal),) if personal else ()
    return how.recipe(last, MeanIn(chart, uniform=uniform), steps)


@method("eaa", paper="arXiv:2206.10897", family="posterior")
def eaa(last: NonNegativeInt = 1, uniform: bool = False, personal: Share = 0.0, how: Variational = USUAL) -> Recipe:
    """Empirical arithmetic aggregation: the mean of means and of variances, v = Σ f_k v_k.

    The network's last layers are Bayesian; the others take the plain mean.

    Args:
        last: how many layers, counted from the end, are Bayesian; 0 is FedAvg.
        uniform: weigh every client alike, whatever its number of examples.
        personal: end with a model for each client, its own posterior weighing so much beside the fused one.
        how: how Bayesian layers are made, learned and asked.
    """
    return _fused_in(EAA, last, uniform, personal, how)


@method("gaa", paper="arXiv:2206.10897", family="posterior")
def gaa(last: NonNegativeInt = 1, uniform: bool = False, personal: Share = 0.0, how: Variational = USUAL) -> Recipe:
    """Gaussian arithmetic aggregation: the distribution of the weighted sum of independent draws, v = Σ f_k² v_k.

    The network's last layers are Bayesian; the others take the plain mean.
    Variances shrink about as 1/clients in every round, so that the network soon is a deterministic one.

    Args:
        last: how many layers, counted from the end, are Bayesian; 0 is FedAvg.
        uniform: weigh every client alike, whatever its number of examples.
        personal: end with a model for each client, its own posterior weighing so much beside the fused one.
        how: how Bayesian layers are made, learned and asked.
    """
    return _fused_in(GAA, last, uniform, personal, how)


@method("aalv", paper="arXiv:2206.10897", family="posterior")
def aalv(last: NonNegativeInt = 1, uniform: bool = False, personal: Share = 0.0, how: Variational = USUAL) -> Recipe:
    """Arithmetic aggregation of log-variances: the mean of means and the geometric mean of variances.

    The network's last layers are Bayesian; the others take the plain mean.

    Args:
        last: how many layers, counted from the end, are Bayesian; 0 is FedAvg.
        uniform: weigh every client alike, whatever its number of examples.
        personal: end with a model for each client, its own posterior weighing so much beside the fused one.
        how: how Bayesian layers are made, learned and asked.
    """
    return _fused_in(AALV, last, uniform, personal, how)


@method("wb", paper="arXiv:2412.11646", family="posterior")
def wb(last: NonNegativeInt = 1, uniform: bool = False, personal: Share = 0.0, how: Variational = USUAL) -> Recipe:
    """The Wasserstein-2 barycenter of the posteriors: standard deviations are averaged, √v = Σ f_k √v_k.

    The network's last layers are Bayesian; the others take the plain mean.

    Args:
        last: how many layers, counted from the end, are Bayesian; 0 is FedAvg.
        uniform: weigh every client alike, whatever its number of examples.
        personal: end with a model for each client, its own posterior weighing so much beside the fused one.
        how: how Bayesian layers are made, learned and asked.
    """
    return _fused_in(WB, last, uniform, personal, how)


@method("rklb", paper="arXiv:2412.11646", family="posterior")
def rklb(last: NonNegativeInt = 1, uniform: bool = False, personal: Share = 0.0, how: Variational = USUAL) -> Recipe:
    """The reverse-KL barycenter of the posteriors: 1/v = Σ f_k / v_k and μ = v Σ f_k μ_k / v_k.

    The network's last layers are Bayesian; the others take the plain mean.
    A client's say about a weight grows with how sure it is of it.

    Args:
        last: how many layers, counted from the end, are Bayesian; 0 is FedAvg.
        uniform: weigh every client alike, whatever its number of examples.
        personal: end with a model for each client, its own posterior weighing so much beside the fused one.
        how: how Bayesian layers are made, learned and asked.
    """
    return _fused_in(RKLB, last, uniform, personal, how)


@method("fklb", paper="arXiv:2412.11646", family="posterior")
def fklb(last: NonNegativeInt = 1, uniform: bool = False, personal: Share = 0.0, how: Variational = USUAL) -> Recipe:
    """The KL barycenter of the posteriors: the moments of their mixture, v = Σ f_k (v_k + (μ_k − μ)²).

    The network's last layers are Bayesian; the others take the plain mean.
    Where clients disagree about a weight the fused posterior is wide.

    Args:
        last: how many layers, counted from the end, are Bayesian; 0 is FedAvg.
        uniform: weigh every client alike, whatever its number of examples.
        personal: end with a model for each client, its own posterior weighing so much beside the fused one.
        how: how Bayesian layers are made, learned and asked.
    """
    return _fused_in(FKLB, last, uniform, personal, how)


@method("alpha", paper="arXiv:2412.11646", family="posterior")
def alpha(
    alpha: float = 0.5,
    last: NonNegativeInt = 1,
    uniform: bool = False,
    personal: Share = 0.0,
    how: Variational = USUAL,
) -> Recipe:
    """The Gaussian nearest to the posteriors in α-divergence: from reverse KL (α = 0) over Hellinger (½) to KL (1).

    The network's last layers are Bayesian; the others take the plain mean. The barycenter is found by iteration.

    Args:
        alpha: the order of the divergence; beyond [0, 1] not every set of posteriors has a barycenter.
        last: how many layers, counted from the end, are Bayesian; 0 is FedAvg.
        uniform: weigh every client alike, whatever its number of examples.
        personal: end with a model for each client, its own posterior weighing so much beside the fused one.
        how: how Bayesian layers are made, learned and asked.
    """
    return _fused_in(AlphaDivergence(alpha), last, uniform, personal, how)
