"""What `fedfuse reproduce` does with many tables at once: run what is missing, store results, write verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedfuse.cli import console
from fedfuse.cli.options import typer
from fedfuse.errors import ConfigError

if TYPE_CHECKING:
    from fedfuse.experiment.claims import Scale


def check_request(name: str | None, flags: Mapping[str, bool], hours: float | None, partial: bool) -> None:
    """Refuse flags that exclude each other, before anything is done."""
    given = [flag for flag, on in flags.items() if on]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} were given together; one after the other: --all, --store, --verdicts")
    if name is not None and given and given != ["--store"]:
        raise ConfigError(f"{name!r} was given with {given[0]}, which is about all of them; leave one of them out")
    if partial and given != ["--store"]:
        raise ConfigError("--partial says what --store may store; add --store or leave it out")
    if hours is not None and given != ["--all"]:
        raise ConfigError("--hours says when --all stops; add --all or leave it out")


def scale_of(word: str) -> Scale:
    """The scale a user typed."""
    from fedfuse.experiment.claims import SCALES

    for known in SCALES:
        if word == known:
            return known
    raise ConfigError(f"--scale is {word!r}, expected cpu or paper")


def run_all_missing(scale: Scale, hours: float | None, out: Path | None, workers: int | None, as_json: bool) -> None:
    """Run every table without a stored result, and tell of each as it ends."""
    from fedfuse.experiment.reproduce import run_missing

    attempts = []
    try:
        for attempt in run_missing(scale, hours, out=out or Path("runs"), workers=workers, progress=not as_json):
            attempts.append(attempt)
            if not as_json:
                console.say(f"{attempt.name}: {attempt.outcome}" + (f" ({attempt.why})" if attempt.why else ""))
    except KeyboardInterrupt:
        console.complain("stopped; the same command goes on")
        raise typer.Exit(1) from None
    if as_json:
        console.say_json([{"name": a.name, "outcome": a.outcome, "why": a.why} for a in attempts])
    elif not attempts:
        console.say(f"nothing is missing at the scale {scale}")


def store_runs(name: str | None, scale: Scale, out: Path | None, partial: bool, as_json: bool) -> None:
    """Store the results of one table's run directory, or of all that are finished, and write their tables anew."""
    from fedfuse.experiment.reproduce import catalogue, store_result

    base = out or Path("runs")
    known = [r.name for r in catalogue() if scale in r.scales]
    names = [name] if name else [n for n in known if any((base / n).glob("**/ledger.jsonl"))]
    written = []
    for each in names:
        folder = base if name and out else base / each
        try:
            written.append(str(store_result(each, scale, folder, partial)))
        except ConfigError as why:
            if name:
                raise
            console.hint(str(why))
    tables = write_documents()
    if as_json:
        console.say_json({"results": written, "documents": tables})
        return
    console.say("\n".join([*written, *(f"tables: {path}" for path in tables)]) or f"no finished run in {base}")


def write_documents() -> list[str]:
    """Write the marked parts of the experiments' documents anew; the documents that changed."""
    from fedfuse.experiment.claims import fill_documents

    changed = {path: text for path, text in fill_documents().items() if path.read_text(encoding="utf-8") != text}
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
    return [str(path) for path in changed]


def write_verdicts(scale: Scale, out: Path | None, as_json: bool) -> None:
    """Write the document and the page of verdicts, and count them."""
    from fedfuse.experiment.claims import all_findings
    from fedfuse.experiment.figures import experiments_folder
    from fedfuse.report.claims import VERDICTS
    from fedfuse.report.reproduction import effect_text, reproduction_document, reproduction_page

    findings = all_findings(scale, Path("runs"))
    document = (out or experiments_folder().parent / "docs") / "reproduction.md"
    page = (out or Path("runs")) / "reproduction.html"
    for path, text in ((document, reproduction_document(findings)), (page, reproduction_page(findings))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if as_json:
        each = [{"id": f.claim.id, "verdict": f.verdict, "effect": effect_text(f)} for f in findings]
        console.say_json({"document": str(document), "page": str(page), "claims": each})
        return
    for verdict in VERDICTS:
        console.say(f"{sum(f.verdict == verdict for f in findings):3d}  {verdict}")
    console.say(f"document: {document}   page: {page}")
