"""Texts as sources: speakers, folders and lines; and what cannot be is refused by file and line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedfuse.data import Natural, load, outline, partition
from fedfuse.data.texts import cut_windows, encode, speeches, vocabulary_of
from fedfuse.errors import ConfigError
from fedfuse.tasks import CLASSIFICATION, LANGUAGE_MODEL, TEXT_CLASSIFICATION
from fedfuse.tasks.language import NO_TARGET

PLAY = "".join(f"{who}:\n{who} says {'again ' * n}and again\n\n" for n in range(8) for who in ("Ann", "Bob", "Cid"))


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "input.txt").write_text(PLAY.rstrip() + "\n")
    monkeypatch.setenv("FEDFUSE_DATA", str(tmp_path))


def write_lines(path: Path, rows: list[object]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


@pytest.mark.usefixtures("play")
def test_speakers_are_clients_and_the_end_of_their_words_is_judged_on() -> None:
    found = load("shakespeare", task=LANGUAGE_MODEL, options={"length": 16, "speakers": 2, "test_fraction": 0.25})
    assert found.train.x.shape[1] == 16
    assert len(found.vocabulary) == len(found.classes) == 66
    assert sorted(set(found.owners)) == ["Ann", "Bob"]
    parts = partition(found.labels(), Natural(), 1, 0, owners=found.owners).clients
    rows = found.train.take(parts["Ann"])
    words = speeches(PLAY.rstrip() + "\n", "play")["Ann"]
    told = rows.y[rows.y != NO_TARGET]
    assert "".join(found.vocabulary[t] for t in told.tolist()) == words[1 : round(0.75 * len(words))]


@pytest.mark.usefixtures("play")
def test_what_plays_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ConfigError, match="'lenght' is unknown .* length, speakers, test_fraction"):
        load("shakespeare", task=LANGUAGE_MODEL, options={"lenght": 3})
    with pytest.raises(ConfigError, match="speakers is -1"):
        load("shakespeare", task=LANGUAGE_MODEL, options={"speakers": -1})
    with pytest.raises(ConfigError, match=r"expected int64 of shape .*task classification"):
        load("shakespeare", options={"speakers": 2})
    with pytest.raises(ConfigError, match="damaged: a speech begins with 'no name'"):
        speeches("no name\nat all", "a play")


def test_windows_lose_no_token_but_the_first() -> None:
    for count in range(12):
        tokens = np.arange(1, count + 1)
        x, y = cut_windows(tokens, 4)
        assert y[y != NO_TARGET].tolist() == tokens[1:].tolist()
        assert x[y != NO_TARGET].tolist() == tokens[:-1].tolist()


def test_unknown_characters_share_a_token() -> None:
    known = vocabulary_of(["abc"])
    assert encode("aé?c", known).tolist() == [1, 0, 0, 3]


def test_lines_with_a_label_are_classified(tmp_path: Path) -> None:
    rows = [
        {"body": f"text {i} " * (1 + i % 2), "kind": "good" if i % 2 else "bad", "by": f"w{i % 3}"} for i in range(20)
    ]
    source = write_lines(tmp_path / "texts.jsonl", rows)  # type: ignore[arg-type]
    options = {"text": "body", "label": "kind", "client": "by", "length": 12}
    found = load(source, task=TEXT_CLASSIFICATION, options=options)
    assert (found.classes, len(found.train), len(found.test)) == (("bad", "good"), 16, 4)
    assert found.train.x.dtype == torch.int64
    assert sorted(set(found.owners)) == ["w0", "w1", "w2"]
    assert int(found.train.x.max()) < len(found.vocabulary)


def test_folders_are_classes_or_writers(tmp_path: Path) -> None:
    for folder in ("ham", "spam"):
        (tmp_path / "mail" / folder).mkdir(parents=True)
        for i in range(5):
            (tmp_path / "mail" / folder / f"{i}.txt").write_text(f"{folder} number {i}: hello there")
    mail = str(tmp_path / "mail")
    assert load(mail, task=TEXT_CLASSIFICATION, options={"length": 8}).classes == ("ham", "spam")
    found = load(mail, task=LANGUAGE_MODEL, options={"length": 8})
    assert sorted(set(found.owners)) == ["ham", "spam"]
    one = load(f"{mail}/ham/0.txt", task=LANGUAGE_MODEL, options={"length": 8})
    assert set(one.owners) == {"0"}


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        (["{", "line 1 is no JSON"], "line 1 is no JSON"),
        (["[1]"], "line 1 is a list"),
        (['{"texts": "a"}'], "line 1: 'text' is no text; the line has 'texts'"),
        (['{"text": "a"}'], "a text has no class"),
        ([], "holds no text"),
    ],
)
def test_lines_that_cannot_be_are_named(tmp_path: Path, lines: list[str], word: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=word):
        load(str(path), task=TEXT_CLASSIFICATION)


def test_a_file_of_texts_needs_a_task_of_texts(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "texts.jsonl", [{"text": "a", "label": "b"}])
    with pytest.raises(ConfigError, match="holds texts; set task = 'text-classification'"):
        load(source, task=CLASSIFICATION)


def test_the_form_of_plays_is_known_without_them() -> None:
    form = outline("shakespeare", train_limit=7, task=LANGUAGE_MODEL)
    assert (form.train.x.dtype, tuple(form.train.y.shape), len(form.vocabulary)) == (torch.int64, (7, 80), 66)
