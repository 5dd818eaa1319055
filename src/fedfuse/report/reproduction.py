"""Verdicts and stored tables in words: a document, a page, and the tables between marks in other documents."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from fedfuse.errors import ConfigError
from fedfuse.report.claims import STORED_COLUMNS, VERDICTS, Finding, StoredResult, Verdict
from fedfuse.report.scores import MeanSd

TITLE = "# What holds: every claim, with a verdict"

PREFACE = """\
Every sentence below is a claim of one of the five papers, or of ours, in our words. The verdict is computed from
`experiments/claims.toml` (what is claimed, and which comparison tests it) and `experiments/results/` (scores seed by
seed); nobody writes it. An *effect* is the first method less the second, or over it where a factor is claimed, the mean
over all cases of the comparison. Its interval is Student's 95 % over seeds, paired: methods of one file have the same
start and rows, and fuse the same updates where they train alike. Small files keep the papers' proportions and not their
size: a verdict is of that scale, and what does not hold here may hold there."""

CLOSING = """\
`fedfuse reproduce --verdicts` writes this document; `fedfuse reproduce --all --scale cpu` runs what is missing."""

DASH = "–"


def reproduction_document(findings: Sequence[Finding]) -> str:
    """The whole document in Markdown: what the verdicts mean, how often each was reached, then paper by paper."""
    papers = _by_paper(findings)
    lines = [f"| verdict | {' | '.join(papers)} | all | it means |", "|---|" + "--:|" * (len(papers) + 1) + "---|"]
    for verdict, means in VERDICTS.items():
        counts = [sum(found.verdict == verdict for found in mine) for mine in papers.values()]
        lines.append(f"| {verdict} | {' | '.join(map(str, counts))} | {sum(counts)} | {means} |")
    parts = [TITLE, PREFACE, "\n".join(lines)]
    for paper, mine in papers.items():
        parts += [f"## {paper}", claims_table(mine), *_notes(mine)]
    return "\n\n".join([*parts, CLOSING]) + "\n"


def _by_paper(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    papers: dict[str, list[Finding]] = {}
    for found in findings:
        papers.setdefault(found.claim.paper, []).append(found)
    return papers


def claims_table(findings: Sequence[Finding]) -> str:
    """The verdicts as a Markdown table, one row per claim."""
    lines = ["| claim | where | published | verdict | effect, 95 % interval | cases | seeds | command |"]
    lines.append("|---|---|---|---|--:|--:|--:|---|")
    for found in findings:
        claim = found.claim
        cells = (claim.says, claim.place, claim.published or DASH, f"**{found.verdict}**", *_number_cells(found))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _number_cells(found: Finding) -> tuple[str, str, str, str]:
    command = f"`{found.claim.command}`" if found.claim.command else DASH
    if found.effect is None:
        return DASH, DASH, DASH, command
    return effect_text(found), f"{found.agreeing} of {found.cases}", str(found.effect.n), command


def effect_text(found: Finding) -> str:
    """An effect with its interval, in points, as a factor, or in the score's own unit.

    Example:
        >>> from fedfuse.report.claims import Claim
        >>> from fedfuse.report.stats import Difference
        >>> words = {"id": "a", "paper": "X", "place": "Table 1", "says": "a is above b"}
        >>> claim = Claim(**words, file="x/t", first=("a",), second=("b",))
        >>> effect_text(Finding(claim, "holds", Difference(3, 20.04, 10.0, 30.0, 0.01, 0.25, 3), 1, 1))
        '+20.0 (+10.0 … +30.0) points'
    """
    gap, claim = found.effect, found.claim
    if gap is None:
        return DASH

    def write(value: float) -> str:
        if claim.effect == "ratio":
            return f"×{value:.3g}"
        sign, digits = "+" if claim.second else "", 1 if claim.in_points else 3
        return f"{value:{sign}.{digits}f}"

    ends = "" if gap.low is None or gap.high is None else f" ({write(gap.low)} … {write(gap.high)})"
    unit = " points" if claim.in_points and claim.second else " %" if claim.in_points else ""
    return f"{write(gap.mean)}{ends}{unit}"


def _notes(findings: Sequence[Finding]) -> list[str]:
    """What the table does not say: notes, reasons, what is missing, what is older than its file."""
    lines = []
    for found in findings:
        claim = found.claim
        words = [claim.note, claim.untestable]
        if found.verdict != "not run" and found.missing:
            words.append(f"missing in whole or in part: {', '.join(found.missing)}")
        if found.older:
            words.append("the experiment file has changed since it was run")
        if said := "; ".join(word for word in words if word):
            lines.append(f"- *{claim.says}* {said[0].upper()}{said[1:]}.")
    return ["\n".join(lines)] if lines else []


def method_verdicts(method: str, findings: Sequence[Finding]) -> list[str]:
    """The lines of a method's page about its claims; none where no claim names it."""
    mine = [found for found in findings if method in found.claim.methods]
    if not mine:
        return []
    lines = ["| claim | whose | verdict | effect, 95 % interval | seeds |", "|---|---|---|--:|--:|"]
    for found in mine:
        claim, seeds = found.claim, DASH if found.effect is None else str(found.effect.n)
        where = f"{claim.paper}, {claim.place}"
        lines.append(f"| {claim.says} | {where} | **{found.verdict}** | {effect_text(found)} | {seeds} |")
    return lines


