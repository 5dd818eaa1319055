"""The Python interface: train at a site, fuse anywhere, run experiments."""

from fedfuse.api.fusion import Fused, fuse
from fedfuse.api.runs import list_methods, list_models, load, recipe, run
from fedfuse.api.update import Update, local_update, settings_from

__all__ = [
    "Fused",
    "Update",
    "fuse",
    "list_methods",
    "list_models",
    "load",
    "local_update",
    "recipe",
    "run",
    "settings_from",
]
