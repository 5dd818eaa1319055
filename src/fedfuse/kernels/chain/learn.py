"""The loss at the network's end, and what becomes of the gradients at the batch's: pulls, signs, norms and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedfuse.core.settings import Optimizer
from fedfuse.kernels.chain.tiles import Two
from fedfuse.kernels.target import Floats, Ints, compile_kernel

_NOTHING = np.zeros(0, np.float32)


@compile_kernel
def cross_entropy(count: int, z: Floats, form: Two, y: Ints, order: Ints, begin: int, dz: Floats) -> float:
    """The mean of −log softmax(z)_y over the rows, and its gradient (softmax(z) − onehot(y)) / n in dz."""
    classes, row = form
    total, part = 0.0, np.float32(1 / count)
    for i in range(count):
        scores, out = z[i * row : i * row + classes], dz[i * row : i * row + classes]
        # NaN wins the maximum as in torch: fast arithmetic here leaves `nnan` off (see `target`), so that a network
        # which diverged is seen to have diverged
        top = scores[0]
        for c in range(1, classes):
            top = scores[c] if scores[c] > top or scores[c] != scores[c] else top
        mass = np.float32(0)
        for c in range(classes):
            out[c] = np.exp(scores[c] - top)
            mass += out[c]
        label = y[order[begin + i]]
        total += np.float64(np.log(mass) + top - scores[label])
        for c in range(classes):
            out[c] *= part / mass
        out[label] -= part
    return total / count


@compile_kernel
def pull(w: Floats, g: Floats, anchor: Floats, linear: Floats, mu: float) -> float:
    """Add g += μ (w − anchor) + linear, the gradient of μ/2 ‖w − anchor‖² + ⟨linear, w⟩, whose value comes back.

    Either array may be empty for a term that is not there.
    """
    # partial sums in float32: the value is only reported, and no gradient depends on it
    strength, value = np.float32(mu), 0.0
    if anchor.size:
        squares = np.float32(0)
        for i in range(w.size):
            away = w[i] - anchor[i]
            squares += away * away
            g[i] += strength * away
        value += 0.5 * mu * np.float64(squares)
    if linear.size:
        inner = np.float32(0)
        for i in range(w.size):
            inner += linear[i] * w[i]
            g[i] += linear[i]
        value += np.float64(inner)
    return value


@compile_kernel
def add_signs(w: Floats, g: Floats, l1: float) -> None:
    """Add g += λ sign(w), the subgradient of λ ‖w‖₁."""
    strength = np.float32(l1)
    for i in range(w.size):
        g[i] += strength * (np.float32(w[i] > 0) - np.float32(w[i] < 0))


@compile_kernel
def norm_of(g: Floats) -> float:
    """‖g‖."""
    total = np.float32(0)
    for i in range(g.size):
        total += g[i] * g[i]
    return float(np.sqrt(total))


@compile_kernel
def pulled_step(
    w: Floats,
    g: Floats,
    anchor: Floats,
    linear: Floats,
    mu: float,
    velocity: Floats,
    rate: float,
    momentum: float,
    decay: float,
) -> float:
    """Take `pull` and `sgd_step` in one pass, where nothing is clipped between them.

    Every combination has a loop of its own: an array that stood in for a missing one would overlap with what is
    written, and the loop would go number by number.
    """
    lr, rho, weight, strength = np.float32(rate), np.float32(momentum), np.float32(decay), np.float32(mu)
    squares, inner = np.float32(0), np.float32(0)
    if anchor.size and linear.size:
        for i in range(w.size):
            away = w[i] - anchor[i]
            squares += away * away
            inner += linear[i] * w[i]
            v = rho * velocity[i] + (g[i] + strength * away + linear[i] + weight * w[i])
            velocity[i] = v
            w[i] -= lr * v
    elif anchor.size:
        for i in range(w.size):
            away = w[i] - anchor[i]
            squares += away * away
            v = rho * velocity[i] + (g[i] + strength * away + weight * w[i])
            velocity[i] = v
            w[i] -= lr * v
    else:
        for i in range(w.size):
            inner += linear[i] * w[i]
            v = rho * velocity[i] + (g[i] + linear[i] + weight * w[i])
            velocity[i] = v
            w[i] -= lr * v
    return 0.5 * mu * np.float64(squares) + np.float64(inner)


def rows_needed(optimizer: Optimizer) -> int:
    """How many numbers an optimizer remembers of each weight.

    Example:
        >>> [rows_needed(Optimizer(name=name)) for name in ("sgd", "adam", "amsgrad")]
        [0, 2, 3]
    """
    if optimizer.name == "sgd":
        return 1 if optimizer.momentum else 0
    return 3 if optimizer.name == "amsgrad" else 2


def make_descent(optimizer: Optimizer, rows: Sequence[Floats]) -> CompiledSgd | CompiledAdam:
    """A fresh optimizer.

    Args:
        optimizer: its name and settings.
        rows: of zeros, as many as it needs.
    """
    if optimizer.name == "sgd":
        return CompiledSgd(optimizer.momentum, optimizer.weight_decay, rows[0] if rows else _NOTHING)
    largest = rows[2] if optimizer.name == "amsgrad" else _NOTHING
    return CompiledAdam(optimizer.betas, optimizer.weight_decay, rows[0], rows[1], largest, optimizer.eps)


@dataclass(slots=True)
class CompiledSgd:
    """v ← ρ v + g + λ w;  w ← w − η v."""

    momentum: float
    weight_decay: float
    velocity: Floats

    def step(self, w: Floats, g: Floats, scale: float, rate: float) -> None:
        """One step along the gradients times a scale."""
        sgd_step(w, g, self.velocity, scale, rate, self.momentum, self.weight_decay)


@compile_kernel
def sgd_step(w: Floats, g: Floats, velocity: Floats, scale: float, rate: float, momentum: float, decay: float) -> None:
    """Move: v ← ρ v + scale · g + λ w;  w ← w − η v; without momentum the velocity is empty."""
    s, lr, rho, weight = np.float32(scale), np.float32(rate), np.float32(momentum), np.float32(decay)
    if velocity.size:
        for i in range(w.size):
            v = rho * velocity[i] + (s * g[i] + weight * w[i])
            velocity[i] = v
            w[i] -= lr * v
    else:
        for i in range(w.size):
            w[i] -= lr * (s * g[i] + weight * w[i])


@dataclass(slots=True)
class CompiledAdam:
    """Adam with L2 weight decay; with room for the largest second moments, AMSGrad."""

    betas: tuple[float, float]
    weight_decay: float
    first: Floats
    second: Floats
    largest: Floats
    eps: float
    steps: int = 0

    def step(self, w: Floats, g: Floats, scale: float, rate: float) -> None:
        """One step along the gradients times a scale."""
        self.steps += 1
        b1, b2 = self.betas
        corrections = 1 / (1 - b1**self.steps), (1 - b2**self.steps) ** -0.5
        moments = self.first, self.second, self.largest
        adam_step(w, g, *moments, self.betas, corrections, scale, rate, self.weight_decay, self.eps)


@compile_kernel
def adam_step(
    w: Floats,
    g: Floats,
    first: Floats,
    second: Floats,
    largest: Floats,
    betas: tuple[float, float],
    corrections: tuple[float, float],
    scale: float,
    rate: float,
    decay: float,
    eps: float,
) -> None:
    """Adam: h = scale · g + λ w;  m ← β₁ m + (1 − β₁) h;  v ← β₂ v + (1 − β₂) h²;  w ← w − η c₁ m / (√v c₂ + ε).

    With room for the largest v seen so far (AMSGrad) that stands in the place of v, in a loop of its own. The
    corrections c₁ = 1/(1 − β₁ᵗ) and c₂ = 1/√(1 − β₂ᵗ) are the caller's, who counts steps.
    """
    s, lr, weight, small = np.float32(scale), np.float32(rate * corrections[0]), np.float32(decay), np.float32(eps)
    new, old2, new2 = np.float32(1 - betas[0]), np.float32(betas[1]), np.float32(1 - betas[1])
    root = np.float32(corrections[1])
    if largest.size:
        for i in range(w.size):
            h = s * g[i] + weight * w[i]
            m = first[i] + new * (h - first[i])
            v = old2 * second[i] + new2 * h * h
            first[i], second[i] = m, v
            v = largest[i] if largest[i] > v else v
            largest[i] = v
            w[i] -= lr * m / (np.sqrt(v) * root + small)
    else:
        for i in range(w.size):
            h = s * g[i] + weight * w[i]
            m = first[i] + new * (h - first[i])
            v = old2 * second[i] + new2 * h * h
            first[i], second[i] = m, v
            w[i] -= lr * m / (np.sqrt(v) * root + small)
