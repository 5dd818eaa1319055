"""The page's figures."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fedfuse.experiment.config import Experiment
from fedfuse.experiment.run import execute
from fedfuse.report import Run, plots, write_page
from fedfuse.report.page import method_facts
from fedfuse.report.plots import NAMED, answer_cost, layer_lines, reliability
from fedfuse.report.read import Panel, Swept


def row(seed: int, at: int, **values: object) -> dict[str, object]:
    return {"seed": seed, "round": at, **values}


def test_one_round_has_no_learning_curve() -> None:
    assert plots.learning_curve({"wb": [row(0, 1, accuracy=0.5)]}, {"wb": 0}, "accuracy", "Accuracy") is None


def test_a_curve_passes_through_the_means() -> None:
    rows = [row(seed, at, accuracy=0.1 * at + 0.1 * seed) for at in (1, 2, 3) for seed in (0, 1)]
    figure = plots.learning_curve({"wb": rows}, {"wb": 0}, "accuracy", "Accuracy")
    assert figure is not None
    curve = re.search(r'd="M([^"]*)" class="curve ink0"', figure.picture)
    assert curve is not None
    heights = [float(point.split()[1]) for point in curve[1].split("L")]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)  # equal steps of 0.1
    assert "wb, round 3: 0.35" in figure.picture
    assert figure.picture.count('class="band ink0"') == 1


def test_a_score_over_decades_is_logarithmic() -> None:
    rows = [row(0, at, nll=100.0 / 10**at) for at in (1, 2, 3)]
    figure = plots.learning_curve({"wb": rows}, {"wb": 0}, "nll", "NLL")
    assert figure is not None
    assert figure.note == "Logarithmic scale."


def test_reliability_pools_seeds_by_count() -> None:
    def bins(right: float, count: int) -> dict[str, object]:
        return {"confidence": [None, 0.8], "accuracy": [None, right], "count": [0, count]}

    rows = [row(0, 1, reliability=bins(0.5, 30), ece=0.1), row(1, 1, reliability=bins(0.9, 10), ece=0.3)]
    figure = reliability("wb", rows, 0)
    assert figure is not None
    assert "says 80 %, is right 60 % of 40 rows" in figure.picture
    assert figure.note == "ECE 20.0 %"
    assert reliability("wb", [row(0, 1)], 0) is None


def test_every_client_is_a_mark_until_there_are_too_many() -> None:
    def figure(clients: int) -> str:
        found = {f"c{k}": {"own_accuracy": k / clients} for k in range(clients)}
        drawn = plots.fairness({"wb": [row(0, 1, clients=found)]}, {"wb": 0}, "own_", "Own")
        assert drawn is not None
        return drawn.picture

    assert figure(20).count('class="mark ink0"') == 20
    assert figure(5000).count('class="mark ink0"') == 0
    assert len(figure(5000)) < 10_000
    assert plots.fairness({"wb": [row(0, 1, clients={"a": {"num_examples": 1.0}})]}, {"wb": 0}, "own_", "Own") is None


def test_the_partition_shows_the_server_last_and_totals() -> None:
    seed = {"clients": {"a": [3, 0], "b": [1200, 34]}, "server": [0, 7]}
    svg = plots.partition(["cat", "dog"], seed)
    assert svg is not None
    assert [word for word in re.findall(r">([^<>]+)</text>", svg) if word in ("a", "b", "server")] == [
        "a",
        "b",
        "server",
    ]
    assert ">1,234</text>" in svg
    assert plots.partition([], seed) is None
    empty = plots.partition(["cat"], {"clients": {"a": [1]}, "server": [0]})
    assert empty is not None
    assert "server" not in empty


def test_confusion_is_per_cent_of_the_true_class_over_seeds() -> None:
    rows = [row(0, 1, confusion=[[8, 2], [0, 10]]), row(1, 1, confusion=[[6, 4], [5, 5]])]
    figure = plots.confusion(rows, ["cat", "dog"])
    assert figure is not None
    assert all(words in figure.picture for words in ("cat, cat: 70", "cat, dog: 30", "dog, cat: 25", "dog, dog: 75"))
    assert plots.confusion([row(0, 1, confusion=[[1, 2]])], []) is None


def test_per_class_accuracy_skips_what_is_missing() -> None:
    figure = plots.per_class(
        {"wb": [row(0, 1, per_class=[0.5, None]), row(1, 1, per_class=[0.7, 0.2])]}, ["cat", "dog"]
    )
    assert figure is not None
    assert "wb, cat: 60" in figure.picture
    assert "wb, dog: 20" in figure.picture


def test_an_axis_is_not_zoomed_into_nothing() -> None:
    rows = [row(0, at, accuracy=0.9 + 0.0001 * at) for at in (1, 2, 3)]
    figure = plots.learning_curve({"wb": rows}, {"wb": 0}, "accuracy", "Accuracy")
    assert figure is not None
    curve = re.search(r'd="M([^"]*)" class="curve ink0"', figure.picture)
    assert curve is not None
    heights = [float(point.split()[1]) for point in curve[1].split("L")]
    assert max(heights) - min(heights) < 5  # of 216 pixels


def test_what_never_changes_is_not_drawn() -> None:
    rows = [row(0, at, nll=0.0) for at in (1, 2, 3)]
    assert plots.learning_curve({"wb": rows}, {"wb": 0}, "nll", "NLL") is None


def test_a_sweep_is_drawn_against_its_key() -> None:
    def run(accuracy: float) -> Run:
        return Run("", "", {}, {}, tuple({"label": "wb", **row(seed, 1, accuracy=accuracy)} for seed in (0, 1)))

    swept = Swept("data.partition.alpha", (10.0, 0.1, 1.0))
    panel = Panel("", (run(0.9), run(0.3), run(0.6)), swept)
    (figure,) = plots.sweep_curves([panel], {"wb": 0}, "accuracy", "Accuracy")
    assert figure is not None
    assert figure.title == "Accuracy"
    assert ">alpha</text>" in figure.picture
    assert figure.note == "Logarithmic scale below."
    curve = re.search(r'd="M([^"]*)" class="curve ink0"', figure.picture)
    assert curve is not None
    points = [[float(n) for n in point.split()] for point in curve[1].split("L")]
    assert points == sorted(points)
    assert points[1][0] - points[0][0] == pytest.approx(points[2][0] - points[1][0], abs=0.2)  # equal in decades


def test_panels_of_a_sweep_have_one_axis_of_scores() -> None:
    def run(accuracy: float) -> Run:
        return Run("", "", {}, {}, ({"label": "wb", **row(0, 1, accuracy=accuracy)},))

    swept = Swept("alpha", (1.0, 2.0))
    panels = [Panel("few", (run(0.1), run(0.2)), swept), Panel("many", (run(0.8), run(0.9)), swept)]
    few, many = plots.sweep_curves(panels, {"wb": 0}, "accuracy", "Accuracy")
    assert few is not None
    assert many is not None
    assert (few.title, many.title) == ("Accuracy, few", "Accuracy, many")
    words = re.compile(r"<text[^>]*>([^<]*)<")
    assert words.findall(few.picture) == words.findall(many.picture)


INKS = {"all": 0, "few": 1, "mean": 2}


def rows(accuracy: float, **facts: object) -> list[dict[str, Any]]:
    return [
        {"seed": seed, "round": at, "accuracy": accuracy + 0.02 * seed, "facts": facts if at == 2 else {}}
        for at in (1, 2)
        for seed in (0, 1)
    ]


def test_methods_are_placed_by_cost_and_accuracy_of_the_last_round() -> None:
    figure = answer_cost({"all": rows(0.8, cost=1.0), "few": rows(0.7, cost=0.25), "mean": rows(0.3)}, INKS)
    assert figure is not None
    assert figure.legend == ("all", "few"), "who says nothing of cost is not shown"
    assert "all: 81.0 % for 100 % of the work" in figure.picture
    assert "few: 71.0 % for 25 % of the work" in figure.picture


def test_there_is_no_picture_without_a_choice() -> None:
    assert answer_cost({"all": rows(0.8, cost=1.0), "few": rows(0.7, cost=1.0)}, INKS) is None
    assert answer_cost({"mean": rows(0.3)}, INKS) is None
    assert answer_cost({"all": rows(0.8, cost="much"), "few": rows(0.8, cost=float("nan"))}, INKS) is None
    assert answer_cost({}, INKS) is None


KEY, TITLE = "gaussianity", "Distance from Gaussian"


def layer_row(at: int, table: Any, seed: int = 0) -> dict[str, Any]:
    return {"seed": seed, "round": at, "facts": {KEY: table}}


def ends(picture: str) -> dict[str, float]:
    """The height at which each layer's line ends."""
    lines = re.findall(r"<g[^>]*><title>([^,<]+),.*?</title><path d=\"M([^\"]+)\"", picture)
    return {name: float(path.split("L")[-1].split(" ")[1]) for name, path in lines}


