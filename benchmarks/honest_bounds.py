"""What do the bounds cost honest clients? Accuracy with and without them, on digits.

Run `python benchmarks/honest_bounds.py [--seeds N …] [--epochs N …] [--methods NAME …]`. Honest clients whose rows
differ as much as they can (Dirichlet 0.01, 0.1 and 1.0, one class each, shares of 0.6, 0.15 and 0.15) train for five
rounds of one epoch, or for one of two hundred, and pass the door once with its default bounds and once with none. Shown
are both accuracies, means over seeds, and how many replies of all rounds and seeds were refused or weakened.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.model import Single
from fedfuse.core.params import Params
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.settings import Bounds, LocalSettings
from fedfuse.core.state import Bench, ServerState
from fedfuse.data.partitions import partition
from fedfuse.data.schemes import Classes, Dirichlet, Scheme, Shares
from fedfuse.data.sources import load
from fedfuse.server.admission.admit import Rules, admit_all
from fedfuse.server.judge import log_probabilities
from fedfuse.server.round import fuse_round
from fedfuse.training.round import client_round
from influence import CLASSES, SPEC

REGIMES: dict[str, tuple[Scheme, int]] = {
    "Dirichlet 0.01": (Dirichlet(alpha=0.01), 10),
    "Dirichlet 0.1": (Dirichlet(alpha=0.1), 10),
    "Dirichlet 1.0": (Dirichlet(alpha=1.0), 10),
    "one class each": (Classes(per_client=1), 10),
    "0.6/0.15/0.15": (Shares(shares=(0.6, 0.15, 0.15)), 3),
}
METHODS = ("fedavg", "fedavgm", "swa", "fedlpa", "laplace", "rklb")


def answers(
    recipe: Recipe, brief: Brief, rows: dict[str, Rows], memories: dict[str, Params], local: LocalSettings, seed: int
) -> list[Envelope]:
    """Everybody's honest replies; memories go on."""
    sent = []
    for client, own in rows.items():
        answer = client_round(recipe.work(local), brief, client, own, memory=memories.get(client), seed=seed)
        memories[client] = answer.memory
        sent.append(Envelope(client, answer.payload))
    return sent


def run(method: str, regime: str, epochs: int, seed: int, bounds: Bounds) -> tuple[float, int, int]:
    """Accuracy after the last round, and how many replies were refused and weakened."""
    data, (scheme, clients) = load("digits"), REGIMES[regime]
    parts = partition(data.train.y, scheme, clients, seed).clients
    rows = {c: Rows(data.train.x[i].flatten(1), data.train.y[i]) for c, i in parts.items()}
    enrolled = {c: len(r) for c, r in rows.items()}
    local = LocalSettings(epochs=epochs, batch_size=16 if epochs == 1 else 32, optimizer={"lr": 0.05, "momentum": 0.9})
    recipe, memories = find_method(method).recipe(), dict[str, Params]()
    bench = Bench(population=clients, classes=CLASSES, local=local, seed=seed)
    torch.manual_seed(seed)
    state, refused, weakened = ServerState(0, Single.of(SPEC.build(), SPEC)), 0, 0
    for _ in range(5 if epochs == 1 else 1):
        state = recipe.begin_round(state, bench)
        brief = state.brief(recipe.publishes, CLASSES)
        sent = answers(recipe, brief, rows, memories, local, seed)
        rules = Rules(bounds=bounds)
        seen = admit_all(sent, brief, recipe.evidence, list(rows), rules, enrolled=enrolled, training=local)
        refused, weakened = refused + len(seen.refused), weakened + len({c["client"] for c in seen.clipped})
        state = fuse_round(recipe, seen.cohort, state, bench)
    right = log_probabilities(state.model, data.test.x.flatten(1))[:, :CLASSES].argmax(-1) == data.test.y
    return float(right.double().mean()), refused, weakened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", nargs="*", type=int, default=[1, 200])
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for method in args.methods:
        for epochs in args.epochs:
            for regime in REGIMES:
                without, within = (
                    [run(method, regime, epochs, seed, bounds) for seed in args.seeds]
                    for bounds in (Bounds(over="off"), Bounds())
                )
                plain, bounded = (100 * statistics.mean(a for a, _, _ in each) for each in (without, within))
                refused, weakened = (sum(found[i] for found in within) for i in (1, 2))
                print(
                    f"{method:8} {epochs:3} epochs, {regime:14}: {plain:5.1f} % without bounds, {bounded:5.1f} % with; "
                    f"{refused} refused, {weakened} weakened",
                    flush=True,
                )


if __name__ == "__main__":
    main()
