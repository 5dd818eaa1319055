"""The Python interface: train at a site, fuse anywhere, run experiments."""

from fedfuse.api.fusion import Fused, fuse
from fedfuse.api.runs import list_methods, list_models, load, recipe, run
from fedfuse.api.update import Update, bring_evidence, local_update, settings_from

__all__ = [
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
    "settings_from",
]
