"""Fuse models trained apart, on data that may not meet, into one model.

Example:
    >>> import torch, fedfuse
    >>> fedfuse.fuse([{"w": torch.zeros(1)}, {"w": torch.ones(1)}], "fedavg", num_examples=[1, 1]).state_dict()
    {'w': tensor([0.5000])}
"""

import fedfuse.methods  # noqa: F401 - importing it later would put the package in the place of the function `methods`
from fedfuse.api import Fused, Update, fuse, local_update, method, methods, run
from fedfuse.core.recipe import Recipe
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError, FuseError, NotConverged, QuorumLost, RecipeError, Refused

__all__ = [
    "ConfigError",
    "FuseError",
    "Fused",
    "NotConverged",
    "QuorumLost",
    "Recipe",
    "RecipeError",
    "Refused",
    "Rows",
    "Spec",
    "Update",
    "fuse",
    "local_update",
    "method",
    "methods",
    "run",
]
