"""Make a federation folder: from what the user says, or from what a first site has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedfuse.api.update import start_of
from fedfuse.core.inputs import PLAIN, ArrayForm, PictureForm, RowForm, TextForm
from fedfuse.core.settings import validate_settings
from fedfuse.data import standardize
from fedfuse.data.rows import SiteRows
from fedfuse.data.site import read_site
from fedfuse.data.tables import SUFFIXES
from fedfuse.data.texts import LENGTH, read_words
from fedfuse.errors import ConfigError
from fedfuse.experiment.config import assign
from fedfuse.federation.agreement import (
    TEXT_NETWORKS,
    Agreement,
    FederationFolder,
    write_federation,
)
from fedfuse.federation.moments import TableAgreement, agree_on_table
from fedfuse.tasks import CLASSIFICATION, Classification, task_named

TRAINING: Mapping[str, Any] = {"epochs": 20, "batch_size": 32}
OPTIMIZER: Mapping[str, Any] = {"lr": 0.01, "momentum": 0.9}
TEXT_OPTIMIZER: Mapping[str, Any] = {"name": "adam", "lr": 2e-3}  # plain steps hardly move a transformer
"""How sites train unless it is said otherwise: there is one exchange only, so each must come somewhere by itself."""


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


def create_federation(
    folder: Path,
    model: str | None,
    method: str,
    *,
    task: str | None = None,
    table: TableAgreement | None = None,
    classes: Sequence[str] = (),
    image_size: int | None = None,
    channels: int | None = None,
    shape: Sequence[int] = (),
    texts: TextAgreement | None = None,
    data: str | None = None,
    normalize: bool = False,
    least_rows: int | None = None,
    all_examples: int | None = None,
    sets: Sequence[str] = (),
    start: Path | None = None,
    seed: int = 0,
    name: str | None = None,
) -> FederationFolder:
    """Write the folder that is sent to every site.

    Args:
        folder: where to make it.
        model: the network's name, or package.module:Class; by default an mlp, a transformer for texts, or lenet.
        method: how updates will be fused.
        task: what is to be learned; by default what moments are for, or else classification.
        table: what is said of tables.
        classes: the names of all classes.
        image_size: width and height of pictures.
        channels: 1 for grey pictures, 3 for colour.
        shape: of one row, where rows are arrays.
        texts: what is said of texts.
        data: a first site's rows, for whatever of classes, size and channels is not said.
        normalize: shift and scale inputs by that first site's mean and standard deviation.
        least_rows: a site with fewer rows brings nothing.
        all_examples: how many examples all sites hold together, if that is known.
        sets: `model.key=value`, `local.key=value` and `method.key=value`.
        start: common weights, if not drawn by the seed.
        seed: of the start and of every draw at sites.
        name: what to call the federation; by default the folder's name.

    Raises:
        ConfigError: if something is not said, or does not fit.
    """
    options, table = read_sets(sets), table or TableAgreement()
    if texts and task not in TEXT_NETWORKS:
        raise ConfigError(f"--length and --characters are said of texts, and the task is {task or 'classification'}")
    if task in TEXT_NETWORKS:
        said = {"image_size": image_size, "channels": channels, "shape": shape, "normalize": normalize, "target": table}
        found = _agree_on_texts(texts or TextAgreement(), data, task, classes, said)
    elif table or (data is not None and Path(data).suffix in SUFFIXES):
        found = agree_on_table(table, data, task, classes, normalize)
    else:
        found = _agree_on_rows(data, task, classes, image_size, channels, shape, normalize)
    known = {"least_rows": least_rows, "all_examples": all_examples, "seed": seed, **found}
    values = {key: value for key, value in known.items() if value is not None}
    kind, local = found["inputs"]["kind"], options["local"]
    network = {"table": "mlp", "texts": TEXT_NETWORKS.get(found["task"])}.get(kind) or "lenet"
    optimizer = {**(TEXT_OPTIMIZER if kind == "texts" else OPTIMIZER), **local.get("optimizer", {})}
    values |= {
        "name": name or folder.resolve().name,
        "model": {"name": model or network, **options["model"]},
        "method": {"name": method, **options["method"]},
        "local": {**TRAINING, **local, "optimizer": optimizer},
    }
    agreement = validate_settings(Agreement, values)
    return write_federation(folder, agreement, None if start is None else start_of(start)[1])


def read_sets(sets: Sequence[str]) -> Mapping[str, dict[str, Any]]:
    """What `--set` says of the network, of training and of the method.

    Example:
        >>> read_sets(["model.hidden=[8]", "local.epochs=2"])
        {'model': {'hidden': [8]}, 'local': {'epochs': 2}, 'method': {}}
    """
    given: dict[str, dict[str, Any]] = {section: {} for section in ("model", "local", "method")}
    for text in sets:
        if text.split(".", 1)[0] not in given:
            raise ConfigError(f"--set {text!r} must begin with model., local. or method.")
        assign(given, text)
    return given


def _agree_on_texts(
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


def _agree_on_rows(
    data: str | None,
    task: str | None,
    classes: Sequence[str],
    image_size: int | None,
    channels: int | None,
    shape: Sequence[int],
    normalize: bool,
) -> dict[str, Any]:
    """Task, classes and form of pictures or arrays, as they were said or as a first site has them."""
    learns = task_named(task or CLASSIFICATION.name)
    said = None if image_size is None or channels is None else _pictures(image_size, channels)
    given = ArrayForm(shape=tuple(shape)) if said is None and shape else said
    site = None
    if data is not None:
        site = read_site(data, form=given, classes=classes or None, image_size=image_size, task=learns)
        if given is None and channels not in (None, site.form.shape[0]):
            wanted = _pictures(site.form.shape[1], channels)
            site = read_site(data, form=wanted, classes=classes or None, task=learns)
    form = _find_form(given, site, normalize)
    if site is not None and site.remarks:  # all sites will keep to what is agreed, so it is not guessed
        raise ConfigError(site.remarks[0])
    names = list(classes) or (list(site.class_names) if site is not None else [])
    return {"task": learns.name, "classes": names, "inputs": form.model_dump()}


def _pictures(size: int, channels: int) -> RowForm:
    return validate_settings(PictureForm, {"height": size, "width": size, "channels": channels}, "inputs")


def _find_form(given: RowForm | None, site: SiteRows | None, normalize: bool) -> RowForm:
    """What was said, or else what the first site's rows have; normalized by those rows if that is wanted."""
    form = given if site is None else site.form
    if form is None:
        raise ConfigError(
            "nobody says what rows look like; give --image-size and --channels for pictures, --shape for arrays, "
            "--columns and --target for tables, or --data with a first site's rows"
        )
    if not normalize:
        return form
    if site is None:
        raise ConfigError("--normalize takes mean and standard deviation of a first site's rows; name it with --data")
    scale = standardize(site.rows.x)
    return form.model_copy(update={"mean": scale.mean, "std": scale.std})
