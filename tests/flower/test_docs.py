"""The code in docs/flower.md runs as it stands, and its table says what the strategy does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("flwr")

import task
from client_app import app as plain_client
from fake_grid import Gathering
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp

from fedfuse.core.registry import all_methods
from fedfuse.errors import RecipeError
from fedfuse.flower import FuseStrategy

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "flower_quickstart"
PAGE = (ROOT / "docs" / "flower.md").read_text()


def blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def small_part(part: int | str) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = task.load_part(int(part))
    return x[:24], y[:24]


def run(server: Any, client: ClientApp) -> None:
    grid = Gathering()
    for place in range(2):
        grid.add(client, f"client-{place}", **{"partition-id": place})
    server(grid, Context(1, 1, {}, RecordDict(), {}))


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("client_app.load_part", small_part)
    plain, client, ours = blocks(PAGE)
    names: dict[str, Any] = {"Net": task.Net, "load_part": small_part}
    seen: list[FuseStrategy] = []
    begin = FuseStrategy.start
    monkeypatch.setattr(FuseStrategy, "start", lambda self, *a, **k: (seen.append(self), begin(self, *a, **k))[1])
    exec(plain, names)
    run(names["app"], plain_client)
    exec(client + ours, names)
    run(names["app"], names["client"])
    assert [(s.recipe.name, s.rounds_fused, s.rounds_lost) for s in seen] == [("fedavgm", 2, 0), ("fedprox", 2, 0)]


def works(name: str, clients: Any) -> bool:
    try:
        FuseStrategy(name, nn.Linear(2, 2), clients=clients, local={"lr": 0.1})
    except RecipeError:
        return False
    return True


def test_the_table_names_every_method_where_it_belongs() -> None:
    plain, ours, app = (
        set(re.findall(r"`(\w+)`", row.rpartition("|")[0].rpartition("|")[2]))
        for row in re.findall(r"^\| (?:`\"|neither).*$", PAGE, re.MULTILINE)
    )
    assert plain == {name for name in all_methods() if works(name, "plain")}
    assert ours == {name for name in all_methods() if works(name, "fedfuse")} - plain
    assert app == set(all_methods()) - plain - ours


def test_the_examples_readme_shows_the_examples_own_lines() -> None:
    code = "".join((EXAMPLE / f"fused_{side}_app.py").read_text() for side in ("client", "server"))
    shown = blocks((EXAMPLE / "README.md").read_text())
    assert len(shown) == 2
    assert all(block in code for block in shown)
