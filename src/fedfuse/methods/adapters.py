"""Low-rank adapters: FLoRA (NeurIPS 2024), FlexLoRA (NeurIPS 2024) and FedIT (ICASSP 2024)."""

from __future__ import annotations

from pydantic import PositiveInt

from fedfuse.client.evidence.inputs import AdapterInputs, InputFactors
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.errors import RecipeError
from fedfuse.models.adapted import MergesRounds
from fedfuse.server.aggregate.lowrank import AdapterMean, SeparateMeans


@method("flora", paper="arXiv:2409.05976", family="adapters")
def flora() -> Recipe:
    """The exact mean of low-rank adapters: their factors stacked, so that the rank is the sum of the clients' ranks.

    In a run what a round has learned is merged beside the resting weights, and clients begin new adapters. What is no
    adapter is averaged, so without adapters this is FedAvg.
    """
    return Recipe(aggregate=AdapterMean(stack=True), prepare_model=MergesRounds())


@method("flexlora", paper="arXiv:2402.11505", family="adapters")
def flexlora(rank: PositiveInt | None = None, moments: bool = False, min_rows: PositiveInt | None = None) -> Recipe:
    """The mean of low-rank adapters as well as one of a given rank can be it: the truncated SVD of the mean product.

    What is no adapter is averaged, so without adapters this is FedAvg.

    Args:
        rank: of the fused adapter; by default the largest of the clients'. The record says how much is lost.
        moments: clients send second moments of what adapted layers read, and what is lost is measured by those.
        min_rows: a client with fewer rows sends how large they are alone; by default twice the batch it trains with.
    """
    if min_rows is not None and not moments:
        raise RecipeError("flexlora: min_rows is about moments of inputs and there are none; set moments too")
    if not moments:
        return Recipe(aggregate=AdapterMean(rank))
    return Recipe(evidence=(AdapterInputs(InputFactors(min_rows=min_rows)),), aggregate=AdapterMean(rank, moments=True))


@method("fedit", paper="arXiv:2305.05644", family="adapters")
def fedit() -> Recipe:
    """Average the two factors of low-rank adapters apart, which is not the mean of the adapters: a baseline.

    The record says how far off it is. What is no adapter is averaged, so without adapters this is FedAvg.
    """
    return Recipe(aggregate=SeparateMeans())
