"""Ashman et al., Partitioned Variational Inference: A Framework for Probabilistic Federated Learning, 2022."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from fedfuse.client.elbo import Elbo, KeepFactor
from fedfuse.core.messages import Cohort
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError
from fedfuse.models.bayes import BayesianLayers, prior_log_variance
from fedfuse.server.aggregate.charts import Pair, deviations
from fedfuse.server.aggregate.mean import ALL_LAWS, mean_by_examples

_LEAST = 1e-2  # where clients take more of the precision than this leaves, nobody knows what they mean


@dataclass(frozen=True, slots=True)
class Product(ServerPart):
    """Fuse Bayesian layers as q ∏_k (q_k / q)^damping, q being what all believed before; others take the plain mean.

    In natural parameters, precision and shift, this is the sum η + damping Σ_k (η_k − η). In the first round q is the
    prior N(start, scale²/fan-in), and without damping the product is Π q_k / p^(K−1). A weight whose precision would
    end below a hundredth of what it was keeps what was believed before; the facts count them.

    Attributes:
        scale: of the prior's standard deviation, in units of 1/√fan-in.
        damping: the share of each client's change that is taken.
    """

    scale: float
    damping: float = 1.0
    needs: ClassVar[frozenset[str]] = frozenset({"start"})

    @property
    def laws(self) -> frozenset[str]:
        """Clients that agree are surer together than alone, and a damped step does not arrive."""
        return ALL_LAWS - ({"agree"} if self.damping == 1 else {"agree", "one"})

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Fuse tensor by tensor; the facts say how wide the posterior is."""
        spec, before = cohort.updates[0].spec, state.start.params
        pairs = spec.layout.log_variances
        if not pairs:
            raise ConfigError("the product of posteriors needs Bayesian layers and the network has none; use last ≥ 1")
        fused, undecided = dict[str, Tensor](), 0
        for mean, log in pairs.items():
            usual = prior_log_variance(_fan_in(before, mean), self.scale)
            old = before[log].double() if state.round else torch.full_like(before[log], usual, dtype=torch.float64)
            (fused[mean], fused[log]), lost = self._multiply(cohort, mean, log, (before[mean].double(), old))
            undecided += lost
        fused |= {name: mean_by_examples(cohort, name) for name in cohort.names if name not in fused}
        after = state.fused({name: fused[name] for name in cohort.names}, None, spec)
        return after.noting(**deviations(cohort, fused), undecided=undecided)

    def _multiply(self, cohort: Cohort, mean: str, log: str, before: Pair) -> tuple[Pair, int]:
        """One tensor's fused mean and log-variance in its own dtype, and how many of its weights stayed."""
        first = (-before[1]).exp()
        precision, shift = first.clone(), first * before[0]
        for mu, rho in zip(cohort.tensors(mean), cohort.tensors(log), strict=True):
            own = (-rho.double()).exp()
            precision += self.damping * (own - first)
            shift += self.damping * (own * mu.double() - first * before[0])
        lost = precision < _LEAST * first
        location = torch.where(lost, before[0], shift / precision)
        width = torch.where(lost, before[1], -precision.log())
        like = next(iter(cohort)).posterior.mean
        return (location.to(like[mean].dtype), width.to(like[log].dtype)), int(lost.sum())


def _fan_in(params: Params, mean: str) -> int:
    """How many inputs the layer of a mean sums: a bias belongs to the weight beside it."""
    parent, dot, _ = mean.rpartition(".")
    return params[f"{parent}{dot}weight"][0].numel()


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
