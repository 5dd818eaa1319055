"""Options that several commands share."""

from __future__ import annotations

import warnings
from typing import Annotated

with warnings.catch_warnings():  # typer imports what click will drop in its next version; that is between them
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer

__all__ = ["Json", "Log", "MaybeMethod", "MethodName", "Sets", "Source", "Trust", "Workers", "typer"]


def _check_method(name: str | None) -> str | None:
    """Refuse a misspelt method before torch is imported."""
    if name is not None:
        from fedfuse.core.catalogue import method_options

        method_options(name)
    return name


Sets = Annotated[list[str] | None, typer.Option("--set", help="key.key=value; beats the file. May be repeated.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Workers = Annotated[
    int | None, typer.Option(min=0, help="Worker processes; 0 trains in this one, by default there is one per core.")
]
Trust = Annotated[list[str] | None, typer.Option("--model", help="package.module:Class that a file may name.")]
Source = Annotated[str, typer.Option("--data", help="digits, mnist, …, a folder, an .npz or package.module:function.")]
MethodName = Annotated[str, typer.Option("--method", help="The method that fuses.", callback=_check_method)]
Log = Annotated[
    list[str] | None,
    typer.Option("--log", help="Also log to tensorboard, mlflow or wandb, as NAME or NAME=WHERE. May be repeated."),
]
MaybeMethod = Annotated[
    str | None,
    typer.Option("--method", help="The method that fuses: the federation's, or else fedavg.", callback=_check_method),
]
