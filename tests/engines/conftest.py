"""One pool for all engine tests, and parts that worker processes can import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from builders import initial, rows
from fedfuse.core.messages import Brief
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings, Optimizer
from fedfuse.core.spec import Spec
from fedfuse.engines.local import Population
from fedfuse.engines.pool import Pool

sys.path.insert(0, str(Path(__file__).parent))  # workers inherit it and find `odd_parts`


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool(workers=2) as pool:
        yield pool


@pytest.fixture
def population() -> Population:
    """Five clients with 8 to 24 images each; the one with most rows stands in the middle."""
    sizes = {"site-1": 12, "site-2": 20, "site-3": 24, "site-10": 8, "site-11": 16}
    return Population.of({client: rows(n, 1, 8, 8, seed=k) for k, (client, n) in enumerate(sizes.items())})


@pytest.fixture
def brief() -> Brief:
    spec = Spec("lenet", {"size": 8, "classes": 3, "maps": [2, 3], "hidden": [6]})
    return Brief(0, spec, initial(spec, 3), classes=3)


@pytest.fixture
def work() -> Work:
    return Work(LocalSettings(epochs=2, batch_size=5, optimizer=Optimizer(lr=0.1, momentum=0.9)))
