"""One pool for all engine tests, and parts that worker processes can import."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
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
    draw = torch.Generator().manual_seed(1)
    sizes = {"site-1": 12, "site-2": 20, "site-3": 24, "site-10": 8, "site-11": 16}
    return Population.of(
        {
            client: Rows(torch.rand(n, 1, 8, 8, generator=draw), torch.randint(0, 3, (n,), generator=draw))
            for client, n in sizes.items()
        }
    )


@pytest.fixture
def brief() -> Brief:
    return make_brief(Spec("lenet", {"size": 8, "classes": 3, "maps": [2, 3], "hidden": [6]}))


def make_brief(spec: Spec) -> Brief:
    torch.manual_seed(3)
    return Brief(0, spec, spec.build().state_dict(), classes=3)


@pytest.fixture
def work() -> Work:
    return Work(LocalSettings(epochs=2, batch_size=5, optimizer=Optimizer(lr=0.1, momentum=0.9)))
