"""Whether networks and data fit each other, found by running a network on two rows."""

from __future__ import annotations

import torch

from fedfuse.core.answers import logits_in
from fedfuse.core.spec import Spec
from fedfuse.data import Dataset
from fedfuse.errors import ConfigError, FuseError, error_text
from fedfuse.tasks import Classification, LanguageModel


def check_equal_outputs(outputs: set[int]) -> None:
    """Refuse networks that tell different numbers of classes apart."""
    if len(outputs) > 1:
        counts = " and ".join(map(str, sorted(outputs)))
        raise ConfigError(f"the networks of [model] and [[models]] give {counts} logits; all must give as many")


def check_fit(spec: Spec, dataset: Dataset) -> int:
    """How many logits a network gives, after checking that they fit the data."""
    out, classes, task = logits_in(_answer(spec, dataset.train.x[:2]), spec.factory), len(dataset.classes), dataset.task
    places = tuple(dataset.train.y.shape[1:]) if isinstance(task, LanguageModel) else ()
    wanted = task.outputs(classes)
    more = wanted + isinstance(task, Classification)  # open-set networks have one more: none of them
    if tuple(out.shape) not in ((2, *places, wanted), (2, *places, more)):
        why = f"{classes} classes" if isinstance(task, Classification) else f"the task {task.name}"
        raise ConfigError(
            f"model {spec.factory!r} gives outputs of shape {tuple(out.shape)} for two rows, expected "
            f"{(2, *places, wanted)}: {dataset.name} has {why}"
        )
    return int(out.shape[-1])


def _answer(spec: Spec, rows: torch.Tensor) -> object:
    """A network's output for some rows; a user's network may raise anything while it is built or run."""
    try:
        network = spec.skeleton()
    except FuseError:
        raise
    except Exception as why:
        raise ConfigError(
            f"model {spec.factory!r} cannot be built with {dict(spec.options)}: {error_text(why)}"
        ) from why
    try:
        with torch.no_grad():
            return network(spec.cast(rows))
    except FuseError:
        raise
    except Exception as why:
        shape = "×".join(map(str, rows.shape[1:]))
        raise ConfigError(f"model {spec.factory!r} cannot read rows of shape {shape}: {error_text(why)}") from why
