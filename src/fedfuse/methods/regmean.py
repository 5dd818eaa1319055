"""Jin et al., Dataless Knowledge Fusion by Merging Weights of Language Models, ICLR 2023 (RegMean).

The fused layer's answers are to be nearest to each client's own on that client's inputs X_k,

    argmin_M Σ_k f_k ‖(M − M_k) X_kᵀ‖² / n_k,      M = [W | b],

which with the input moments A_k = X_kᵀ X_k / n_k has a closed form:

    client   A_k of every layer, one pass forward without labels                                  `InputFactors`
    server   Ã_k = α A_k + (1 − α) diag(A_k)
             M = (Σ f_k M_k Ã_k)(Σ f_k Ã_k)⁻¹                                                     `RegressionMean`

It is FedLPA's equation Σ f_k B_k (M − M_k) A_k = 0 with B_k = I.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from fedfuse.client.layer_inputs import InputFactors
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import RecipeError
from fedfuse.linalg.factor import BlockDiagonal, Factor, as_stack
from fedfuse.linalg.ridge import regression_mean, shrink_moments
from fedfuse.linalg.subspace import blocks_of_all
from fedfuse.nets.kronecker import Block, Which
from fedfuse.server.aggregate.mean import ALL_LAWS
from fedfuse.server.aggregate.natural import (
    Shares,
    factors_of,
    known_blocks,
    shares_of,
    split_solutions,
    with_the_rest_averaged,
)


@dataclass(frozen=True, slots=True)
class RegressionMean(ServerPart):
    """M = (Σ f_k M_k Ã_k)(Σ f_k Ã_k)⁻¹ for every layer M = [W | b], where Ã_k = α A_k + (1 − α) diag(A_k).

    Shrinking the off-diagonals by α keeps every system well conditioned: at 1 − α or more of its diagonal. Tensors
    without an input factor, and layers that no client's factors inform, take the weighted mean and are named in the
    facts. Only input factors are read, so factors sent for FedLPA will do.

    Attributes:
        alpha: what off-diagonals are multiplied by; 1 leaves them, 0 is a mean weighed by the inputs' squares.
        shares: f_k by "examples", or "uniform".
    """

    alpha: float = 0.9
    shares: Shares = "examples"
    needs: ClassVar[frozenset[str]] = frozenset({"kron"})
    layerwise: ClassVar[bool] = True
    laws: ClassVar[frozenset[str]] = ALL_LAWS

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise RecipeError(f"fusing by input moments: alpha is {self.alpha}, expected a number from 0 to 1")

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:  # noqa: ARG002
        """Solve layer by layer; the facts name what was averaged."""
        mean: dict[str, Tensor] = {}
        for block in known_blocks(cohort):
            if block.kind != "norm" and any(bool(factors_of(u, block)[0].any()) for u in cohort):
                mean |= self.fuse_block(cohort, block)
        return with_the_rest_averaged(cohort, state, mean)

    def fuse_block(self, cohort: Cohort, block: Block) -> dict[str, Tensor]:
        """One layer's fused tensors."""
        fused = [self._fuse_group(cohort, block, group) for group in range(block.groups)]
        return split_solutions(cohort, block, fused)

    def _fuse_group(self, cohort: Cohort, block: Block, group: int) -> Tensor:
        """One matrix; where moments are blocks along a diagonal, the columns of each by themselves."""
        shares = shares_of(cohort, self.shares).tolist()
        layers = [block.matrices(u.posterior.mean)[group] for u in cohort]
        dtype = layers[0].dtype
        first = _input_factor(cohort.updates[0], block, group)
        if not isinstance(first, BlockDiagonal):
            # a generator: a client's moments can be as large as its layer, so one client's are in memory at a time
            whole = (shrink_moments(_input_factor(u, block, group), self.alpha) for u in cohort)
            return regression_mean(layers, whole, shares, dtype)
        parts = []
        for columns, moments in blocks_of_all([_input_factor(u, block, group) for u in cohort]):
            own = (shrink_moments(factor, self.alpha) for factor in moments)
            parts.append(regression_mean([M[:, columns] for M in layers], own, shares, dtype))
        return torch.cat(parts, 1)


def _input_factor(update: ClientUpdate, block: Block, group: int) -> Factor:
    return as_stack(factors_of(update, block)[0])[group]


@method("regmean", paper="arXiv:2212.09849", family="posterior")
def regmean(
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.9,
    shares: Shares = "examples",
    layers: Which = "all",
    min_rows: PositiveInt | None = None,
    block_width: PositiveInt | None = None,
) -> Recipe:
    """Fuse layers by regression: the fused layer's answers are nearest to everybody's own on everybody's own inputs.

    Clients send the second moments A_k of every layer's inputs, which takes a pass forward, no labels and no gradients;
    M = (Σ f_k M_k A_k)(Σ f_k A_k)⁻¹, FedLPA's equation with B = I. Layers without input moments are averaged.

    Args:
        alpha: what A_k's off-diagonals are multiplied by before the solve; 1 leaves them as they are.
        shares: a client counts by its examples, or uniform.
        layers: all that read vectors, patches or tokens, or plain: linear layers and convolutions alone.
        min_rows: a client with fewer rows sends no directions, only sizes; by default twice the batch it trains with.
        block_width: of layers that read more numbers, send blocks of at most so many along A_k's diagonal.
    """
    return Recipe(
        evidence=(InputFactors(layers, min_rows, width=block_width),), aggregate=RegressionMean(alpha, shares)
    )
