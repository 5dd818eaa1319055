"""Where a network's training rows lie in its own features, told by moments alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedfuse.core.params import Params
from fedfuse.core.state import entries_of, with_kind
from fedfuse.errors import ConfigError
from fedfuse.linalg.psd import add_diagonal, cholesky, symmetrize
from fedfuse.linalg.ridge import Sums

KIND = "region"
DAMPING = 1e-2
"""The share of the mean variance that is added to every direction: features that never vary would count without end."""


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRegion:
    """The classes' means and the within-class covariance of a network's features φ (Lee et al., NeurIPS 2018).

    d(x) = min_c (φ − μ_c)ᵀ Σ⁻¹ (φ − μ_c) / dim φ, over the classes the network has seen, with
    Σ = Σ_c Σ_{i in c} (φ_i − μ_c)(φ_i − μ_c)ᵀ / n + λ (mean variance) I. Divided by the number of features it is about
    1 for a row like those seen, whatever the width, so that networks can be compared.

    Attributes:
        means: μ, one row per class seen.
        root: the lower triangular L of Σ = L Lᵀ.
    """

    means: Tensor
    root: Tensor

    @classmethod
    def of(cls, sums: Sums, damping: float = DAMPING) -> FeatureRegion:
        """The region of one client's sums (evidence `moments`), whose last feature is the constant 1.

        Example:
            >>> phi = torch.tensor([[0.0, 1.0], [2.0, 1.0], [9.0, 1.0], [11.0, 1.0]])
            >>> sums = Sums.of(phi, torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1]]))
            >>> region = FeatureRegion.of(sums, damping=0.0)
            >>> region.means.flatten().tolist(), region.distance(torch.tensor([[4.0]])).item()
            ([1.0, 10.0], 9.0)
        """
        counts = sums.cross[-1]
        seen = counts > 0
        if not bool(seen.any()):
            raise ConfigError("a client's moments count no row of any class, so its features have no region")
        totals = sums.cross[:-1, seen]
        means = totals / counts[seen]
        within = symmetrize(sums.gram[:-1, :-1] - totals @ means.mT) / float(counts.sum())
        shift = damping * max(float(within.diagonal().mean()), torch.finfo(within.dtype).tiny ** 0.5)
        return cls(means.mT.contiguous(), cholesky(add_diagonal(within, shift), what="the covariance of features"))

    def distance(self, features: Tensor) -> Tensor:
        """D of every row of features (n,)."""
        phi, root = features.double(), self.root.to(features.device)
        white, centres = (
            torch.linalg.solve_triangular(root, rows.mT, upper=False).mT
            for rows in (phi, self.means.to(features.device))
        )
        apart = torch.cdist(white, centres, compute_mode="donot_use_mm_for_euclid_dist")  # which keeps small ones exact
        return apart.square().amin(1) / max(1, len(root))

    def to_notes(self) -> dict[str, Tensor]:
        """As tensors for a file."""
        return with_kind(KIND, {"means": self.means, "root": self.root})

    @classmethod
    def from_notes(cls, notes: Params) -> FeatureRegion | None:
        """What a file holds, if it holds one.

        Raises:
            ConfigError: if it does not fit together.
        """
        found = entries_of(dict(notes), KIND)
        if not found:
            return None
        means, root = found.get("means"), found.get("root")
        if means is None or root is None or means.ndim != 2 or root.shape != (means.shape[1],) * 2:
            raise ConfigError("the file's regions of features do not fit together; fuse it anew")
        return cls(means.double(), root.double())
