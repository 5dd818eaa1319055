"""What can be made again, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedfuse.errors import ConfigError
from fedfuse.experiment.reproduce import (
    PaperFigure,
    all_figures,
    catalogue,
    experiments_folder,
    file_digests,
    find,
    store_result,
)
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
