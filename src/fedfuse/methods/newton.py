"""Wu et al., Grid Binary LOgistic REgression (GLORE), JAMIA 2012: Newton's method from sums of gradient and Hessian."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from fedfuse.client.evidence.newton import CurvatureSums, First
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.newton import NewtonStep


@method("newton", paper="doi:10.1136/amiajnl-2012-000862", family="statistics")
def newton(
    ridge: NonNegativeFloat = 0.0,
    family: Literal["auto", "poisson"] = "auto",
    first: First = "sums",
) -> Recipe:
    """Exact Newton steps of a generalized linear model, or of a network's last layer: the pooled fit in a few rounds.

    Clients do not train; they send loss, gradient and Hessian of the last linear layer at the common weights. The sums
    are those of the pooled rows, so rounds converge to the pooled optimum, whatever the partition. Beside the model are
    coefficients with standard errors, intervals, p-values and odds ratios, and the sites' heterogeneity (Q, I²).

    Args:
        ridge: the penalty ρ of ½ρ‖w‖², constants aside; 0 for inference, where the first class is the reference.
        family: "auto" is logistic, multinomial or linear as the task says; "poisson" models counts (regression), and
            the network's output is then the logarithm of the rate.
        first: "local" lets the first exchange bring each client's own fit: the inverse-variance estimate.
    """
    return Recipe(
        trains=False,
        evidence=(CurvatureSums(family, first, ridge),),
        aggregate=NewtonStep(ridge, family),
        publishes=("newton",),
    )
