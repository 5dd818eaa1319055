"""Ashman et al., Partitioned Variational Inference: A Framework for Probabilistic Federated Learning, 2022.

The common posterior is q = p Π_k t_k: the prior p and a factor t_k for what client k's rows say. A round of
Algorithm 1 with synchronous, damped updates (ρ is the damping) is

    client   q_k = argmin E_{q_k}[loss] + KL(q_k ‖ q / t_k) / n_k            `Elbo` around the cavity q / t_k, `Cavity`
             t_k ← t_k (q_k / q)^ρ                                           `KeepFactor`
    server   q ← q Π_k (q_k / q)^ρ                                           `Product`

All of these are Gaussians with diagonal covariance, so products and quotients are sums and differences of natural
parameters: the precision 1/v and the shift μ/v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor

from fedfuse.client.elbo import Elbo, posterior_before
from fedfuse.core.messages import Cohort
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, Local, ServerState
from fedfuse.core.torch_utils import in_full
from fedfuse.errors import ConfigError
from fedfuse.models.bayes import BayesianLayers, factors, prior_log_variance
from fedfuse.server.aggregate.charts import Pair, deviations
from fedfuse.server.aggregate.mean import ALL_LAWS, mean_by_examples

# A quotient of Gaussians need not be one: its precision can be zero or negative. Both sides hold it to this share of
# the precision it is taken from.
_LEAST = 1e-2
_PRECISION, _SHIFT = "factor_precision", "factor_shift"  # kinds of client memory


class Natural(NamedTuple):
    """A Gaussian's natural parameters, in float64: precision 1/v and shift μ/v."""

    precision: Tensor
    shift: Tensor

    @classmethod
    def of(cls, mean: Tensor, log_variance: Tensor) -> Natural:
        """Of a mean and log v."""
        precision = (-log_variance.detach().double()).exp()
        return cls(precision, precision * mean.detach().double())


def common_posterior(local: Local, scale: float) -> dict[str, Natural]:
    """Q at a client, by tensor: in the first round the prior N(start, scale²/fan-in), then the fused posterior."""
    found = {}
    for name, factor in posterior_before(local).items():
        usual = torch.full_like(factor.log_variance, prior_log_variance(factor.fan_in, scale))
        found[name] = Natural.of(factor.mean, factor.log_variance if local.brief.round else usual)
    return found


@dataclass(frozen=True, slots=True)
class Cavity:
    """The client's prior q / t_k, so that its own rows, which q knows already, are not counted again.

    Where its factor holds nearly all of the precision, the cavity keeps a hundredth of it around the same mean.
    """

    scale: float = 1.0

    def __call__(self, local: Local) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean and log-variance of every Gaussian tensor, in the tensor's own dtype."""
        precisions, shifts = local.recall(_PRECISION), local.recall(_SHIFT)
        dtypes = {factor.name: in_full(factor.mean).dtype for factor in factors(local.module)}
        found = {}
        for name, (precision, shift) in common_posterior(local, self.scale).items():
            left = precision - precisions[name] if name in precisions else precision
            rest = shift - shifts[name] if name in shifts else shift
            narrow = left < _LEAST * precision
            left = torch.where(narrow, _LEAST * precision, left)
            mean = torch.where(narrow, shift / precision, rest / left)
            found[name] = mean.to(dtypes[name]), -left.log().to(dtypes[name])
        return found


@dataclass(frozen=True, slots=True)
class KeepFactor:
    """t_k ← t_k (q_k / q)^damping, in natural parameters: what the client remembers for its next round."""

    scale: float
    damping: float

    def __call__(self, local: Local, notes: Params) -> Params:  # noqa: ARG002 - the seam's signature
        """The factor's precision and shift, for every Gaussian tensor."""
        before, precisions, shifts = common_posterior(local, self.scale), local.recall(_PRECISION), local.recall(_SHIFT)
        flat = torch.zeros((), dtype=torch.float64)  # t_k = 1, until the client is asked for the first time
        kept: dict[str, Tensor] = {}
        for factor in factors(local.module):
            name, own = factor.name, Natural.of(factor.mean, factor.log_variance)
            step = own.precision - before[name].precision, own.shift - before[name].shift
            kept[f"{_PRECISION}/{name}"] = precisions.get(name, flat) + self.damping * step[0]
            kept[f"{_SHIFT}/{name}"] = shifts.get(name, flat) + self.damping * step[1]
        return kept


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
        if not spec.layout.log_variances:
            raise ConfigError("the product of posteriors needs Bayesian layers and the network has none; use last ≥ 1")
        fused, undecided = dict[str, Tensor](), 0
        for mean, log in spec.layout.log_variances.items():
            usual = prior_log_variance(_fan_in(before, mean), self.scale)
            old = before[log].double() if state.round else torch.full_like(before[log], usual, dtype=torch.float64)
            (fused[mean], fused[log]), lost = self._multiply(cohort, mean, log, (before[mean].double(), old))
            undecided += lost
        fused |= {name: mean_by_examples(cohort, name) for name in cohort.names if name not in fused}
        after = state.fused({name: fused[name] for name in cohort.names}, None, spec)
        return after.noting(**deviations(cohort, fused), undecided=undecided)

    def _multiply(self, cohort: Cohort, mean: str, log: str, before: Pair) -> tuple[Pair, int]:
        """One tensor's fused mean and log-variance in its own dtype, and how many of its weights stayed."""
        old = Natural.of(*before)
        precision, shift = old.precision.clone(), old.shift.clone()
        for mu, rho in zip(cohort.tensors(mean), cohort.tensors(log), strict=True):
            own = Natural.of(mu, rho)
            precision += self.damping * (own.precision - old.precision)
            shift += self.damping * (own.shift - old.shift)
        lost = precision < _LEAST * old.precision
        location = torch.where(lost, before[0], shift / precision)
        width = torch.where(lost, before[1], -precision.log())
        like = cohort.updates[0].posterior.mean
        return (location.to(like[mean].dtype), width.to(like[log].dtype)), int(lost.sum())


def _fan_in(params: Params, mean: str) -> int:
    """How many inputs the layer of a mean sums: a bias counts as its layer's weight does."""
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
        objective=Elbo(1.0, Cavity(scale)),
        memory=(KeepFactor(scale, damping),),
        aggregate=Product(scale, damping),
        prepare_model=BayesianLayers(last, layers, log_variance, bias, draws=predict_draws),
    )
