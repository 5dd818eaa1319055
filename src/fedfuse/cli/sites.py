"""Commands of sites that exchange files, in the order of a site's day.

`init`, `moments` and `scale` agree; `update` and `evidence` make what a site sends; `fuse` and `evaluate` work on the
files that came. What a command says and refuses is here, what it does in `fedfuse.federation`. Everything that brings
torch is imported inside the commands, so that help and errors of the command line do not wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fedfuse.cli import console
from fedfuse.cli.options import (
    Columns,
    FederationOption,
    ImageSize,
    Json,
    MaybeMethod,
    MethodName,
    MomentsFiles,
    SkipBroken,
    Source,
    Target,
    TaskName,
    Trust,
    check_method,
    check_written,
    said_of_table,
    split_words,
    typer,
)
from fedfuse.core.files import write_output
from fedfuse.core.lazy import without_collecting
from fedfuse.errors import ConfigError

if TYPE_CHECKING:
    from fedfuse.api import Fused, Update
    from fedfuse.federation.agreement import FederationFolder
    from fedfuse.federation.site import SiteUpdate

AllExamples = Annotated[
    int | None, typer.Option(min=1, help="How many examples all sites hold together, if that is known.")
]
Model = Annotated[
    str | None,
    typer.Option(help="A model's name, or package.module:Class; lenet, mlp for tables, or a transformer for texts."),
]
Classes = Annotated[str | None, typer.Option(help="The names of all classes, with commas between.")]
Size = Annotated[int | None, typer.Option(min=1, help="Width and height of pictures.")]
Channels = Annotated[int | None, typer.Option(help="1 for grey pictures, 3 for colour.")]
Shape = Annotated[str | None, typer.Option(help="Of one row where rows are arrays, as in 13 or 1,28,28.")]
TextWidth = Annotated[int | None, typer.Option(min=2, help="Of texts: how many characters the network reads.")]
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
CommonStart = Annotated[Path | None, typer.Option(help="Common weights; by default drawn by the seed.")]
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
    length: TextWidth = None,
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
    start: CommonStart = None,
    seed: Annotated[int, typer.Option(help="Fixes the start and every random draw at sites.")] = 0,
    name: Annotated[str | None, typer.Option(help="What to call the federation.")] = None,
    as_json: Json = False,
) -> None:
    """Once, for everybody: write down what all sites agree on, with the weights they begin with.

    FOLDER is made, to be sent to every site. A table's columns get their scale from --moments, or wait for `scale`;
    MORE_MOMENTS are further files behind --moments.
    """
    if more_moments and not moments:  # `--moments a b c` reads as one option and two arguments
        raise ConfigError(
            f"init makes one folder, and {more_moments[0]} came too; name files of moments after --moments"
        )
    sums = [*(moments or []), *(more_moments or [])]
    for made_here in ("federation.toml", "w0.safetensors"):
        check_written(folder / made_here, start, characters, *sums, data=[data])
    from fedfuse.federation.create import TextAgreement, create_federation

    agreed = create_federation(
        folder,
        model,
        method,
        task=task,
        table=said_of_table(target, columns, sums, unscaled),
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
    ).agreement
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


def _whole_numbers(text: str | None, option: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")] if text else []
    except ValueError as why:
        raise ConfigError(f"{option} is {text!r}, expected whole numbers with commas between, as in 1,28,28") from why


def _say_next(folder: Path) -> None:
    console.say(
        f"send the folder to every site; each runs: fedfuse update --federation {folder} --data … -o ….safetensors"
    )


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
    from fedfuse.federation.moments import moments_by_federation, moments_by_words

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


def refuse_said(said: Mapping[str, object]) -> None:
    """Refuse options that the federation says already."""
    for option, value in said.items():
        if value is not None:
            raise ConfigError(f"{option} is said by the federation, for every site alike; leave it out")


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


PrivacyLedger = Annotated[
    Path | None, typer.Option(help="This site's account of what left it; the release is added before it is written.")
]
Budget = Annotated[float | None, typer.Option(min=0.0, help="The most ε that all releases in the ledger may have.")]


def update(
    data: Source,
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to send.")],
    federation: FederationOption = None,
    model: Annotated[str | None, typer.Option(help="A model's name, or package.module:Class.")] = None,
    method: MaybeMethod = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="model.key=…, local.key=… or method.key=…; may be repeated.")
    ] = None,
    start: Annotated[Path | None, typer.Option(help="Common weights to start from.")] = None,
    client: Annotated[str | None, typer.Option(help="This site's name; by default the file's.")] = None,
    train_limit: Annotated[int | None, typer.Option(min=1, help="Use only so many rows.")] = None,
    image_size: ImageSize = None,
    hold_out: Annotated[
        float | None, typer.Option(min=0.01, max=0.99, help="Keep this share of rows out of training, to judge by.")
    ] = None,
    cross_validate: Annotated[
        int | None, typer.Option(min=2, help="Judge by so many folds first; the update is of all rows.")
    ] = None,
    skip_broken: SkipBroken = False,
    task: TaskName = None,
    target: Target = None,
    columns: Columns = None,
    moments: MomentsFiles = None,
    classes: Annotated[str | None, typer.Option(help="Without a federation: the names of all classes.")] = None,
    all_examples: AllExamples = None,
    privacy_ledger: PrivacyLedger = None,
    budget: Budget = None,
    seed: Annotated[int | None, typer.Option(help="Fixes every random draw; 0 without a federation.")] = None,
    as_json: Json = False,
) -> None:
    """At a site: train on its own rows, bring the evidence a method asks for, write one file."""
    from fedfuse.federation.agreement import read_federation
    from fedfuse.federation.site import site_update, update_by_federation

    if hold_out and cross_validate:
        raise ConfigError("--hold-out and --cross-validate are two ways to judge; choose one")
    read = (start, *(moments or []), privacy_ledger)
    check_written(output, *read, data=[data], federation=federation)
    check_written(_broken_file(output), *read, data=[data], federation=federation)
    options: dict[str, Any] = {"hold_out": hold_out, "folds": cross_validate, "skip_broken": skip_broken}
    options |= {"client": client or output.stem, "limit": train_limit}
    agreed: FederationFolder | None = None
    if federation is None:
        options |= {"start": start, "seed": seed or 0, "image_size": image_size, "classes": split_words(classes)}
        options |= {"all_examples": all_examples, "task": task or "classification"}
        options |= {"table": said_of_table(target, columns, moments)}
    else:
        refuse_said({"--method": method, "--start": start, "--image-size": image_size, "--seed": seed, "--task": task})
        refuse_said({"--target": target, "--columns": columns, "--moments": moments, "--classes": classes})
        refuse_said({"--all-examples": all_examples})
        agreed = read_federation(federation, sets or [], [model] if model else [])
        if model not in (None, own := agreed.agreement.model.name):
            raise ConfigError(f"--model is {model!r}, and the federation's is {own!r}; leave it out")
    with console.err.status(f"training on {data}"):
        if agreed is None:
            done = site_update(data, model or "mlp", method or "fedavg", sets or [], **options)
        else:
            done = update_by_federation(agreed, data, **options)
    _write_update(done, output, as_json, privacy_ledger, budget, federation)


def _write_update(
    done: SiteUpdate, output: Path, as_json: bool, ledger: Path | None, budget: float | None, federation: Path | None
) -> None:
    """Write an update, if its privacy can be afforded, and say what is in it."""
    if ledger is not None or budget is not None:
        from fedfuse.federation.fusion import charge

        if ledger is None and federation is None:
            raise ConfigError("--budget is of all releases together; name the ledger that has them (--privacy-ledger)")
        path = ledger or Path(str(federation)) / "site-privacy.json"
        what = f"{output.name} by {done.update.about.method}"
        total = charge(done.update.release, path, what, budget)  # before the file exists, so no release goes uncounted
        console.note(f"privacy of any one row so far: ε = {total.epsilon:.4g} at δ = {total.delta:g} ({path})", "dim")
    done.update.save(output)
    if done.site.broken:
        lines = "".join(f"{name}\t{why}\n" for name, why in done.site.broken.items())
        write_output(_broken_file(output), lines.encode())
    facts = {"file": str(output), "bytes": output.stat().st_size, **done.facts()}
    if as_json:
        console.say_json(facts)
        return
    counts = ", ".join(f"{name} {count}" for name, count in done.site.counts.items())
    console.say(f"{done.site.source}: {len(done.site):,} rows ({counts or done.site.targets_text})")
    parts = [] if done.loss is None else [f"loss {done.loss:.4g}"]
    if (seen := done.assessment) is not None:
        spread = "" if seen.spread is None else f" ± {seen.words(seen.spread)}"
        parts.append(
            f"{seen.score_name} {seen.words(seen.score)}{spread} on {seen.rows} {seen.what.removeprefix('the ')} "
            f"({seen.constant_words}: {seen.words(seen.constant)})"
        )
    if parts:
        console.say("; ".join(parts))
    if done.site.broken:
        console.say(f"{len(done.site.broken)} broken pictures were left out, listed in {_broken_file(output)}")
    console.say(f"{facts['file']}: {facts['bytes']:,} bytes, {done.update.num_examples:,.0f} examples behind it")
    console.say(f"it reveals: {'; '.join(done.update.reveals) or 'nothing beside the trained weights'}")
    for warning in done.warnings:
        console.warn(warning)


def _broken_file(output: Path) -> Path:
    return output.with_suffix(".broken.txt")


OfMethod = Annotated[
    list[str] | None, typer.Option("--set", help="An option of the method, or model.key=…; may be repeated.")
]
Trusted = Annotated[
    list[str] | None,
    typer.Option("--model", help="package.module:Class that the file names, or plain weights are of."),
]
Length = Annotated[int, typer.Option(min=2, help="Tokens of a text that a folder's network reads.")]
Own = Annotated[Path | None, typer.Option(help="This site's own update, for refit with layers=true.")]
AdapterBase = Annotated[Path | None, typer.Option(help="Of an adapter's folder: that of the model it adapts.")]


def evidence(
    model: Annotated[Path, typer.Argument()],
    data: Source,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file to send.")] = None,
    federation: FederationOption = None,
    method: Annotated[str | None, typer.Option(help="The federation's, or else refit.", callback=check_method)] = None,
    sets: OfMethod = None,
    client: Annotated[str | None, typer.Option(help="This site's name; by default the file's.")] = None,
    train_limit: Annotated[int | None, typer.Option(min=1, help="Use only so many rows.")] = None,
    image_size: ImageSize = None,
    skip_broken: SkipBroken = False,
    classes: Annotated[str | None, typer.Option(help="The names of all classes, where no file tells them.")] = None,
    task: TaskName = None,
    target: Target = None,
    columns: Columns = None,
    moments: MomentsFiles = None,
    trust: Trusted = None,
    length: Length = 128,
    own: Own = None,
    privacy_ledger: PrivacyLedger = None,
    budget: Budget = None,
    base: AdapterBase = None,
    as_json: Json = False,
) -> None:
    """At a site: bring the evidence a method asks for at a finished model, without training.

    MODEL is a file that `fuse`, `run` or `update` wrote, or plain safetensors of a network trained elsewhere (--model):
    for a method that does not train, such as refit, the model all sites have (--start of `fuse`), else the site's own;
    or a folder of transformers or an adapter (--base), into which evidence is written for `fuse` unless -o says where.
    """
    if output is not None:
        read = (model, own, base, *(moments or []), privacy_ledger)
        check_written(output, *read, data=[data], federation=federation)
    if model.is_dir():
        reading = {"client": client or (output or model).stem, "limit": train_limit, "length": length, "base": base}
        _folder_evidence(model, data, output, method or "regmean", sets or [], reading, as_json)
        return
    if output is None:
        raise ConfigError(f"{model} is no folder, so its evidence needs a file of its own; name it (-o)")
    from fedfuse.federation.agreement import read_federation
    from fedfuse.federation.evidence import Saying, site_evidence

    agreed = None if federation is None else read_federation(federation, trusted=trust or [])
    if agreed is not None:
        said_here = {"--task": task, "--target": target, "--columns": columns, "--moments": moments}
        refuse_said(said_here | {"--classes": classes, "--image-size": image_size})
    said = Saying(task, tuple(split_words(classes)), said_of_table(target, columns, moments), image_size)
    with console.err.status(f"looking at {data}"):
        done = site_evidence(
            model,
            data,
            method,
            sets or [],
            client=client or output.stem,
            limit=train_limit,
            skip_broken=skip_broken,
            trusted=trust or [],
            federation=agreed,
            saying=said,
            own=own,
        )
    _write_update(done, output, as_json, privacy_ledger, budget, federation)


def _folder_evidence(
    folder: Path,
    data: str,
    output: Path | None,
    method: str,
    sets: list[str],
    reading: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Evidence at the weights of a folder of transformers."""
    from fedfuse.federation.checkpoint import checkpoint_evidence, save_evidence

    with console.err.status(f"looking at {data}"):
        update = checkpoint_evidence(folder, data, method, sets, **reading)
        output = save_evidence(update, folder, output)
    facts = {"file": str(output), "bytes": output.stat().st_size, "examples": update.num_examples}
    if as_json:
        console.say_json(facts | {"reveals": list(update.reveals)})
        return
    console.say(f"{output}: {facts['bytes']:,} bytes, of {update.num_examples:,.0f} rows")
    console.say(f"it reveals {'; '.join(update.reveals) or 'nothing beside its weights'}")


