"""The curvature of a loss around trained weights: its spectrum, how quadratic it is, and squared gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedfuse.core.params import Params
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.core.torch_utils import answer_in_full, as_floats_of, in_full
from fedfuse.linalg.lanczos import Spectrum, hessian_vector_product, spectrum
from fedfuse.tasks import CLASSIFICATION, Task

_WIDE = 2**21  # parameters up to which Lanczos vectors are kept in float64; beyond, they would fill the memory


class Curvature(NamedTuple):
    """What is known of a loss around trained weights.

    Attributes:
        spectrum: the Hessian's eigenvalues, by Lanczos.
        lipschitz: how fast the Hessian's linear picture of the gradient goes wrong on the way to the start.
    """

    spectrum: Spectrum
    lipschitz: float


@dataclass(frozen=True, slots=True)
class CurvatureProbe:
    """How closely a Hessian is looked at.

    Attributes:
        steps: Hessian-vector products per probe; as many as there are parameters find every eigenvalue.
        probes: random vectors to begin with.
        rows: rows of the loss, drawn at random; 30 products of 16 rows cost less than an epoch of 2,000.
    """

    steps: int = 30
    probes: int = 1
    rows: int = 16

    def __call__(
        self, module: nn.Module, start: Params, rows: Rows, generator: torch.Generator, task: Task = CLASSIFICATION
    ) -> Curvature:
        """The curvature of a module's mean loss at its own weights, those the start has, in evaluation mode.

        H is the Hessian at the weights W′, and Δ = W − W′ leads back to the start W. The map
        B(Δ) = H Δ − ∇L(W′ + Δ) measures what a quadratic does not see; its Lipschitz constant is estimated between
        Δ and 0: ‖H Δ − ∇L(W) + ∇L(W′)‖ / ‖Δ‖. The paper's Δ leads back over T rounds of training; a client
        knows the start of its round only, so Δ spans one round here.
        """
        module.eval()
        some = rows.take(torch.randperm(len(rows), generator=generator)[: self.rows].to(rows.y.device))
        params = {n: p.detach() for n, p in module.named_parameters() if n in start}
        loss = _Loss(module, Rows(as_floats_of(params.values(), some.x), some.y), task)
        with sdpa_kernel(SDPBackend.MATH):  # the fast kernels of attention have no second derivative
            hessian = hessian_vector_product(loss, params)
            seen = spectrum(
                hessian,
                hessian.size,
                steps=self.steps,
                generator=generator,
                probes=self.probes,
                dtype=torch.float64 if hessian.size <= _WIDE else torch.float32,
                what="the curvature's spectrum",
            )
            back = {n: start[n].to(p) - p for n, p in params.items()}
            lipschitz = _lipschitz(loss, params, back, hessian(_flat(back)), _flat_slopes(hessian.gradient))
        if seen.values.shape[1] == hessian.size:  # every eigenvalue was found, so each is known to count alike
            seen = Spectrum(seen.values, torch.full_like(seen.weights, 1 / hessian.size))
        return Curvature(seen, lipschitz)

    def num_values(self, size: int) -> int:
        """Ritz values per probe for a network of `size` parameters."""
        return min(self.steps, size)


@dataclass(frozen=True, slots=True)
class _Loss:
    """Mean loss of some rows as a function of a network's parameters."""

    module: nn.Module
    rows: Rows
    task: Task

    def __call__(self, params: Mapping[str, Tensor]) -> Tensor:
        return self.task.loss(in_full(functional_call(self.module, dict(params), (self.rows.x,))), self.rows.y)


def curvature_in(notes: Params) -> Curvature:
    """The curvature a client sent."""
    found = Spectrum(notes["spectrum/values"].clone(), notes["spectrum/weights"].clone())
    return Curvature(found, float(notes["spectrum/lipschitz"]))


def _lipschitz(loss: _Loss, params: Params, back: Params, image: Tensor, slope: Tensor) -> float:
    length = float(_flat(back).double().norm())
    if length == 0:
        return 0.0
    with torch.enable_grad():
        there = {n: (p + back[n]).requires_grad_() for n, p in params.items()}
        slopes = torch.autograd.grad(loss(there), list(there.values()), materialize_grads=True)
    return float((image - _flat_slopes(slopes) + slope).double().norm()) / length


def _flat(params: Params) -> Tensor:
    return torch.cat([t.flatten() for t in params.values()])


def _flat_slopes(slopes: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([g.detach().flatten() for g in slopes])


def maskable(spec: Spec) -> tuple[str, ...]:
    """The weights that masks may hold at zero: those of linear layers and convolutions that train, and under one name.

    Example:
        >>> maskable(Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2}))
        ('fc1.weight', 'classifier.weight')
    """
    own = frozenset(spec.layout.trainable).difference(*spec.layout.tied)
    return tuple(layer.weight for layer in spec.layout.layers if layer.is_plain and layer.weight in own)


def is_every_nth(round_: int, every: int) -> bool:
    """Whether a round, counted from 0, is the every-th, the 2·every-th, …, counted from 1.

    Example:
        >>> [is_every_nth(r, 2) for r in range(4)]
        [False, True, False, True]
    """
    return (round_ + 1) % every == 0


def squared_gradients(
    module: nn.Module,
    names: tuple[str, ...],
    rows: Rows,
    *,
    batch: int,
    batches: int,
    generator: torch.Generator,
    task: Task = CLASSIFICATION,
) -> dict[str, Tensor]:
    """Mean over some batches of (∂L/∂w)², for the named weights, in evaluation mode."""
    module.eval()
    params = dict(module.named_parameters())
    total = {n: torch.zeros_like(in_full(params[n].detach())) for n in names}
    order = torch.randperm(len(rows), generator=generator).to(rows.y.device).split(batch)[:batches]
    with torch.enable_grad():
        for index in order:
            some = rows.take(index)
            loss = task.loss(answer_in_full(module, some.x), some.y)
            slopes = torch.autograd.grad(loss, [params[n] for n in names], materialize_grads=True)
            for name, slope in zip(names, slopes, strict=True):
                total[name] += in_full(slope.detach()).square() / len(order)
    return total
