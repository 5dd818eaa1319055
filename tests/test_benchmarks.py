"""Benchmarks are run by hand and rarely: what they take from the library must still be there."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


def imports_of(file: Path) -> list[tuple[str, str]]:
    """What a file takes from the library, wherever in it: modules and names."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedfuse":
            found += [(str(node.module), alias.name) for alias in node.names]
    return found


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_what_a_benchmark_takes_is_there(file: Path) -> None:
    for module, name in imports_of(file):
        found = importlib.import_module(module)
        if not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")  # else a module of that name


def test_a_name_that_is_gone_would_be_seen() -> None:
    assert ("fedfuse.server.steps.prune", "rank_scores") in imports_of(FOLDER / "prune.py")
