"""Texts as sources: the speakers of Shakespeare's plays, folders of `.txt` files, and `.jsonl` files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedfuse.core.characters import UNKNOWN
from fedfuse.core.files import regular
from fedfuse.data.rows import stratified_split
from fedfuse.data.stores import Store, damaged_error
from fedfuse.data.texts import TextHalves, TextSplit, language_halves, pad, vocabulary_of
from fedfuse.errors import ConfigError
from fedfuse.tasks import LanguageModel, Task, TextClassification

OPTIONS = ("length", "test_fraction", "text", "label", "client")
SUFFIXES = (".jsonl", ".txt")
LENGTH, _FRACTION = 80, 0.2

PLAYS = "input.txt"
PLAY_OPTIONS = ("length", "speakers", "test_fraction")
CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Those of the plays, so that the vocabulary is the same whoever is chosen."""


def reads_texts(task: Task) -> bool:
    """Whether a task's rows are texts."""
    return isinstance(task, LanguageModel | TextClassification)


def read_plays(
    store: Store,
    parts: object,  # noqa: ARG001 - the form of readers; there is one file
    half: Literal["train", "test"],
    length: int = LENGTH,
    speakers: int = 0,
    test_fraction: float = _FRACTION,
) -> TextSplit:
    """One half of what the speakers of the plays say, in windows of characters with the next as target.

    Args:
        store: where the text lies.
        parts: its one file.
        half: the first part of what each speaker says, or the last.
        length: of a window.
        speakers: how many, those who say the most; 0 for all.
        test_fraction: of each speaker's words that are judged on.
    """
    spoken = speeches(store.read(PLAYS).decode("utf-8"), store.location / PLAYS)
    most = sorted(spoken, key=lambda who: (-len(spoken[who]), who))[: _whole("speakers", speakers, 0) or None]
    chosen = {who: spoken[who] for who in sorted(most)}
    length, fraction = _whole("length", length), _share("test_fraction", test_fraction)
    halves = language_halves(chosen, length, fraction, (UNKNOWN, *CHARACTERS))
    return halves.train if half == "train" else halves.test


def speeches(text: str, where: object) -> dict[str, str]:
    r"""What each speaker of a play says, in order: a name and a colon, then lines up to an empty one.

    Example:
        >>> speeches("All:\nSpeak.\n\nFirst:\nYou are\nresolved?\n\nAll:\nResolved.\n", "a play")
        {'All': 'Speak.\nResolved.\n', 'First': 'You are\nresolved?\n'}
    """
    spoken: dict[str, list[str]] = {}
    for part in text.split("\n\n"):
        name, _, words = part.strip("\n").partition("\n")
        if not name.endswith(":"):
            raise damaged_error(where, f"a speech begins with {name[:40]!r}, expected a name and a colon")
        spoken.setdefault(name[:-1], []).append(words + "\n")
    return {who: "".join(words) for who, words in spoken.items()}


@dataclass(frozen=True, slots=True)
class WrittenText:
    """One text, its class and its writer where they are known, and where it stands in its source."""

    words: str
    label: str | None
    owner: str | None
    place: str


def open_texts(location: Path, options: Mapping[str, object], task: Task) -> TextHalves:
    """A folder of `.txt` files, one such file, or a `.jsonl` file, as a source.

    In a folder, the folder that a file lies in is its class, or for a language model its writer; files beside each
    other without a folder are writers of their own. A line of a `.jsonl` is an object with the keys `text` and `label`;
    options of those names say otherwise, and `client` names the key of the writer.

    Raises:
        ConfigError: naming the file and line that cannot be.
    """
    length = _whole("length", options.get("length", LENGTH))
    fraction = _share("test_fraction", options.get("test_fraction", _FRACTION))
    texts = read_texts(location, options, task)
    if isinstance(task, LanguageModel):
        return language_halves(texts_by_owner(texts), length, fraction)
    return _class_halves(texts, length, fraction, location)


def read_texts(location: Path, options: Mapping[str, object], task: Task) -> list[WrittenText]:
    """All texts of a folder of `.txt` files, of one such file, or of a `.jsonl` file.

    Raises:
        ConfigError: naming the file and line that cannot be, or that there is none.
    """
    texts = list(_read_lines(location, options) if location.suffix == ".jsonl" else _read_folder(location, task))
    if not any(text.words for text in texts):
        raise ConfigError(f"{location} holds no text; put .txt files in it, or give a .jsonl file")
    return texts


def texts_by_owner(texts: list[WrittenText]) -> dict[str, str]:
    """What each writer wrote, text after text; `all` is whoever is not named."""
    together: dict[str, list[str]] = {}
    for text in texts:
        together.setdefault(text.owner or "all", []).append(text.words)
    return {who: "\n".join(words) for who, words in together.items()}


def _class_halves(texts: list[WrittenText], length: int, fraction: float, location: Path) -> TextHalves:
    if any(text.label is None for text in texts):
        raise ConfigError(f"{location}: a text has no class; put it into a folder of that name, or add a label")
    classes = tuple(sorted({str(text.label) for text in texts}))
    y = np.array([classes.index(str(text.label)) for text in texts], dtype=np.int64)
    train, test = stratified_split(y, fraction)
    vocabulary = vocabulary_of(texts[i].words for i in train)
    x = pad([text.words for text in texts], length, vocabulary)
    owners = tuple(texts[i].owner or "unknown" for i in train) if any(t.owner for t in texts) else ()
    own, rest = (TextSplit(x[half], y[half], vocabulary=vocabulary) for half in (train, test))
    return TextHalves(replace(own, owners=owners), rest, classes)


def _read_folder(location: Path, task: Task) -> Iterator[WrittenText]:
    if location.is_file():
        yield WrittenText(read_words(location), None, location.stem, location.name)
        return
    for path in sorted(location.rglob("*.txt")):
        folder = path.relative_to(location).parts[0] if path.parent != location else None
        speaks = folder or path.stem if isinstance(task, LanguageModel) else None
        yield WrittenText(read_words(path), folder, speaks, path.relative_to(location).as_posix())


def _read_lines(location: Path, options: Mapping[str, object]) -> Iterator[WrittenText]:
    keys = {key: str(options.get(key, default)) for key, default in (("text", "text"), ("label", "label"))}
    owner = options.get("client")
    for number, line in enumerate(read_words(location).splitlines(), 1):
        if line.strip():
            row = _parse(line, f"{location}, line {number}")
            words = row.get(keys["text"])
            if not isinstance(words, str):
                have = ", ".join(map(repr, list(row)[:6]))
                raise ConfigError(f"{location}, line {number}: {keys['text']!r} is no text; the line has {have}")
            label, who = row.get(keys["label"]), row.get(str(owner)) if owner is not None else None
            label, who = (None if value is None else str(value) for value in (label, who))
            yield WrittenText(words, label, who, f"line {number}")


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as why:
        raise ConfigError(f"{where} is no JSON ({why}), expected an object with a text and a label") from why
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is a {type(row).__name__}, expected an object with a text and a label")
    return row


def read_words(path: Path) -> str:
    """A file's text.

    Raises:
        ConfigError: if it is none.
    """
    try:
        return regular(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as why:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {why}") from why


def _whole(name: str, value: object, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}, expected a whole number from {least} on")
    return value


def _share(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ConfigError(f"{name} is {value!r}, expected a number between 0 and 1; try 0.2")
    return float(value)


read_first_words, read_last_words = partial(read_plays, half="train"), partial(read_plays, half="test")
