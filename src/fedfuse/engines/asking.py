"""Models asked by a pool's workers, which would idle while a round is scored."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedfuse.core.model import AskModel, ask_in_batches
from fedfuse.core.rows import Rows
from fedfuse.engines.local import ClientResult
from fedfuse.engines.pool import Pool
from fedfuse.engines.worker import ByValue, PackedQuestion
from fedfuse.wire.codec import decode


@dataclass(frozen=True, slots=True)
class WorkersAnswer:
    """Asks models about rows in a pool's workers.

    The batches are those that one process would take, so the bits are the same; only who computes them differs.

    Example:
        >>> rows = Rows(torch.ones(3, 1), torch.zeros(3))
        >>> with Pool(workers=0) as pool:
        ...     [answer] = WorkersAnswer(pool)(lambda scale, x: (scale * x)[None], [2.0], rows, 2)
        >>> answer.flatten().tolist()
        [2.0, 2.0, 2.0]
    """

    pool: Pool

    def __call__(self, ask: AskModel, models: Sequence[object], rows: Rows, batch: int) -> list[Tensor]:
        """What `ask(model, x)` gives for every model and all rows.

        Args:
            ask: a function of a module, so that workers can import it.
            models: who is asked.
            rows: about what.
            batch: rows at a time.
        """
        # starting workers takes longer than most answers do
        tasks = self._tasks(ask, models, rows, batch) if self.pool.is_awake else []
        if len(tasks) < 2:
            return [ask_in_batches(ask, model, rows.x, batch) for model in models]
        done = {(task.who, task.start): found for task, found in self.pool.run(deque(tasks))}
        parts = [(task, done[task.who, task.start]) for task in tasks]
        return [
            torch.cat([_outputs(task, found, rows, batch) for task, found in parts if task.who == who], 1)
            for who in range(len(models))
        ]

    def _tasks(self, ask: AskModel, models: Sequence[object], rows: Rows, batch: int) -> list[_QuestionTask]:
        """Spans of whole batches, as many as keep the workers busy; none if a model cannot be sent."""
        batches = -(-len(rows) // batch)
        spans = min(batches, -(-self.pool.workers // max(len(models), 1)))
        step = -(-batches // max(spans, 1)) * batch
        mapped = self.pool.share_rows(rows)
        packed = [PackedQuestion(ask, model, mapped, batch) for model in models]
        try:
            sent = [_SentQuestion(question, ByValue.dumps(question)) for question in packed]
        except Exception:  # a user's network may raise anything when it is pickled: this process can ask it
            return []
        starts = range(0, len(rows), step)
        return [_QuestionTask(q, who, s, min(s + step, len(rows))) for who, q in enumerate(sent) for s in starts]


@dataclass(frozen=True, slots=True)
class _SentQuestion:
    """A model and what it is asked, pickled once."""

    packed: PackedQuestion
    bytes: memoryview

    def to_bytes(self) -> memoryview:
        return self.bytes


@dataclass(slots=True)
class _QuestionTask:
    """One model's answer about a span of rows."""

    inputs: _SentQuestion
    who: int
    start: int
    stop: int
    tries: int = 0

    def to_bytes(self) -> memoryview:
        return ByValue.dumps((self.start, self.stop))


def _outputs(task: _QuestionTask, done: ClientResult, rows: Rows, batch: int) -> Tensor:
    """What a worker found; where it failed, this process asks, and meets the same failure if there is one."""
    if done.payload is None:
        question = task.inputs.packed
        return ask_in_batches(question.ask, question.model, rows.x[task.start : task.stop], batch)
    return decode(done.payload).tensors["outputs"]
