"""Texts as rows of tokens: as an experiment's source (`open_texts`), as a site's own (`read_text_rows`), and the plays.

A token is a character's place in a vocabulary, 0 for any it lacks. A text classifier reads each text cut or padded to
one length (`pad`); a language model reads windows, each position's target being the next character (`cut_windows`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedfuse.core.files import regular
from fedfuse.core.inputs import UNKNOWN, TextForm, token_names
from fedfuse.core.metadata import names_text
from fedfuse.data.images import half_folder
from fedfuse.data.rows import Array, ArraySplit, Halves, Rows, SiteRows, stratified_split
from fedfuse.data.stores import Store, damaged_error
from fedfuse.errors import ConfigError, suggest
from fedfuse.tasks import LanguageModel, Task, TextClassification
from fedfuse.tasks.language import NO_TARGET, PADDING

OPTIONS = ("length", "test_fraction", "text", "label", "client")
SUFFIXES = (".jsonl", ".txt")
LENGTH = 80
_TEST_FRACTION = 0.2

PLAYS = "input.txt"
PLAY_OPTIONS = ("length", "speakers", "test_fraction")
CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Those of the plays, so that the vocabulary is the same whichever speakers are chosen."""


def reads_texts(task: Task) -> bool:
    """Whether a task's rows are texts."""
    return isinstance(task, LanguageModel | TextClassification)


def vocabulary_of(texts: Iterable[str]) -> tuple[str, ...]:
    """The unknown, then every character of some texts in order.

    Example:
        >>> vocabulary_of(["ba", "ac"])
        ('�', 'a', 'b', 'c')
    """
    return (UNKNOWN, *sorted(set().union(*texts)))


def encode(text: str, vocabulary: Sequence[str]) -> Array:
    """A text's tokens; what the vocabulary lacks is unknown.

    Example:
        >>> encode("abx", ("�", "a", "b"))
        array([1, 2, 0])
    """
    places = {character: place for place, character in enumerate(vocabulary)}
    return np.array([places.get(character, PADDING) for character in text], dtype=np.int64)


