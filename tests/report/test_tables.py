from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedfuse.report.scores import SummaryRow, summary
from fedfuse.report.tables import grid, markdown, rich_table


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
