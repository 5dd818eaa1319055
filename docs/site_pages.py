"""Pages of the site that are written by what they describe: one per method, the decisions, and the root's documents.

MkDocs calls `on_config` first, `on_files` while it collects pages, and `on_page_markdown` for each.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from fedfuse.core.catalogue import FAMILIES, list_catalogue
from fedfuse.core.messages import Brief
from fedfuse.core.model import Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.seams import TRAINING_PASSES, Effort, HasPasses, passes_of
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.experiment.reproduce import all_findings
from fedfuse.report.claims import Finding
from fedfuse.report.reproduction import method_verdicts

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent))  # MkDocs loads this file by its path
from graph_picture import picture_of  # noqa: E402

NETWORK, SHAPE, ROWS = Spec("lenet"), (1, 28, 28), 600
"""What bytes and passes are told for: LeNet on 28×28 pixels, ten classes, a client of 600 rows."""

PAPERS = {"arXiv:": "https://arxiv.org/abs/", "doi:": "https://doi.org/"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List what is written in depth of methods, so that a new document needs no entry."""
    methods = next(entry["Methods"] for entry in config.nav if "Methods" in entry)
    deep = next(entry for entry in methods if "In depth" in entry)
    deep["In depth"] = [f"methods/{path.name}" for path in sorted((ROOT / "docs" / "methods").glob("*.md"))]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to code of the repository become its path, as the site has the documents only; graphs become pictures."""
    markdown = re.sub(r"```mermaid\n(.*?)```", lambda found: picture_of(found[1]), markdown, flags=re.DOTALL)
    return re.sub(r"\[([^\]]+)\]\(\.\./(?:examples|tests|src|benchmarks)[^)]*\)", r"\1", markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the written pages to those that lie in the folder."""
    pages = {f"methods/reference/{entry['name']}.md": method_page(entry) for entry in list_catalogue()}
    pages["methods/index.md"] = index_page()
    pages["decisions/index.md"] = decisions_page()
    pages |= {f"{name.lower()}.md": root_document(f"{name}.md") for name in ("CONTRIBUTING", "CHANGELOG")}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def index_page() -> str:
    """All methods by where they take the mean."""
    lines = ["# All methods", "", "Every aggregator is a weighted mean; methods differ in where they take it.", ""]
    for family, words in FAMILIES.items():
        entries = [entry for entry in list_catalogue() if entry["family"] == family]
        if entries:
            lines += ["", f"## The mean is taken {words}", "", "| method | what it does |", "|---|---|"]
            lines += [f"| [{e['name']}](reference/{e['name']}.md) | {_cell(e['summary'])} |" for e in entries]
    return "\n".join(lines)


def method_page(entry: dict[str, Any]) -> str:
    """What one method says of itself, and what it costs on a small network."""
    said = entry["text"].split("\nArgs:")[0].rstrip()
    parts = [f"# {entry['name']}", "", *_paper_line(entry["paper"]), _escape(said), ""]
    parts += ["```toml", "[[methods]]", f'name = "{entry["name"]}"', "```", ""]
    if entry["options"]:
        parts += ["## Options", "", "| option | takes | default | |", "|---|---|---|---|"]
        parts += [_option_line(option) for option in entry["options"]]
    reveals = [f"- {_escape(words)}" for words in entry["reveals"]]
    parts += ["", "## What clients reveal", ""]
    parts += (
        ["Beside the trained weights and the number of examples:", "", *reveals]
        if reveals
        else ["Nothing beside the trained weights and the number of examples."]
    )
    parts += ["", *_cost_lines(find_method(entry["name"]).recipe())]
    if verdicts := method_verdicts(entry["name"], _findings()):
        parts += ["", "## Claims and verdicts", "", *verdicts, "", "[All claims](../../reproduction.md)"]
    return "\n".join(parts)


@cache
def _findings() -> tuple[Finding, ...]:
    """The verdict on every claim, computed once for all pages."""
    return tuple(all_findings())


def _cost_lines(recipe: Recipe) -> list[str]:
    """What a client sends and computes, told for one network."""
    start = recipe.prepare_model(Single.of(NETWORK.build(), NETWORK), 10, 0)
    weights = start.posterior.mean
    brief, effort = Brief(0, start.spec, weights, classes=10), Effort(start.spec, SHAPE, 1, ROWS, LocalSettings())
    size = sum(t.numel() * t.element_size() for t in weights.values())
    lines = [
        "## Bytes and work",
        "",
        "For LeNet on 28×28 pixels and ten classes, in a client's second round; passes are of the network, per row.",
        "",
        "| what | bytes up | passes |",
        "|---|---:|---:|",
        f"| weights, trained for an epoch | {size:,} | {passes_of(recipe.objective, effort):.3g} |",
    ]
    for evidence in recipe.evidence:
        forms = evidence.expects(brief).values()
        sent = sum(_numel(form.shape) * form.dtype.itemsize for form in forms)
        passes = evidence.passes(effort) if isinstance(evidence, HasPasses) else 0.0
        lines.append(f"| evidence `{evidence.name}` | {sent:,} | {passes:.3g} |")
    return [*lines, "", f"Plain training takes {TRAINING_PASSES:.0f} passes per row and epoch."]


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for side in shape:
        total *= side
    return total


def _paper_line(paper: str) -> list[str]:
    for prefix, address in PAPERS.items():
        if paper.startswith(prefix):
            return [f"[{paper}]({address}{paper.removeprefix(prefix)})", ""]
    return [_escape(paper), ""] if paper else []


def _option_line(option: dict[str, Any]) -> str:
    default = "" if option["default"] is None else f"`{option['default']}`"
    return f"| `{option['name']}` | {_cell(option['type'])} | {default} | {_cell(option['text'])} |"


def _cell(text: str) -> str:
    return " ".join(_escape(text).replace("|", "\\|").split())


def _escape(text: str) -> str:
    """Formulas in plain text: what Markdown would take for emphasis, a tag or a reference stays as written."""
    return re.sub(r"([*_<\[\]])", r"\\\1", text)


def decisions_page() -> str:
    """All decision records, in order."""
    files = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    titles = {path.name: path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") for path in files}
    lines = [f"- [{title}]({name})" for name, title in titles.items()]
    return "\n".join(["# Decisions", "", "What was decided, when it could have been otherwise.", "", *lines])


def root_document(name: str) -> str:
    """A document of the repository's root, its links as seen from the site's."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return text.replace("](docs/", "](").replace("](CONTRIBUTING.md)", "](contributing.md)")
