"""Generalized linear models: loss, gradient and Hessian of a linear layer, as sums over rows that sites can add up.

With η = Wφ per row, φ being what the layer reads with a 1 appended where it has a bias, every family has the gradient
Σ (μ(η) − y) φᵀ and the Hessian Σ V(η) ⊗ φφᵀ: V is p(1 − p) for yes or no, diag(p) − ppᵀ for classes, 1 for numbers
and e^η for counts.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedfuse.core.params import Params
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.linalg.psd import pack, unpack
from fedfuse.nets.head import linear_layer
from fedfuse.tasks import Task

Family = Literal["bernoulli", "multinomial", "gaussian", "poisson"]
_FAMILIES: dict[str, Family] = {
    "classification": "multinomial",
    "binary": "bernoulli",
    "multilabel": "bernoulli",
    "regression": "gaussian",
    "text-classification": "multinomial",
}


class NewtonSums(NamedTuple):
    """Sums over rows at some weights.

    Attributes:
        loss: the negative log-likelihood, constants left out.
        gradient: outputs × features.
        hessian: (outputs · features) squared, rows of the weights one after another.
    """

    loss: Tensor
    gradient: Tensor
    hessian: Tensor

    def __add__(self, other: object) -> NewtonSums:
        assert isinstance(other, NewtonSums)
        return NewtonSums(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def family_of(task: Task, asked: str) -> Family:
    """The family of a task, or the one asked for where it fits.

    Raises:
        ConfigError: for counts where the task has none.
    """
    if (own := _FAMILIES.get(task.name)) is None:
        raise ConfigError(f"a generalized linear model has one target per row and the task is {task.name}")
    if asked == "auto":
        return own
    if asked != "poisson" or own != "gaussian":
        raise ConfigError(f"family {asked!r} is for counts and the task is {task.name}; use task = 'regression'")
    return "poisson"


def newton_sums(features: Tensor, y: Tensor, weights: Tensor, family: Family, batch: int = 512) -> NewtonSums:
    """Loss, gradient and Hessian of a linear layer over some rows, in the weights' precision.

    Args:
        features: rows × features.
        y: labels, or numbers.
        weights: outputs × features.
        family: of the likelihood.
        batch: rows at a time.

    Example:
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1])
        >>> sums = newton_sums(x, y, torch.zeros(1, 1), "bernoulli")
        >>> float(sums.gradient), float(sums.hessian)
        (-0.5, 1.25)
    """
    parts = zip(features.split(batch), y.split(batch), strict=True)
    first, *rest = (_sums(phi.to(weights), t, weights, family) for phi, t in parts)
    return sum(rest, first)


def _sums(phi: Tensor, y: Tensor, weights: Tensor, family: Family) -> NewtonSums:
    eta = phi @ weights.T
    loss, mean, variance = _moments(eta, y, family)
    target = torch.nn.functional.one_hot(y, eta.shape[1]).to(eta) if family == "multinomial" else _columns(y, eta)
    hessian = torch.einsum("nab,ni,nj->aibj", variance, phi, phi).reshape(weights.numel(), weights.numel())
    return NewtonSums(loss, (mean - target).T @ phi, hessian)


def _moments(eta: Tensor, y: Tensor, family: Family) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss, and each row's mean and variance as functions of η."""
    if family == "multinomial":
        log_p = eta.log_softmax(-1)
        p = log_p.exp()
        return -log_p.gather(1, y[:, None]).sum(), p, torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    t = _columns(y, eta)
    if family == "bernoulli":
        p = eta.sigmoid()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(eta, t, reduction="sum")
        return loss, p, torch.diag_embed(p * (1 - p))
    if family == "poisson":
        rate = eta.exp()
        return (rate - t * eta).sum(), rate, torch.diag_embed(rate)
    return (eta - t).square().sum() / 2, eta, torch.diag_embed(torch.ones_like(eta))


def _columns(y: Tensor, eta: Tensor) -> Tensor:
    return y.reshape(len(eta), -1).to(eta)


def solve_symmetric(matrix: Tensor, right: Tensor) -> Tensor:
    """The shortest solution of a positive semi-definite system: directions without information stay where they are."""
    values, vectors = torch.linalg.eigh(matrix)
    # below that an eigenvalue is rounding, and a step divided by it would go anywhere
    kept = values > 1e-12 * values[-1].clamp(min=1e-300)
    inverse = torch.where(kept, 1 / torch.where(kept, values, 1.0), 0.0)
    solved: Tensor = vectors @ (inverse * (vectors.T @ right))
    return solved


