"""What a file is, for a reader: from its header alone, as facts and as a model card."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfuse.core.escape import markdown_text
from fedfuse.core.files import check_output, write_output
from fedfuse.core.metadata import About
from fedfuse.errors import ConfigError
from fedfuse.wire.codec import Altered, Malformed, read
from fedfuse.wire.messages import NOTE


def describe_file(path: Path) -> dict[str, Any]:
    """What a file says of itself, as plain data; nothing that it names is built or imported.

    Raises:
        ConfigError: if it is no safetensors file, or its header says what cannot be.
    """
    try:
        packet = read(path)
    except Altered:
        raise
    except Malformed as why:
        raise ConfigError(f"{path} cannot be shown: {why}") from why
    header, forms = packet.header, packet.tensors.forms
    kinds = {"reply": "update of a site", "model": "model"}
    specs, kind = [header.get("spec")], kinds.get(str(header.get("kind")), "plain set of tensors")
    if isinstance(members := header.get("members"), list):
        specs = members
        kind = f"{len(members)} networks that {'answer together' if 'combine' in header else 'stay apart'}"
    own = [form for name, form in forms.items() if not name.startswith(NOTE) and NOTE not in name.split("/", 1)[-1][:1]]
    evidence = sorted({name.removeprefix(NOTE).partition("/")[0] for name in forms if name.startswith(NOTE)})
    facts = {
        "file": str(path),
        "kind": kind,
        "bytes": packet.size,
        "checksum": "as it was written" if packet.sealed else "no checksum",
        "network": list(dict.fromkeys(_spec_words(spec) for spec in specs if isinstance(spec, dict))),
        "parameters": sum(math.prod(form.shape) for form in own),
        "evidence": evidence,
        **About.of(header).to_json(),
    }
    loss = header.get("facts", {}).get("loss") if isinstance(header.get("facts"), dict) else None
    return {key: value for key, value in (facts | {"loss": loss}).items() if value not in (None, "", [], {})}


def _spec_words(spec: Mapping[str, Any]) -> str:
    options = spec.get("options")
    inside = ", ".join(f"{key}={value}" for key, value in options.items()) if isinstance(options, dict) else ""
    return f"{spec.get('factory')}({inside})" + (", pruned or grown since" if spec.get("surgery") else "")


def facts_in_words(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The facts as lines of a table."""
    return [(key.replace("_", " "), _printable(_words(key, value))) for key, value in facts.items() if key != "file"]


def _printable(words: str) -> str:
    """Words from a file without what would steer a terminal or break a line."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in words)


def _words(key: str, value: Any) -> str:
    match key, value:
        case "sites", list():
            return ", ".join(f"{site['client']} ({_site_words(site)})" for site in value)
        case "refused", list():
            return "; ".join(f"{r.get('client')}: {r.get('field')} is {r.get('got')}" for r in value)
        case "inputs", {"columns": [*columns]}:
            names = ", ".join(_column_words(column) for column in columns)
            targets = ", ".join(_column_words(target) for target in value.get("targets", []))
            return f"table of {names}" + (f"; predicts {targets}" if targets else "")
        case "inputs", dict():
            return ", ".join(f"{name} {_plain(entry)}" for name, entry in value.items() if entry not in ([], None))
        case _, dict():
            return ", ".join(f"{name} {_plain(entry)}" for name, entry in value.items())
        case _, list():
            return ", ".join(map(_plain, value))
    return f"{value:,}" if isinstance(value, int) else _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "(" + _words("", value) + ")" if isinstance(value, dict) else str(value)


def _site_words(site: Mapping[str, Any]) -> str:
    """How many examples a site sent, for how many they counted, and where its update lay."""
    counted = f", counted as {site['counted']:,.10g}" if "counted" in site else ""
    return f"{site['num_examples']:,.0f} examples{counted}" + (f", from {site['file']}" if "file" in site else "")


def _column_words(column: Mapping[str, Any]) -> str:
    """A column as `init` takes it: with its unit, or its categories."""
    unit = f" [{column['unit']}]" if column.get("unit") else ""
    return f"{column['name']}{unit}" + (f" ({'|'.join(column['levels'])})" if "levels" in column else "")


def save_card(facts: Mapping[str, Any], path: Path) -> None:
    """Write the model card of these facts.

    Raises:
        ConfigError: if it would take the place of the file it is about, or cannot be written.
    """
    check_output(path, [Path(facts["file"])], streams=True)
    write_output(path, model_card(facts).encode())


def model_card(facts: Mapping[str, Any]) -> str:
    """A model card in Markdown: what the file is, what it is for, who is in it, what is not known of it."""
    rows = "\n".join(f"| {name} | {markdown_text(words)} |" for name, words in facts_in_words(facts))
    sites = "".join(f"- {markdown_text(s['client'] + ': ' + _site_words(s))}\n" for s in facts.get("sites", []))
    refused = "".join(
        "- "
        + markdown_text(f"{r.get('client')}: {r.get('field')} is {r.get('got')}, expected {r.get('expected')}")
        + "\n"
        for r in facts.get("refused", [])
    )
    classes = "".join(f"{place}. {markdown_text(name)}\n" for place, name in enumerate(facts.get("class_names", [])))
    article = "" if facts["kind"][0].isdigit() else "An " if facts["kind"][0] in "aeiou" else "A "
    heading = "Targets" if facts.get("task") in ("regression", "multilabel") else "Classes"
    parts = [
        f"# {markdown_text(Path(facts['file']).name)}",
        f"{article}{facts['kind']}"
        + (f", made by `{_printable(facts['method']).replace('`', '’')}`." if "method" in facts else "."),
        f"## What it is\n\n| | |\n|---|---|\n{rows}",
        f"## {heading}\n\nIn the order of its outputs, counted from 0:\n\n{classes}" if classes else "",
        f"## Columns\n\n{_column_lines(facts['inputs'])}" if "columns" in facts.get("inputs", {}) else "",
        f"## Who is in it\n\n{sites}" if sites else "",
        f"## Who was refused\n\n{refused}" if refused else "",
        "## What this card does not say\n\nHow well it does: score it with `fedfuse evaluate` on rows that no site "
        "trained on. For whom it must not be used: whoever gives it away should write that here.",
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _column_lines(inputs: Mapping[str, Any]) -> str:
    """The columns of a table, with what stands for a missing value and by what numbers are scaled."""
    lines = [
        f"| {markdown_text(_column_words(column))} | "
        + (
            f"{markdown_text(column['mode'])} | |"
            if "levels" in column
            else f"{column['mean']:g} | {column['std']:g} |"
        )
        for column in inputs["columns"]
    ]
    head = "| column | where it is missing | standard deviation |\n|---|---|---|\n"
    scales = {
        "moments": "sums of all sites",
        "site": "one site's rows",
        "none": "nowhere; numbers are taken as they are",
    }
    return f"The scale comes from: {scales.get(inputs.get('scale', ''), 'unknown')}.\n\n{head}" + "\n".join(lines)