UNITS: Mapping[str, tuple[float, int, str]] = {
    "share": (100.0, 1, ", %"),
    "bytes": (1e-6, 2, ", MB"),
    "flops": (1e-9, 1, ", GFLOPs"),
    "seconds": (1.0, 2, ", s"),
}


def stored_table(result: StoredResult, score: str = "accuracy", cells: Sequence[str] = ()) -> str:
    """A stored result as a Markdown table: methods down, experiments across, mean ± standard deviation over seeds.

    The best of a column is bold; a label in parentheses, such as a bound to read the others by, does not compete.
    """
    column, chosen = STORED_COLUMNS[score], [cell for cell in result.cells if not cells or cell in cells]
    factor, digits, unit = UNITS.get(column.kind, (1.0, 3, ""))
    lines = [f"| {column.title}{unit} | {' | '.join(cell.replace('-', ' ') for cell in chosen)} |"]
    lines.append("|---|" + "--:|" * len(chosen))
    found = {cell: {label: result.summarize(cell, label, score) for label in result.labels} for cell in chosen}
    first, best = max if column.better == "high" else min, dict[str, float | None]()
    for cell, values in found.items():
        means = [value.mean for label, value in values.items() if value is not None and not label.startswith("(")]
        best[cell] = first(means) if means else None
    for label in result.labels:
        words = [_cell_text(found[cell][label], factor, digits, best[cell]) for cell in chosen]
        if set(words) != {DASH}:
            lines.append(f"| {label} | {' | '.join(words)} |")
    seeds = sorted({s for methods in result.cells.values() for by in methods.values() for s in by.get(score, {})})
    how = f"\n\nSeeds {_spans(seeds)}; `fedfuse reproduce {result.name} --scale {result.scale}`."
    left = ", ".join(cell.replace("-", " ") for cell in result.unfinished)
    return "\n".join(lines) + how + (f" Not finished: {left}." if left else "")


def _cell_text(value: MeanSd | None, factor: float, digits: int, best: float | None) -> str:
    if value is None:
        return DASH
    deviation = "" if value.sd is None else f" ± {factor * value.sd:.{digits}f}"
    text = f"{factor * value.mean:.{digits}f}{deviation}"
    return f"**{text}**" if value.mean == best else text


def _spans(seeds: Sequence[int]) -> str:
    """Whole numbers in words.

    Example:
        >>> _spans([0, 1, 2]), _spans([0, 3])
        ('0–2', '0, 3')
    """
    if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"{seeds[0]}–{seeds[-1]}"
    return ", ".join(map(str, seeds))


TABLE = re.compile(r"<!-- stored (?P<asked>[^>]*?) -->\n.*?<!-- /stored -->", re.DOTALL)
NEVER_RUN = re.compile(r"<!-- never run (?P<folder>[^>]*?) -->\n.*?<!-- /never run -->", re.DOTALL)


