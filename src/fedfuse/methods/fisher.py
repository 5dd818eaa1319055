"""Matena and Raffel, Merging Models with Fisher-Weighted Averaging, NeurIPS 2022."""

from __future__ import annotations

from pydantic import PositiveFloat

from fedfuse.client.fisher import Fisher
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.methods.laplace import laplace
from fedfuse.server.aggregate.natural import Shares


@method("fisher", paper="arXiv:2111.09832", family="posterior")
def fisher(floor: PositiveFloat = 1e-6, labels: Fisher = "sampled", shares: Shares = "uniform") -> Recipe:
    """Fisher merging: every weight is averaged by the clients' Fisher information about it.

    w = Σ f_k F_k w_k / Σ f_k F_k, weight by weight: `laplace` with what merging takes for granted, labels drawn from
    the networks' own answers and clients that count alike.

    Args:
        floor: what is added to every client's Fisher information, so that weights nobody knows are averaged.
        labels: sampled (drawn from the network, as published) or empirical (the rows' own).
        shares: every client counts alike (as published), or by its examples.
    """
    return laplace(floor, labels, shares)
