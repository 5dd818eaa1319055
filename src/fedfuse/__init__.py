"""Fuse models trained apart, on data that may not meet, into one model.

Everything named here is imported when it is first used, so that asking for help costs no more than help.

Example:
    >>> import torch, fedfuse
    >>> fedfuse.fuse([{"w": torch.zeros(1)}, {"w": torch.ones(1)}], "fedavg", num_examples=[1, 1]).state_dict()
    {'w': tensor([0.5000])}
    >>> fedfuse.recipe("fedprox", mu=0.1).label, "fedlpa" in fedfuse.list_methods()
    ('fedprox(mu=0.1)', True)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedfuse.api import Fused, Update, fuse, list_methods, load, local_update, recipe, run
    from fedfuse.core.recipe import Recipe
    from fedfuse.core.rows import Rows
    from fedfuse.core.spec import Spec
    from fedfuse.errors import ConfigError, FuseError, NotConverged, QuorumLost, RecipeError, Refused

_HOMES = {
    **dict.fromkeys(
        ("Fused", "Update", "fuse", "list_methods", "load", "local_update", "recipe", "run"), "fedfuse.api"
    ),
    **dict.fromkeys(
        ("ConfigError", "FuseError", "NotConverged", "QuorumLost", "RecipeError", "Refused"), "fedfuse.errors"
    ),
    "Recipe": "fedfuse.core.recipe",
    "Rows": "fedfuse.core.rows",
    "Spec": "fedfuse.core.spec",
}

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
    "__version__",
    "fuse",
    "list_methods",
    "load",
    "local_update",
    "recipe",
    "run",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("fedfuse")
    if name not in _HOMES:
        raise AttributeError(f"module 'fedfuse' has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
