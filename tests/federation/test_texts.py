"""Texts by federation folders: typed as a newcomer would, with the mistakes one makes."""

from __future__ import annotations

import csv
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import Fedfuse

from fedfuse.core.inputs import PLAIN, TextForm, form_key
from fedfuse.data.site import read_site
from fedfuse.data.texts import read_text_rows
from fedfuse.errors import ConfigError
from fedfuse.federation.agreement import read_federation
from fedfuse.federation.site import update_by_federation
from fedfuse.tasks import LANGUAGE_MODEL, TEXT_CLASSIFICATION
from fedfuse.tasks.language import NO_TARGET
from fedfuse.wire.files import load_answering

WORDS = {"money": ("stocks fell", "bank shares", "profit rose"), "sport": ("the team won", "goal scored", "match cup")}
SMALL = ("model.width=8", "model.heads=2", "model.depth=1", "local.epochs=6", "local.batch_size=8")
SETS = tuple(word for text in SMALL for word in ("--set", text))
CLASSES = ("init", "news", "--task", "text-classification", "--classes", "money,sport", "--length", "16", *SETS)
LANGUAGE = ("init", "books", "--task", "language-model", "--length", "12", *SETS)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Three sites with lines of two classes, and the same as books without any."""
    for seed, name in enumerate("abt"):
        draw = random.Random(seed)
        labels = [draw.choice(list(WORDS)) for _ in range(24)]
        lines = [{"text": " ".join(draw.choices(WORDS[label], k=2)), "label": label} for label in labels]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        (tmp_path / f"{name}.txt").write_text("\n".join(line["text"] for line in lines), encoding="utf-8")
    return tmp_path


def run(fedfuse: Fedfuse, *words: str) -> str:
    said = fedfuse(*words)
    assert said.code == 0, said.err
    return said.out


def read_rows(path: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).read_text(encoding="utf-8").splitlines()))


def test_classes_of_texts_from_the_folder_to_the_answers(fedfuse: Fedfuse, texts: Path) -> None:
    assert "classes: money, sport" in run(fedfuse, *CLASSES, "--method", "fedlpa")
    for site in "ab":
        told = json.loads(
            run(fedfuse, "update", "--federation", "news", "--data", f"{site}.jsonl", "-o", f"{site}.st", "--json")
        )
        assert told["rows"] == sum(told["classes"].values()) == 24
        assert "accuracy" in told
    run(fedfuse, "fuse", "a.st", "b.st", "--federation", "news", "-o", "all.st")
    model, about = load_answering(Path("all.st"))
    assert about.class_names == ("money", "sport")
    assert isinstance(about.inputs, TextForm)
    scores = json.loads(run(fedfuse, "evaluate", "all.st", "--data", "t.jsonl", "--json"))["all.st"]
    assert (scores["task"], scores["rows"], scores["classes"]) == ("text-classification", 24, ["money", "sport"])
    run(fedfuse, "predict", "all.st", "--data", "t.jsonl", "-o", "answers.csv")
    rows = read_rows("answers.csv")
    assert rows[2]["row"] == "line 3"
    site = read_site("t.jsonl", half="test", form=about.inputs, classes=about.class_names, task=TEXT_CLASSIFICATION)
    with torch.no_grad():
        expected = model.logits(site.rows.x).softmax(-1)  # type: ignore[attr-defined]
    assert [float(row["p(sport)"]) for row in rows] == pytest.approx(expected[:, 1].tolist(), abs=1e-5)
    assert scores["accuracy"] == pytest.approx(float((expected.argmax(-1) == site.rows.y).double().mean()))
    assert "texts" in run(fedfuse, "show", "all.st")


def test_a_language_model_from_the_folder_to_the_next_character(fedfuse: Fedfuse, texts: Path) -> None:
    said = run(fedfuse, *LANGUAGE, "--data", "a.txt", "--method", "fisher")
    assert "characters: �, U+000A, U+0020, a, b" in said
    for site in "ab":
        words = ("--federation", "books", "--data", f"{site}.txt", "-o", f"{site}.st", "--hold-out", "0.2")
        assert "perplexity" in run(fedfuse, "update", *words)
    run(fedfuse, "fuse", "a.st", "b.st", "--federation", "books", "-o", "all.st")
    scores = json.loads(run(fedfuse, "evaluate", "all.st", "--data", "t.txt", "--json"))["all.st"]
    assert scores["perplexity"] == pytest.approx(math.exp(scores["nll"]))
    assert scores["tokens"] == len(read_federation(Path("books")).agreement.output_names)
    Path("asked").mkdir()
    (Path("asked") / "one.txt").write_text("the tea", encoding="utf-8")
    (Path("asked") / "two.txt").write_text("a text that is longer than twelve goa", encoding="utf-8")
    run(fedfuse, "predict", "all.st", "--data", "asked", "-o", "next.csv")
    rows = read_rows("next.csv")
    assert [row["row"] for row in rows] == ["one.txt", "two.txt"]
    model, about = load_answering(Path("all.st"))
    assert isinstance(about.inputs, TextForm)
    places = [about.inputs.vocabulary.index(character) for character in "the tea"]
    with torch.no_grad():
        tokens = torch.tensor([[*places, *[0] * (12 - len(places))]])
        after = model.logits(tokens)[0, len(places) - 1].softmax(-1)  # type: ignore[attr-defined]
    assert float(rows[0]["p(m)"]) == pytest.approx(float(after[about.inputs.vocabulary.index("m")]), abs=1e-5)


def test_a_folder_of_class_folders_and_another_network_go_the_same_way(fedfuse: Fedfuse, texts: Path) -> None:
    for label, words in WORDS.items():
        for half in ("train", "test"):
            (texts / "mails" / half / label).mkdir(parents=True)
            for place in range(8):
                path = texts / "mails" / half / label / f"{place}.txt"
                path.write_text(words[place % len(words)] + half, encoding="utf-8")
    init = ("init", "own", "--task", "text-classification", "--data", "mails", "--model")
    sets = ("--set", "local.epochs=1", "--length", "20")
    said = run(fedfuse, *init, "tests.federation.test_texts:CountedCharacters", *sets)
    assert "classes: money, sport" in said
    trusted = read_federation(Path("own"), trusted=["tests.federation.test_texts:CountedCharacters"])
    made = update_by_federation(trusted, "mails")
    assert made.site.half == "train"
    assert made.site.names[0] == "money/0.txt"
    assert made.site.counts == {"money": 8, "sport": 8}


def tokens_by_the_note(note: dict[str, Any], words: list[str]) -> np.ndarray[Any, Any]:
    """Texts as another program has to give them, by what the note says of the inputs and nothing else."""
    assert note["reads"]["rows"].endswith(
        "int64, a character's place in `characters` of `inputs`, from 1; 0 behind the end and for unknown ones"
    )
    length, known = note["inputs"]["length"], note["inputs"]["characters"]
    return np.array([[known.find(c) + 1 for c in text] + [0] * (length - len(text)) for text in words], dtype=np.int64)


@pytest.mark.parametrize("task", ["text-classification", "language-model"])
def test_onnx_takes_characters_and_gives_the_answers_of_predict(fedfuse: Fedfuse, texts: Path, task: str) -> None:
    runtime = pytest.importorskip("onnxruntime")
    names, kind = (CLASSES, "jsonl") if task == "text-classification" else (LANGUAGE, "txt")
    run(fedfuse, *names, *(() if kind == "jsonl" else ("--data", "a.txt")))
    for site in "ab":
        run(fedfuse, "update", "--federation", names[1], "--data", f"{site}.{kind}", "-o", f"{site}.st")
    run(fedfuse, "fuse", "a.st", "b.st", "--federation", names[1], "-o", "all.st")
    run(fedfuse, "export", "all.st", "--to", "onnx", "-o", "all.onnx")
    words = ["the team", "bank", "goal €", "s"]
    (texts / "asked.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in words), encoding="utf-8")
    run(fedfuse, "predict", "all.st", "--data", "asked.jsonl", "-o", "answers.csv")
    expected = [[float(v) for k, v in row.items() if k.startswith("p(")] for row in read_rows("answers.csv")]
    note = json.loads(Path("all.onnx.json").read_text())
    assert (note["task"], note["normalizes"]) == (task, False)
    session = runtime.InferenceSession("all.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(["probabilities"], {"rows": tokens_by_the_note(note, words)})
    if task == "language-model":
        assert note["gives"]["probabilities"].startswith("at every character, ")
        found = np.stack([each[len(text) - 1] for each, text in zip(found, words, strict=True)])
    np.testing.assert_allclose(found, expected, atol=1e-5)


class CountedCharacters(torch.nn.Module):
    """A network of another kind: it counts characters and weighs them."""

    def __init__(self, tokens: int, classes: int) -> None:
        super().__init__()
        self.weights = torch.nn.EmbeddingBag(tokens, classes, mode="sum")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.weights(x)
        return found


def test_windows_are_told_the_next_character_and_ends_ask_for_it(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("abcab", encoding="utf-8")
    form = TextForm(length=3, characters="abc")
    found = read_text_rows(path, form=form, task=LANGUAGE_MODEL)
    assert found.rows.x.tolist() == [[1, 2, 3], [1, 0, 0]]
    assert found.rows.y.tolist() == [[2, 3, 1], [2, NO_TARGET, NO_TARGET]]
    end = read_text_rows(path, form=form, task=LANGUAGE_MODEL, labelled=False)
    assert end.rows.x.tolist() == [[3, 1, 2]]
    assert end.rows.y.tolist() == [[NO_TARGET, NO_TARGET, 0]]


def test_a_constant_answer_of_a_language_model_is_the_perplexity_of_its_frequencies(
    fedfuse: Fedfuse, texts: Path
) -> None:
    run(fedfuse, *LANGUAGE, "--set", "local.epochs=1")
    seen = update_by_federation(read_federation(Path("books")), "a.txt").assessment
    assert seen is not None
    text = (texts / "a.txt").read_text(encoding="utf-8")[1:]
    shares = [text.count(character) / len(text) for character in set(text)]
    assert seen.constant == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)))


def test_updates_of_another_vocabulary_are_refused_by_the_characters(fedfuse: Fedfuse, texts: Path) -> None:
    run(fedfuse, *CLASSES)
    Path("letters.txt").write_text(PLAIN.replace("q", "ö"), encoding="utf-8")
    run(fedfuse, *("init", "other", *CLASSES[2:]), "--characters", "letters.txt")
    for folder, site in (("news", "a"), ("news", "b"), ("other", "t")):
        run(fedfuse, "update", "--federation", folder, "--data", f"{site}.jsonl", "-o", f"{site}.st")
    said = fedfuse("fuse", "a.st", "b.st", "t.st", "--federation", "news", "-o", "all.st")
    assert said.code == 0
    assert "t: the form of inputs is texts with 'ö', without 'q', expected the characters and length" in said.err


@pytest.mark.parametrize(
    ("name", "contents", "told"),
    [
        ("empty.jsonl", "", "empty.jsonl holds no text"),
        (
            "odd.jsonl",
            '{"text": "goal", "label": "sports"}',
            "odd.jsonl, line 1: the class is 'sports', expected one of money",
        ),
        ("bare.jsonl", '{"text": "goal"}', "bare.jsonl, line 1: the text has no class"),
        ("none.jsonl", '{"words": "goal", "label": "sport"}', "none.jsonl, line 1: 'text' is no text"),
        ("cut.jsonl", '{"text": "goal"', "cut.jsonl, line 1 is no JSON"),
        ("greek.jsonl", '{"text": "ποδόσφαιρο", "label": "sport"}', "100% of the characters of"),
        ("few.jsonl", '{"text": "goal", "label": "sport"}', "few.jsonl has 1 rows and the federation 'news' asks for"),
        ("table.csv", "text,label\ngoal,sport\n", "table.csv holds no texts; give a .jsonl file"),
    ],
)
def test_what_cannot_be_read_is_refused_by_file_and_line(
    fedfuse: Fedfuse, texts: Path, name: str, contents: str, told: str
) -> None:
    run(fedfuse, *CLASSES)
    (texts / name).write_text(contents, encoding="utf-8")
    said = fedfuse("update", "--federation", "news", "--data", name, "-o", "x.st")
    assert said.code == 2
    assert told in said.err
    assert not Path("x.st").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--task", "text-classification"), "the classes of texts are not named"),
        (("--task", "language-model", "--classes", "a,b"), "a language model tells characters and no classes"),
        (("--task", "language-model", "--model", "text_classifier"), "answers once for a text"),
        (("--task", "language-model", "--image-size", "8"), "--image-size is said of other rows than texts"),
        (("--task", "language-model", "--method", "pfnm"), "pfnm"),
        (("--length", "8", "--classes", "a,b", "--shape", "3"), "--length and --characters are said of texts"),
    ],
)
def test_a_folder_that_cannot_be_is_not_made(fedfuse: Fedfuse, texts: Path, words: tuple[str, ...], told: str) -> None:
    said = fedfuse("init", "fed", *words)
    assert said.code == 2
    assert told in said.err
    assert not Path("fed").exists()


def test_characters_that_stand_there_twice_and_public_sets_are_refused(texts: Path) -> None:
    with pytest.raises(ValueError, match="name 'a' twice"):
        TextForm(length=4, characters="aba")
    with pytest.raises(ConfigError, match="shakespeare is no file of a site's texts"):
        read_site("shakespeare", task=LANGUAGE_MODEL)
    one, other = TextForm(length=4, characters="ab"), TextForm(length=4, characters="ba")
    assert form_key(one, mixed=True) != form_key(other, mixed=True)
    assert one.differences(other) == "texts whose characters stand in another order"
    assert one.differences(TextForm(length=5, characters="ab")) == "texts of up to 4 characters"
