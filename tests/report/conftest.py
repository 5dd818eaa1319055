"""A run directory made up for tests: plausible numbers, no training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HOSTILE = '<img src=x onerror="document.title=1">\u202e</script>'
METHODS = {
    "fedavg": 0.70,
    "fedprox(mu=0.01)": 0.71,
    "scaffold": 0.74,
    "fedlpa(damping=0.001)": 0.80,
    "ensemble": 0.78,
}
CLASSES = ["t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"]


def _reliability(rng: np.random.Generator) -> dict[str, list[float | None]]:
    said = (np.arange(15) + 0.5) / 15
    count = np.round(300 * said**3)
    right = np.clip(said - 0.12 * said + rng.normal(0, 0.02, 15), 0, 1)
    keep = [float(value) if n else None for value, n in zip(right, count, strict=True)]
    return {"confidence": [*said], "accuracy": keep, "count": [*count]}


def _line(label: str, top: float, seed: int, at: int, rounds: int, clients: int) -> dict[str, Any]:
    rng = np.random.default_rng([seed, at, sum(map(ord, label))])
    accuracy = float(np.clip(top - 0.5 * top * np.exp(-6 * at / rounds) * (rounds > 1) + rng.normal(0, 0.012), 0, 1))
    own = np.clip(accuracy + rng.normal(0, 0.08, clients), 0, 1)
    per_class = np.clip(accuracy + rng.normal(0, 0.1, 10), 0.05, 0.99)
    confusion = [
        [int(100 * p) if i == j else int(100 * (1 - p) / 9) for j in range(10)] for i, p in enumerate(per_class)
    ]
    names = [f"client-{k:02d}" for k in range(clients)]
    facts: dict[str, Any] = {}
    if label.startswith("fedlpa"):
        weights = rng.dirichlet(np.ones(clients), size=4)
        layers = ["conv1", "conv2", "fc1", "fc2"]
        table = {
            layer: dict(zip(names, map(float, row), strict=True)) for layer, row in zip(layers, weights, strict=True)
        }
        facts = {
            "solver": "cg",
            "iterations": int(rng.integers(40, 60)),
            "converged": True,
            "layer_weights": table,
        }
        facts["residual"] = {"conv1": 1e-9 * (1 + seed), "fc1": 3e-9}
    trains = label in ("fedavg", "fedprox(mu=0.01)", "scaffold")
    scores = {"nll": 2.2 * (1 - accuracy), "ece": 0.05 + 0.1 * (1 - accuracy), "brier": 1.3 * (1 - accuracy)}
    costs = {
        "bytes_up": 1_777_040 * (3 if facts else 2 if label == "scaffold" else 1),
        "bytes_down": 1_777_040,
        "train_seconds": 11.5 + float(rng.random()) if trains else 0.0,
        "server_seconds": 0.05 + float(rng.random()) / 10,
        "trained": clients if trains else 0,
        "remembered": 0 if trains else clients,
    }
    fair = {
        "own_accuracy_mean": float(own.mean()),
        "own_accuracy_worst10": float(own.min()),
        "client_accuracy_mean": float(own.mean()) / 2,
        "client_accuracy_std": float(own.std()) / 2,
        "client_accuracy_worst10": float(own.min()) / 2,
        "clients": {
            name: {"num_examples": 600.0, "steps": 100, "own_accuracy": float(score), "accuracy": float(score) / 2}
            for name, score in zip(names, own, strict=True)
        },
    }
    rest = {
        "per_class": [*map(float, per_class)],
        "confusion": confusion,
        "reliability": _reliability(rng),
        "refused": [],
        "dropped": [],
        "reveals": ["second moments of activations", "second moments of gradients"] if facts else [],
        "facts": facts,
        "parameters": 44426,
        "selected": False,
    }
    who = {"method": label.split("(")[0], "label": label, "seed": seed, "round": at, "accuracy": accuracy}
    return {**who, **scores, **fair, **costs, **rest}


def _partition(seeds: int, clients: int) -> dict[str, Any]:
    found = {}
    for seed in range(seeds):
        shares = np.random.default_rng(seed).dirichlet(np.full(clients, 0.3), size=10).T
        counts = {f"client-{k:02d}": [*map(int, 600 * shares[k])] for k in range(clients)}
        found[str(seed)] = {"kind": "dirichlet", "alpha": 0.3, "clients": counts, "server": [5] * 10}
    return {"classes": CLASSES, "seeds": found}


def write_run(
    folder: Path,
    rounds: int = 1,
    seeds: int = 3,
    clients: int = 10,
    hostile: bool = True,
    name: str = "one-shot-fashion",
) -> Path:
    """Write a run directory with five methods and return it."""
    folder.mkdir(parents=True)
    lines = [
        _line(label, top, seed, at, rounds, clients)
        for label, top in METHODS.items()
        for seed in range(seeds)
        for at in range(1, rounds + 1)
    ]
    if hostile:
        lines[0]["refused"] = [
            {"client": HOSTILE, "field": "num_examples", "got": "-9", "expected": "a number in (0, 1e6]"}
        ]
        lines[0]["clipped"] = [
            {
                "client": HOSTILE,
                "field": "move of fc",
                "got": "310",
                "expected": "at most 3.1, going by the round's other clients",
            }
        ]
        lines[0]["dropped"] = [{"client": "client-03", "reason": "no answer within 60 s"}]
        lines[0]["clients"][HOSTILE] = {"own_accuracy": 0.4}
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = f'name = "{name}"\nrounds = {rounds}\nseeds = {list(range(seeds))}\n\n'
    config += '[data]\nsource = "fashion-mnist"\n'
    (folder / "config.toml").write_text(config)
    facts = {
        "python": "3.11.2",
        "torch": "2.13.0",
        "threads": 1,
        "git": "0a1b2c3",
        "data": {"train_rows": 6000},
    }
    (folder / "environment.json").write_text(json.dumps(facts))
    (folder / "partition.json").write_text(json.dumps(_partition(seeds, clients)))
    return folder


@pytest.fixture
def make_run() -> Callable[..., Path]:
    return write_run


@pytest.fixture
def hostile() -> str:
    return HOSTILE
