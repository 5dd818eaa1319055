"""Where things are kept between runs."""

from __future__ import annotations

from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """Where downloads and compiled code go: the user's cache, on Linux `$XDG_CACHE_HOME` or `~/.cache`."""
    return platformdirs.user_cache_path("fedfuse")
