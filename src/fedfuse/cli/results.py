"""Commands that read runs: the page, tables, plots and comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fedfuse.cli import console
from fedfuse.cli.options import Json, check_written, typer
from fedfuse.core.files import STREAM, write_output
from fedfuse.errors import ConfigError

if TYPE_CHECKING:
    from fedfuse.experiment.reproduce import Scale
    from fedfuse.report import Run
    from fedfuse.report.tables import Format


Runs = Annotated[list[Path], typer.Argument()]


def report(
    runs: Runs,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the page.")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Make one self-contained page of one run or several: tables, curves, heat maps.

    RUNS are run directories; a sweep's folder stands for all runs in it.
    """
    from fedfuse.report import find_runs, read_run, write_page
    from fedfuse.report.tables import as_data

    check_written(output, *_files_of(runs), streams=True, as_json=as_json)
    path = write_page(runs, output)
    _warn_of_other_code([read_run(run) for run in find_runs(runs)])
    if output == STREAM:
        return
    if as_json:
        console.say_json({"page": str(path), "runs": as_data([read_run(run) for run in find_runs(runs)])})
        return
    console.say(f"page: {path}")


def table(
    runs: Runs,
    form: Annotated[str | None, typer.Option("--format", help="md, latex, csv or json; by default as -o ends.")] = None,
    rows: Annotated[str, typer.Option(help="Methods in this order, by commas; fed* will do.")] = "",
    columns: Annotated[str, typer.Option(help="Scores in this order, by commas: accuracy,nll,rmse,bytes_up,…")] = "",
    interval: Annotated[bool, typer.Option("--interval", help="± half of the 95 % interval, not sd.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A file; by default it is printed.")] = None,
    as_json: Json = False,
) -> None:
    """Make a table for a paper: mean ± spread over seeds, the best of each column and its ties marked.

    RUNS are run directories; a sweep's folder stands for all runs in it. One run has a column per score, several runs
    have a column per run and score.
    """
    from fedfuse.report import find_runs, read_run
    from fedfuse.report.tables import WRITERS, make_sheet

    if output is not None:
        check_written(output, *_files_of(runs), streams=True)
    write = WRITERS["json" if as_json else _format(form, output)]
    found = [read_run(run) for run in find_runs(runs)]
    _warn_of_other_code(found)
    text = write(make_sheet(found, _split(rows), _split(columns), "interval" if interval else "sd"))
    if output in (None, STREAM):
        console.say(text)
        return
    write_output(output, f"{text}\n".encode())
    console.say(f"table: {output}")


def _warn_of_other_code(runs: Sequence[Run]) -> None:
    from fedfuse.report.page import code_caution

    if words := code_caution(runs):
        console.warn(words)


def _files_of(runs: Sequence[Path]) -> list[Path]:
    """What runs wrote of themselves, and what pages and tables are read from."""
    from fedfuse.report import find_runs

    names = ("ledger.jsonl", "config.toml", "environment.json", "partition.json", "results.json")
    return [run / name for run in find_runs(runs) for name in names]


def _format(form: str | None, output: Path | None) -> Format:
    from fedfuse.report.tables import SUFFIXES

    if form is None:
        return SUFFIXES.get(output.suffix, "md") if output else "md"
    for known in SUFFIXES.values():
        if form == known:
            return known
    raise ConfigError(f"--format is {form!r}, expected md, latex, csv or json")


def _split(text: str) -> list[str]:
    """Words between commas, those inside parentheses kept together: fedprox(mu=0.1, base=2) is one label.

    Example:
        >>> _split("fedavg, fedprox(mu=0.1, b=2)")
        ['fedavg', 'fedprox(mu=0.1, b=2)']
    """
    words, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return [word.strip() for word in words if word.strip()]


