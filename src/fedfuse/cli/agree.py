"""Commands before anybody trains: init for everybody, and for tables moments at each site and scale for all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fedfuse.cli import console
from fedfuse.cli.files import AllExamples, Columns, FederationOption, MomentsFiles, Target, TaskName, refuse_said
from fedfuse.cli.options import Json, MethodName, Source, check_written, said_of_table, split_words, typer
from fedfuse.errors import ConfigError

if TYPE_CHECKING:  # it brings torch, which a person who asks for help need not wait for
    from fedfuse.federation.agreement import Agreement

Model = Annotated[
    str | None,
    typer.Option(help="A model's name, or package.module:Class; lenet, mlp for tables, or a transformer for texts."),
]
Classes = Annotated[str | None, typer.Option(help="The names of all classes, with commas between.")]
Size = Annotated[int | None, typer.Option(min=1, help="Width and height of pictures.")]
Channels = Annotated[int | None, typer.Option(help="1 for grey pictures, 3 for colour.")]
Shape = Annotated[str | None, typer.Option(help="Of one row where rows are arrays, as in 13 or 1,28,28.")]
Length = Annotated[int | None, typer.Option(min=2, help="Of texts: how many characters the network reads.")]
Characters = Annotated[
    Path | None, typer.Option(help="Of texts: a file of all characters there may be; by default ASCII, or --data's.")
]
FirstSite = Annotated[str | None, typer.Option(help="A first site's rows, for what is not said.")]
Normalize = Annotated[
    bool, typer.Option("--normalize", help="Scale inputs by that site's mean and deviation, which tells them.")
]
Unscaled = Annotated[
    bool, typer.Option("--unscaled", help="Take a table's numbers as they are; no moments are awaited.")
]
LeastRows = Annotated[int | None, typer.Option(min=1, help="A site with fewer rows brings nothing.")]
Start = Annotated[Path | None, typer.Option(help="Common weights; by default drawn by the seed.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="model.key=…, local.key=… or method.key=…; may be repeated.")
]


def init(
    folder: Annotated[Path, typer.Argument()],
    more_moments: Annotated[list[Path] | None, typer.Argument()] = None,
    model: Model = None,
    method: MethodName = "fedavg",
    task: TaskName = None,
    classes: Classes = None,
    image_size: Size = None,
    channels: Channels = None,
    shape: Shape = None,
    length: Length = None,
    characters: Characters = None,
    target: Target = None,
    columns: Columns = None,
    moments: MomentsFiles = None,
    unscaled: Unscaled = False,
    data: FirstSite = None,
    normalize: Normalize = False,
    least_rows: LeastRows = None,
    all_examples: AllExamples = None,
    sets: Settings = None,
    start: Start = None,
    seed: Annotated[int, typer.Option(help="Fixes the start and every random draw at sites.")] = 0,
    name: Annotated[str | None, typer.Option(help="What to call the federation.")] = None,
    as_json: Json = False,
) -> None:
    """Once, for everybody: write down what all sites agree on, with the weights they begin with.

    FOLDER is made, to be sent to every site. A table's columns get their scale from --moments, or wait for `scale`;
    MORE_MOMENTS are further files behind --moments.
    """
    read = (start, characters, *_all_moments(moments, more_moments))
    for made_here in ("federation.toml", "w0.safetensors"):
        check_written(folder / made_here, *read, data=[data])
    from fedfuse.federation.create import create_federation
    from fedfuse.federation.texts import TextAgreement

    made = create_federation(
        folder,
        model,
        method,
        task=task,
        table=said_of_table(target, columns, _all_moments(moments, more_moments), unscaled),
        classes=split_words(classes),
        image_size=image_size,
        channels=channels,
        shape=_whole_numbers(shape, "--shape"),
        texts=TextAgreement(length, characters),
        data=data,
        normalize=normalize,
        least_rows=least_rows,
        all_examples=all_examples,
        sets=sets or [],
        start=start,
        seed=seed,
        name=name,
    )
    _say_agreement(folder, made.agreement, as_json)


def _all_moments(first: Sequence[Path] | None, more: Sequence[Path] | None) -> list[Path]:
    """`--moments a b c` reads as one option and two arguments."""
    if more and not first:
        raise ConfigError(f"init makes one folder, and {more[0]} came too; name files of moments after --moments")
    return [*(first or []), *(more or [])]


def _say_agreement(folder: Path, agreed: Agreement, as_json: bool) -> None:
    if as_json:
        console.say_json({"folder": str(folder), **agreed.model_dump(mode="json", exclude_none=True)})
        return
    console.say(f"{folder}: {agreed.model.name} on {agreed.inputs}, fused by {agreed.method.name}")
    named = {"regression": "targets", "multilabel": "targets", "language-model": "characters"}
    console.say(f"{named.get(agreed.task, 'classes')}: {', '.join(agreed.output_names)}")
    if agreed.awaits_moments:
        console.say(
            "its columns wait for a common scale: send the folder to every site, which runs: fedfuse moments "
            f"--federation {folder} --data … -o ….moments; then fedfuse scale {folder} ….moments, and send it anew"
        )
    else:
        _say_next(folder)


def _say_next(folder: Path) -> None:
    console.say(
        f"send the folder to every site; each runs: fedfuse update --federation {folder} --data … -o ….safetensors"
    )


def _whole_numbers(text: str | None, option: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")] if text else []
    except ValueError as why:
        raise ConfigError(f"{option} is {text!r}, expected whole numbers with commas between, as in 1,28,28") from why


def moments(
    data: Source,
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to send.")],
    federation: FederationOption = None,
    task: TaskName = None,
    target: Target = None,
    columns: Columns = None,
    least_rows: Annotated[int, typer.Option(min=1, help="Without a federation: fewer rows give no file.")] = 10,
    client: Annotated[str | None, typer.Option(help="This site's name; by default the file's.")] = None,
    as_json: Json = False,
) -> None:
    """At a site: write counts and sums of a table's columns, from which all sites get one scale; no row leaves it."""
    from fedfuse.federation.agreement import read_federation
    from fedfuse.federation.moments import moments_by_federation
    from fedfuse.federation.tables import moments_by_words

    check_written(output, data=[data], federation=federation)
    name = client or output.stem
    if federation is None:
        said = said_of_table(target, columns)
        found = moments_by_words(data, name, task or "classification", said, least_rows)
    else:
        refuse_said({"--task": task, "--target": target, "--columns": columns})
        found = moments_by_federation(read_federation(federation), data, name)
    found.save(output)
    size, warnings = output.stat().st_size, found.warnings()
    if as_json:
        told = {"rows": found.rows, "columns": list(found.columns), "reveals": list(found.reveals)}
        console.say_json({"file": str(output), "bytes": size, **told, "warnings": warnings})
        return
    console.say(f"{output}: {size:,} bytes, sums of {found.rows:,} rows and {len(found.columns)} columns")
    console.say(f"it reveals: {'; '.join(found.reveals)}")
    for warning in warnings:
        console.warn(warning)


def scale(
    folder: Annotated[Path, typer.Argument()],
    moments: Annotated[list[Path], typer.Argument()],
    as_json: Json = False,
) -> None:
    """Once, for everybody: give a federation of tables the common scale that all sites' moments add up to.

    FOLDER is what `fedfuse init` made, MOMENTS are the files that sites sent.
    """
    from fedfuse.federation.agreement import read_federation
    from fedfuse.federation.moments import scale_by_moments

    for made_here in ("federation.toml", "w0.safetensors"):
        check_written(folder / made_here, *moments)

    made, added = scale_by_moments(read_federation(folder), moments)
    for warning in added.warnings:
        console.warn(warning)
    if as_json:
        plain = made.agreement.model_dump(mode="json", exclude_none=True)
        console.say_json({"folder": str(folder), "sites": list(added.sites), "rows": added.rows, **plain})
        return
    console.say(f"{folder}: scaled by {added.rows:,} rows of {', '.join(added.sites)}")
    _say_next(folder)
