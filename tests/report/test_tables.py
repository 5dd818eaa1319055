"""Tables for the terminal and for papers."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.mathtext import MathTextParser
from rich.console import Console

from fedfuse.errors import ConfigError
from fedfuse.report import Run, read_run
from fedfuse.report.scores import SummaryRow, summary
from fedfuse.report.tables import (
    WRITERS,
    Sheet,
    as_data,
    grid,
    latex_text,
    make_sheet,
    markdown,
    rich_table,
    write_latex,
    write_markdown,
)


def table(**accuracies: list[float]) -> list[SummaryRow]:
    return summary(
        [
            {
                "method": label,
                "seed": seed,
                "round": 1,
                "accuracy": a,
                "nll": 1 - a,
                "bytes_up": 2_000_000,
                "trained": 10,
            }
            for label, scores in accuracies.items()
            for seed, a in enumerate(scores)
        ]
    )


def printed(rows: list[SummaryRow], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(rich_table(rows, width=width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def marked(rows: list[SummaryRow], key: str) -> list[str]:
    layout = grid(rows)
    at = [heading.column.key for heading in layout.headings].index(key)
    return [row.label for row, cells in layout.lines if cells[at].mark == "best"]


def test_the_best_is_the_highest_or_the_lowest() -> None:
    rows = table(fedavg=[0.7, 0.72], wb=[0.8, 0.83])
    assert marked(rows, "accuracy") == ["wb"]
    assert marked(rows, "nll") == ["wb"]


def test_ties_share_the_mark_and_equal_columns_have_none() -> None:
    rows = table(a=[0.8], b=[0.80001], c=[0.7])
    assert marked(rows, "accuracy") == ["a", "b"]  # both print as 80.0
    assert marked(rows, "bytes_up") == []
    assert marked(table(a=[0.8], b=[0.8]), "accuracy") == []


def test_costs_that_memory_pays_are_never_best() -> None:
    rows = summary(
        [{"method": m, "seed": 0, "round": 1, "trained": n, "train_seconds": n} for m, n in (("a", 0), ("b", 9))]
    )
    assert marked(rows, "trained") == marked(rows, "train_seconds") == []


def test_means_stand_under_each_other() -> None:
    rows = table(a=[0.1, 0.9], b=[0.50, 0.51])
    cells = [str(cells[0]) for _, cells in grid(rows).lines]
    assert cells == ["50.0 ± 56.6", "50.5 ±  0.7"]


def test_a_mean_over_fewer_seeds_says_so() -> None:
    rows = summary([{"method": "a", "seed": s, "round": 1, "accuracy": a} for s, a in enumerate([0.5, None, 0.7])])
    assert str(grid(rows).lines[0][1][0]) == "60.0 ± 14.1 (2 of 3 seeds)"


@pytest.mark.parametrize(("size", "unit", "text"), [(999, "B", "999"), (1_500, "kB", "1.50"), (2.5e9, "GB", "2.50")])
def test_bytes_have_one_unit_per_column(size: float, unit: str, text: str) -> None:
    layout = grid(summary([{"method": "a", "seed": 0, "round": 1, "bytes_up": size}]))
    assert layout.headings[0].text == f"sent up, {unit}"
    assert str(layout.lines[0][1][0]) == text


def test_bytes_up_and_down_share_a_unit_unless_one_would_vanish() -> None:
    both = [{"method": "a", "seed": 0, "round": 1, "bytes_up": 900_000, "bytes_down": 4_000_000}]
    assert [heading.text for heading in grid(summary(both)).headings] == ["sent up, MB", "sent down, MB"]
    apart = [{"method": "a", "seed": 0, "round": 1, "bytes_up": 900, "bytes_down": 4_000_000}]
    assert [heading.text for heading in grid(summary(apart)).headings] == ["sent up, B", "sent down, MB"]


def test_the_terminal_keeps_the_most_telling_columns_whole() -> None:
    rows = table(fedavg=[0.7, 0.72], wb=[0.8, 0.83])
    narrow, roomy = printed(rows, 34), printed(rows, 100)
    assert "★ 81.5 ± 2.1" in narrow
    assert "…" not in narrow
    assert "NLL" not in narrow
    assert "NLL" in roomy
    assert "trained" in roomy
    assert all(len(line) <= 34 for line in narrow.splitlines())
    assert "mean ± standard deviation over 2 seeds" in roomy


def test_a_label_is_text_not_markup() -> None:
    assert "[bold]x[/nope]" in printed(table(**{"[bold]x[/nope]": [0.5]}), 60)


def test_markdown_is_bold_where_best_and_keeps_pipes() -> None:
    assert markdown(table(**{"a|b": [0.7, 0.72], "wb": [0.8, 0.83]}), ["accuracy", "nll"]).splitlines() == [
        "| method | accuracy, % | NLL |",
        "|---|---:|---:|",
        "| a\\|b | 71.0 ± 1.4 | 0.290 ± 0.014 |",
        "| wb | **81.5 ± 2.1** | **0.185 ± 0.021** |",
    ]


Make = Callable[..., Path]
NASTY = r"a_b & 50 % #1 {x} ^ ~ \ $y$ <α|Σ> ≤ é 名"


def run_of(name: str, config: str = "", **scores: list[float]) -> Run:
    rows = tuple(
        {"method": label, "label": label, "seed": seed, "round": 1, "accuracy": a, "nll": 3 * a, "bytes_up": 2e6}
        for label, given in scores.items()
        for seed, a in enumerate(given)
    )
    return Run(name, config, {}, {}, rows)


@pytest.fixture
def study() -> Run:
    return run_of("study", a=[0.70, 0.72, 0.71], wb=[0.80, 0.81, 0.80], near=[0.79, 0.81, 0.81])


@pytest.fixture
def sweep() -> list[Run]:
    return [run_of(f"s-{a}", f"data.partition.alpha = {a}", x=[a, a + 0.1], y=[0.2, 0.3]) for a in (0.1, 0.5)]


def test_one_run_has_a_column_per_score(study: Run) -> None:
    assert write_markdown(make_sheet([study])).splitlines() == [
        "| method | accuracy, % | NLL | sent up, MB |",
        "|---|---:|---:|---:|",
        "| a | 71.0 ± 1.0 | **2.130 ± 0.030** | 2.00 |",
        "| wb | **80.3 ± 0.6** | 2.410 ± 0.017 | 2.00 |",
        "| near | **80.3 ± 1.2** | 2.410 ± 0.035 | 2.00 |",
    ]
    tied = run_of("study", a=[0.70, 0.72, 0.71], wb=[0.80, 0.81, 0.80], near=[0.79, 0.80, 0.81])
    assert "| near | *80.0 ± 1.0* |" in write_markdown(make_sheet([tied]))


def test_rows_and_columns_are_chosen_in_order(study: Run) -> None:
    text = write_markdown(make_sheet([study], rows=["wb", "n*"], columns=["nll", "accuracy"]))
    assert [line.split(" | ")[0] for line in text.splitlines()] == ["| method", "|---|---:|---:|", "| wb", "| near"]
    assert text.startswith("| method | NLL | accuracy, % |")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"rows": ["fedx"]}, "no method 'fedx'"),
        ({"columns": ["acc"]}, "no column 'acc'"),
        ({"columns": ["ece"]}, "ece"),
    ],
)
def test_what_is_not_there_is_named(study: Run, asked: dict[str, list[str]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_sheet([study], **asked)


def test_several_runs_stand_side_by_side(sweep: list[Run]) -> None:
    assert write_markdown(make_sheet(sweep)).splitlines() == [
        "| accuracy, % | alpha = 0.1 | alpha = 0.5 |",
        "|---|---:|---:|",
        "| x | 15.0 ± 7.1 | **55.0 ± 7.1** |",
        "| y | **25.0 ± 7.1** | 25.0 ± 7.1 |",
    ]
    two = write_latex(make_sheet(sweep, columns=["accuracy", "nll"]))
    assert r" & \multicolumn{2}{c}{alpha = 0.1} & \multicolumn{2}{c}{alpha = 0.5} \\" in two
    assert r"\cmidrule(lr){2-3} \cmidrule(lr){4-5}" in two


def test_a_method_that_a_run_lacks_is_a_dash() -> None:
    text = write_markdown(make_sheet([run_of("one", a=[0.5]), run_of("two", b=[0.5])]))
    assert "| a | 50.0 | – |" in text
    assert "| b | – | 50.0 |" in text


def test_the_interval_is_wider_than_the_deviation_of_three_seeds(study: Run) -> None:
    assert "71.0 ± 2.5" in write_markdown(make_sheet([study], spread="interval"))  # 4.303 · 1.0 / √3


def test_machines_get_every_number(study: Run) -> None:
    sheet = make_sheet([study])
    lines = list(csv.DictReader(io.StringIO(WRITERS["csv"](sheet))))
    told = json.loads(WRITERS["json"](sheet))
    assert [line["label"] for line in lines] == [entry["label"] for entry in told]
    first = told[0]
    assert (first["run"], first["column"], first["n"]) == ("study", "accuracy", 3)
    assert first["mean"] == pytest.approx(0.71)
    assert first["low"] == pytest.approx(0.71 - 4.302653 * 0.01 / 3**0.5)
    assert float(lines[0]["sd"]) == pytest.approx(first["sd"])


def test_data_of_runs_have_every_seed(tmp_path: Path, make_run: Make) -> None:
    [told] = as_data([read_run(make_run(tmp_path / "run", hostile=False))])
    rows = {row.label: row for row in summary(read_run(tmp_path / "run").rows)}
    entry = next(e for e in told["scores"] if (e["label"], e["column"]) == ("scaffold", "nll"))
    assert entry["seeds"] == rows["scaffold"].by_seed["nll"]
    json.dumps(told)


def cells(line: str) -> list[str]:
    return re.split(r"(?<!\\)&", line.removesuffix(r" \\"))


def test_latex_has_as_many_cells_as_columns_whatever_a_label_says() -> None:
    sheet = make_sheet([run_of("study", **{NASTY: [0.7, 0.72], "wb": [0.8, 0.9]})])
    body = [line for line in write_latex(sheet).splitlines() if line.endswith(r"\\")]
    assert [len(cells(line)) for line in body] == [4, 4, 4]
    for cell in (cell for line in body[1:] for cell in cells(line)[1:]):
        MathTextParser("path").parse(re.sub(r"\\underline\{(.*)\}", r"\1", cell.strip()))


def test_text_that_means_something_to_tex_is_escaped() -> None:
    text = latex_text(NASTY)
    assert text.isascii() or set(text) - set(map(chr, range(128))) == {"é"}
    bare = re.sub(r"\\(?:[a-zA-Z]+|[&%$#_{}])", "", text)
    assert not set(bare) & set("&%$#_~^\\<>|")
    assert bare.count("{") == bare.count("}")


def test_latex_compiles(tmp_path: Path, study: Run, sweep: list[Run]) -> None:
    compiler = shutil.which("pdflatex")
    if compiler is None:
        pytest.skip("no pdflatex on the path: the tables were not compiled")
    named = run_of("n", **{NASTY: [0.1, 0.2], "b": [0.9, 0.91]})
    sheets: list[Sheet] = [make_sheet([study]), make_sheet(sweep, columns=["accuracy", "nll"]), make_sheet([named])]
    tables = "\n\n".join(map(write_latex, sheets))
    (tmp_path / "t.tex").write_text(
        f"\\documentclass{{article}}\\usepackage{{booktabs}}\\usepackage[T1]{{fontenc}}\\begin{{document}}\n{tables}\n\\end{{document}}",
        encoding="utf-8",
    )
    subprocess.run([compiler, "-halt-on-error", "t.tex"], cwd=tmp_path, check=True, capture_output=True, timeout=60)