OfFusion = Annotated[
    list[str] | None,
    typer.Option("--set", help="An option of the method, or of guard., align. and bounds.; may be repeated."),
]
Start = Annotated[
    Path | None, typer.Option("--start", "--base", help="The weights all started from, where a method needs them.")
]
NumExamples = Annotated[list[str] | None, typer.Option(help="Examples behind each, in order, as in 100,300.")]
Quorum = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="The share that must be admitted: half of updates, all of folders."),
]
Networks = Annotated[
    list[str] | None, typer.Option("--model", help="A network that is not fedfuse's own, to be run; may be repeated.")
]
OverBounds = Annotated[
    str | None,
    typer.Option(help="Who says far more than the others: refuse (by default), clip, or off to compare nobody."),
]
AlignName = Annotated[
    str | None, typer.Option(help="Align hidden units first: by weights, activations, transport or graph.")
]
ServerData = Annotated[str | None, typer.Option(help="Labelled rows the server holds, where a method needs them.")]
Unlabelled = Annotated[str | None, typer.Option(help="Inputs the server holds, their labels unseen, for distillation.")]
Into = Annotated[Path | None, typer.Option(help="A fused file that keeps its sums: add to them.")]
Remove = Annotated[list[str] | None, typer.Option(help="A site to take out of --into: its name or its update file.")]
KeepSites = Annotated[bool, typer.Option("--keep-sites", help="Keep each site's sums apart in the fused file.")]
Partial = Annotated[bool, typer.Option("--partial", help="Write the sum of these updates, an update again.")]
ShardSize = Annotated[str, typer.Option(help="The largest file of a folder that is written, as in 5GB.")]
Dtype = Annotated[str | None, typer.Option(help="Of a folder's weights: float32, bfloat16, …; by default the widest.")]
EvidenceFiles = Annotated[
    list[str] | None,
    typer.Option("--evidence", help="Of folders, a file each in their order, where it is not in them; as in a,b."),
]


