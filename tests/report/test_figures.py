"""Figures for papers: each kind is drawn, in every format, the same bytes each time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure

from fedfuse.errors import ConfigError
from fedfuse.report import Run, read_run
from fedfuse.report.figures import KINDS, MARKERS, Plot, save_diagram, save_figure
from fedfuse.report.stats import rank_methods
from fedfuse.report.svg import COLOURS, look

Make = Callable[..., Path]


@pytest.fixture
def study(tmp_path: Path, make_run: Make) -> Run:
    return read_run(make_run(tmp_path / "run", rounds=4, hostile=False))


def sweep(values: tuple[float, ...] = (0.1, 1.0, 10.0), methods: int = 3) -> list[Run]:
    return [
        Run(
            f"s-{alpha}",
            f"data.partition.alpha = {alpha}",
            {},
            {},
            tuple(
                {
                    "method": f"m{m}",
                    "label": f"m{m}",
                    "seed": s,
                    "round": 1,
                    "accuracy": 0.3 + 0.05 * m + 0.1 * k + 0.01 * s,
                }
                for m in range(methods)
                for s in (0, 1, 2)
            ),
        )
        for k, alpha in enumerate(values)
    ]


@pytest.mark.parametrize("kind", ["curve", "bytes", "reliability", "partition", "heat"])
def test_every_kind_of_one_run_is_drawn(kind: str, study: Run, tmp_path: Path) -> None:
    out = save_figure(kind, Plot([study]), tmp_path / "new" / f"{kind}.png")
    pixels = image.imread(out)[..., :3]
    assert (pixels.min(axis=2) < 0.9).mean() > 0.02  # something is on the paper
    edges = [pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]
    assert all(edge.min() > 0.95 for edge in edges)  # and nothing is cut off at its edge


@pytest.mark.parametrize("kind", ["sweep", "heat"])
def test_every_kind_of_a_sweep_is_drawn(kind: str, tmp_path: Path) -> None:
    assert save_figure(kind, Plot(sweep()), tmp_path / "s.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("ending", [".pdf", ".svg", ".png"])
def test_the_same_runs_give_the_same_bytes(ending: str, study: Run, tmp_path: Path) -> None:
    one, two = (save_figure("curve", Plot([study]), tmp_path / f"{name}{ending}").read_bytes() for name in "ab")
    assert one == two


def test_a_pdf_has_its_fonts_as_text(study: Run, tmp_path: Path) -> None:
    text = save_figure("curve", Plot([study]), tmp_path / "c.pdf").read_bytes()
    assert b"/Type3" not in text
    assert b"/Subtype /Type0" in text or b"/TrueType" in text


def test_twelve_methods_are_told_apart() -> None:
    figure = Figure()
    KINDS["sweep"](figure, Plot(sweep(methods=12)))
    lines = figure.axes[0].get_lines()
    assert len({line.get_color() for line in lines}) == 12
    assert len({(str(line.get_linestyle()), line.get_marker(), str(line._dash_pattern)) for line in lines}) == 12
    assert [line.get_color() for line in lines] == list(COLOURS)
    assert set(MARKERS) == {look(at).shape for at in range(12)}


def test_a_method_looks_the_same_whichever_are_chosen() -> None:
    figure = Figure()
    KINDS["sweep"](figure, Plot(sweep(), rows=("m2",)))
    (line,) = figure.axes[0].get_lines()
    assert line.get_color() == COLOURS[2]


def test_a_curve_passes_through_the_means_in_per_cent(study: Run) -> None:
    figure = Figure()
    KINDS["curve"](figure, Plot([study], rows=("fedavg",)))
    (line,) = figure.axes[0].get_lines()
    rows = [row for row in study.rows if row["label"] == "fedavg"]
    means = [100 * np.mean([row["accuracy"] for row in rows if row["round"] == at]) for at in (1, 2, 3, 4)]
    np.testing.assert_allclose(line.get_ydata(), means)
    assert figure.axes[0].get_ylabel() == "accuracy (%)"


@pytest.mark.parametrize("kind", ["sweep", "bytes"])
def test_numbers_on_a_logarithmic_axis_are_words(kind: str, tmp_path: Path) -> None:
    row = {"method": "a", "label": "a", "seed": 0, "bytes_up": 10_000, "bytes_down": 0}
    rows = tuple({**row, "round": at, "accuracy": 0.1 * at, "bytes_up": 10 ** (3 + at)} for at in (1, 2, 3, 4))
    runs = [Run("", "", {}, {}, rows)] if kind == "bytes" else sweep((0.01, 0.1, 10.0))
    text = save_figure(kind, Plot(runs), tmp_path / "f.svg").read_text()
    assert "mathdefault" not in text
    assert ">0.1<" in text


def two_keys(*pairs: tuple[object, float]) -> list[Run]:
    """A run per source and number of clients, its accuracy a function of the latter."""
    return [
        Run(
            f"{source}-{clients}",
            f"data.source = {source!r}\ndata.clients = {clients}",
            {},
            {},
            tuple({"method": "a", "label": "a", "seed": s, "round": 1, "accuracy": 0.05 * clients} for s in (0, 1)),
        )
        for source, clients in pairs
    ]


def test_a_sweep_over_two_keys_has_a_panel_per_value_of_the_other() -> None:
    figure = Figure()
    runs = two_keys(("b", 9), ("b", 5), ("b", 7), ("a", 5), ("a", 9))
    KINDS["sweep"](figure, Plot(runs))
    first, second = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["b", "a"]
    assert [list(axes.lines[0].get_xdata()) for axes in figure.axes] == [[5, 7, 9], [5, 9]]
    np.testing.assert_allclose(first.lines[0].get_ydata(), [25, 35, 45])
    assert first.get_ylim() == second.get_ylim()
    assert (first.get_ylabel(), second.get_ylabel()) == ("accuracy (%)", "")
    assert len(figure.legends) == 1


def test_either_key_of_a_sweep_may_be_on_the_axis() -> None:
    runs = two_keys(*((source, clients) for source in (10, 2) for clients in (5, 9)))
    for along, titles, values in (
        ("clients", ["source = 2", "source = 10"], [5, 9]),
        ("data.source", ["clients = 5", "clients = 9"], [2, 10]),
    ):
        figure = Figure()
        KINDS["sweep"](figure, Plot(runs, along=along))
        assert [axes.get_title() for axes in figure.axes] == titles
        assert list(figure.axes[0].lines[0].get_xdata()) == values
    with pytest.raises(ConfigError, match=r"differ in data.source, data.clients, .* a key of numbers 'epochs'"):
        KINDS["sweep"](Figure(), Plot(runs, along="epochs"))
    with pytest.raises(ConfigError, match="at which runs differ in nothing else"):
        KINDS["sweep"](Figure(), Plot(two_keys(("a", 5), ("b", 9))))


def test_an_axis_of_shares_is_not_zoomed_into_nothing() -> None:
    runs = [
        Run(
            "",
            f"local.epochs = {k}",
            {},
            {},
            ({"method": "a", "label": "a", "seed": 0, "round": 1, "accuracy": 0.9 + k / 1e5},),
        )
        for k in (1, 2)
    ]
    figure = Figure()
    KINDS["sweep"](figure, Plot(runs))
    low, high = figure.axes[0].get_ylim()
    assert high - low >= 3.9


@pytest.mark.parametrize(
    ("kind", "ending", "words"),
    [
        ("pie", ".pdf", "--kind is 'pie', expected one of curve, sweep"),
        ("curve", ".gif", "expected one of .pdf, .svg, .png"),
        ("sweep", ".pdf", "these runs differ in nothing, expected those of a sweep"),
        ("partition", ".pdf", "has no partition of seed 99"),
    ],
)
def test_what_cannot_be_drawn_is_named(kind: str, ending: str, words: str, study: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        save_figure(kind, Plot([study], seed=99 if kind == "partition" else None), tmp_path / f"f{ending}")
    assert not list(tmp_path.glob("f.*"))


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    empty = Run("r", "", {}, {}, ({"method": "a", "label": "a", "seed": 0, "round": 1},))
    for kind in ("curve", "bytes", "reliability", "partition", "heat"):
        with pytest.raises(ConfigError, match="nothing to draw|no partition"):
            save_figure(kind, Plot([empty]), tmp_path / "f.png")
    with pytest.raises(ConfigError, match="this kind shows one run and 3 were given"):
        save_figure("curve", Plot(sweep()), tmp_path / "f.png")


def test_hostile_names_are_drawn_as_text(tmp_path: Path, make_run: Make, hostile: str) -> None:
    run = make_run(tmp_path / "run")
    partition = json.loads((run / "partition.json").read_text())
    partition["seeds"]["0"]["clients"] = {hostile: [1] * 10, "$\\frac$": [2] * 10}
    (run / "partition.json").write_text(json.dumps(partition))
    assert save_figure("partition", Plot([read_run(run)]), tmp_path / "p.svg").exists()


def test_the_diagram_joins_whom_the_ranks_do_not_tell_apart(tmp_path: Path) -> None:
    ranking = rank_methods([{"a": 4.0, "b": 3.0, "c": 2.0, "d": 1.0}] * 14)
    text = save_diagram(ranking, tmp_path / "cd.svg").read_text()
    assert "critical difference 1.25" in text
    assert all(f"{name} {rank}.00" in text for rank, name in enumerate("abcd", start=1))
    assert save_diagram(ranking, tmp_path / "cd.pdf").stat().st_size > 1000
