"""The distance from Gaussian of each layer over the rounds, as lines in the report."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fedfuse.experiment.config import Experiment
from fedfuse.experiment.run import execute
from fedfuse.report import write_page
from fedfuse.report.page import method_facts
from fedfuse.report.plots import NAMED, layer_lines

KEY, TITLE = "gaussianity", "Distance from Gaussian"


def row(at: int, table: Any, seed: int = 0) -> dict[str, Any]:
    return {"seed": seed, "round": at, "facts": {KEY: table}}


def ends(picture: str) -> dict[str, float]:
    """The height at which each layer's line ends."""
    lines = re.findall(r"<g[^>]*><title>([^,<]+),.*?</title><path d=\"M([^\"]+)\"", picture)
    return {name: float(path.split("L")[-1].split(" ")[1]) for name, path in lines}


def test_values_are_means_over_clients_and_seeds() -> None:
    rows = [row(at, {"fc1": {"a": at, "b": 3 * at}}, seed) for at in (1, 2) for seed in (0, 1)]
    figure = layer_lines(rows, KEY, TITLE)
    assert figure is not None
    assert "fc1, round 1: 2; fc1, round 2: 4" in figure.picture
    assert figure.note == "Mean over clients and seeds."


def test_far_apart_layers_are_drawn_on_a_logarithmic_scale() -> None:
    tables = [{name: {"a": value} for name, value in zip("xyz", (1e-12, 1e-9, 1e-6), strict=True)}] * 2
    figure = layer_lines([row(at, table) for at, table in enumerate(tables, 1)], KEY, TITLE)
    assert figure is not None
    assert "Logarithmic" in figure.note
    x, y, z = (ends(str(figure.picture))[name] for name in "xyz")
    assert x > y > z
    assert x - y == pytest.approx(y - z, abs=0.2)


def test_one_round_stays_a_map() -> None:
    assert layer_lines([row(1, {"fc1": {"a": 1e-9}})], KEY, TITLE) is None
    (note,) = method_facts({"swa": [row(1, {"fc1": {"a": 1e-9, "b": 3e-9}})]})
    assert note.maps[0].title == KEY
    assert "fc1, b: 3e-09" in note.maps[0].picture


def test_several_rounds_become_lines_in_the_place_of_the_map() -> None:
    (note,) = method_facts({"swa": [row(at, {"fc1": {"a": at, "b": 2.0}}) for at in (1, 2, 3)]})
    (figure,) = note.maps
    assert figure.title == "Distance from Gaussian of each layer"
    assert "fc1, round 3: 2.5" in figure.picture


def test_layers_without_scores_are_left_out() -> None:
    rows = [row(at, {"tiny": {"a": None}, "fc1": {"a": 1.0, "b": None}}) for at in (1, 2)]
    figure = layer_lines(rows, KEY, TITLE)
    assert figure is not None
    assert ends(str(figure.picture)).keys() == {"fc1"}
    assert layer_lines([row(at, {"tiny": {"a": None}}) for at in (1, 2)], KEY, TITLE) is None


def test_of_many_layers_some_are_named_and_no_names_touch() -> None:
    table = {f"layer{k}": {"a": 1.0 + 1e-3 * k} for k in range(54)}
    figure = layer_lines([row(at, table) for at in (1, 2)], KEY, TITLE)
    assert figure is not None
    names = re.findall(r'<text x="315" y="([\d.]+)" class="fill ink\d">(layer\d+)</text>', str(figure.picture))
    assert len(names) == NAMED
    assert {"layer0", "layer53"} <= {name for _, name in names}
    heights = sorted(float(y) for y, _ in names)
    assert all(b - a >= 12.9 for a, b in pairwise(heights))
    assert len(ends(str(figure.picture))) == 54


@pytest.mark.parametrize("table", [None, 3, [], {"fc1": 3}, {"fc1": {"a": "x"}}, {"<b>": {"a": {}}}])
def test_a_damaged_ledger_draws_nothing(table: Any) -> None:
    assert layer_lines([row(1, table), row(2, table)], KEY, TITLE) is None


def test_names_are_escaped() -> None:
    rows = [row(at, {"<script>x": {"a": float(at)}}) for at in (1, 2)]
    figure = layer_lines(rows, KEY, TITLE)
    assert figure is not None
    assert "<script" not in figure.picture


def test_a_real_run_shows_weights_and_lines(tmp_path: Path) -> None:
    experiment = Experiment(
        rounds=2,
        data={"clients": 3, "train_limit": 120, "test_limit": 40},
        model={"name": "mlp", "hidden": [6]},
        methods=[{"name": "fedavg"}, {"name": "swa"}],
    )
    execute(experiment, tmp_path / "run", workers=0)
    page = write_page([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert "layer weights" in page
    assert page.count("Distance from Gaussian of each layer") == 2  # its caption, and the words for a screen reader
    assert re.search(r"fc1, client-01: 0\.\d\d", page)
    assert re.search(r"fc1, round 2: [\d.e-]+", page)