def fuse(
    output: Annotated[Path, typer.Option("-o", "--output", help="The fused model's file.")],
    updates: Annotated[list[Path] | None, typer.Argument()] = None,
    federation: FederationOption = None,
    method: MaybeMethod = None,
    sets: OfFusion = None,
    start: Start = None,
    num_examples: NumExamples = None,
    quorum: Quorum = None,
    model: Networks = None,
    guard: Annotated[str | None, typer.Option(help="A filter first: clip, krum, median, trimmed or private.")] = None,
    bounds: OverBounds = None,
    align: AlignName = None,
    server_data: ServerData = None,
    unlabelled: Unlabelled = None,
    seed: Annotated[int, typer.Option(help="Fixes every random draw of the server.")] = 0,
    into: Into = None,
    remove: Remove = None,
    keep_sites: KeepSites = False,
    partial: Partial = False,
    shard_size: ShardSize = "5GB",
    dtype: Dtype = None,
    evidence: EvidenceFiles = None,
    as_json: Json = False,
) -> None:
    """Anywhere: admit update files, fuse them, write one model file; no server needed.

    UPDATES are files that `update` wrote, plain safetensors, or checkpoint folders as `save_pretrained` writes them,
    with evidence in them where a method reads some (`fedfuse evidence`); of folders a folder is made.
    """
    with without_collecting():
        from fedfuse.federation.fusion import fuse_files

    updates = updates or []
    brought = [Path(word.strip()) for text in evidence or [] for word in text.split(",")] or None
    read = (*updates, start, into, *(brought or []), *map(Path, remove or []))
    if not output.is_dir() or all(path.suffix == ".safetensors" for path in updates):  # of folders a folder is made
        check_written(output, *read, data=[server_data, unlabelled], federation=federation)
    agreed: FederationFolder | None = None
    if federation is not None:  # late: it brings experiments and their data, which a plain merge does not wait for
        from fedfuse.federation.agreement import read_federation

        agreed = read_federation(federation, trusted=model or [])
    with console.err.status(f"fusing {len(updates)} updates"):
        fused = fuse_files(
            updates,
            method,
            sets or [],
            federation=agreed,
            start=start,
            num_examples=_numbers_of_examples(num_examples),
            quorum=quorum,
            models=model or [],
            guard=guard,
            bounds=bounds,
            align=align,
            server_data=server_data,
            unlabelled=unlabelled,
            seed=seed,
            into=into,
            remove=remove or [],
            keep_sites=keep_sites,
            evidence=brought,
        )
    _save(fused.partial() if partial else fused, output, shard_size, dtype)
    how = f"{'added up' if partial else 'fused'}{f' into the sums of {into}' if into else ''}"
    _say_fused(fused, output, len(updates), how, as_json)


