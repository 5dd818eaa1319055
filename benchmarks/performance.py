"""Write the tables of docs/performance.md from what benchmarks measured; a table without numbers stays as it is.

for name in train whole_run mean fedlpa bayes match swa; do  # mean and bayes with the threads that torch has
    python benchmarks/$name.py --json benchmarks/results/$name.json
done
python benchmarks/merge.py --mergekit peers/bin --json benchmarks/results/merge.json
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
        peers = [f"{core[peer]:,.0f}" if peer in core else "–" for peer in ("flower", "pfl")]
        rows.append([row["model"], *peers, *cells, "compiled" if row["compiled"] else "torch", pulled])
    ours = ["plain loop", '`kernel = "torch"`', '`"auto"`', "which is", "FedProx / SCAFFOLD"]
    heads = ["samples/s per core", "Flower", "pfl-research", *ours]
    return f"{table(heads, rows)}\n\nBatches of {data['batch']}. {where(data)}"


def whole_runs(data: dict[str, Any]) -> str:
    """A run from the command to its page."""
    row = [f"{data['workers']} workers", f"{data['seconds']:.1f}", f"{data['peak_mib']:.0f}"]
    return f"{table(['three LeNet rounds', 'seconds', 'peak MiB'], [row])}\n\n{where(data)}"


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


def solves(data: dict[str, Any]) -> str:
    """FedLPA's solvers, and its factors beside local epochs."""
    released = data["solve"][-1]
    rows = []
    for row in data["solve"]:
        name = "scale = root (the default)" if row["pi"] == "root" else f"absolute damping, π = {row['pi']}"
        way = {"gradient": "released steps"}.get(row["solver"], row["solver"])
        times = released["seconds"] / row["seconds"]
        numbers = [f"{row['seconds']:.2f}", str(row["iterations"]), f"{row['residual']:.0e}", f"{times:,.0f}"]
        rows.append([f"{way}, {name}", *numbers])
    heads = ["ten LeNets", "seconds", "iterations", "residual", "times as fast as released"]
    factors, epoch, compiled = (data[f"{what}_seconds"] for what in ("factor", "epoch", "compiled_epoch"))
    words = (
        f"Bringing the factors takes {factors / epoch:.2f} local epochs of torch's, or {factors / compiled:.1f} "
        f"compiled ones. Released steps are scaled from {data['steps']} to 10,000, and their residual is the one after "
        f"{data['steps']}. Processor time. {where(data)}"
    )
    return f"{table(heads, rows)}\n\n{words}"


def bayesian(data: dict[str, Any]) -> str:
    """Steps of Bayesian layers and means in charts, as multiples."""
    rows = [
        [f"{row['what']} ({row['network']})", f"{row['milliseconds']:.1f}", f"{row['ratio']:.2f}", _limit(row)]
        for row in data["rows"]
    ]
    heads = ["Bayesian layers", "ms", "times its reference", "wanted at most"]
    return f"{table(heads, rows)}\n\nProcessor time of one thread; of several, seconds on the clock. {where(data)}"


def _limit(row: dict[str, Any]) -> str:
    return "–" if row["limit"] is None else f"{row['limit']:g}"


def matching(data: dict[str, Any]) -> str:
    """Alignments of LeNets, in plain means beside the assignments themselves."""
    rows = [
        [
            f"{row['case']}, {start}",
            f"{1e3 * row['seconds']:.0f}",
            f"{1e3 * row['assigning']:.0f}",
            f"{row['means']:.1f}",
        ]
        for start, key in (("a common start", "common"), ("own starts", "apart"))
        for row in data[key]
        if not row["case"].startswith("finding")
    ]
    heads = [f"{data['clients']} LeNets", "ms", "of it assigning", "the rest in plain means"]
    return f"{table(heads, rows)}\n\nProcessor time. {where(data)}"


def scoring(data: dict[str, Any]) -> str:
    """SWA beside the plain mean."""
    rows = [[row["case"], f"{1e3 * row['cpu_seconds']:.0f}", f"{row['ratio']:.2f}"] for row in data["rows"]]
    heads = [f"{data['model']}, {data['clients']} clients", "ms", "plain means"]
    return f"{table(heads, rows)}\n\nProcessor time. {where(data)}"


def merges(data: dict[str, Any]) -> str:
    """Checkpoint folders merged, beside mergekit's mean."""
    rows = [
        [row["tool"], f"{row['seconds']:.1f}", f"{row['processor_seconds']:.1f}", f"{row['peak_mb']:.0f}"]
        for row in data["rows"]
    ]
    heads = [f"{data['rows'][0]['models']} folders", "seconds", "processor seconds", "peak MB"]
    return f"{table(heads, rows)}\n\nIn this order, each a process of its own from start to end. {where(data)}"


TABLES = {
    "train": training,
    "whole_run": whole_runs,
    "mean": means,
    "fedlpa": solves,
    "bayes": bayesian,
    "match": matching,
    "swa": scoring,
    "merge": merges,
}


def inserted(page: str, name: str, text: str) -> str:
    """The page with a new text between its marks."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    return page[: page.index(begin)] + f"{begin}\n{text}\n{end}" + page[page.index(end) + len(end) :]


def main() -> None:
    page = PAGE.read_text()
    for name, write in TABLES.items():
        if (file := HERE / "results" / f"{name}.json").is_file():
            page = inserted(page, name, write(json.loads(file.read_text())))
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
