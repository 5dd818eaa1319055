"""Four tasks, one backbone: which rule makes one network of four that were fine-tuned apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

import fedfuse
from fedfuse.core.rng import seeded, stream
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.data import Dataset, load, standardize
from fedfuse.experiment.reproduce import figure
from fedfuse.report.claims import StoredResult, digest_of, read_result, result_path, write_result

NAME = "merging/tasks"
SOURCES = ("mnist", "fashion-mnist", "svhn", "cifar10")
SEEDS = range(5)
CLASSES, SIZE, DIGITS = 10, 16, 4
OWN, COMMON, HELD, TEST, LOOKED_AT = 3000, 600, 400, 1500, 1000
BEFORE = {"epochs": 6, "lr": 0.03, "momentum": 0.9, "batch_size": 32}
AFTER = {"epochs": 4, "lr": 0.02, "momentum": 0.9, "batch_size": 32}

PLAIN = ("fedavg", "slerp", "model_stock")
BY_EVIDENCE = ("fisher", "regmean", "fedlpa")
SCALED = {
    "task_arithmetic": (0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7),
    "ties": (0.5, 0.7, 1.0, 1.3, 1.6, 2.0),
    "iso": (0.3, 0.5, 0.7, 1.0, 1.4, 2.0),
}
BASE, ALONE = "(base)", "(own network)"  # in parentheses: nothing was merged


@dataclass(frozen=True, slots=True)
class TaskRows:
    """One task's rows: for the common start, to fine-tune with, to choose λ by, and to judge by at the end."""

    source: str
    common: Rows
    own: Rows
    held: Rows
    test: Rows


Weights = Mapping[str, Tensor]
Brought = fedfuse.Update | Weights


@figure(NAME, paper="four tasks, one backbone")
def merge_tasks(folder: Path) -> list[Path]:
    """Four fine-tuned networks become one by every rule: accuracy on each task with its own head, five seeds."""
    digest = digest_of(Path(__file__))
    path = result_path(NAME, "cpu", folder)
    result = read_result(path) if path.is_file() else StoredResult(NAME, "cpu", digest, {})
    if result.digest != digest:
        result = StoredResult(NAME, "cpu", digest, {})  # of another text of this file: begin anew
    for seed in SEEDS:
        if seed not in result.cells.get("mean", {}).get(BASE, {}).get("accuracy", {}):
            result = with_seed(result, seed, score_rules(seed))
            write_result(result, folder)
    return [path]


def with_seed(result: StoredResult, seed: int, scores: Mapping[str, Mapping[str, float]]) -> StoredResult:
    """The result with one more seed, which has per label the accuracy of every task and perhaps the λ it took.

    Example:
        >>> more = with_seed(StoredResult("a", "cpu", "", {}), 3, {"ties": {"mnist": 0.5, "svhn": 0.25, "scale": 1.0}})
        >>> more.cells["mean"]
        {'ties': {'accuracy': {3: 0.375}, 'scale': {3: 1.0}}}
    """
    cells = {cell: {label: dict(by) for label, by in methods.items()} for cell, methods in result.cells.items()}
    for label, found in scores.items():
        tasks = {name: value for name, value in found.items() if name != "scale"}
        for cell, value in {**tasks, "mean": sum(tasks.values()) / len(tasks)}.items():
            by = cells.setdefault(cell, {}).setdefault(label, {})
            by["accuracy"] = {**by.get("accuracy", {}), seed: round(value, DIGITS)}
        if "scale" in found:
            by["scale"] = {**by.get("scale", {}), seed: found["scale"]}
    return replace(result, cells=cells)


def score_rules(seed: int, sources: Sequence[str] = SOURCES) -> dict[str, dict[str, float]]:
    """Per rule the accuracy on every task's test rows, with the scale that held-out rows chose."""
    tasks = [rows_of(source, seed) for source in sources]
    starts = common_start(tasks, seed)
    own = [
        fedfuse.local_update(network(), task.own, start=start, seed=seed, **AFTER).state_dict()
        for task, start in zip(tasks, starts, strict=True)
    ]
    tests = [task.test for task in tasks]
    scores = {
        BASE: accuracies(starts[0], starts, tests),
        ALONE: [accuracies(mine, [mine], [rows])[0] for mine, rows in zip(own, tests, strict=True)],
    }
    chosen: dict[str, float] = {}
    for method in (*PLAIN, *BY_EVIDENCE, *SCALED):
        brought = bring_all(method, tasks, own) if method in BY_EVIDENCE else own
        fused, chosen[method] = merge(method, brought, starts[0], own, [task.held for task in tasks])
        scores[method] = accuracies(fused, own, tests)
        print(seed, method, chosen[method], [round(score, 3) for score in scores[method]], flush=True)
    told = {method: {"scale": chosen[method]} for method in SCALED}
    return {label: dict(zip(sources, each, strict=True)) | told.get(label, {}) for label, each in scores.items()}