def fit_glm(
    features: Tensor, y: Tensor, family: Family, ridge: Tensor, free: Tensor, steps: int = 25
) -> tuple[Tensor, NewtonSums]:
    """A model fitted to some rows by Newton's method with step halving, and the sums at the fit.

    Args:
        features: rows × features, float64.
        y: labels, or numbers.
        family: of the likelihood.
        ridge: the penalty of each weight, outputs × features.
        free: which weights move; the others stay zero.
        steps: the most Newton steps.
    """
    weights = torch.zeros_like(ridge)
    sums = newton_sums(features, y, weights, family)
    value = penalized_loss(sums.loss, weights, ridge)
    for _ in range(steps):
        step = newton_direction(sums, weights, ridge, free)
        for _ in range(30):
            tried = newton_sums(features, y, weights + step, family)
            if penalized_loss(tried.loss, weights + step, ridge) <= value:
                break
            step = step / 2
        weights, sums = weights + step, tried
        value = penalized_loss(sums.loss, weights, ridge)
        if float(step.abs().max()) < 1e-10:
            break
    return weights, sums


def penalized_loss(loss: Tensor, weights: Tensor, ridge: Tensor) -> float:
    """The loss with the penalty ½ Σ ρ w²."""
    return float(loss + (ridge * weights.square()).sum() / 2)


def newton_direction(sums: NewtonSums, weights: Tensor, ridge: Tensor, free: Tensor) -> Tensor:
    """−(H + ρ)⁻¹ (g + ρw), for the weights that are free."""
    chosen = free.flatten()
    hessian = (sums.hessian + torch.diag(ridge.flatten()))[chosen][:, chosen]
    gradient = (sums.gradient + ridge * weights).flatten()[chosen]
    step = torch.zeros_like(weights).flatten()
    step[chosen] = -solve_symmetric(hessian, gradient)
    return step.view_as(weights)


def penalties(weights: Tensor, ridge: float, family: Family, bias: bool = True) -> tuple[Tensor, Tensor]:
    """The penalty of each weight, the constant's being none, and which weights are free.

    Without a penalty the first class is the reference, whose weights stay where they are: only differences count.
    """
    penalty, free = torch.full_like(weights, ridge), torch.ones_like(weights, dtype=torch.bool)
    if bias:
        penalty[:, -1] = 0.0
    if family == "multinomial" and ridge == 0:
        free[0] = False
    return penalty, free


WEIGHTS = "newton/weights"
"""Under which name a server keeps and publishes the layer in float64, whatever the network's own precision."""


def layer_matrix(spec: Spec, params: Params, memory: Params) -> Tensor:
    """[W | b] in float64: what the server published, or else the network's own.

    Example:
        >>> spec = Spec("mlp", {"inputs": 2, "hidden": [], "classes": 3})
        >>> layer_matrix(spec, spec.build().state_dict(), {}).shape
        torch.Size([3, 3])
    """
    if WEIGHTS in memory:
        return memory[WEIGHTS].clone()
    layer = linear_layer(spec.layout)
    weight = params[layer.weight].double()
    return weight if layer.bias is None else torch.cat([weight, params[layer.bias].double()[:, None]], 1)


def with_layer(spec: Spec, params: Params, matrix: Tensor) -> dict[str, Tensor]:
    """The parameters with another last layer, in their own precision."""
    layer = linear_layer(spec.layout)
    kept = {name: tensor.clone() for name, tensor in params.items()}
    weight = matrix if layer.bias is None else matrix[:, :-1]
    kept[layer.weight] = weight.to(kept[layer.weight]).clone(memory_format=torch.contiguous_format)
    if layer.bias is not None:
        kept[layer.bias] = matrix[:, -1].to(kept[layer.bias]).clone(memory_format=torch.contiguous_format)
    return kept


def sum_notes(sums: NewtonSums, count: int) -> dict[str, Tensor]:
    """Sums as notes, and over how many rows they were taken."""
    return {
        "newton/count": torch.tensor(count, dtype=torch.float64),
        "newton/loss": sums.loss.double(),
        "newton/gradient": sums.gradient,
        "newton/hessian": pack(sums.hessian),
    }


def hessian_in(notes: Params) -> Tensor:
    """The Hessian that notes hold."""
    return unpack(notes["newton/hessian"], notes["newton/gradient"].numel())


def sums_in(notes: Params) -> NewtonSums:
    """The sums that notes hold."""
    return NewtonSums(notes["newton/loss"], notes["newton/gradient"], hessian_in(notes))
