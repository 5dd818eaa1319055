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

from typing import TYPE_CHECKING, Any

from fedfuse.core.lazy import lazy_names

if TYPE_CHECKING:
    from fedfuse.api import (
        Fused,
        Update,
        bring_evidence,
        fuse,
        list_methods,
        list_models,
        load,
        local_update,
        recipe,
        run,
    )
    from fedfuse.core.recipe import Recipe
    from fedfuse.core.rows import Rows
    from fedfuse.core.spec import Spec
    from fedfuse.errors import ConfigError, FuseError, NotConverged, QuorumLost, RecipeError, Refused

_HOMES = {
    "fedfuse.api": (
        "Fused",
        "Update",
        "bring_evidence",
        "fuse",
        "list_methods",
        "list_models",
        "load",
        "local_update",
        "recipe",
        "run",
    ),
    "fedfuse.core.recipe": ("Recipe",),
    "fedfuse.core.rows": ("Rows",),
    "fedfuse.core.spec": ("Spec",),
    "fedfuse.errors": ("ConfigError", "FuseError", "NotConverged", "QuorumLost", "RecipeError", "Refused"),
}
_find = lazy_names(globals(), _HOMES)

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
    "bring_evidence",
    "fuse",
    "list_methods",
    "list_models",
    "load",
    "local_update",
    "recipe",
    "run",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("fedfuse")
    return _find(name)


def __dir__() -> list[str]:
    return __all__