def cut_windows(tokens: Array, length: int) -> tuple[Array, Array]:
    """Consecutive windows of `length` tokens, and for each of their tokens the one that follows it.

    The last window is filled up with padding, which has no target.

    Example:
        >>> x, y = cut_windows(np.array([1, 2, 3, 4]), 2)
        >>> x.tolist(), y.tolist()
        ([[1, 2], [3, 0]], [[2, 3], [4, -100]])
    """
    count = max(0, -(-(len(tokens) - 1) // length))
    x = np.full((count, length), PADDING, dtype=np.int64)
    y = np.full((count, length), NO_TARGET, dtype=np.int64)
    x.reshape(-1)[: len(tokens) - 1] = tokens[:-1] if count else []
    y.reshape(-1)[: len(tokens) - 1] = tokens[1:] if count else []
    return x, y


def pad(texts: Sequence[str], length: int, vocabulary: Sequence[str]) -> Array:
    """Texts as rows of tokens, cut or filled up to one length.

    Example:
        >>> pad(["abc", "b"], 2, ("�", "a", "b"))
        array([[1, 2], [2, 0]])
    """
    x = np.full((len(texts), length), PADDING, dtype=np.int64)
    for row, text in enumerate(texts):
        tokens = encode(text[:length], vocabulary)
        x[row, : len(tokens)] = tokens
    return x


@dataclass(frozen=True, slots=True)
class WrittenText:
    """One text, its class and its writer where they are known, and where it stands in its source."""

    words: str
    label: str | None
    owner: str | None
    place: str


def read_texts(location: Path, options: Mapping[str, object], task: Task) -> list[WrittenText]:
    """All texts of a folder of `.txt` files, of one such file, or of a `.jsonl` file.

    Raises:
        ConfigError: naming the file and line that cannot be, or that there is none.
    """
    texts = list(_read_lines(location, options) if location.suffix == ".jsonl" else _read_folder(location, task))
    if not any(text.words for text in texts):
        raise ConfigError(f"{location} holds no text; put .txt files in it, or give a .jsonl file")
    return texts


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


def open_texts(location: Path, options: Mapping[str, object], task: Task) -> Halves:
    """A folder of `.txt` files, one such file, or a `.jsonl` file, as a source.

    In a folder, the folder that a file lies in is its class, or for a language model its writer; files next to each
    other without a folder are writers of their own. A line of a `.jsonl` is an object with the keys `text` and `label`;
    options of those names say otherwise, and `client` names the key of the writer.

    Raises:
        ConfigError: naming the file and line that cannot be.
    """
    length = _whole("length", options.get("length", LENGTH))
    fraction = _share("test_fraction", options.get("test_fraction", _TEST_FRACTION))
    texts = read_texts(location, options, task)
    if isinstance(task, LanguageModel):
        return language_halves(texts_by_owner(texts), length, fraction)
    if any(text.label is None for text in texts):
        raise ConfigError(f"{location}: a text has no class; put it into a folder of that name, or add a label")
    classes = tuple(sorted({str(text.label) for text in texts}))
    y = np.array([classes.index(str(text.label)) for text in texts], dtype=np.int64)
    train, test = stratified_split(y, fraction)
    vocabulary = vocabulary_of(texts[i].words for i in train)
    x = pad([text.words for text in texts], length, vocabulary)
    owners = tuple(texts[i].owner or "unknown" for i in train) if any(text.owner for text in texts) else ()
    own, rest = (ArraySplit(x[half], y[half], vocabulary=vocabulary) for half in (train, test))
    return Halves(replace(own, owners=owners), rest, classes)


def texts_by_owner(texts: list[WrittenText]) -> dict[str, str]:
    """What each writer wrote, text after text; texts without a named writer are those of `all`."""
    together: dict[str, list[str]] = {}
    for text in texts:
        together.setdefault(text.owner or "all", []).append(text.words)
    return {who: "\n".join(words) for who, words in together.items()}


def language_halves(texts: Mapping[str, str], length: int, fraction: float, vocabulary: Sequence[str] = ()) -> Halves:
    """Each writer's text cut into windows: the first part of it to train on, the last to judge on.

    Args:
        texts: by writer.
        length: of a window, in characters.
        fraction: of each text that is judged on.
        vocabulary: where it is fixed; else the characters of all training texts.
    """
    begins = {who: round((1 - fraction) * len(text)) for who, text in texts.items()}
    known = tuple(vocabulary) or vocabulary_of(text[: begins[who]] for who, text in texts.items())
    train = [cut_windows(encode(text[: begins[who]], known), length) for who, text in texts.items()]
    test = [cut_windows(encode(text[begins[who] :], known), length) for who, text in texts.items()]
    owners = tuple(who for who, (x, _) in zip(texts, train, strict=True) for _ in x)
    return Halves(_join(train, known, owners), _join(test, known), token_names(known))


def _join(
    parts: Sequence[tuple[Array, Array]], vocabulary: tuple[str, ...], owners: tuple[str, ...] = ()
) -> ArraySplit:
    if not any(len(x) for x, _ in parts):
        raise ConfigError("there is no text of two characters, so nothing is to be told; give longer texts")
    x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
    return ArraySplit(x, y, owners, vocabulary=vocabulary)


def _whole(name: str, value: object, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}, expected a whole number from {least} on")
    return value


def _share(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ConfigError(f"{name} is {value!r}, expected a number between 0 and 1; try 0.2")
    return float(value)


def read_text_rows(
    location: Path,
    *,
    form: TextForm | None = None,
    classes: Sequence[str] = (),
    task: Task,
    half: str = "train",
    labelled: bool = True,
) -> SiteRows:
    """The texts of a `.jsonl` file, a `.txt` file or a folder of such files, in a form or in the one they have.

    A language model's rows are windows, each position's target the next character; without labels they are the ends of
    the texts, and what follows the last character is asked for.

    Args:
        location: the file or folder.
        form: length and characters that were agreed on.
        classes: the names of all classes, where each text has one; by default those the texts have.
        task: text classification, or a language model.
        half: which half to take of a folder that has two.
        labelled: whether classes are needed.

    Raises:
        ConfigError: naming file and line of what does not fit.
    """
    if location.suffix not in SUFFIXES and not location.is_dir():
        raise ConfigError(f"{location} holds no texts; give a .jsonl file, a .txt file or a folder of .txt files")
    own = half_folder(location, half) if location.is_dir() else None
    texts, remarks = read_texts(location if own is None else location / own, {}, task), []
    if form is None:
        form = form_of_texts(texts)
        remarks.append(
            f"no vocabulary was agreed on, so characters are those of {location} itself; let all sites make one "
            "federation folder (`fedfuse init`)"
        )
    remarks += _unknown_characters(texts, form, location)
    if isinstance(task, LanguageModel):
        rows, places = _windows(texts, form, location) if labelled else _ends(texts, form)
        names = form.token_names
    else:
        names = tuple(classes)
        if labelled:
            for text in texts:
                _check_label(text, names, location)
            names = names or tuple(sorted({str(text.label) for text in texts}))
        labels = [names.index(str(text.label)) if labelled else 0 for text in texts]
        x = pad([text.words for text in texts], form.length, form.vocabulary)
        rows = Rows(torch.from_numpy(x), torch.tensor(labels, dtype=torch.int64))
        places = tuple(text.place for text in texts)
    more: dict[str, Any] = {"half": own or "", "labelled": labelled, "task": task, "remarks": tuple(remarks)}
    return SiteRows(str(location), rows, names, form, places, **more)


def form_of_texts(texts: Sequence[WrittenText], length: int = LENGTH) -> TextForm:
    """The form texts have by themselves: their own characters.

    Example:
        >>> form_of_texts([WrittenText("ba", None, None, "line 1")], 4).characters
        'ab'
    """
    return TextForm(length=length, characters="".join(vocabulary_of(text.words for text in texts)[1:]))


def _windows(texts: list[WrittenText], form: TextForm, location: Path) -> tuple[Rows, tuple[str, ...]]:
    """Windows of what each writer wrote, with the next character after each, and their names."""
    written = texts_by_owner(texts)
    parts = {who: cut_windows(encode(words, form.vocabulary), form.length) for who, words in written.items()}
    names = tuple(f"{who} {place}" for who, (x, _) in parts.items() for place in range(1, len(x) + 1))
    if not names:
        raise ConfigError(f"{location} has no text of two characters, so nothing is to be told; give longer texts")
    x, y = (np.concatenate(each) for each in zip(*parts.values(), strict=True))
    return Rows(torch.from_numpy(x), torch.from_numpy(y)), names


def _ends(texts: Sequence[WrittenText], form: TextForm) -> tuple[Rows, tuple[str, ...]]:
    """The last characters of each text; the one place with a target is where the next character is asked for."""
    asked = [text for text in texts if text.words]
    x = pad([text.words[-form.length :] for text in asked], form.length, form.vocabulary)
    y = np.full(x.shape, NO_TARGET, dtype=np.int64)
    y[range(len(asked)), [min(len(text.words), form.length) - 1 for text in asked]] = PADDING
    return Rows(torch.from_numpy(x), torch.from_numpy(y)), tuple(text.place for text in asked)


def _check_label(text: WrittenText, classes: Sequence[str], location: Path) -> None:
    if text.label is None:
        raise ConfigError(
            f"{location}, {text.place}: the text has no class; put it into a folder of that name, or add a label"
        )
    if classes and text.label not in classes:
        raise ConfigError(
            f"{location}, {text.place}: the class is {text.label!r}, expected one of {names_text(classes)}"
            f"{suggest(text.label, classes)} correct it, or take the text out"
        )


def _unknown_characters(texts: Sequence[WrittenText], form: TextForm, location: Path) -> list[str]:
    """A remark on the characters that the vocabulary lacks; texts of another script are refused."""
    known, words = set(form.characters), "".join(text.words for text in texts)
    strange = sorted({character for character in words if character not in known})
    if not strange:
        return []
    share = sum(character not in known for character in words) / len(words)
    shown = ", ".join(map(repr, strange[:6])) + (", …" if len(strange) > 6 else "")
    if share > 0.5:  # of another script
        raise ConfigError(
            f"{share:.0%} of the characters of {location} are not in the vocabulary ({shown}); agree on one that has "
            "them (`fedfuse init --characters FILE`)"
        )
    return [f"{share:.2%} of the characters of {location} are not in the vocabulary and count as unknown: {shown}"]


def read_plays(
    store: Store,
    _parts: object,
    half: Literal["train", "test"],
    length: int = LENGTH,
    speakers: int = 0,
    test_fraction: float = _TEST_FRACTION,
) -> ArraySplit:
    """One half of what the speakers of the plays say, in windows of characters with the next as target.

    Args:
        store: where the text lies.
        half: the first part of what each speaker says, or the last.
        length: of a window.
        speakers: how many: those with the most words; 0 for all.
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
