"""A site's own account of what left it: every release of its rows, added up, and a budget that ends it."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedfuse.core.files import regular, write_atomically
from fedfuse.core.privacy import Release
from fedfuse.errors import ConfigError


def charge(release: Release, path: Path, what: str, budget: float | None = None) -> Release:
    """Write a release into a site's ledger, before it leaves, and give the total so far.

    All entries of one ledger count as told of the same rows. Signals add in squares, exactly.

    Args:
        release: what is about to leave.
        path: the ledger; it is made where there is none.
        what: what the entry says of it: file and method.
        budget: the most ε, at the release's own δ, that all of them may have together.

    Raises:
        ConfigError: if the budget would be exceeded, and then nothing is written; or if the ledger cannot be read.
    """
    entries = _read(path)
    past = [Release.from_json(entry if entry.get("signal") is not None else None) for entry in entries]
    total = release.after(past)
    if budget is not None and total.epsilon > budget:
        spent = total.epsilon if math.isfinite(total.epsilon) else "without bound, since something has no noise"
        words = spent if isinstance(spent, str) else f"{spent:.4g}"
        raise ConfigError(
            f"the budget of {path} is ε = {budget:g} and with {what} it would be {words} (δ = {release.delta:g}, "
            f"{len(entries)} releases before); nothing was written"
        )
    told: dict[str, Any] = {"what": what, "when": datetime.now(UTC).isoformat(timespec="seconds")}
    told |= {"signal": None}
    if math.isfinite(release.signal):
        told |= {"signal": release.signal, "epsilon": release.epsilon, "delta": release.delta}
    with write_atomically(path) as file:
        file.write(json.dumps({"releases": [*entries, told]}, indent=1).encode() + b"\n")
    return total


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        entries = json.loads(regular(path).read_text(encoding="utf-8"))["releases"]
    except (OSError, ValueError, KeyError, TypeError) as why:
        raise ConfigError(f"{path} is no privacy ledger: {why}; name the file that `--privacy-ledger` wrote") from why
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path} is no privacy ledger: it has no list of releases")
    return entries
