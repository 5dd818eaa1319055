"""Marczak et al., No Task Left Behind: Isotropic Model Merging with Common and Task-Specific Subspaces, ICML 2025."""

from __future__ import annotations

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.isotropic import IsotropicSum


@method("iso", paper="arXiv:2502.04959", family="base")
def iso(scale: float = 1.0) -> Recipe:
    """Add the clients' moves and let every direction of their sum count alike: singular values become their mean.

    Args:
        scale: λ, what the flattened move is multiplied by; best chosen on held-out rows.
    """
    return Recipe(aggregate=IsotropicSum(scale))
