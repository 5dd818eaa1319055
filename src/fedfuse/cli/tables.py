"""Commands for tables before anybody trains: moments at each site, scale for everybody."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fedfuse.cli import console
from fedfuse.cli.files import Columns, FederationOption, Target, TaskName
from fedfuse.cli.options import Json, Source, said_of_table, typer
from fedfuse.errors import ConfigError


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
    from fedfuse.core.columns import parse_columns
    from fedfuse.data.table_site import TableChoice
    from fedfuse.federation.agreement import read_federation
    from fedfuse.federation.moments import moments_by_federation, moments_of_table
    from fedfuse.tasks import task_named

    name = client or output.stem
    if federation is None:
        said = said_of_table(target, columns)
        choice = TableChoice(said.targets, parse_columns(said.columns))
        found = moments_of_table(data, name, task_named(task or "classification"), choice, least_rows)
    else:
        for option, value in {"--task": task, "--target": target, "--columns": columns}.items():
            if value is not None:
                raise ConfigError(f"{option} is said by the federation, for every site alike; leave it out")
        found = moments_by_federation(read_federation(federation), data, name)
    found.save(output)
    warnings = found.warnings()
    if as_json:
        told = {"rows": found.rows, "columns": list(found.columns), "reveals": list(found.reveals)}
        console.say_json({"file": str(output), "bytes": output.stat().st_size, **told, "warnings": warnings})
        return
    console.say(
        f"{output}: {output.stat().st_size:,} bytes, sums of {found.rows:,} rows and {len(found.columns)} columns"
    )
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

    made, added = scale_by_moments(read_federation(folder), moments)
    for warning in added.warnings:
        console.warn(warning)
    if as_json:
        plain = made.agreement.model_dump(mode="json", exclude_none=True)
        console.say_json({"folder": str(folder), "sites": list(added.sites), "rows": added.rows, **plain})
        return
    features = len(made.agreement.inputs.shape and getattr(made.agreement.inputs, "features", ()))
    console.say(f"{folder}: scaled by {added.rows:,} rows of {', '.join(added.sites)}; {features} features")
    console.say(
        f"send the folder to every site; each runs: fedfuse update --federation {folder} --data … -o ….safetensors"
    )
