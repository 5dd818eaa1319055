"""What a run gives: rows, as a table for a person, a page or a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedfuse.errors import ConfigError
from fedfuse.experiment.ledger import flat

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, repr=False)
class Results:
    """What a run gives: its rows, one for each method, seed and round, and where its files are."""

    name: str
    folder: Path
    rows: tuple[Mapping[str, Any], ...]

    def table(self) -> str:
        """Mean ± standard deviation over seeds, as a markdown table; of a sweep, one table per experiment."""
        each = self._by_experiment()
        if len(each) == 1:
            return _markdown(self.rows)
        return "\n\n".join(f"### {name}\n\n{_markdown(rows)}" for name, rows in each.items())

    def frame(self) -> pd.DataFrame:
        """The rows as a pandas data frame: experiment, method, label, seed, round, scores and costs.

        Raises:
            ConfigError: if pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as why:
            raise ConfigError("Results.frame needs pandas; install fedfuse[tables]") from why
        return pd.DataFrame([{"experiment": row["experiment"], **flat(row)} for row in self.rows])

    def __repr__(self) -> str:
        labels = list(dict.fromkeys(row["label"] for row in self.rows))
        seeds = len({row["seed"] for row in self.rows})
        rounds = max((row["round"] for row in self.rows), default=0)
        shown = ", ".join(labels[:6]) + (", …" if len(labels) > 6 else "")
        return f"Results({self.name!r}: {shown}; seeds {seeds}, rounds {rounds}; files in {str(self.folder)!r})"

    def _repr_html_(self) -> str:
        """The tables as a notebook shows them."""
        parts = [
            f"<p><b>{escape(name)}</b></p>{_html(_markdown(rows))}" for name, rows in self._by_experiment().items()
        ]
        return "\n".join([*parts, f"<p>files: <code>{escape(str(self.folder))}</code></p>"])

    def dropped_clients(self) -> list[str]:
        """Who was left out of a round for a crash, each in words: client, method, seed, round and reason."""
        return [
            f"{entry['client']} in round {row['round']} of {row['label']}, seed {row['seed']} ({entry['reason']})"
            for row in self.rows
            for entry in row.get("dropped", ())
        ]

    def judged_clients(self) -> list[str]:
        """Whom the door refused or weakened, each in words: client, method, seed, round and the first reason."""
        found: dict[tuple[object, ...], str] = {}
        for row in self.rows:
            for what in ("refused", "clipped"):
                for entry in row.get(what, ()):
                    when = f"{what} in round {row['round']} of {row['label']}, seed {row['seed']}"
                    why = f"{entry['field']} is {entry['got']}, expected {entry['expected']}"
                    found.setdefault((when, entry["client"]), f"{entry['client']} was {when} ({why})")
        return list(found.values())

    def _by_experiment(self) -> dict[str, list[Mapping[str, Any]]]:
        each: dict[str, list[Mapping[str, Any]]] = {}
        for row in self.rows:
            each.setdefault(row["experiment"], []).append(row)
        return each


def _markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    from fedfuse.report import markdown, summary  # late: whoever misspelt a key does not wait for the page

    return markdown(summary(rows))


def _html(table: str) -> str:
    """A markdown table as HTML, so that both say the same.

    Example:
        >>> _html(chr(10).join(["| method | NLL |", "|---|---:|", "| fedavg | **0.9** |"]))
        '<table><tr><th>method</th><th>NLL</th></tr><tr><td>fedavg</td><td><b>0.9</b></td></tr></table>'
    """
    lines = [line.strip().strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    rows = []
    for place, cells in enumerate(lines):
        if place == 1:  # the rule below the heads
            continue
        tag = "th" if place == 0 else "td"
        rows.append("".join(f"<{tag}>{_bold(cell.strip())}</{tag}>" for cell in cells))
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _bold(cell: str) -> str:
    inner = cell.removeprefix("**").removesuffix("**")
    return f"<b>{escape(inner)}</b>" if inner != cell else escape(cell)
