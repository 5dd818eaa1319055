"""Commands of a site and of whoever fuses: update, evidence, fuse, evaluate; all by files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fedfuse.cli import console
from fedfuse.cli.fused import Account, evidence_files, numbers_of_examples, read_agreed, save, say_fused
from fedfuse.cli.options import (
    Json,
    MaybeMethod,
    Source,
    Trust,
    check_method,
    check_task,
    check_written,
    said_of_table,
    split_words,
    typer,
)
from fedfuse.core.files import write_output
from fedfuse.core.lazy import without_collecting
from fedfuse.errors import ConfigError

if TYPE_CHECKING:  # it brings torch, which a person who asks for help need not wait for
    from fedfuse.federation.agreement import FederationFolder
    from fedfuse.federation.site import SiteUpdate

FederationOption = Annotated[
    Path | None, typer.Option("--federation", help="The folder that `fedfuse init` made and every site has.")
]
SkipBroken = Annotated[bool, typer.Option("--skip-broken", help="Leave out pictures that cannot be read.")]
Into = Annotated[Path | None, typer.Option(help="A fused file that keeps its sums: add to them.")]
Remove = Annotated[list[str] | None, typer.Option(help="A site to take out of --into: its name or its update file.")]
KeepSites = Annotated[bool, typer.Option("--keep-sites", help="Keep each site's sums apart in the fused file.")]
Partial = Annotated[bool, typer.Option("--partial", help="Write the sum of these updates, an update again.")]
ServerData = Annotated[str | None, typer.Option(help="Labelled rows the server holds, where a method needs them.")]
Unlabelled = Annotated[str | None, typer.Option(help="Inputs the server holds, their labels unseen, for distillation.")]
AlignName = Annotated[
    str | None, typer.Option(help="Align hidden units first: by weights, activations, transport or graph.")
]
AllExamples = Annotated[
    int | None, typer.Option(min=1, help="How many examples all sites hold together, if that is known.")
]
Networks = Annotated[
    list[str] | None, typer.Option("--model", help="A network that is not fedfuse's own, to be run; may be repeated.")
]
Start = Annotated[
    Path | None, typer.Option("--start", "--base", help="The weights all started from, where a method needs them.")
]
EvidenceFiles = Annotated[
    list[str] | None,
    typer.Option("--evidence", help="Of folders, a file each in their order, where it is not in them; as in a,b."),
]
NumExamples = Annotated[list[str] | None, typer.Option(help="Examples behind each, in order, as in 100,300.")]
Quorum = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="The share that must be admitted: half of updates, all of folders."),
]
ShardSize = Annotated[str, typer.Option(help="The largest file of a folder that is written, as in 5GB.")]
Dtype = Annotated[str | None, typer.Option(help="Of a folder's weights: float32, bfloat16, …; by default the widest.")]
ImageSize = Annotated[int | None, typer.Option(min=1, help="Resize pictures to this width and height.")]
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
Own = Annotated[Path | None, typer.Option(help="This site's own update, for refit with layers=true.")]
AdapterBase = Annotated[Path | None, typer.Option(help="Of an adapter's folder: that of the model it adapts.")]
OfMethod = Annotated[
    list[str] | None, typer.Option("--set", help="An option of the method, or model.key=…; may be repeated.")
]
OfFusion = Annotated[
    list[str] | None,
    typer.Option("--set", help="An option of the method, or of guard., align. and bounds.; may be repeated."),
]
OverBounds = Annotated[
    str | None,
    typer.Option(help="Who says far more than the others: refuse (by default), clip, or off to compare nobody."),
]
Length = Annotated[int, typer.Option(min=2, help="Tokens of a text that a folder's network reads.")]
Trusted = Annotated[
    list[str] | None,
    typer.Option("--model", help="package.module:Class that the file names, or plain weights are of."),
]
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
    from fedfuse.federation.site import site_update, update_by_federation

    name = client or output.stem
    if hold_out and cross_validate:
        raise ConfigError("--hold-out and --cross-validate are two ways to judge; choose one")
    read = (start, *(moments or []), privacy_ledger)
    check_written(output, *read, data=[data], federation=federation)
    check_written(_broken_file(output), *read, data=[data], federation=federation)
    judged: dict[str, Any] = {"hold_out": hold_out, "folds": cross_validate, "skip_broken": skip_broken}
    judged |= {"client": name, "limit": train_limit}
    if federation is None:
        judged |= {"start": start, "seed": seed or 0, "image_size": image_size, "classes": split_words(classes)}
        judged |= {
            "all_examples": all_examples,
            "task": task or "classification",
            "table": said_of_table(target, columns, moments),
        }
        with console.err.status(f"training on {data}"):
            done = site_update(data, model or "mlp", method or "fedavg", sets or [], **judged)
    else:
        refuse_said({"--method": method, "--start": start, "--image-size": image_size, "--seed": seed, "--task": task})
        refuse_said({"--target": target, "--columns": columns, "--moments": moments, "--classes": classes})
        refuse_said({"--all-examples": all_examples})
        agreed = _read_agreed(federation, sets or [], model)
        with console.err.status(f"training on {data}"):
            done = update_by_federation(agreed, data, **judged)
    _write_update(done, output, as_json, Account(privacy_ledger, budget, federation))


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
    _write_update(done, output, as_json, Account(privacy_ledger, budget, federation))


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


def _write_update(done: SiteUpdate, output: Path, as_json: bool, account: Account) -> None:
    """Write an update, if its privacy can be afforded, and say what is in it."""
    account.charge(done.update, output)
    done.update.save(output)
    broken = _write_broken(output, done.site.broken)
    facts = {"file": str(output), "bytes": output.stat().st_size, **done.facts()}
    if as_json:
        console.say_json(facts)
    else:
        _say_update(done, facts, broken)


def _read_agreed(folder: Path, sets: list[str], model: str | None) -> FederationFolder:
    from fedfuse.federation.agreement import read_federation

    agreed = read_federation(folder, sets, [model] if model else [])
    if model not in (None, agreed.agreement.model.name):
        own = agreed.agreement.model.name
        raise ConfigError(f"--model is {model!r}, and the federation's is {own!r}; leave it out")
    return agreed


def refuse_said(said: Mapping[str, object]) -> None:
    """Refuse options that the federation says already."""
    for option, value in said.items():
        if value is not None:
            raise ConfigError(f"{option} is said by the federation, for every site alike; leave it out")


def _write_broken(output: Path, broken: Mapping[str, str]) -> Path | None:
    """Write down which pictures were left out, beside the file that was made without them."""
    if not broken:
        return None
    return write_output(_broken_file(output), "".join(f"{n}\t{why}\n" for n, why in broken.items()).encode())


def _broken_file(output: Path) -> Path:
    return output.with_suffix(".broken.txt")


def _say_update(done: SiteUpdate, facts: Mapping[str, Any], broken: Path | None) -> None:
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
    if broken is not None:
        console.say(f"{len(done.site.broken)} broken pictures were left out, listed in {broken}")
    console.say(f"{facts['file']}: {facts['bytes']:,} bytes, {done.update.num_examples:,.0f} examples behind it")
    console.say(f"it reveals: {'; '.join(done.update.reveals) or 'nothing beside the trained weights'}")
    for warning in done.warnings:
        console.warn(warning)


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

    updates, brought = updates or [], evidence_files(evidence)
    read = (*updates, start, into, *(brought or []), *map(Path, remove or []))
    if not output.is_dir() or all(path.suffix == ".safetensors" for path in updates):  # of folders a folder is made
        check_written(output, *read, data=[server_data, unlabelled], federation=federation)
    agreed = read_agreed(federation, model or [])
    with console.err.status(f"fusing {len(updates)} updates"):
        fused = fuse_files(
            updates,
            method,
            sets or [],
            federation=agreed,
            start=start,
            num_examples=numbers_of_examples(num_examples),
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
    save(fused.partial() if partial else fused, output, shard_size, dtype)
    how = f"{'added up' if partial else 'fused'}{f' into the sums of {into}' if into else ''}"
    say_fused(fused, output, len(updates), how, as_json)
