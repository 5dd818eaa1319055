"""Lin et al., HRank: Filter Pruning using High-Rank Feature Map, CVPR 2020, once, in a federation."""

from __future__ import annotations

from pydantic import PositiveInt

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.methods._pruning import RANKING, FilterRanking
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.steps.prune import FixedRate, Share


@method("hrank", paper="arXiv:2002.10179", family="pruned")
def hrank(rate: Share = 0.6, at: PositiveInt = 30, ranking: FilterRanking = RANKING) -> Recipe:
    """FedAvg that removes the same share of every convolution's channels once: those with the lowest-rank feature maps.

    Ranks are means over the server's rows, of maps after the ReLU. Nothing beside the weights leaves a client.

    Args:
        rate: the share of each convolution's channels that goes; at least one channel stays.
        at: they are removed at the end of this round, counted from 1.
        ranking: which filters stay.
    """
    step = ranking.step(at - 1, FixedRate(rate), "uniform")
    return Recipe(aggregate=Mean(), steps=(step,))
