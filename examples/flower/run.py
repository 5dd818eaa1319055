"""A SuperLink and three SuperNodes as separate processes, TLS and keys included: run `python run.py [FOLDER]`.

Each site has a file of its own and its SuperNode is told where; the server has test rows and nothing of theirs. The run
directory is the same as `fedfuse run` would write: a ledger, a model, a page.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from deployment import Deployment

from fedfuse.data import load
from fedfuse.experiment.config import load_experiment
from fedfuse.experiment.results import Ledger
from fedfuse.flower.app import write_app

HERE = Path(__file__).resolve().parent
SITES = {"north": (0, 1, 2, 3), "east": (3, 4, 5, 6), "south": (6, 7, 8, 9, 0)}


def write_rows(folder: Path) -> dict[str, Path]:
    """Every site's own digits, one file each."""
    digits, files = load("digits"), {}
    folder.mkdir(parents=True, exist_ok=True)
    for site, labels in SITES.items():
        own = digits.train.take(torch.isin(digits.train.y, torch.tensor(labels)).nonzero()[:, 0])
        files[site] = folder / f"{site}.npz"
        x, y = own.x.numpy(), own.y.numpy()
        np.savez(files[site], x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    return files


def wait_for(out: Path, rounds: int, federation: Deployment, patience: float = 600.0) -> None:
    """Wait until the run has recorded its last round and its page is there."""
    ends = time.monotonic() + patience
    while not (out / "report.html").exists() or len(Ledger(out / "ledger.jsonl").lines()) < rounds:
        if time.monotonic() > ends or federation.processes["superlink"].poll() is not None:
            raise SystemExit(f"the run did not end; the SuperLink says:\n{federation.log('superlink')[-4000:]}")
        time.sleep(1)


def main(folder: Path) -> None:
    experiment = load_experiment(HERE / "federation.toml")
    write_app(experiment, folder / "app")
    rows, out = write_rows(folder / "rows"), folder / "run"
    with Deployment(folder) as federation:
        for site, data in rows.items():
            federation.register(site)
            federation.start_node(site, data)
        run = federation.submit(folder / "app", out=str(out), deadline=300.0)
        print(f"run {run} on https://127.0.0.1:{federation.port}, sites {', '.join(SITES)}")
        wait_for(out, experiment.rounds, federation)
    for line in Ledger(out / "ledger.jsonl").lines():
        who, right = ", ".join(line["clients"]), line["accuracy"]
        print(f"round {line['round']}: {who} fused, {right:.0%} of the test digits right")
    print(f"ledger, model and page: {out}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as home:
            main(Path(home).resolve())