def test_values_are_means_over_clients_and_seeds() -> None:
    rows = [layer_row(at, {"fc1": {"a": at, "b": 3 * at}}, seed) for at in (1, 2) for seed in (0, 1)]
    figure = layer_lines(rows, KEY, TITLE)
    assert figure is not None
    assert "fc1, round 1: 2; fc1, round 2: 4" in figure.picture
    assert figure.note == "Mean over clients and seeds."


def test_far_apart_layers_are_drawn_on_a_logarithmic_scale() -> None:
    tables = [{name: {"a": value} for name, value in zip("xyz", (1e-12, 1e-9, 1e-6), strict=True)}] * 2
    figure = layer_lines([layer_row(at, table) for at, table in enumerate(tables, 1)], KEY, TITLE)
    assert figure is not None
    assert "Logarithmic" in figure.note
    x, y, z = (ends(str(figure.picture))[name] for name in "xyz")
    assert x > y > z
    assert x - y == pytest.approx(y - z, abs=0.2)


def test_one_round_stays_a_map() -> None:
    assert layer_lines([layer_row(1, {"fc1": {"a": 1e-9}})], KEY, TITLE) is None
    (note,) = method_facts({"swa": [layer_row(1, {"fc1": {"a": 1e-9, "b": 3e-9}})]})
    assert note.maps[0].title == KEY
    assert "fc1, b: 3e-09" in note.maps[0].picture


