"""What is to be learned: classes, yes or no, numbers, or the next token; each with its loss and its scores."""

from __future__ import annotations

from fedfuse.errors import ConfigError
from fedfuse.tasks.bernoulli import BINARY, MULTILABEL, Binary, Multilabel
from fedfuse.tasks.classification import CLASSIFICATION, Classification
from fedfuse.tasks.language import LANGUAGE_MODEL, TEXT_CLASSIFICATION, LanguageModel, TextClassification
from fedfuse.tasks.regression import REGRESSION, Regression
from fedfuse.tasks.task import Task, scores_better

__all__ = [
    "BINARY",
    "CLASSIFICATION",
    "LANGUAGE_MODEL",
    "MULTILABEL",
    "REGRESSION",
    "TASKS",
    "TEXT_CLASSIFICATION",
    "Binary",
    "Classification",
    "LanguageModel",
    "Multilabel",
    "Regression",
    "Task",
    "TextClassification",
    "scores_better",
    "task_header",
    "task_named",
]

TASKS: dict[str, Task] = {
    task.name: task for task in (CLASSIFICATION, BINARY, MULTILABEL, REGRESSION, TEXT_CLASSIFICATION, LANGUAGE_MODEL)
}


def task_named(name: object) -> Task:
    """A task by its name, from a closed table.

    Raises:
        ConfigError: naming those there are.

    Example:
        >>> task_named("regression").headline
        'rmse'
    """
    if not isinstance(name, str) or name not in TASKS:
        raise ConfigError(f"task is {str(name)!r:.60}, expected one of {', '.join(TASKS)}")
    return TASKS[name]


def task_header(task: Task) -> dict[str, str]:
    """What a message or file says of its task; where nothing stands, it is classification.

    Example:
        >>> task_header(CLASSIFICATION), task_header(BINARY)
        ({}, {'task': 'binary'})
    """
    return {} if task is CLASSIFICATION else {"task": task.name}
