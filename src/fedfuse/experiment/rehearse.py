"""A trial step before training: if a network cannot train by a method, one sentence says why before the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.recipe import Recipe
from fedfuse.core.rng import seeded, stream
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.threads import one_thread
from fedfuse.data import Dataset
from fedfuse.errors import ConfigError, FuseError, Refused, error_text
from fedfuse.server.door.admit import Contract, admit
from fedfuse.training.round import client_round

_WHO = "rehearsal"
_ROWS = 2


def rehearse(recipe: Recipe, brief: Brief, rows: Rows, local: LocalSettings, rounds: int) -> None:
    """Let every network of a brief take one step of a recipe on two rows, and pass the door with all its evidence.

    Every kind of evidence is asked for in the first round that brings it, and whoever remembers something takes
    another step with what it remembers.

    Args:
        recipe: the method, and those that take over from it.
        brief: what the server would send in the first round.
        rows: two rows, or a few.
        local: how clients train.
        rounds: how many there will be.

    Raises:
        ConfigError: naming the network, the method and what went wrong.
    """
    trial: dict[str, object] = {"epochs": 1, "max_steps": 1, "batch_size": _ROWS, "drop_last": False}
    if local.kernel == "auto":  # loading compiled code for one step takes longer, and memory that stays
        trial["kernel"] = "torch"
    step = local.model_copy(update=trial)
    networks = {variant.spec: variant for variant in (brief.to(client) for client in ("", *brief.own))}
    for variant in networks.values():
        for round_, now in _distinct_rounds(recipe, variant, rounds):
            with one_thread(), seeded(0, _WHO):
                _take_step(now, replace(variant, round=round_), now.work(step), rows)


def some_rows(dataset: Dataset, form: InputForm) -> Rows:
    """Two rows to take a step on: the first of the data, or noise of their form where they are not at hand."""
    if "outline" in dataset.facts or len(dataset.train) < _ROWS:
        return Rows(form.noise(_ROWS, stream(0, _WHO)), dataset.train.y[torch.arange(_ROWS) % len(dataset.train)])
    return dataset.train.take(torch.arange(_ROWS))


def _distinct_rounds(recipe: Recipe, brief: Brief, rounds: int) -> Iterator[tuple[int, Recipe]]:
    """The first round of every recipe in force and of every set of evidence that is due together."""
    seen: set[tuple[int, frozenset[str]]] = set()
    for round_ in range(rounds):
        now, variant = recipe.at(round_), replace(brief, round=round_)
        due = id(now), frozenset(name for kind in now.evidence for name in kind.expects(variant))
        if due not in seen:
            seen.add(due)
            yield round_, now


@contextmanager
def without_remarks() -> Iterator[None]:
    """Leave unsaid what clients remark about their rows: two rows taken for a trial are nobody's."""
    logger = logging.getLogger("fedfuse")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _take_step(recipe: Recipe, brief: Brief, work: Work, rows: Rows) -> None:
    who = f"model {brief.spec.factory!r} cannot train by {recipe.label or recipe.name!r}"
    try:
        with without_remarks():
            answer = client_round(work, brief, _WHO, rows)
            if answer.memory:
                answer = client_round(work, brief, _WHO, rows, memory=answer.memory)
        admit(Envelope(_WHO, answer.payload), Contract.of(brief, recipe.evidence, trains=recipe.trains))
    except Refused as why:
        facts = why.facts()
        raise ConfigError(
            f"{who}: after one step {facts['field']} is {facts['got']}, expected {facts['expected']}"
        ) from why
    except FuseError:
        raise
    except Exception as why:  # the user's own network and parts run in here
        raise ConfigError(f"{who}: one step on two rows ends in {error_text(why)}") from why
