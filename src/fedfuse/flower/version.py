"""Flower is optional: whether it is here, whether we know this version, and what it must not do unasked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from fedfuse.errors import ConfigError

TESTED = "1.41"
INSTALL = "pip install 'fedfuse[flower]'"
# While a federation runs, Flower sends no telemetry, looks for no updates and installs nothing.
QUIET: Mapping[str, str] = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def need_flower() -> None:
    """Go on only with a Flower we have tested; it is set to be quiet before it is first imported.

    Raises:
        ConfigError: one sentence with the command that installs the right one.

    Example:
        >>> need_flower()
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise ConfigError(f"Flower is not installed here; install it with {INSTALL}") from None
    if found.split(".")[:2] != TESTED.split("."):
        raise ConfigError(
            f"Flower {found} is installed and fedfuse was tested with {TESTED}; install that one with {INSTALL}"
        )
