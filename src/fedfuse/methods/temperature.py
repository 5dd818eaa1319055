"""Guo et al., On Calibration of Modern Neural Networks, ICML 2017, for a fused network."""

from __future__ import annotations

from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.steps.temperature import Temperature


@method("temperature", paper="arXiv:1706.04599", family="server rows")
def temperature() -> Recipe:
    """FedAvg whose logits are divided by one number, under which the server's labelled rows are likeliest.

    Every answer stays the same; how sure it is changes. Clients train on from the undivided network.
    """
    return Recipe(aggregate=Mean(), steps=(Temperature(),))
