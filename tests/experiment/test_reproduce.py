"""The papers' tables, figures and claims, by name: found, run, stored and judged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fedfuse.errors import ConfigError
from fedfuse.experiment.jobs import jobs_of
from fedfuse.experiment.reproduce import (
    PaperFigure,
    all_figures,
    all_findings,
    catalogue,
    experiments_folder,
    file_digests,
    find,
    load_claims,
    missing_names,
    run_missing,
    store_result,
)
from fedfuse.experiment.run import execute
from fedfuse.report.claims import StoredResult, read_result, write_result


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("swa/table2.cpu.toml", "swa/table2.paper.toml", "swa/deep/figure.cpu.toml", "swa/other.toml"):
        path = tmp_path / "experiments" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\nrounds = 1\n")
    monkeypatch.setenv("FEDFUSE_EXPERIMENTS", str(tmp_path / "experiments"))
    return tmp_path / "experiments"


def test_the_catalogue_names_tables_at_their_scales_and_pictures(shelf: Path) -> None:
    found = {entry.name: entry for entry in catalogue()}
    assert found["swa/table2"].scales == ("cpu", "paper")
    assert found["swa/table2"].summary == "swa/table2.cpu.toml"
    assert "swa/deep/figure" in found
    assert "swa/other" not in found
    assert set(all_figures()) <= found.keys()


def test_a_summary_is_the_first_sentence_of_the_comment_however_many_lines_it_takes(shelf: Path) -> None:
    (shelf / "swa" / "long.cpu.toml").write_text(
        "# Fewer clients, chosen by\n# their classes at α = 0.5. Seeds follow.\nrounds = 1\n"
    )
    (shelf / "swa" / "open.cpu.toml").write_text("# no stop at all\n# here\n\n# and another comment\nrounds = 1\n")
    (shelf / "swa" / "bare.cpu.toml").write_text("rounds = 1\n# not at its head\n")
    found = {entry.name: entry.summary for entry in catalogue()}
    assert found["swa/long"] == "Fewer clients, chosen by their classes at α = 0.5."
    assert found["swa/open"] == "no stop at all here"
    assert found["swa/bare"] == ""


def test_the_catalogue_says_which_results_are_stored(shelf: Path) -> None:
    digest = file_digests("cpu")["swa/table2"]
    folder = shelf / "results"
    states = []
    for result in (
        StoredResult("swa/table2", "cpu", digest, {}),
        StoredResult("swa/table2", "cpu", digest, {}, ("a cell",)),
        StoredResult("swa/table2", "cpu", "another text", {}),
    ):
        write_result(result, folder)
        states.append({entry.name: entry.result for entry in catalogue()})
    assert [state["swa/table2"] for state in states] == ["stored", "in part", "older"]
    assert states[0]["swa/deep/figure"] == ""


def test_a_table_is_found_at_its_scale(shelf: Path) -> None:
    assert find("swa/table2", "paper") == shelf / "swa" / "table2.paper.toml"
    with pytest.raises(ConfigError, match="swa/deep/figure exists at the scales cpu, not paper"):
        find("swa/deep/figure", "paper")
    with pytest.raises(ConfigError, match="nothing to reproduce is called 'swa/table3'; did you mean 'swa/table2'"):
        find("swa/table3", "cpu")


def test_a_picture_needs_no_scale(shelf: Path) -> None:
    for name, picture in all_figures().items():
        found = find(name, "cpu")
        assert isinstance(found, PaperFigure)
        assert found == picture


def test_numbers_of_a_figure_are_stored_as_those_of_a_table_are(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = PaperFigure("x-toy", "X", lambda folder: [folder])
    monkeypatch.setattr("fedfuse.experiment.reproduce._FIGURES", {"x-toy": toy})
    with pytest.raises(ConfigError, match="no numbers of the figure x-toy in .*; fedfuse reproduce x-toy draws it"):
        store_result("x-toy", "cpu", tmp_path)
    drawn = StoredResult("x-toy", "cpu", "d", {"all": {"added": {"accuracy": {0: 0.9}}}})
    write_result(drawn, tmp_path)
    assert read_result(store_result("x-toy", "cpu", tmp_path)) == drawn
    assert (shelf / "results" / "x-toy.cpu.json").is_file()


def test_the_folder_beside_the_source_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDFUSE_EXPERIMENTS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert experiments_folder().name == "experiments"
    (tmp_path / "experiments").mkdir()
    assert experiments_folder() == Path("experiments")


GOOD = """
[[claims]]
id = "a"
paper = "X"
place = "Table 1"
says = "a is above b"
file = "x/table1"
first = ["swa"]
second = ["fedavg"]
"""

TABLE = """# Table 1 in small.
name = "table1"
rounds = 2
seeds = [0, 1]

[data]
source = "digits"
clients = 3
train_limit = 60
test_limit = 40

[model]
name = "mlp"
hidden = [4]

[local]
epochs = 1

[[methods]]
name = "fedavg"

