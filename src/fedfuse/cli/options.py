"""Options that several commands share."""

from __future__ import annotations

import warnings
from typing import Annotated

with warnings.catch_warnings():  # typer imports what click will drop in its next version; that is between them
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer

__all__ = ["Json", "Sets", "Source", "Trust", "Workers", "typer"]

Sets = Annotated[list[str] | None, typer.Option("--set", help="key.key=value; beats the file. May be repeated.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Workers = Annotated[
    int | None, typer.Option(min=0, help="Worker processes; 0 trains in this one, by default there is one per core.")
]
Trust = Annotated[list[str] | None, typer.Option("--model", help="package.module:Class that a file may name.")]
Source = Annotated[str, typer.Option("--data", help="digits, mnist, …, a folder, an .npz or package.module:function.")]
