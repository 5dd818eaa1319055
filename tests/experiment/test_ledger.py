"""Lines on disk: whole, in order, mended after a crash."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfuse.errors import ConfigError
from fedfuse.experiment.results import FLAT, Ledger, flat, plain, write_json, write_results


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