def fill_tables(text: str, results: Mapping[str, StoredResult], missing: Sequence[str] = ()) -> str:
    """A document with its marked parts written again, from stored results.

    `<!-- stored NAME -->` … `<!-- /stored -->` is the accuracy of all methods in all experiments of the file NAME;
    `<!-- stored NAME SCORE -->` another score; `<!-- never run FOLDER -->` … `<!-- /never run -->` the files of a
    folder that have no stored result.

    Args:
        text: the document.
        results: stored results by the name of their file.
        missing: names of experiment files without one, with their scale: `fedlpa/table1.paper`.

    Raises:
        ConfigError: for a mark that asks for a score that is not stored.
    """

    def write_table(found: re.Match[str]) -> str:
        asked = found["asked"].strip()
        name, _, score = asked.partition(" ")
        if score and score not in STORED_COLUMNS:
            raise ConfigError(f"there is no stored score {score!r}; expected one of {', '.join(STORED_COLUMNS)}")
        table = stored_table(results[name], score or "accuracy") if name in results else f"`{name}` was never run."
        return f"<!-- stored {asked} -->\n{table}\n<!-- /stored -->"

    def write_missing(found: re.Match[str]) -> str:
        folder = found["folder"].strip()
        return f"<!-- never run {folder} -->\n{never_run_text(folder, missing)}\n<!-- /never run -->"

    return NEVER_RUN.sub(write_missing, TABLE.sub(write_table, text))


def never_run_text(folder: str, missing: Sequence[str]) -> str:
    """Which files of a folder have no stored result, in words.

    Example:
        >>> never_run_text("swa", ["swa/table1.cpu", "swa/table1.paper", "ams/skew.cpu"])
        'No stored result of the small files `table1`; of the files as published `table1`.'
        >>> never_run_text("swa", [])
        'Every file has a stored result.'
    """
    words = {"cpu": "of the small files", "paper": "of the files as published"}
    mine = [name.removeprefix(f"{folder}/") for name in missing if name.startswith(f"{folder}/")]
    names = {scale: [name.removesuffix(f".{scale}") for name in mine if name.endswith(f".{scale}")] for scale in words}
    parts = [f"{words[scale]} {', '.join(f'`{name}`' for name in each)}" for scale, each in names.items() if each]
    return f"No stored result {'; '.join(parts)}." if parts else "Every file has a stored result."


INK: Mapping[Verdict, str] = {
    "holds": "#1a7f37",
    "holds in part": "#9a6700",
    "does not hold": "#b42318",
    "not testable at this scale": "#667085",
    "not run": "#667085",
}

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #1d2433; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 2.5rem; }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem; border-bottom: 1px solid #d7dce5; }
td.n { white-space: nowrap; text-align: right; } .v { font-weight: 600; white-space: nowrap; }
.t { overflow-x: auto; } code { font-size: .85em; }
"""


def reproduction_page(findings: Sequence[Finding]) -> str:
    """The verdicts as one self-contained page."""
    parts = [f"<h1>{escape(TITLE.lstrip('# '))}</h1>", f"<p>{escape(re.sub('[`*]', '', PREFACE))}</p>"]
    counts = {verdict: sum(found.verdict == verdict for found in findings) for verdict in VERDICTS}
    parts.append("<p>" + " · ".join(f"{_verdict_html(v)} {n}" for v, n in counts.items()) + "</p>")
    heads = "".join(f"<th>{h}</th>" for h in ("claim", "published", "verdict", "effect", "cases", "seeds", "command"))
    for paper, mine in _by_paper(findings).items():
        rows = "".join(map(_row_html, mine))
        parts.append(f'<h2>{escape(paper)}</h2><div class="t"><table><tr>{heads}</tr>{rows}</table></div>')
    head = f'<meta charset="utf-8"><title>fedfuse: what holds</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _row_html(found: Finding) -> str:
    claim = found.claim
    effect, cases, seeds, command = _number_cells(found)
    numbers = "".join(f'<td class="n">{escape(word)}</td>' for word in (effect, cases, seeds))
    return (
        f"<tr><td>{escape(claim.says)}<br><small>{escape(claim.place)}</small></td>"
        f"<td>{escape(claim.published or DASH)}</td><td>{_verdict_html(found.verdict)}</td>{numbers}"
        f"<td><code>{escape(command.strip('`'))}</code></td></tr>"
    )


def _verdict_html(verdict: Verdict) -> str:
    return f'<span class="v" style="color: {INK[verdict]}">{verdict}</span>'
