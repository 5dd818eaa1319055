from __future__ import annotations

import re

import pytest

from fedfuse.report import Run, plots
from fedfuse.report.plots import reliability
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
