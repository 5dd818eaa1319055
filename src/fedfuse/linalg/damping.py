"""Damping of Kronecker products, and how large their factors are."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

from torch import Tensor

from fedfuse.core.factor import Factor
from fedfuse.errors import ConfigError
from fedfuse.linalg.psd import add_diagonal

Split: TypeAlias = Literal["one", "trace", "frobenius"]


def damp(A: Factor, B: Factor, lam: float, pi: Split = "one") -> tuple[Factor, Factor]:
    """Damp both factors of a Kronecker product: A + π √λ I and B + √λ / π I.

    π balances the two sides (Martens and Grosse 2015, section 6.3): `one` is 1; `trace` is
    √((tr A / dim A) / (tr B / dim B)); `frobenius` is √((‖A‖_F / √dim A) / (‖B‖_F / √dim B)).
    Where a balanced factor vanishes, A ⊗ B informs about nothing and only the damping remains: both sides become
    √λ I, which is the limit of an ever smaller factor.

    Example:
        >>> import torch
        >>> A, B = damp(torch.eye(2), 4 * torch.eye(2), lam=1.0, pi="trace")
        >>> A[0, 0].item(), B[0, 0].item()
        (1.5, 6.0)
    """
    if not (math.isfinite(lam) and lam >= 0):
        raise ConfigError(f"damping: lambda is {lam}, expected a finite number of at least 0")
    root, ratio = math.sqrt(lam), balance(A, B, pi)
    if pi != "one" and not (bool(A.any()) and bool(B.any())):
        A, B = A * 0.0, B * 0.0
    return _add_diagonal(A, ratio * root), _add_diagonal(B, root / ratio)


def mean_eigenvalue(factor: Factor) -> float:
    """The mean eigenvalue of a symmetric matrix: its trace over its size.

    Example:
        >>> import torch
        >>> mean_eigenvalue(torch.diag(torch.tensor([1.0, 3.0])))
        2.0
    """
    return float(factor.trace()) / len(factor)


def _add_diagonal(factor: Factor, shift: float) -> Factor:
    return add_diagonal(factor, shift) if isinstance(factor, Tensor) else factor.plus(shift)


def balance(A: Factor, B: Factor, pi: Split) -> float:
    """π of `damp`: how much larger a share of the damping falls to A than to B; 1 where a factor is zero.

    Example:
        >>> import torch
        >>> balance(4 * torch.eye(2), torch.eye(3), "trace")
        2.0
    """
    if pi == "one":
        return 1.0
    if pi == "trace":
        ratio = mean_eigenvalue(A), mean_eigenvalue(B)
    elif pi == "frobenius":
        ratio = float(A.norm()) / math.sqrt(len(A)), float(B.norm()) / math.sqrt(len(B))
    else:
        raise ConfigError(f"damping: pi is {pi!r}, expected one of {', '.join(get_args(Split))}")
    return math.sqrt(ratio[0] / ratio[1]) if min(ratio) > 0 else 1.0
