"""The Python interface: train at a site, fuse anywhere, run experiments."""

from fedfuse.api.fusion import Fused, fuse
from fedfuse.api.runs import method, methods, run
from fedfuse.api.update import Update, local_update, settings_from

__all__ = ["Fused", "Update", "fuse", "local_update", "method", "methods", "run", "settings_from"]
