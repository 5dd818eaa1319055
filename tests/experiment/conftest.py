"""Experiments small enough to run whole in a fraction of a second."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedfuse.data import Dataset, load
from fedfuse.experiment.config import Experiment

TINY: dict[str, Any] = {
    "name": "tiny",
    "rounds": 2,
    "seeds": [0],
    "data": {"clients": 3, "train_limit": 90, "test_limit": 60, "validation_fraction": 0.1},
    "model": {"name": "mlp", "hidden": [4]},
    "local": {"batch_size": 16, "optimizer": {"lr": 0.1}},
    "methods": [{"name": "fedavg"}],
}


@cache
def _digits(**limits: Any) -> Dataset:
    return load("digits", **limits)


def _load(source: str, *, options: Any = None, **limits: Any) -> Dataset:
    return _digits(**limits) if source == "digits" else load(source, options=options, **limits)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test waits for the disk, parses the digits again, or finds what another run remembers."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr("fedfuse.experiment.prepare.load", _load)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tiny() -> Callable[..., Experiment]:
    """Makes a small experiment: `tiny("fedavg", "local", rounds=3)`."""

    def make(*methods: str, **changes: Any) -> Experiment:
        chosen = {"methods": [{"name": name} for name in methods]} if methods else {}
        return Experiment(**(TINY | chosen | changes))

    return make


@pytest.fixture
def tiny_file(tmp_path: Path, tiny: Callable[..., Experiment]) -> Callable[..., Path]:
    """Writes a small experiment to a file."""

    def make(*methods: str, more: str = "", **changes: Any) -> Path:
        path = tmp_path / "tiny.toml"
        path.write_text(tiny(*methods, **changes).to_toml() + more)
        return path

    return make
