"""Write the tables of docs/performance.md from what `train.py --json` and `mean.py --json` measured.

python benchmarks/train.py --json benchmarks/results/train.json
python benchmarks/mean.py --json benchmarks/results/mean.json
python benchmarks/performance.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "performance.md"


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def where(data: dict[str, Any]) -> str:
    return f"{data['machine']}; {data['software']}; {data['date']}."


def training(data: dict[str, Any]) -> str:
    """Samples per second and core, and how many times the plain loop that is."""
    rows = []
    for row in data["rows"]:
        core, times, pulls = row["per_core"], row["over_plain"], row["over_fedavg"]
        cells = [f"{core['plain']:,.0f}", *(f"{core[way]:,.0f} ({times[way]:.1f}×)" for way in ("torch", "auto"))]
        pulled = " / ".join(f"{pulls[way]:.2f}" for way in ("fedprox", "scaffold")) if pulls else "–"
        rows.append([row["model"], *cells, "compiled" if row["compiled"] else "torch", pulled])
    heads = ["samples/s per core", "plain loop", '`kernel = "torch"`', '`"auto"`', "which is", "FedProx / SCAFFOLD"]
    return f"{table(heads, rows)}\n\nBatches of {data['batch']}. {where(data)}"


def means(data: dict[str, Any]) -> str:
    """Gigabytes of updates averaged per second, beside what reading them alone takes."""
    rows = []
    for row in data["rows"]:
        fast = f"{row['ours_gb_s']:.1f} ({row['share_of_limit']:.2f})"
        flower = "–" if row["flower_gb_s"] is None else f"{row['flower_gb_s']:.1f}"
        files = f"{row['files_gb_s']:.1f} ({row['share_of_files_limit']:.2f})"
        rows.append([row["case"], fast, f"{row['torch_gb_s']:.1f}", files, flower, f"{row['extra_models']:.2f}"])
    heads = ["GB/s (of reading alone)", "compiled", "torch", "from files", "Flower", "models of memory"]
    return f"{table(heads, rows)}\n\n{data['threads']} threads. {where(data)}"


def inserted(page: str, name: str, text: str) -> str:
    """The page with a new text between its marks."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    return page[: page.index(begin)] + f"{begin}\n{text}\n{end}" + page[page.index(end) + len(end) :]


def main() -> None:
    page = PAGE.read_text()
    for name, write in (("train", training), ("mean", means)):
        page = inserted(page, name, write(json.loads((HERE / "results" / f"{name}.json").read_text())))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