def _numbers_of_examples(given: list[str] | None) -> list[float] | None:
    """Numbers of examples, one option each or with commas between."""
    words = [word for text in given or [] for word in text.split(",")]
    try:
        return [float(word) for word in words] or None
    except ValueError as why:
        raise ConfigError(f"--num-examples is {','.join(words)!r}, expected numbers as in 100,300") from why


def _save(fused: Fused | Update, output: Path, shard_size: str, dtype: str | None) -> None:
    """Write what was fused; of folders a folder, tensor by tensor, with a bar that fills."""
    from fedfuse.api import Fused
    from fedfuse.data.stores import bar

    if not isinstance(fused, Fused):
        fused.save(output)
        return
    with bar(f"fusing into {output}", fused.num_bytes(dtype) if fused.folders else None, in_bytes=True) as watch:
        fused.save(output, shard_size=shard_size, dtype=dtype, watch=watch)


def _say_fused(fused: Fused, output: Path, count: int, how: str, as_json: bool) -> None:
    """Say which updates were fused, which were refused or clipped, and what a person should know."""
    if as_json:
        facts = {"file": str(output), "refused": [dict(r) for r in fused.refused], "facts": fused.facts}
        facts |= {"clipped": [dict(c) for c in fused.clipped]}
        told = fused.about.model_dump(mode="json", include={"method", "class_names", "sites"})
        console.say_json(facts | told | {"remarks": list(fused.remarks)})
        return
    for refusal in fused.refused:
        reason = f"{refusal['client']}: {refusal['field']} is {refusal['got']}, expected {refusal['expected']}"
        console.note(f"refused {reason}", "yellow")
    for weak in fused.clipped:
        console.note(
            f"weakened {weak['client']}: {weak['field']} is {weak['got']}, expected {weak['expected']}", "yellow"
        )
    for remark in fused.remarks:
        console.warn(remark)
    if fused.about.class_names:
        named = "targets" if fused.about.task in ("regression", "multilabel") else "classes"
        console.say(f"{named}: {', '.join(fused.about.class_names)}")
    if left_out := fused.facts.get("not_aligned"):
        console.warn(f"not aligned: {', '.join(left_out)}; these units were averaged where they stand")
    if (error := fused.facts.get("adapter_error")) is not None:
        norm = "its answers to the clients' inputs" if fused.facts.get("adapter_metric") == "inputs" else "its norm"
        console.say(f"lost of the mean of the adapters: {error:.2%} of {norm}")
    console.say(f"{output}: {count - len(fused.refused)} of {count} updates {how} by {fused.about.method}")


