"""How long an experiment will take, before anything is trained: a few timed steps of every client's work, scaled up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from fedfuse.core.messages import Brief
from fedfuse.core.recipe import Recipe
from fedfuse.core.rng import seeded
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.torch_utils import one_thread
from fedfuse.engines.local import Population
from fedfuse.engines.pool import Pool, count_cores
from fedfuse.experiment.prepare import PreparedExperiment, Setting, some_rows, without_remarks
from fedfuse.training.round import client_round

TimeRound: TypeAlias = Callable[[Work, Brief, Rows], float]  # seconds that one client's round takes
_WHO = "estimate"
_STEPS = 3  # of the longer of two timed rounds


def time_here(work: Work, brief: Brief, rows: Rows) -> float:
    """The seconds of a round in this process."""
    with one_thread(), without_remarks(), seeded(0, _WHO):
        begin = time.perf_counter()
        client_round(work, brief.to(_WHO), _WHO, rows)
        return time.perf_counter() - begin


@dataclass(frozen=True, slots=True)
class TimeInWorker:
    """The seconds of a round in a worker, which will train and so has to load what training needs; we need not."""

    pool: Pool

    def __call__(self, work: Work, brief: Brief, rows: Rows) -> float:
        """Time one round."""
        if work.evidence:  # a worker would print its remarks about rows that are no client's
            return time_here(work, brief, rows)
        taken: list[float] = []
        alone = Population(rows, {_WHO: torch.arange(len(rows))})
        engine = self.pool.engine(alone, on_client=lambda _, seconds, __: taken.append(seconds))
        for _ in engine.exchange(brief, work, (_WHO,)):
            pass
        return taken[0]


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast clients work by a method, measured on one batch.

    Attributes:
        step: seconds a step takes.
        served: seconds a step takes the server, which torch does; the clients' own may be compiled.
        rest: seconds a round takes in addition to its steps, evidence included.
        batch: rows in a step.
    """

    step: float
    rest: float
    batch: int
    served: float = 0.0

    def round_seconds(self, rows: int, local: LocalSettings, evidence: bool) -> float:
        """Seconds a client's round takes; evidence looks at every row, so it grows with them.

        Example:
            >>> Pace(step=0.5, rest=1.0, batch=10).round_seconds(40, LocalSettings(epochs=2, batch_size=10), False)
            5.0
        """
        steps = local.epochs * math.ceil(rows / local.batch_size)
        steps = min(steps, local.max_steps) if local.max_steps else steps
        return steps * self.step + self.rest * (max(1.0, rows / self.batch) if evidence else 1.0)


def estimate_seconds(
    prepared: PreparedExperiment, workers: int | None = 1, time_round: TimeRound = time_here
) -> dict[str, float]:
    """Seconds each method will take over all rounds and seeds, by label: an order of magnitude.

    Clients' rounds are timed on one batch, with the method's own objective and evidence, and scaled by rows, epochs
    and rounds; long server steps by the examples they say they will pass through a network; scores by test rows. In
    one-shot runs, what clients do alike for several methods is counted once, because it is remembered: the whole of it,
    or the training to which a method adds its own evidence. Whatever else a method does is left out.

    Args:
        prepared: the experiment.
        workers: processes that train at a time; None for one per core.
        time_round: does one client's round and returns its seconds.
    """
    experiment, at_a_time = prepared.experiment, max(1, count_cores() if workers is None else workers)
    setting = prepared.setting(experiment.seeds[0])
    paces: dict[tuple[str, bool], Pace] = {}
    counted: set[str] = set()
    found: dict[str, float] = {}
    for label, recipe in prepared.recipes.items():
        work, passes = recipe.work(prepared.local), _passes(recipe, setting)
        key, trained = work.key or label, replace(work, evidence=(), memory=()).key or label
        alike = key, bool(passes)
        if alike not in paces:
            paces[alike] = _measure(recipe, prepared, setting, time_round)
        pace, known = paces[alike], counted if experiment.rounds == 1 else set()
        training = 0.0
        if key not in known:
            steps = recipe.trains and trained not in known
            training = _training(pace, recipe, prepared, setting, steps) / at_a_time
        counted |= {key, trained}
        with one_thread():
            other = sum(part.seconds(setting.bench) for part in (recipe.aggregate, *recipe.steps))
        # scoring a row is a forward pass: a third of a step
        serving = other + (passes * pace.served + len(prepared.dataset.test) / 3 * pace.step) / pace.batch
        found[label] = (training + serving) * experiment.rounds * len(experiment.seeds)
    return found


def _passes(recipe: Recipe, setting: Setting) -> float:
    """Examples that the server's long steps pass through a network in a round."""
    clients = min(setting.plan.per_round or setting.bench.population, setting.bench.population)
    return sum(part.passes(clients, setting.bench) for part in (recipe.aggregate, *recipe.steps))


def _training(pace: Pace, recipe: Recipe, prepared: PreparedExperiment, setting: Setting, steps: bool) -> float:
    """Seconds of one round's clients, one after another, with their steps or without."""
    sizes: Mapping[str, int] = setting.population.sizes()
    asked = min(setting.plan.per_round or len(sizes), len(sizes)) / max(1, len(sizes))
    local = prepared.local if steps else prepared.local.model_copy(update={"epochs": 0})
    return asked * sum(pace.round_seconds(n, local, bool(recipe.evidence)) for n in sizes.values())


def _measure(recipe: Recipe, prepared: PreparedExperiment, setting: Setting, time_round: TimeRound) -> Pace:
    """How fast a client is on one batch, and the server where it has long steps of its own."""
    batch = min(prepared.local.batch_size, max(setting.population.sizes().values(), default=1))
    few, bench = some_rows(prepared.dataset, prepared.inputs), setting.bench
    rows = few.take([i % len(few) for i in range(batch)])
    brief = recipe.prepare_models(setting.start, bench).brief(recipe.publishes, bench.classes, bench.task)
    step, rest = _step_and_rest(recipe, brief, rows, prepared.local, time_round)
    served = step
    if prepared.local.kernel != "torch" and _passes(recipe, setting):
        plain = prepared.local.model_copy(update={"kernel": "torch"})
        served, _ = _step_and_rest(recipe, brief, rows, plain, time_round)
    return Pace(step, rest, len(rows), served)


def _step_and_rest(
    recipe: Recipe, brief: Brief, rows: Rows, local: LocalSettings, time_round: TimeRound
) -> tuple[float, float]:
    """Time two rounds of one client on one batch; their difference is the steps'."""
    whole = {"max_steps": None, "drop_last": False}
    # the first is not counted: it loads compiled code and fills caches, once for all rounds
    works = (recipe.work(local.model_copy(update={"epochs": epochs, **whole})) for epochs in (1, 1, _STEPS))
    _, short, long = (time_round(work, brief, rows) for work in works)
    if not recipe.trains:  # no client takes a step: both were evidence alone
        return min(short, long), min(short, long)
    step = max(long - short, 0.0) / (_STEPS - 1)
    return step or short, max(short - step, 0.0)