def test_several_rounds_become_lines_in_the_place_of_the_map() -> None:
    (note,) = method_facts({"swa": [layer_row(at, {"fc1": {"a": at, "b": 2.0}}) for at in (1, 2, 3)]})
    (figure,) = note.maps
    assert figure.title == "Distance from Gaussian of each layer"
    assert "fc1, round 3: 2.5" in figure.picture


def test_layers_without_scores_are_left_out() -> None:
    rows = [layer_row(at, {"tiny": {"a": None}, "fc1": {"a": 1.0, "b": None}}) for at in (1, 2)]
    figure = layer_lines(rows, KEY, TITLE)
    assert figure is not None
    assert ends(str(figure.picture)).keys() == {"fc1"}
    assert layer_lines([layer_row(at, {"tiny": {"a": None}}) for at in (1, 2)], KEY, TITLE) is None


def test_of_many_layers_some_are_named_and_no_names_touch() -> None:
    table = {f"layer{k}": {"a": 1.0 + 1e-3 * k} for k in range(54)}
    figure = layer_lines([layer_row(at, table) for at in (1, 2)], KEY, TITLE)
    assert figure is not None
    names = re.findall(r'<text x="315" y="([\d.]+)" class="fill ink\d">(layer\d+)</text>', str(figure.picture))
    assert len(names) == NAMED
    assert {"layer0", "layer53"} <= {name for _, name in names}
    heights = sorted(float(y) for y, _ in names)
    assert all(b - a >= 12.9 for a, b in pairwise(heights))
    assert len(ends(str(figure.picture))) == 54


@pytest.mark.parametrize("table", [None, 3, [], {"fc1": 3}, {"fc1": {"a": "x"}}, {"<b>": {"a": {}}}])
def test_a_damaged_ledger_draws_nothing(table: Any) -> None:
    assert layer_lines([layer_row(1, table), layer_row(2, table)], KEY, TITLE) is None


def test_names_are_escaped() -> None:
    rows = [layer_row(at, {"<script>x": {"a": float(at)}}) for at in (1, 2)]
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
