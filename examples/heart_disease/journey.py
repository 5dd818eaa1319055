"""Four hospitals, one file each: from `fedfuse init` to a model card, by the commands a user types.

Run `python journey.py [FOLDER]`. Every hospital has its own table and sends two small files: sums of its columns, then
an update. What comes out stands beside the pooled fit, each hospital alone and the figures that FLamby published.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from run import OWN_RIDGE, PUBLISHED, fit, score_line, with_constant
from torch import Tensor

from fedfuse.data import load
from fedfuse.data.download import locate
from fedfuse.data.official import OFFICIAL
from fedfuse.data.rows import SiteRows
from fedfuse.data.site import read_site
from fedfuse.data.table_sources import HOSPITALS, hospital_halves
from fedfuse.data.tables import RawTable
from fedfuse.federation.agreement import read_federation
from fedfuse.nets.glm import layer_matrix
from fedfuse.tasks import BINARY
from fedfuse.wire.files import load_model

UNITS = {"age": "years", "trestbps": "mmHg", "chol": "mg/dl", "thalach": "1/min", "oldpeak": "mm"}
COLUMNS = (
    "age[years],sex:0|1,cp:1|2|3|4,trestbps[mmHg],chol[mg/dl],fbs:0|1,restecg:0|1|2,"
    "thalach[1/min],exang:0|1,oldpeak[mm]"
)
TRAINING = (
    "model.hidden=[]",
    "local.epochs=60",
    "local.batch_size=16",
    "local.optimizer.lr=0.02",
    "method.min_rows=20",
)
EXCHANGES = 7
HEADS = (
    "| | accuracy | 95 % interval | AUROC | NLL | ECE | distance to the pooled fit |",
    "|---|---:|---:|---:|---:|---:|---:|",
)
Command = Callable[..., None]


def write_tables(folder: Path) -> None:
    """Each hospital's own table, its test rows apart; and all test rows together, for whoever judges."""
    load("heart-disease", task=BINARY)  # fetches it, where it is not there
    found = locate(OFFICIAL["heart-disease"])
    if found is None:
        raise SystemExit("the heart disease data are not there")
    halves = hospital_halves(found.store, HOSPITALS)
    for hospital, (train, test) in halves.items():
        _write(folder / f"{hospital}.csv", [train])
        _write(folder / f"{hospital}-test.csv", [test])
    _write(folder / "pooled.csv", [train for train, _ in halves.values()])
    _write(folder / "test.csv", [test for _, test in halves.values()])


def _write(path: Path, tables: list[RawTable]) -> None:
    names = [name for name in tables[0].columns if name != "num"]
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow([f"{name} [{UNITS[name]}]" if name in UNITS else name for name in (*names, "disease")])
        for table in tables:
            ill = ["ill" if float(value or 0) > 0 else "healthy" for value in table.column("num")]
            lines.writerows(zip(*(table.column(name) for name in names), ill, strict=True))


def exchange_files(command: Command, exchanges: int = EXCHANGES) -> None:
    """Everything that is typed, at the hospitals and where the files are fused."""
    sets = [word for text in TRAINING for word in ("--set", text)]
    agreed = ("--target", "disease", "--classes", "healthy,ill", "--task", "binary", "--method", "fedlpa")
    command("init", "federation", "--columns", COLUMNS, *agreed, *sets)
    for hospital in HOSPITALS:
        command("moments", "--federation", "federation", "--data", f"{hospital}.csv", "-o", f"{hospital}.moments")
    command("scale", "federation", *(f"{hospital}.moments" for hospital in HOSPITALS))
    for hospital in HOSPITALS:
        command("update", "--federation", "federation", "--data", f"{hospital}.csv", "-o", f"{hospital}.safetensors")
    updates = [f"{hospital}.safetensors" for hospital in HOSPITALS]
    command("fuse", *updates, "--federation", "federation", "-o", "fedlpa.safetensors")
    command("fuse", *updates, "--federation", "federation", "--method", "fedavg", "-o", "fedavg.safetensors")
    fit_together(command, exchanges)
    fused = [f"{method}.safetensors" for method in ("fedlpa", "fedavg", "newton")]
    command("evaluate", *fused, *updates, "--data", "test.csv")
    by_site = [word for hospital in HOSPITALS for word in ("--data", f"{hospital}-test.csv")]
    command("evaluate", "newton.safetensors", *by_site)
    command("predict", "newton.safetensors", "--data", "test.csv", "-o", "predictions.csv")
    command("show", "newton.safetensors", "--card", "card.md")


def fit_together(command: Command, exchanges: int) -> None:
    """Newton's method by files: in each exchange every hospital sends sums at the model that all have."""
    now = "federation/w0.safetensors"
    for exchange in range(1, exchanges + 1):
        fused = "newton.safetensors" if exchange == exchanges else f"newton-{exchange}.safetensors"
        sums = [f"sums/{hospital}.safetensors" for hospital in HOSPITALS]  # a site is called by its file
        for hospital, file in zip(HOSPITALS, sums, strict=True):
            command("evidence", now, "--data", f"{hospital}.csv", "--method", "newton", "-o", file)
        command("fuse", *sums, "--method", "newton", "--start", now, "-o", fused)
        now = fused


def rows_of(folder: Path, name: str) -> SiteRows:
    """A table in the federation's form."""
    agreed = read_federation(folder / "federation").agreement
    return read_site(str(folder / name), form=agreed.inputs, classes=agreed.classes, task=BINARY)


def fused_weights(path: Path) -> Tensor:
    """Coefficients and constant of a file's one layer."""
    member = load_model(path)[0].members[0]
    return layer_matrix(member.spec, member.posterior.mean, {})


def score_lines(folder: Path) -> Iterator[str]:
    """The pooled fit, each hospital alone, and every fused file."""
    rows, test = rows_of(folder, "pooled.csv").rows, rows_of(folder, "test.csv").rows
    pooled = fit(rows.x, rows.y)
    models = {"pooled fit": pooled}
    for hospital in HOSPITALS:
        own = rows_of(folder, f"{hospital}.csv").rows
        models[f"{hospital} alone ({len(own)} rows)"] = fit(own.x, own.y, OWN_RIDGE)
    models["fedavg, one file each"] = fused_weights(folder / "fedavg.safetensors")
    models["fedlpa, one file each"] = fused_weights(folder / "fedlpa.safetensors")
    models[f"newton, {EXCHANGES} files each"] = fused_weights(folder / "newton.safetensors")
    for name, weights in models.items():
        scores = BINARY.measure(with_constant(test.x) @ weights.T, test.y, 2)
        yield score_line(name, weights, scores, len(test), pooled)
    published = ", ".join(f"{name} {value:.3f}" for name, value in PUBLISHED.items())
    yield f"\n{len(test)} test rows; FLamby reports {published} (another split by the same rule)."


def main(folder: Path, command: Command, exchanges: int = EXCHANGES) -> str:
    """Make the tables, type the commands there, and lay the results side by side."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tables(folder)
    exchange_files(command, exchanges)
    return "\n".join([*HEADS, *score_lines(folder)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    words = argparse.ArgumentParser(description="Four hospitals, from the federation folder to the model card.")
    words.add_argument("folder", nargs="?", help="where files are written; by default a new temporary folder")
    where = Path(words.parse_args().folder or tempfile.mkdtemp()).resolve()
    where.mkdir(parents=True, exist_ok=True)

    def type_there(*words: str) -> None:
        print("fedfuse", *words, flush=True)
        subprocess.run([sys.executable, "-m", "fedfuse", *words], check=True, cwd=where)

    print(main(where, type_there))
