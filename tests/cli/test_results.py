"""Commands that read runs, typed as a user would."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedfuse import cli

Typed = Callable[[str], tuple[int, str]]


def write_run(folder: Path, alpha: float, shift: float = 0.0) -> None:
    folder.mkdir(parents=True)
    scores = {"fedavg": 0.5, "fedprox(mu=0.1, b=2)": 0.6, "fedlpa": 0.7}
    lines = [
        {
            "method": label.split("(")[0],
            "label": label,
            "seed": seed,
            "round": 1,
            "accuracy": a + shift + 0.01 * seed + 0.002 * ((at + seed) % 3),
            "nll": 1 - a,
            "bytes_up": 10_000 * (at + 1),
            "bytes_down": 10_000,
        }
        for at, (label, a) in enumerate(scores.items())
        for seed in range(4)
    ]
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.toml").write_text(f'name = "s-{alpha}"\n[data]\npartition = {{ alpha = {alpha} }}\n')


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for alpha in (0.1, 1.0, 10.0):
        write_run(tmp_path / "runs" / "sweep" / f"s-{alpha}", alpha, 0.05 * alpha / (1 + alpha))

    def call(line: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fedfuse", *shlex.split(line)])
        try:
            cli.main()
        except SystemExit as end:
            said = capsys.readouterr()
            return int(end.code or 0), said.out + said.err
        return 0, capsys.readouterr().out

    return call


@pytest.mark.parametrize("command", ["report -o page.html", "table", "compare"])
def test_runs_that_were_made_by_different_code_are_named(
    command: str, typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr("fedfuse.cli.console.warn", warned.append)
    for alpha, net in ((0.1, "aaaa"), (1.0, "aaaa"), (10.0, "bbbb")):
        made = {"fedfuse": {"version": "1.0", "code": "cccc"}, "network": {"net.py": net}}
        (tmp_path / "runs" / "sweep" / f"s-{alpha}" / "made-of.json").write_text(json.dumps(made))
    assert typed(f"{command} runs/sweep/s-0.1 runs/sweep/s-1.0")[0] == 0
    assert not warned
    assert typed(f"{command} runs/sweep")[0] == 0
    assert [words.partition(": ")[2] for words in warned] == [
        "net.py (code aaaa) made s-0.1, s-1.0, net.py (code bbbb) s-10.0."
    ]
    if (tmp_path / "page.html").exists():
        assert warned[0] in (tmp_path / "page.html").read_text()


def test_a_report_of_a_sweeps_folder(typed: Typed, tmp_path: Path) -> None:
    assert typed("report runs/sweep -o page.html") == (0, "page: page.html\n")
    assert typed("report runs/sweep/s-0.1 runs/sweep/s-1.0 page.html") == (0, "page: report.html\n")
    assert "s-10.0" in (tmp_path / "page.html").read_text()


def test_a_report_for_machines_has_the_data(typed: Typed) -> None:
    code, said = typed("report runs/sweep --json")
    told = json.loads(said)
    assert (code, told["page"]) == (0, "report.html")
    assert [run["name"] for run in told["runs"]] == ["s-0.1", "s-1.0", "s-10.0"]
    best = [entry["label"] for entry in told["runs"][0]["scores"] if entry["column"] == "accuracy" and entry["best"]]
    assert best == ["fedlpa"]
    assert len(told["runs"][0]["scores"][0]["seeds"]) == 4


def test_a_table_in_every_format(typed: Typed, tmp_path: Path) -> None:
    one = "table runs/sweep/s-0.1"
    assert typed(f"{one} --columns accuracy --rows fedlpa,'fedprox(mu=0.1, b=2)'")[1].splitlines()[2:] == [
        "| fedlpa | **72.2 ± 1.3** |",
        "| fedprox(mu=0.1, b=2) | 62.2 ± 1.2 |",
    ]
    assert "\\toprule" in typed(f"{one} --format latex")[1]
    assert typed(f"{one} --format csv")[1].startswith("run,label,")
    assert len(json.loads(typed(f"{one} --json")[1])) == 9
    assert typed(f"{one} -o paper/t.tex") == (0, "table: paper/t.tex\n")
    assert (tmp_path / "paper" / "t.tex").read_text().endswith("\\end{tabular}\n")
    assert "| accuracy, % | alpha = 0.1 | alpha = 1 | alpha = 10 |" in typed("table runs/sweep")[1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("table runs/sweep --format pdf", "--format is 'pdf', expected md, latex, csv or json"),
        ("table runs/sweep --rows fedx", "no method 'fedx' in these runs; they have fedavg"),
        ("table nowhere", "nowhere is not a directory"),
        ("report runs/sweep -o runs/sweep/s-0.1/config.toml/page.html", "cannot write"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(typed: Typed, line: str, words: str) -> None:
    code, said = typed(line)
    assert (code, words in said, said.count("\n")) == (2, True, 1)


def test_a_figure_and_a_comparison(typed: Typed, tmp_path: Path) -> None:
    assert typed("plot runs/sweep --kind sweep -o fig/s.pdf") == (0, "figure: fig/s.pdf\n")
    assert (tmp_path / "fig" / "s.pdf").read_bytes().startswith(b"%PDF")
    code, said = typed("compare runs/sweep/s-0.1")
    assert (code, "accuracy, points: fedlpa less …" in said, "4 of 4" in said) == (0, True, True)
    code, said = typed("compare runs/sweep -o cd.svg")
    assert (code, "Friedman p = 0.0498 over 3 runs" in said, said.endswith("figure: cd.svg\n")) == (0, True, True)
    told = json.loads(typed("compare runs/sweep --json")[1])
    assert list(told["ranking"]["ranks"]) == ["fedlpa", "fedprox(mu=0.1, b=2)", "fedavg"]
    code, said = typed("compare runs/sweep/s-0.1 -o cd.svg")
    assert (code, "give three runs or more" in said) == (2, True)
