"""Ashman et al., Partitioned Variational Inference: A Framework for Probabilistic Federated Learning, 2022."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from fedfuse.client.cavity import KeepFactor
from fedfuse.client.elbo import Elbo
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.models.bayes import BayesianLayers
from fedfuse.server.aggregate.product import Product


@method("pvi", paper="arXiv:2202.12275", family="posterior")
def pvi(
    last: PositiveInt = 1,
    layers: tuple[str, ...] = (),
    scale: PositiveFloat = 1.0,
    damping: Annotated[float, Field(gt=0, le=1)] = 1.0,
    bias: bool = False,
    log_variance: float | None = None,
    predict_draws: PositiveInt = 100,
) -> Recipe:
    """Fuse posteriors as the product of what every client's rows say: q = p Π t_k, each counted once in any round.

    A client learns with the cavity q / t_k as its prior, in place of q, which knows its rows already; the server
    multiplies the changes, q ← q Π (q_k / q)^damping. No number of examples weighs a Bayesian layer: who has more rows
    is surer. The network's last layers are Bayesian; the others take the plain mean.

    Args:
        last: how many layers, counted from the end, are Bayesian.
        layers: their names, in place of the last ones.
        scale: standard deviation of the prior N(start, scale²/fan-in), in units of 1/√fan-in.
        damping: the share of each client's change that is taken; below 1 for many clients that did not converge.
        bias: whether biases are Gaussians too.
        log_variance: log σ² every weight starts with; by default σ is a twentieth of 1/√fan-in.
        predict_draws: networks drawn to predict.
    """
    return Recipe(
        objective=Elbo(1.0, "cavity", scale),
        memory=(KeepFactor(scale, damping),),
        aggregate=Product(scale, damping),
        prepare_model=BayesianLayers(last, layers, log_variance, bias, draws=predict_draws),
    )
