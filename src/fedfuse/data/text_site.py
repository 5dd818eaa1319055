"""A site's texts brought to the form that all sites have: characters by one vocabulary, classes by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedfuse.core.about import names_text
from fedfuse.core.characters import TextForm
from fedfuse.core.words import suggest
from fedfuse.data.images import half_folder
from fedfuse.data.rows import Rows
from fedfuse.data.text_source import LENGTH, SUFFIXES, WrittenText, read_texts, texts_by_owner
from fedfuse.data.texts import cut_windows, encode, pad, vocabulary_of
from fedfuse.errors import ConfigError
from fedfuse.tasks import LanguageModel, Task
from fedfuse.tasks.language import NO_TARGET, PADDING

_MOST_UNKNOWN = 0.5  # texts of which the vocabulary lacks more are of another script


@dataclass(frozen=True, slots=True, eq=False)
class TextRows:
    """Texts in a form.

    Attributes:
        rows: tokens, and the class of each text or the token after each token.
        class_names: of classes, or of tokens.
        form: length and characters.
        names: where each text stands in its source.
        half: which half of the source these are; empty if they are all of it.
        remarks: what a reader should know.
        labelled: whether the texts tell their classes.
    """

    rows: Rows
    class_names: tuple[str, ...]
    form: TextForm
    names: tuple[str, ...]
    half: str = ""
    remarks: tuple[str, ...] = ()
    labelled: bool = True

    def take(self, index: Sequence[int]) -> TextRows:
        """The rows at these positions."""
        names = tuple(self.names[i] for i in index)
        return TextRows(
            self.rows.take(index), self.class_names, self.form, names, self.half, self.remarks, self.labelled
        )


def read_text_rows(
    location: Path,
    *,
    form: TextForm | None = None,
    classes: Sequence[str] = (),
    task: Task,
    half: str = "train",
    labelled: bool = True,
) -> TextRows:
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
    texts = read_texts(location if own is None else location / own, {}, task)
    remarks = [] if form is not None else [_NOT_AGREED.format(location)]
    form = form or form_of_texts(texts)
    remarks += _tell_unknown(texts, form, location)
    if isinstance(task, LanguageModel):
        found = _windows(texts, form, location) if labelled else _ends(texts, form)
    else:
        found = _classes(texts, form, classes, location, labelled)
    return TextRows(*found, half=own or "", remarks=tuple(remarks), labelled=labelled)


_NOT_AGREED = (
    "no vocabulary was agreed on, so characters are those of {} itself; let all sites make one federation folder "
    "(`fedfuse init`)"
)


def form_of_texts(texts: Sequence[WrittenText], length: int = LENGTH) -> TextForm:
    """The form texts have by themselves: their own characters.

    Example:
        >>> form_of_texts([WrittenText("ba", None, None, "line 1")], 4).characters
        'ab'
    """
    return TextForm(length=length, characters="".join(vocabulary_of(text.words for text in texts)[1:]))


_Found = tuple[Rows, tuple[str, ...], TextForm, tuple[str, ...]]


def _windows(texts: list[WrittenText], form: TextForm, location: Path) -> _Found:
    """Windows of what each writer wrote, with the next character after each."""
    written = texts_by_owner(texts)
    parts = {who: cut_windows(encode(words, form.vocabulary), form.length) for who, words in written.items()}
    names = tuple(f"{who} {place}" for who, (x, _) in parts.items() for place in range(1, len(x) + 1))
    if not names:
        raise ConfigError(f"{location} has no text of two characters, so nothing is to be told; give longer texts")
    x, y = (np.concatenate(each) for each in zip(*parts.values(), strict=True))
    return Rows(torch.from_numpy(x), torch.from_numpy(y)), form.token_names, form, names


def _ends(texts: Sequence[WrittenText], form: TextForm) -> _Found:
    """The last characters of each text; the one place with a target is where the next character is asked for."""
    asked = [text for text in texts if text.words]
    x = pad([text.words[-form.length :] for text in asked], form.length, form.vocabulary)
    y = np.full(x.shape, NO_TARGET, dtype=np.int64)
    y[range(len(asked)), [min(len(text.words), form.length) - 1 for text in asked]] = PADDING
    rows = Rows(torch.from_numpy(x), torch.from_numpy(y))
    return rows, form.token_names, form, tuple(text.place for text in asked)


def _classes(
    texts: Sequence[WrittenText], form: TextForm, classes: Sequence[str], location: Path, labelled: bool
) -> _Found:
    """Texts cut or filled up to one length, with their classes in the order of these names."""
    x = torch.from_numpy(pad([text.words for text in texts], form.length, form.vocabulary))
    places = tuple(text.place for text in texts)
    if not labelled:
        return Rows(x, torch.zeros(len(texts), dtype=torch.int64)), tuple(classes), form, places
    for text in texts:
        _check_label(text, classes, location)
    names = tuple(classes) or tuple(sorted({str(text.label) for text in texts}))
    y = torch.tensor([names.index(str(text.label)) for text in texts], dtype=torch.int64)
    return Rows(x, y), names, form, places


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


def _tell_unknown(texts: Sequence[WrittenText], form: TextForm, location: Path) -> list[str]:
    """Say how many characters the vocabulary lacks; refuse texts of another script."""
    known, words = set(form.characters), "".join(text.words for text in texts)
    strange = sorted({character for character in words if character not in known})
    if not strange:
        return []
    share = sum(character not in known for character in words) / len(words)
    shown = ", ".join(map(repr, strange[:6])) + (", …" if len(strange) > 6 else "")
    if share > _MOST_UNKNOWN:
        raise ConfigError(
            f"{share:.0%} of the characters of {location} are not in the vocabulary ({shown}); agree on one that has "
            "them (`fedfuse init --characters FILE`)"
        )
    return [f"{share:.2%} of the characters of {location} are not in the vocabulary and count as unknown: {shown}"]
