"""Where a run happened: versions, machine, data; what a reader needs to believe or repeat it."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fedfuse.data import Dataset

PACKAGES = (
    *("fedfuse", "torch", "numpy", "scipy", "scikit-learn", "safetensors", "pydantic"),
    *("numba", "flwr", "POT", "pygmtools"),
)


def environment(dataset: Dataset, workers: int) -> dict[str, Any]:
    """Facts about the software, the machine and the data."""
    return {
        "versions": versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "workers": workers,
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "data": {"name": dataset.name, "classes": len(dataset.classes), **_facts(dataset.facts)},
    }


@cache
def versions() -> Mapping[str, str]:
    """The installed version of every package that matters; it cannot change while we run."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of the source tree fedfuse runs from, if it is one."""
    here = Path(__file__).resolve().parents[3]
    if not (here / ".git").exists():  # an installed copy may lie in a tree of somebody else's
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _facts(facts: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in facts.items() if value is not None}
