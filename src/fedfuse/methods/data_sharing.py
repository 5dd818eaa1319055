"""Zhao et al., Federated Learning with Non-IID Data, 2018."""

from __future__ import annotations

from pydantic import PositiveInt

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.roster import ShareServerRows


@method("data_sharing", paper="arXiv:1806.00582", family="server rows")
def data_sharing(most: PositiveInt | None = None) -> Recipe:
    """FedAvg whose clients all train on the same rows of the server's beside their own.

    The rows are sent once, before the first round, and count in every client's number of examples; local work grows
    by as many rows as each client was given.

    Args:
        most: give at most so many rows, drawn at random once; by default all the server has.
    """
    return Recipe(aggregate=Mean(), roster=ShareServerRows(most))