def evaluate(
    models: Annotated[list[Path], typer.Argument()],
    data: Annotated[list[str], typer.Option("--data", help="Rows to score on; repeated, a table by site.")],
    test_limit: Annotated[int | None, typer.Option(min=1, help="Use only so many rows.")] = None,
    train_limit: Annotated[int | None, typer.Option(min=1, help="Needed where only part of a set is there.")] = None,
    standardize: Annotated[bool, typer.Option(help="Standardize by the training rows, as the run did.")] = False,
    image_size: ImageSize = None,
    skip_broken: SkipBroken = False,
    bins: Annotated[int, typer.Option(min=1, help="Calibration bins.")] = 15,
    task: TaskName = None,
    target: Target = None,
    columns: Columns = None,
    moments: MomentsFiles = None,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Score models and updates: on the test half of a source that has one, else on all its rows.

    MODELS are files that `fuse`, `run` or `update` wrote. Say task and columns for files that do not.
    """
    from fedfuse.federation.evaluate import Reading, evaluate_files

    table = said_of_table(target, columns, moments)
    reading = Reading(test_limit, image_size, skip_broken, standardize, train_limit, task, table)
    found = {one: evaluate_files(models, one, reading, bins, frozenset(trust or [])) for one in data}
    for remark in dict.fromkeys(remark for _, remarks in found.values() for remark in remarks):
        console.warn(remark)
    scores = {source: each for source, (each, _) in found.items()}
    if as_json:
        console.say_json(scores if len(data) > 1 else scores[data[0]])
    elif len(data) > 1:
        console.show_sites(scores)
    else:
        console.show_scores(data[0], scores[data[0]])
