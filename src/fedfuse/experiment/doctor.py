"""What is installed, what is found, how much room there is."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import torch

from fedfuse.data import cache_folder, find, source_names
from fedfuse.errors import FuseError
from fedfuse.experiment.rundir import versions
from fedfuse.kernels import why_not
from fedfuse.kernels.code_cache import is_cold


def examine() -> dict[str, dict[str, str]]:
    """Findings by topic, in words."""
    software = {"python": platform.python_version(), **versions()}
    extras = {"numba": "fast", "flwr": "flower", "POT": "match", "pygmtools": "match"}
    for package, extra in extras.items():
        software.setdefault(package, f"not installed: pip install 'fedfuse[{extra}]'")
    devices = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    here = Path.cwd()
    machine = {
        "cores": str(os.cpu_count()),
        "torch threads": str(torch.get_num_threads()),
        "devices": ", ".join(device for device, available in devices.items() if available),
        "free disk here": f"{shutil.disk_usage(here).free / 2**30:.1f} GiB",
        "this folder": "can be written" if os.access(here, os.W_OK) else "cannot be written: use --out elsewhere",
        "cache": str(cache_folder()),
        "kernels": why_not() or "compiled where they are faster; the first use of each takes some seconds",
    }
    return {"software": software, "machine": machine, "data": {name: _data(name) for name in source_names()}}


def _data(name: str) -> str:
    try:
        found = find(name)
    except FuseError as why:
        return str(why)
    if found is None:
        return "not found: set FEDFUSE_DATA to the folder that has it, or it is downloaded when used"
    if found.missing:
        return f"{found.location}, without {', '.join(found.missing)}: set train_limit to use what is there"
    return found.location


def compile_notice(kernel: str) -> str:
    """What to tell a person before a run whose first clients may wait for a compiler; usually nothing."""
    if kernel == "torch" or not is_cold() or why_not():
        return ""
    return "compiled kernels are made at their first use: some twenty seconds, once on this machine"