[[methods]]
name = "swa"
"""


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "experiments"
    (folder / "x").mkdir(parents=True)
    (folder / "x" / "table1.cpu.toml").write_text(TABLE)
    (folder / "claims.toml").write_text(GOOD)
    monkeypatch.setenv("FEDFUSE_EXPERIMENTS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('id = "a"', "", r"claim 1 \(without id\): the key 'id' is missing"),
        ("first", "frist", "there is no key 'frist'; did you mean 'first'"),
        ("x/table1", "x/table2", "there is no experiment x/table2.cpu.toml"),
        ('file = "x/table1"', "", "it needs `file` or `picture`"),
        ('place = "Table 1"', 'place = "Table 1"\nuntestable = "no"', "has no `file`, `picture` or `first`"),
        ('place = "Table 1"', 'place = "T"\nscore = "acuracy"', "score is 'acuracy'; did you mean 'accuracy'"),
        ('place = "Table 1"', 'place = "T"\ndirection = "level"', "need a `margin`"),
        ('place = "Table 1"', 'place = "T"\ndirection = "up"', "direction is 'up', expected"),
        ("[[claims]]", "[claim]", "expected .*claims"),
        ("[[claims]]", "[[claims", "cannot be read"),
    ],
)
def test_a_mistake_in_the_register_is_one_sentence(register: Path, old: str, new: str, said: str) -> None:
    (register / "claims.toml").write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=said):
        load_claims()


def test_every_claim_has_a_name_of_its_own(register: Path) -> None:
    (register / "claims.toml").write_text(GOOD + GOOD)
    with pytest.raises(ConfigError, match=r"claim 2 \(a\): the id stands above already"):
        load_claims()


def test_what_is_missing_is_run_stored_and_judged_and_never_twice(register: Path, tmp_path: Path) -> None:
    assert all_findings()[0].verdict == "not run"
    assert missing_names("cpu") == ["x/table1"]
    (attempt,) = run_missing("cpu", out=tmp_path / "runs", workers=0)
    assert attempt.outcome == "stored"
    assert (register / "results" / "x" / "table1.cpu.json").stat().st_size < 2000
    (found,) = all_findings()
    assert found.effect is not None
    assert found.effect.n == 2
    assert list(run_missing("cpu", out=tmp_path / "runs", workers=0)) == []
    (register / "x" / "table1.cpu.toml").write_text(TABLE.replace("rounds = 2", "rounds = 3"))
    assert missing_names("cpu") == ["x/table1"]
    assert all_findings()[0].older


def test_nothing_is_trained_twice(register: Path, tmp_path: Path) -> None:
    for out, trains in ((tmp_path / "runs", True), (tmp_path / "again", False)):
        list(run_missing("cpu", out=out, workers=0))
        shutil.rmtree(register / "results")
        lines = [json.loads(line) for line in (out / "x" / "table1" / "ledger.jsonl").read_text().splitlines()]
        assert any(line["trained"] for line in lines) == trains
        assert len(lines) == 8


def test_run_directories_count_where_nothing_is_stored(register: Path, tmp_path: Path) -> None:
    list(run_missing("cpu", out=tmp_path / "runs", workers=0))
    (register / "results" / "x" / "table1.cpu.json").unlink()
    assert all_findings()[0].verdict == "not run"
    assert all_findings(runs=tmp_path / "runs")[0].effect is not None


def test_a_sweep_may_be_stored_in_part_and_is_then_still_missing(register: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (register / "x" / "table1.cpu.toml").write_text(TABLE + "\n[sweep]\nrounds = [1, 2]\n")
    first = jobs_of(register / "x" / "table1.cpu.toml", out=runs).each[0]
    execute(first.experiment, first.folder, workers=0)
    with pytest.raises(ConfigError, match="is not finished"):
        store_result("x/table1", "cpu", runs)
    with pytest.raises(ConfigError, match="is not finished"):
        store_result("x/table1", "cpu", tmp_path / "elsewhere", partial=True)  # nothing of it is
    stored = read_result(store_result("x/table1", "cpu", runs, partial=True))
    assert (list(stored.cells), stored.unfinished) == (["1"], ("2",))
    assert missing_names("cpu") == ["x/table1"]


def test_time_that_is_over_stops_at_a_round_and_the_next_call_goes_on(register: Path, tmp_path: Path) -> None:
    ticks = iter(range(0, 10**6, 600))  # every look at the clock is ten minutes later
    (attempt,) = run_missing("cpu", 0.5, out=tmp_path / "runs", workers=0, clock=lambda: float(next(ticks)))
    assert attempt.outcome == "stopped"
    assert "time is over in fedavg, seed 0, round 2" in attempt.why
    with pytest.raises(ConfigError, match=r"x/table1 is not finished in .*: table1; continue with: fedfuse reproduce"):
        store_result("x/table1", "cpu", tmp_path / "runs" / "x" / "table1")
    (again,) = run_missing("cpu", 0.0, out=tmp_path / "runs", workers=0)
    assert again.outcome == "not begun"
    (done,) = run_missing("cpu", out=tmp_path / "runs", workers=0)
    assert done.outcome == "stored"


def test_a_table_that_fails_does_not_keep_others_from_running(register: Path, tmp_path: Path) -> None:
    (register / "x" / "table2.cpu.toml").write_text(TABLE.replace('source = "digits"', 'source = "no-such-data"'))
    outcomes = {attempt.name: attempt.outcome for attempt in run_missing("cpu", out=tmp_path / "runs", workers=0)}
    assert outcomes == {"x/table1": "stored", "x/table2": "failed"}
