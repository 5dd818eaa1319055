"""Where and when something was measured."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def processor() -> str:
    """The processor's name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def here() -> dict[str, str]:
    """Machine, software and date."""
    try:
        numba = version("numba")
    except PackageNotFoundError:
        numba = "none"
    words = f"{processor()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores"
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return {"machine": words, "software": f"torch {torch.__version__}, numba {numba}", "date": day}
