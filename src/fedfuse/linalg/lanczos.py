"""The spectrum of a symmetric operator that is known only by its products with vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedfuse.errors import ConfigError, NotConverged
from fedfuse.linalg.cg import Operator

# A residual this small relative to the operator is rounding: the vectors so far span an invariant subspace.
_BREAKDOWN = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Tridiagonal:
    """The symmetric tridiagonal matrix T = Qᵀ A Q that Lanczos builds.

    Attributes:
        diagonal: T's diagonal.
        off_diagonal: the diagonal next to it; zero where the search began again.
    """

    diagonal: Tensor
    off_diagonal: Tensor

    def dense(self) -> Tensor:
        """T as a matrix.

        Example:
            >>> Tridiagonal(torch.tensor([1.0, 2.0]), torch.tensor([3.0])).dense()
            tensor([[1., 3.],
                    [3., 2.]])
        """
        return self.diagonal.diag() + self.off_diagonal.diag(1) + self.off_diagonal.diag(-1)


@dataclass(frozen=True, slots=True, eq=False)
class Spectrum:
    """An operator's eigenvalues as seen by a number of random probes.

    Row i holds probe i's Ritz values and their quadrature weights, which sum to one, so that
    Σ weight·f(value), averaged over probes, estimates tr f(A) / size (Ubaru, Chen and Saad 2017).

    Attributes:
        values: Ritz values, (probes × steps), ascending along each row.
        weights: their weights, in the same shape.
    """

    values: Tensor
    weights: Tensor

    def share_below(self, bound: float) -> float:
        """The estimated share of eigenvalues that are at most `bound`.

        Example:
            >>> Spectrum(torch.tensor([[-1.0, 2.0]]), torch.tensor([[0.25, 0.75]])).share_below(0.0)
            0.25
        """
        return float((self.weights * (self.values <= bound)).sum() / len(self.weights))

    def density(self, points: Tensor, width: float) -> Tensor:
        """The estimated density of eigenvalues at `points`, each Ritz value smeared to a normal of this width.

        Example:
            >>> one = Spectrum(torch.tensor([[0.0]]), torch.tensor([[1.0]]))
            >>> one.density(torch.tensor([0.0, 1.0]), width=1.0)
            tensor([0.3989, 0.2420], dtype=torch.float64)
        """
        values, weights = self.values.double().flatten(), self.weights.double().flatten()
        away = (points.double()[:, None] - values) / width
        bell = torch.exp(-away.square() / 2) / (width * math.sqrt(2 * math.pi))
        return bell @ weights / len(self.weights)


def lanczos(
    apply: Operator,
    size: int,
    steps: int,
    generator: torch.Generator,
    *,
    start: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    what: str = "a spectrum",
) -> Tridiagonal:
    """Symmetric Lanczos with full re-orthogonalisation.

    Each new vector is made orthogonal to all before it, twice, so no eigenvalue appears as a ghost copy;
    where the vectors span an invariant subspace, the search goes on from a random vector orthogonal to it,
    so that with `steps` = `size` every eigenvalue is found, repeated ones included.

    Args:
        apply: v ↦ A v on flat vectors of length `size`, with A symmetric.
        size: the operator's dimension.
        steps: products to spend; more than `size` are not needed and not made.
        generator: draws the first vector and every fresh one.
        start: the first vector, instead of a random one.
        dtype: what the vectors are kept in; `steps` × `size` of these numbers are held.
        what: the caller's name for the operator, for errors.

    Example:
        >>> A = torch.diag(torch.tensor([1.0, 1.0, 5.0], dtype=torch.float64))
        >>> T = lanczos(lambda v: A @ v, 3, 3, torch.Generator().manual_seed(0))
        >>> torch.linalg.eigvalsh(T.dense()).round(decimals=6)
        tensor([1., 1., 5.], dtype=torch.float64)
    """
    if size < 1 or steps < 1:
        raise ConfigError(f"{what}: got size {size} and {steps} steps, expected at least one of each")
    steps = min(steps, size)
    basis = torch.empty(steps, size, dtype=dtype, device=generator.device)
    basis[0] = _fresh(basis[:0], generator) if start is None else start.to(basis) / start.norm()
    diagonal, off_diagonal = [0.0] * steps, [0.0] * (steps - 1)
    scale = 0.0
    for j in range(steps):
        image = apply(basis[j]).to(basis)
        diagonal[j] = float(torch.dot(basis[j], image))
        if not math.isfinite(diagonal[j]):
            raise NotConverged(f"{what}: product {j + 1} with the operator is not finite, expected finite numbers")
        if j + 1 == steps:
            break
        rest = _orthogonal(image, basis[: j + 1])
        length = float(rest.norm())
        scale = max(scale, abs(diagonal[j]), length)
        if length > _BREAKDOWN * scale:
            off_diagonal[j], basis[j + 1] = length, rest / length
        else:
            basis[j + 1] = _fresh(basis[: j + 1], generator)
    return Tridiagonal(torch.tensor(diagonal, dtype=torch.float64), torch.tensor(off_diagonal, dtype=torch.float64))


def ritz(T: Tridiagonal) -> tuple[Tensor, Tensor]:
    """Ritz values, ascending, and their quadrature weights: squared first entries of T's eigenvectors.

    Example:
        >>> values, weights = ritz(Tridiagonal(torch.tensor([0.0, 0.0]), torch.tensor([1.0])))
        >>> values.round(decimals=4), weights.round(decimals=4)
        (tensor([-1.,  1.]), tensor([0.5000, 0.5000]))
    """
    values, vectors = torch.linalg.eigh(T.dense())
    return values, vectors[0].square()


def spectrum(
    apply: Operator,
    size: int,
    *,
    steps: int,
    generator: torch.Generator,
    probes: int = 1,
    dtype: torch.dtype = torch.float64,
    what: str = "a spectrum",
) -> Spectrum:
    """The spectral density of a symmetric operator by stochastic Lanczos quadrature.

    Example:
        >>> A = torch.diag(torch.arange(8.0, dtype=torch.float64))
        >>> seen = spectrum(lambda v: A @ v, 8, steps=8, generator=torch.Generator().manual_seed(0), probes=400)
        >>> round(float((seen.values * seen.weights).sum()) / 400, 1)
        3.5
    """
    if probes < 1:
        raise ConfigError(f"{what}: got {probes} probes, expected at least one")
    found = [ritz(lanczos(apply, size, steps, generator, dtype=dtype, what=what)) for _ in range(probes)]
    return Spectrum(torch.stack([values for values, _ in found]), torch.stack([weights for _, weights in found]))


@dataclass(frozen=True, slots=True, eq=False)
class HessianVectorProduct:
    """The operator v ↦ H v of a loss at fixed parameters, on flat vectors in the parameters' order.

    The gradient's graph is built once and differentiated for every product.

    Attributes:
        leaves: the parameters, detached copies that require gradients.
        gradient: the loss's gradient with its graph.
    """

    leaves: tuple[Tensor, ...]
    gradient: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        """How many parameters there are."""
        return sum(leaf.numel() for leaf in self.leaves)

    def __call__(self, v: Tensor) -> Tensor:
        """H v, flat."""
        parts = v.split([leaf.numel() for leaf in self.leaves])
        pushed = [(g, part.view_as(g).to(g)) for g, part in zip(self.gradient, parts, strict=True) if g.requires_grad]
        if not pushed:  # a loss that is linear in its parameters
            return torch.zeros_like(v)
        outputs, pushes = zip(*pushed, strict=True)
        products = torch.autograd.grad(outputs, self.leaves, pushes, retain_graph=True, materialize_grads=True)
        return torch.cat([product.flatten() for product in products]).detach()


def hessian_vector_product(
    loss: Callable[[Mapping[str, Tensor]], Tensor], params: Mapping[str, Tensor]
) -> HessianVectorProduct:
    """The Hessian of a loss at `params`, as an operator on flat vectors.

    Args:
        loss: named parameters ↦ a scalar; twice differentiable, for instance through
            `torch.func.functional_call` on one batch with the model in eval mode.
        params: floating point tensors; they are copied, not touched.

    Example:
        >>> H = hessian_vector_product(lambda p: (p["w"] ** 3).sum(), {"w": torch.tensor([1.0, 2.0])})
        >>> H(torch.tensor([1.0, 1.0]))
        tensor([ 6., 12.])
    """
    with torch.enable_grad():
        live = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
        value = loss(live)
        if value.ndim:
            raise ConfigError(f"Hessian: the loss has shape {tuple(value.shape)}, expected a scalar")
        leaves = tuple(live.values())
        gradient = torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True)
    return HessianVectorProduct(leaves, tuple(gradient))


def _orthogonal(v: Tensor, basis: Tensor) -> Tensor:
    """What is left of v without the rows of `basis`; twice is enough (Giraud et al. 2005)."""
    for _ in range(2):
        v = v - basis.mT @ (basis @ v)
    return v


def _fresh(basis: Tensor, generator: torch.Generator) -> Tensor:
    """A random unit vector orthogonal to the rows of `basis`."""
    v = torch.randn(basis.shape[1], dtype=basis.dtype, generator=generator, device=generator.device)
    v = _orthogonal(v, basis)
    return v.div_(float(v.norm()))
