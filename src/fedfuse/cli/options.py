"""Options that several commands share."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fedfuse.core.files import STREAM, check_output
from fedfuse.errors import ConfigError

if TYPE_CHECKING:  # it brings torch, which a person who asks for help need not wait for
    from fedfuse.federation.moments import TableAgreement

with warnings.catch_warnings():  # typer imports what click will drop in its next version; that is between them
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer as typer

EVIDENCE = "fedfuse_evidence.safetensors"
"""Of `fedfuse.wire.folders`, which brings torch: what a folder of weights may hold of our own making."""

_TASKS = ("classification", "binary", "multilabel", "regression", "text-classification", "language-model")
"""Of `fedfuse.tasks`, which brings torch."""


def check_method(name: str | None) -> str | None:
    """Refuse a misspelt method before torch is imported."""
    if name is not None:
        from fedfuse.core.catalogue import method_options

        method_options(name)
    return name


def check_task(name: str | None) -> str | None:
    """Refuse a misspelt task before torch is imported."""
    if name not in (None, *_TASKS):
        raise ConfigError(f"--task is {name!r}, expected one of {', '.join(_TASKS)}")
    return name


def split_words(text: str | None) -> list[str]:
    """Words with commas between.

    Example:
        >>> split_words("benign, malignant"), split_words(None)
        (['benign', 'malignant'], [])
    """
    return [word.strip() for word in text.split(",")] if text else []


def said_of_table(
    target: str | None, columns: str | None, moments: Sequence[Path] | None = None, unscaled: bool = False
) -> TableAgreement:
    """What a user says of a table."""
    from fedfuse.federation.moments import TableAgreement

    return TableAgreement(tuple(split_words(target)), tuple(split_words(columns)), tuple(moments or ()), unscaled)


def check_written(
    output: Path,
    *read: Path | None,
    data: Sequence[str | None] = (),
    federation: Path | None = None,
    streams: bool = False,
    as_json: bool = False,
) -> None:
    """Refuse an output that would destroy something, before a command does any work.

    Args:
        output: what the command writes.
        read: files and folders of weights that it reads.
        data: sources of rows that it reads.
        federation: the folder of what sites agreed on.
        streams: whether `-` may be standard output.
        as_json: whether the command prints JSON there.

    Raises:
        ConfigError: if it is an input, by whatever links, or is there and no regular file.
    """
    if output == STREAM and streams and as_json:
        raise ConfigError("--json and an output to - would both be printed; choose one of them")
    inputs = [path for path in read if path is not None]
    inputs += [path for folder in inputs if folder.is_dir() for path in folder.iterdir() if path.name != EVIDENCE]
    inputs += [] if federation is None else [federation / name for name in ("federation.toml", "w0.safetensors")]
    if any(data):
        from fedfuse.data.download import files_at  # late: torch

        inputs += [path for source in data if source for path in files_at(source, output)]
    check_output(output, inputs, streams)


Sets = Annotated[list[str] | None, typer.Option("--set", help="key.key=value; beats the file. May be repeated.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Workers = Annotated[
    int | None, typer.Option(min=0, help="Worker processes; 0 trains in this one, by default there is one per core.")
]
Trust = Annotated[list[str] | None, typer.Option("--model", help="package.module:Class that a file may name.")]
Source = Annotated[
    str,
    typer.Option(
        "--data", help="digits, mnist, …, a folder, an .npz, .csv, .parquet, .jsonl or .txt file, pkg.mod:function."
    ),
]
MethodName = Annotated[str, typer.Option("--method", help="The method that fuses.", callback=check_method)]
Log = Annotated[
    list[str] | None,
    typer.Option("--log", help="Also log to tensorboard, mlflow or wandb, as NAME or NAME=WHERE. May be repeated."),
]
MaybeMethod = Annotated[
    str | None,
    typer.Option("--method", help="The method that fuses: the federation's, or else fedavg.", callback=check_method),
]
FederationOption = Annotated[
    Path | None, typer.Option("--federation", help="The folder that `fedfuse init` made and every site has.")
]
TaskName = Annotated[
    str | None,
    typer.Option(
        "--task",
        help="classification, binary, multilabel, regression, text-classification or language-model.",
        callback=check_task,
    ),
]
Target = Annotated[str | None, typer.Option(help="Of a table: the column to predict, or several with commas between.")]
Columns = Annotated[
    str | None, typer.Option(help="Of a table, with commas between: age, chol[mg/dl], sex:f|m. By default all others.")
]
MomentsFiles = Annotated[
    list[Path] | None, typer.Option("--moments", help="Sums that sites made with `fedfuse moments`; may be repeated.")
]
ImageSize = Annotated[int | None, typer.Option(min=1, help="Resize pictures to this width and height.")]
SkipBroken = Annotated[bool, typer.Option("--skip-broken", help="Leave out pictures that cannot be read.")]
