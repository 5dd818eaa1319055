"""How long does it take to merge five checkpoint folders of 110 million parameters, and how much memory?

Run `python benchmarks/merge.py [--json FILE] [--models N] [--folder DIR] [--mergekit BIN] [--methods a,b]`. Folders in
BERT's shapes are written one tensor at a time (2.6 GB for five and a base), merged in a process of its own for each
rule, start to end, and deleted. With the `bin` folder of an environment that has mergekit (requirements-peers.txt) its
`linear` merge of the same folders is measured in the same run, before and after ours, and the last lines say how many
times faster and smaller each rule of ours is than the mean of the two.

The limit is what a tensor-by-tensor merge may take beside the process itself: 1.2 × largest tensor × (models + 2).
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fedfuse.wire.codec import write
from fuse_files import drawn, use_of
from machine import here

CONFIG = {
    "architectures": ["RobertaModel"],  # of BERT-base's shapes: mergekit 0.1.5 ends in a TypeError on BertModel
    "model_type": "roberta",
    "vocab_size": 30_522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "dtype": "float32",
}
PEER = "mergekit linear"
BASED = ("task_arithmetic", "ties", "dare", "model_stock", "iso")


@dataclass(frozen=True, slots=True)
class Row:
    """What one merge took."""

    tool: str
    models: int
    seconds: float
    processor_seconds: float
    peak_mb: float
    own_mb: float
    limit_mb: float


def bert_base() -> dict[str, tuple[int, ...]]:
    """The tensors of BERT-base under the names of a RoBERTa, which are the same: 109,482,240 parameters."""
    sizes = {"word": 30_522, "position": 512, "token_type": 2}
    shapes: dict[str, tuple[int, ...]] = {f"embeddings.{n}_embeddings.weight": (s, 768) for n, s in sizes.items()}
    dense = {f"attention.self.{part}": (768, 768) for part in ("query", "key", "value")}
    dense |= {"attention.output.dense": (768, 768), "intermediate.dense": (3072, 768), "output.dense": (768, 3072)}
    layers = {f"encoder.layer.{k}.{n}": shape for k in range(12) for n, shape in dense.items()}
    for name, shape in (layers | {"pooler.dense": (768, 768)}).items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    norms = [f"encoder.layer.{k}.{n}.LayerNorm" for k in range(12) for n in ("attention.output", "output")]
    shapes |= {f"{n}.{side}": (768,) for n in ("embeddings.LayerNorm", *norms) for side in ("weight", "bias")}
    return {n if n.startswith("pooler") else f"roberta.{n}": shape for n, shape in shapes.items()}


def make_folders(home: Path, count: int) -> list[Path]:
    folders = [home / f"model-{k}" for k in range(count)]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        write(folder / "model.safetensors", drawn(bert_base(), seed), {}, marks={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    return folders


def measure(tool: str, command: Sequence[str], idle: float, models: int, output: Path) -> Row:
    """Seconds and peak memory of one command, which writes a folder."""
    try:
        used = use_of(list(command))
    finally:
        shutil.rmtree(output, ignore_errors=True)
    largest = 4 * max(math.prod(shape) for shape in bert_base().values()) / 1e6
    limit = 1.2 * largest * (models + 2)
    return Row(tool, models, used.seconds, used.processor_seconds, used.peak_mb, used.peak_mb - idle, limit)


def mergekit_words(place: Path, folders: Sequence[Path], output: Path) -> list[str]:
    """The command of mergekit's plain mean; the place is a `bin` folder, or a Python in it."""
    python = place / "python" if place.is_dir() else place
    config = output.with_suffix(".json")  # YAML reads JSON
    models = [{"model": str(folder), "parameters": {"weight": 1.0}} for folder in folders]
    config.write_text(json.dumps({"merge_method": "linear", "dtype": "float32", "models": models}))
    script = python.parent / "mergekit-yaml"
    return [str(python), str(script), str(config), str(output), "--no-copy-tokenizer", "--no-write-model-card"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--models", type=int, default=5, help="how many are merged (default: 5)")
    parser.add_argument("--folder", type=Path, help="where to put the folders (default: a temporary folder)")
    parser.add_argument("--mergekit", type=Path, help="the bin folder of an environment that has mergekit")
    parser.add_argument(
        "--methods", default="fedavg,slerp,ties,model_stock,iso,fedavg", help="of fedfuse, commas between"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as home:
        rows = compare(Path(home), options.models, options.mergekit, options.methods.split(","))
    if options.json:
        options.json.write_text(json.dumps({**here(), "rows": [asdict(row) for row in rows]}, indent=2) + "\n")


def compare(home: Path, models: int, mergekit: Path | None, methods: Sequence[str]) -> list[Row]:
    *folders, base = make_folders(home, models + 1)
    fedfuse = [sys.executable, "-c", "from fedfuse.cli import main; main()"]
    idle = use_of([sys.executable, "-c", "import fedfuse.api.fusion, fedfuse.federation.fusion"]).peak_mb
    output = home / "merged"
    jobs = [(n, [*fedfuse, "fuse", *map(str, folders), "-o", str(output), "--method", n]) for n in methods]
    jobs = [(name, [*words, "--base", str(base)] if name in BASED else words) for name, words in jobs]
    if mergekit is not None:
        theirs = (PEER, mergekit_words(mergekit, folders, output))
        jobs = [theirs, *jobs, theirs]
    print(f"{'merge':<18}{'models':>8}{'seconds':>10}{'worked':>10}{'peak MB':>10}{'own MB':>10}{'limit MB':>10}")
    rows = []
    for name, words in jobs:
        row = measure(name, words, idle, models, output)
        rows.append(row)
        told = f"{row.seconds:>10.1f}{row.processor_seconds:>10.1f}{row.peak_mb:>10.0f}"
        told += f"{row.own_mb:>10.0f}{row.limit_mb:>10.0f}"
        print(f"{row.tool:<18}{row.models:>8}{told}", flush=True)
    for line in compare_with_peer(rows):
        print(line)
    return rows


def compare_with_peer(rows: Sequence[Row]) -> list[str]:
    """How many times faster and smaller each rule is than mergekit's mean, where that was measured."""
    theirs = [row for row in rows if row.tool == PEER]
    if not theirs:
        return []
    words = {"seconds": "faster", "processor_seconds": "less work", "peak_mb": "smaller"}
    peer = {key: statistics.fmean(getattr(row, key) for row in theirs) for key in words}
    ratios = {
        row.tool: "".join(f"{peer[key] / getattr(row, key):>8.2f} × {word}" for key, word in words.items())
        for row in rows
        if row.tool != PEER
    }
    return [f"{tool:<18}{told}" for tool, told in ratios.items()]


if __name__ == "__main__":
    main()