def plot(
    runs: Runs,
    output: Annotated[Path, typer.Option("-o", "--output", help="A .pdf, .svg or .png file.")],
    kind: Annotated[str, typer.Option(help="curve, sweep, privacy, bytes, reliability, partition or heat.")] = "curve",
    score: Annotated[str, typer.Option(help="What curve, sweep and heat show; by default the task's.")] = "",
    rows: Annotated[str, typer.Option(help="Methods, by commas; fed* will do.")] = "",
    width: Annotated[float, typer.Option(help="Inches; 3.35 is a column, 6.9 a page.", min=1.5, max=20)] = 3.35,
    seed: Annotated[int | None, typer.Option(help="Whose partition; by default the first seed's.")] = None,
    along: Annotated[str, typer.Option(help="A sweep's key on the axis; by default that with most values.")] = "",
    as_json: Json = False,
) -> None:
    """Draw a figure for a paper: told apart without colour, fonts embedded.

    RUNS are run directories; a sweep's folder stands for all runs in it.
    """
    from fedfuse.report import find_runs, read_run
    from fedfuse.report.figures import Plot, save_figure
    from fedfuse.report.scores import headline_of
    from fedfuse.report.tables import choose_labels

    check_written(output, *_files_of(runs))
    found = [read_run(run) for run in find_runs(runs)]
    chosen = choose_labels(found, _split(rows))
    shown = score or headline_of(row for run in found for row in run.rows).key
    path = save_figure(kind, Plot(found, shown, tuple(chosen), width, seed, along), output)
    console.say_json({"figure": str(path)}) if as_json else console.say(f"figure: {path}")


def compare(
    runs: Runs,
    score: Annotated[str, typer.Option(help="What is compared; by default what the task is judged by.")] = "",
    against: Annotated[str | None, typer.Option(help="One run: this method with the others, not the best.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Draw the critical differences here.")] = None,
    as_json: Json = False,
) -> None:
    """Compare by pairs: the methods of one run or two runs seed by seed, several runs as data sets, by ranks.

    RUNS are run directories; a sweep's folder stands for all runs in it. Of one run the best method is compared with
    every other, of two runs each method of the first with itself in the second, of three or more the methods' ranks,
    with Friedman's test and Nemenyi's critical difference.
    """
    from fedfuse.report import find_runs, read_run
    from fedfuse.report.compare import compare_all

    if output is not None:
        check_written(output, *_files_of(runs))
    compared = [read_run(run) for run in find_runs(runs)]
    _warn_of_other_code(compared)
    found = compare_all(compared, score, against)
    if output is not None:
        from fedfuse.report.figures import save_diagram

        if found.ranking is None:
            raise ConfigError("a critical-difference diagram shows ranks over data sets; give three runs or more")
        save_diagram(found.ranking, output)
    if as_json:
        console.say_json({**found.as_json(), "figure": output and str(output)})
        return
    if (ranking := found.ranking) is not None:
        console.table("", ("method", "mean rank"), [(name, f"{rank:.2f}") for name, rank in ranking.ranks.items()])
        console.say(
            f"\nFriedman p = {ranking.p:.3g} over {ranking.sets} runs; ranks nearer than {ranking.distance:.2f} are "
            "not told apart (Nemenyi, 5 %).\n"
        )
    console.table(found.title, found.headings, found.lines)
    console.say(f"\n{found.note}" + (f"\nfigure: {output}" if output else ""))


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
    from fedfuse.experiment.reproduce import SCALES

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
    """Store the results of one table's run directory, or of all that are finished, and rewrite their tables."""
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
    """Rewrite the marked parts of the experiments' documents; the documents that changed."""
    from fedfuse.experiment.reproduce import fill_documents

    changed = {path: text for path, text in fill_documents().items() if path.read_text(encoding="utf-8") != text}
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
    return [str(path) for path in changed]


def write_verdicts(scale: Scale, out: Path | None, as_json: bool) -> None:
    """Write the document and the page of verdicts, and count them."""
    from fedfuse.experiment.reproduce import all_findings, experiments_folder
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
