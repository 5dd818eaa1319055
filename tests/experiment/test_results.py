"""Lines on disk, mended after a crash, and the results that are made of them."""

from __future__ import annotations

import builtins
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedfuse
from fedfuse.errors import ConfigError
from fedfuse.experiment.results import FLAT, Ledger, Results, flat, plain, write_json, write_results

TINY: dict[str, Any] = {
    "name": "a <b> study",
    "rounds": 2,
    "data": {"clients": 2, "train_limit": 60, "test_limit": 30},
    "model": {"name": "mlp", "hidden": [4]},
    "methods": [{"name": "fedavg"}, {"name": "fednova"}],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return fedfuse.run(TINY, out=tmp_path_factory.mktemp("out") / "run", workers=0, memo=False)


def test_a_dictionary_runs_as_a_file_would(results: Results, tmp_path: Path) -> None:
    (tmp_path / "same.toml").write_text((results.folder / "config.toml").read_text())
    again = fedfuse.run(tmp_path / "same.toml", out=tmp_path / "run", workers=0, memo=False)
    assert again.table() == results.table()
    assert TINY["data"] == {"clients": 2, "train_limit": 60, "test_limit": 30}, "what was given is not written to"
    with pytest.raises(ConfigError, match="there is no key 'epochs'; did you mean 'local.epochs'"):
        fedfuse.run(TINY | {"epochs": 3}, out=tmp_path / "bad")


def test_a_dictionary_may_sweep_and_be_changed(tmp_path: Path) -> None:
    values = TINY | {"sweep": {"local.epochs": [1, 2]}}
    swept = fedfuse.run(values, sets=["rounds=1"], out=tmp_path / "both", workers=0, memo=False)
    assert [row["experiment"] for row in swept.rows] == ["a <b> study-1"] * 2 + ["a <b> study-2"] * 2
    assert fedfuse.load(tmp_path / "both").table() == swept.table()


def test_the_repr_is_one_short_line(results: Results) -> None:
    said = repr(results)
    assert said.startswith("Results('a <b> study': fedavg, fednova; seeds 1, rounds 2; files in ")
    assert len(said.splitlines()) == 1
    assert repr(Results("none", Path("x"), ())) == "Results('none': ; seeds 0, rounds 0; files in 'x')"


def test_a_notebook_shows_the_table(results: Results) -> None:
    page = results._repr_html_()
    assert page.count("<tr>") == 3
    assert "<b>a &lt;b&gt; study</b>" in page
    assert "fednova" in page
    assert "**" not in page


def test_the_frame_has_every_row_and_its_numbers(results: Results) -> None:
    frame = results.frame()
    assert len(frame) == 4
    assert list(frame.columns[:5]) == ["experiment", "method", "label", "seed", "round"]
    last = frame[frame["round"] == 2].set_index("label")["accuracy"]
    assert last.to_dict() == {row["label"]: row["accuracy"] for row in results.rows if row["round"] == 2}


def test_without_pandas_it_says_what_to_install(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"needs pandas; install fedfuse\[tables\]"):
        results.frame()


def line(round_: int, **more: object) -> dict[str, object]:
    return {"method": "fedavg", "label": "fedavg", "seed": 0, "round": round_, **more}


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def test_a_line_is_on_disk_when_append_returns(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(ledger.path.stat().st_size))
    for round_ in (1, 2):
        ledger.append(line(round_, nll=math.inf, weights=torch.ones(2)))
        assert ledger.path.read_text().count("\n") == round_
        assert synced[-1] == ledger.path.stat().st_size
    assert ledger.lines()[1] == line(2, nll=None, weights=[1.0, 1.0])


def test_the_last_line_of_a_round_wins(ledger: Ledger) -> None:
    for text in (line(1, accuracy=0.1), line(2), line(1, accuracy=0.2)):
        ledger.append(text)
    assert ledger.lines() == [line(1, accuracy=0.2), line(2)]


def test_keep_rewrites_the_file_whole(ledger: Ledger) -> None:
    for round_ in (1, 2, 3):
        ledger.append(line(round_))
    ledger.keep(lambda found: found["round"] != 2)
    assert [found["round"] for found in ledger.lines()] == [1, 3]
    assert [path.name for path in ledger.path.parent.iterdir() if path.is_file()] == ["ledger.jsonl"]


@given(st.integers(0, 200))
def test_a_line_cut_anywhere_neither_hurts_nor_swallows_the_next(cut: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as home:
        ledger = Ledger(Path(home) / "ledger.jsonl")
        ledger.append(line(1))
        whole = ledger.path.stat().st_size
        ledger.append(line(2))
        size = ledger.path.stat().st_size
        os.truncate(ledger.path, max(whole, size - 1 - cut))
        assert [found["round"] for found in ledger.lines()][:1] == [1]
        ledger.mend()
        ledger.append(line(3))
        assert [found["round"] for found in ledger.lines()] == [1, 3]
        assert all(json.loads(text) for text in ledger.path.read_text().splitlines())


def test_what_is_no_line_is_passed_over(ledger: Ledger) -> None:
    assert ledger.lines() == []
    ledger.mend()
    ledger.path.write_bytes(b'3\n{"label": "x"}\n\xff\xfe\n[]\n' + json.dumps(line(1)).encode() + b"\n")
    assert Ledger(ledger.path).lines() == [line(1)]


@settings(deadline=None)  # it waits for the disk
@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_flipped_bit_of_a_line_is_seen(at: int, bit: int) -> None:
    """A digit of an accuracy that changed on disk was reported as it stood there."""
    import tempfile

    with tempfile.TemporaryDirectory() as home:
        ledger = Ledger(Path(home) / "ledger.jsonl")
        told = line(1, accuracy=0.875, refused=[{"client": "a"}], clients={"a": {"steps": 3}})
        ledger.append(told)
        data = bytearray(ledger.path.read_bytes())
        data[at % len(data)] ^= 1 << bit
        ledger.path.write_bytes(bytes(data))
        assert all({key: found[key] for key in told} == told for found in ledger.lines())


def test_a_resumed_ledger_has_no_damaged_lines(ledger: Ledger) -> None:
    for round_ in (1, 2, 3):
        ledger.append(line(round_, accuracy=0.5))
    ledger.path.write_text(ledger.path.read_text().replace('"round":2,"accuracy":0.5', '"round":2,"accuracy":0.7'))
    ledger.mend()
    assert [found["round"] for found in ledger.lines()] == [1, 3]
    assert ledger.path.read_text().count("\n") == 2


def test_lines_are_read_once_and_are_what_the_file_says(ledger: Ledger) -> None:
    ledger.append(line(1, accuracy=0.5))
    for change in (
        lambda: ledger.append(line(2, weights=(1, math.nan), clients={3: "a"})),
        lambda: ledger.append(line(1, accuracy=0.6)),
        lambda: ledger.keep(lambda found: found["round"] == 2),
    ):
        assert ledger.lines() == Ledger(ledger.path).lines()
        change()
        assert ledger.lines() == Ledger(ledger.path).lines()


def test_lines_of_an_older_ledger_have_no_checksum(ledger: Ledger) -> None:
    ledger.path.write_text(json.dumps(line(1)) + "\n")
    ledger.append(line(2))
    assert [found["round"] for found in ledger.lines()] == [1, 2]


def test_a_full_disk_is_one_sentence(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left on device; free some space and --resume"):
        ledger.append(line(1))


def test_a_row_of_results_has_the_promised_keys(tmp_path: Path) -> None:
    told = {"refused": [{"client": "a"}, {"client": "b"}], "clipped": [{"client": "c"}] * 3}
    row = flat(line(1, accuracy=0.5, confusion=[[1]], **told, selected=True))
    assert set(row) == {*FLAT, "refused", "clipped", "selected"}
    assert (row["accuracy"], row["refused"], row["ece"], row["selected"]) == (0.5, 2, None, True)
    assert row["clipped"] == 1, "one client, however many of its layers were weakened"
    write_results(tmp_path / "results.json", "study", [line(1), line(2)])
    told = json.loads((tmp_path / "results.json").read_text())
    assert told["name"] == "study"
    assert [row["round"] for row in told["rows"]] == [1, 2]
    assert "selected" not in told["rows"][0]


def test_plain_values_are_json(tmp_path: Path) -> None:
    value = {1: (True, None, {2.5}), "t": torch.tensor([math.nan, 1.0]), "p": Path("x")}
    assert plain(value) == {"1": [True, None, [2.5]], "t": [None, 1.0], "p": "x"}
    write_json(tmp_path / "a" / "b.json", value)
    assert json.loads((tmp_path / "a" / "b.json").read_text()) == plain(value)


def test_a_ledger_that_is_a_directory_is_one_sentence(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.path.mkdir()
    for use in (ledger.lines, ledger.mend, lambda: ledger.append({"label": "a"})):
        with pytest.raises(ConfigError, match="ledger.jsonl.*: Is a directory"):
            use()