def network(outputs: int = CLASSES) -> Spec:
    """The backbone, three convolutions and a hidden layer, with a head: 57,770 weights where it has ten outputs."""
    return Spec("convnet_ams", {"channels": 3, "size": SIZE, "classes": outputs, "widths": [16, 32, 64]})


def rows_of(source: str, seed: int) -> TaskRows:
    """A task's rows as 3×16×16 pictures of mean 0 and deviation 1; which rows are for what the seed decides."""
    data = _load_rows(source)
    scale = standardize(data.train.x)
    order = torch.randperm(len(data.train), generator=stream(seed, "tasks", source))
    parts = order.split([COMMON, OWN, HELD, len(order) - COMMON - OWN - HELD])[:3]
    common, own, held = (data.train.take(part) for part in parts)
    formed = [Rows(_colour(scale(rows.x)), rows.y) for rows in (common, own, held, data.test)]
    return TaskRows(source, *formed)


@cache
def _load_rows(source: str) -> Dataset:
    return load(source, train_limit=10_000, test_limit=TEST)


def _colour(x: Tensor) -> Tensor:
    """Every second pixel's mean; grey pictures of 28×28 get an edge of their darkest value, and three colours."""
    edge = (2 * SIZE - x.shape[-1]) // 2
    padded = functional.pad(x, (edge,) * 4, value=float(x.min())) if edge else x
    return functional.avg_pool2d(padded, 2).expand(-1, 3, -1, -1).contiguous()


def common_start(tasks: Sequence[TaskRows], seed: int) -> list[Weights]:
    """One network learns all tasks' classes from few rows; it is everybody's start, with ten of its outputs each."""
    with seeded(seed, "start"):
        first = network(CLASSES * len(tasks)).build()
    rows = Rows(
        torch.cat([task.common.x for task in tasks]),
        torch.cat([task.common.y + CLASSES * at for at, task in enumerate(tasks)]),
    )
    weights = fedfuse.local_update(first, rows, seed=seed, **BEFORE).state_dict()
    places = (slice(CLASSES * at, CLASSES * (at + 1)) for at in range(len(tasks)))
    return [weights | {name: weights[name][place] for name in HEAD} for place in places]


HEAD = ("classifier.weight", "classifier.bias")


def bring_all(method: str, tasks: Sequence[TaskRows], own: Sequence[Weights]) -> list[Brought]:
    """What a rule that reads evidence asks of every task, at its finished network."""
    return [
        fedfuse.bring_evidence(
            network(), task.own.take(torch.arange(LOOKED_AT)), method, client=task.source, weights=weights
        )
        for task, weights in zip(tasks, own, strict=True)
    ]


def merge(
    method: str, updates: Sequence[Brought], start: Weights, own: Sequence[Weights], held: Sequence[Rows]
) -> tuple[Weights, float]:
    """The merged weights, and the λ whose accuracy on held-out training rows is the best, where a rule has one."""
    found = {
        scale: fedfuse.fuse(updates, fedfuse.recipe(method, **options), start=start).state_dict()
        for scale, options in ((s, {"scale": s} if s else {}) for s in SCALED.get(method, (0.0,)))
    }
    if len(found) == 1:
        return found[0.0], 0.0
    best = max(found, key=lambda scale: sum(accuracies(found[scale], own, held)))
    return found[best], best


@torch.no_grad()
def accuracies(backbone: Weights, heads: Sequence[Weights], rows: Sequence[Rows]) -> list[float]:
    """The share of each task's rows that a backbone tells rightly with that task's head."""
    module, shares = network().build().eval(), []
    for weights, each in zip(heads, rows, strict=True):
        module.load_state_dict({**backbone, **{name: weights[name] for name in HEAD}})
        right = [(module(x).argmax(-1) == y).sum() for x, y in zip(each.x.split(250), each.y.split(250), strict=True)]
        shares.append(float(sum(right)) / len(each))
    return shares
