"""What a user says of texts, on the way to what all sites agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfuse.core.characters import PLAIN, TextForm
from fedfuse.core.forms import RowForm
from fedfuse.core.settings import validate_settings
from fedfuse.data.site import read_site
from fedfuse.data.text_source import LENGTH, read_words
from fedfuse.errors import ConfigError
from fedfuse.federation.agreement import TEXT_NETWORKS
from fedfuse.tasks import Classification, task_named


@dataclass(frozen=True, slots=True)
class TextAgreement:
    """What a user says of texts: how many characters a network reads, and a file of all there may be."""

    length: int | None = None
    characters: Path | None = None

    def __bool__(self) -> bool:
        return self.length is not None or self.characters is not None

    def form(self) -> RowForm:
        """The form of texts; characters are plain English's if no file names them."""
        known = PLAIN if self.characters is None else "".join(sorted(set(read_words(self.characters))))
        return validate_settings(TextForm, {"length": self.length or LENGTH, "characters": known}, "inputs")


def check_texts_said(texts: TextAgreement | None, task: str | None) -> None:
    """Refuse what is said of texts where the task has none."""
    if texts and task not in TEXT_NETWORKS:
        raise ConfigError(f"--length and --characters are said of texts, and the task is {task or 'classification'}")


def agree_on_texts(
    texts: TextAgreement, data: str | None, task: str, classes: Sequence[str], said: Mapping[str, object]
) -> dict[str, Any]:
    """Task, classes, length and characters of texts, as they were said or as a first site has them.

    Args:
        texts: what is said of texts.
        data: a first site's texts, for the classes and characters that are not said.
        task: text-classification or language-model.
        classes: the names of all classes.
        said: what was said of other rows, which texts have not.
    """
    if odd := [name for name, value in said.items() if value]:
        raise ConfigError(f"--{odd[0].replace('_', '-')} is said of other rows than texts; leave it out")
    learns, form, names = task_named(task), texts.form(), list(classes)
    if data is not None:
        agreed = form if texts.characters is not None else None
        site = read_site(data, form=agreed, classes=classes or None, task=learns)
        names = names or (list(site.class_names) if isinstance(learns, Classification) else [])
        form = agreed or site.form.model_copy(update={"length": texts.length or LENGTH})
    return {"task": learns.name, "classes": names, "inputs": form.model_dump()}
