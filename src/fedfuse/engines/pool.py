"""Clients in worker processes: one thread each, rows in shared memory, the longest client first.

Processes cost seconds to start, so a pool outlives rounds, seeds and methods: it gives out engines, one per run.
"""

from __future__ import annotations

import json
import os
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedfuse.core.messages import Brief, Envelope, client_order
from fedfuse.core.model import AskModel, ask_in_batches
from fedfuse.core.params import Params
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Terms, Work
from fedfuse.engines import local as local_engine
from fedfuse.engines.local import ClientResult, FindTraining, InProcess, LocalEngine, OncePerBrief, OnClient, Population
from fedfuse.engines.starting import process_context, start_conditions, start_early
from fedfuse.engines.worker import READY, USERS_FAULT, ByValue, MappedRows, PackedQuestion, PackedRound, RowFiles, serve
from fedfuse.errors import ConfigError, FuseError
from fedfuse.wire.codec import decode, encode
from fedfuse.wire.messages import encode_brief

_TRIES = 2  # of a task whose worker dies, and of starting workers that do not


class SharedInputs(Protocol):
    """What several tasks share; sent to each worker once."""

    def to_bytes(self) -> memoryview:
        """The inputs as bytes for a worker, a pickled `PackedInputs`."""
        ...


class PoolTask(Protocol):
    """Something for a worker to do."""

    tries: int

    @property
    def inputs(self) -> SharedInputs:
        """What it shares with others."""
        ...

    def to_bytes(self) -> memoryview:
        """What is this task's own, as bytes for a worker."""
        ...


AnyTask = TypeVar("AnyTask", bound=PoolTask)


class Pool:
    """Worker processes that train clients, for one run after another.

    Args:
        workers: how many; 0 trains in this process, and by default there is one for each core we may use.

    Example:
        >>> rows = Rows(torch.zeros(4, 1), torch.arange(4))
        >>> with Pool(workers=0) as pool:
        ...     pool.engine(Population.of({"a": rows, "b": rows}), seed=1).clients
        ('a', 'b')
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is None:
            workers = count_cores()
        if not isinstance(workers, int) or isinstance(workers, bool) or workers < 0:
            raise ConfigError(f"workers is {workers!r}, expected a whole number ≥ 0; 0 trains in this process")
        self.workers = workers
        self._context = process_context()
        if workers:
            start_early()
        self._running: list[_Worker] = []
        self._row_files = RowFiles()
        self._failed_starts = 0  # in a row: a client's result sets it back, for then workers do start here
        # also when nobody calls `close`: workers must not outlive a notebook's pool; it may not refer to `self`
        self._end = weakref.finalize(self, _end_workers, self._running, self._row_files, os.getpid())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers and remove the rows; the pool cannot be used again."""
        self._end()

    def engine(self, population: Population, seed: int = 0, on_client: OnClient | None = None) -> LocalEngine:
        """An engine for one run: these clients, this seed, and memories of its own.

        Args:
            population: whose rows are whose.
            seed: the run's seed.
            on_client: called with client, seconds and whether nothing was trained, whenever a client is done.
        """
        if not self.workers:
            return InProcess(population, seed, on_client=on_client)
        return PoolEngine(self, population, seed, on_client=on_client)

    def share_rows(self, rows: Rows) -> MappedRows:
        """Put rows where the workers see them, unless they are there."""
        self._check_open()
        return self._row_files.add(rows)

    def move_rows(self, rows: Rows) -> None:
        """Have large rows only where the workers see them: this process looks at them there too."""
        self._check_open()
        if self.workers:
            self._row_files.move(rows)

    @property
    def is_awake(self) -> bool:
        """Whether there are workers that need not be started first."""
        return bool(self._running)

    def run(self, waiting: deque[AnyTask]) -> Iterator[tuple[AnyTask, ClientResult]]:
        """Do tasks in their order as workers come free, and give each back when it ends."""
        self._check_open()
        if any(worker.task for worker in self._running):
            raise FuseError("this pool is in the middle of another exchange; read that to its end or close it first")
        try:
            while waiting or any(worker.task for worker in self._running):
                self._assign_tasks(waiting)
                yield from self._collect_results(waiting)
        finally:  # the reader stopped early: who is still training would answer into the next exchange
            for worker in [w for w in self._running if w.task]:
                self._remove(worker)

    def _check_open(self) -> None:
        if not self._end.alive:
            raise FuseError("this pool is closed; make a new one")

    def _assign_tasks(self, waiting: deque[AnyTask]) -> None:
        """Give every idle worker a task, and start the workers that are missing."""
        idle = [worker for worker in self._running if not worker.task]
        # no more than there is work for: each holds its own copy of the network, and costs a start
        for _ in range(min(self.workers - len(self._running), len(waiting) - len(idle))):
            self._running.append(_Worker.start(self._context))
            idle.append(self._running[-1])
        for worker in idle[: len(waiting)]:
            task = waiting.popleft()
            try:
                worker.send(task)
            except OSError:  # it had died before it could begin
                self._discard_dead_worker(worker)
                waiting.appendleft(task)

    def _collect_results(self, waiting: deque[AnyTask]) -> Iterator[tuple[AnyTask, ClientResult]]:
        """Wait until a worker sends something, and receive from all that did."""
        busy = {worker.wire: (worker, worker.task) for worker in self._running if worker.task}
        for wire in wait(list(busy)) if busy else []:  # it would wait for nobody for ever
            worker, task = busy[wire]  # type: ignore[index]  # wait() gives back what it was given
            try:
                done = worker.receive()
            except (EOFError, OSError):
                done = self._retry(worker, task, waiting)
            if done is not None:
                self._failed_starts, worker.task = 0, None
                self._assign_tasks(waiting)  # before the reader looks at the result: it may take its time
                yield task, done

    def _retry(self, worker: _Worker, task: AnyTask, waiting: deque[AnyTask]) -> ClientResult | None:
        """Try a dead worker's task once more in another worker, then give it up."""
        self._discard_dead_worker(worker)
        task.tries += worker.ready  # one that never woke up says nothing about the client
        if task.tries >= _TRIES:
            return ClientResult(None, dropped="its worker died twice")
        waiting.appendleft(task)
        return None

    def _discard_dead_worker(self, worker: _Worker) -> None:
        self._remove(worker)
        self._failed_starts += not worker.ready
        if self._failed_starts >= _TRIES:
            raise FuseError(
                "worker processes do not start (their own words are above); put what your script runs under "
                '`if __name__ == "__main__":`, or use workers=0'
            )

    def _remove(self, worker: _Worker) -> None:
        self._running.remove(worker)
        worker.end()


@dataclass(slots=True)
class PoolEngine:
    """The clients of one run, trained by a pool."""

    pool: Pool
    population: Population
    seed: int = 0
    memories: dict[str, Params] = field(default_factory=dict)
    on_client: OnClient | None = None
    terms: ClassVar[Terms] = Terms()

    @property
    def clients(self) -> tuple[str, ...]:
        """Client ids in client order."""
        return self.population.clients

    def exchange(
        self, brief: Brief, work: Work, asked: tuple[str, ...], trained: FindTraining | None = None
    ) -> Iterator[Envelope]:
        """Train the asked clients, the longest first; a client that fails is dropped with its reason."""
        mapped, sizes = self.pool.share_rows(self.population.rows), self.population.sizes()
        per_brief = OncePerBrief(brief, lambda own_brief: RoundInputs(work, own_brief, self.seed, mapped))
        # the longest first, so that nobody begins a long task when the others are done; the cohort is sorted at the
        # door, so the order in which clients end changes no bit
        order = sorted(asked, key=lambda client: (-sizes[client], client_order(client)))
        for task, done in self.pool.run(deque(self._task(c, per_brief.for_client(c), trained) for c in order)):
            yield local_engine.close_round(self, task.client, done)

    def _task(self, client: str, inputs: RoundInputs, trained: FindTraining | None) -> WorkerTask:
        index = torch.as_tensor(self.population.index[client], dtype=torch.int64).numpy()
        return WorkerTask(client, inputs, index, self.memories.get(client, {}), trained)


@dataclass(slots=True)
class RoundInputs:
    """What all clients of one brief share; pickled once, and sent to each worker once."""

    work: Work
    brief: Brief
    seed: int
    mapped: MappedRows
    _bytes: memoryview | None = None

    def to_bytes(self) -> memoryview:
        """The inputs as bytes for a worker."""
        if self._bytes is None:
            spec = self.brief.spec
            try:
                packed = PackedRound(self.work, spec, encode_brief(self.brief), self.seed, self.mapped)
                self._bytes = ByValue.dumps(packed)
            except FuseError:
                raise
            except Exception as why:  # a user's object may raise anything when it is pickled
                raise ConfigError(
                    f"the recipe or the model {spec.factory!r} cannot be sent to a worker process ({why}); "
                    "define its parts as classes or functions of a module, or use workers=0"
                ) from why
        return self._bytes


@dataclass(slots=True)
class WorkerTask:
    """One client's round, as a worker is asked for it."""

    client: str
    inputs: RoundInputs
    index: npt.NDArray[np.int64]
    memory: Params
    trained: FindTraining | None
    tries: int = 0

    def to_bytes(self) -> memoryview:
        """The task as bytes for a worker; a known training is fetched now and not kept."""
        known = self.trained(self.client) if self.trained else None
        return ByValue.dumps((self.client, self.index, encode(self.memory, {}), known))


@dataclass(slots=True)
class _Worker:
    """A worker process as its pool sees it."""

    process: BaseProcess
    wire: Connection
    task: Any = None  # a `PoolTask`, of the kind that is being run
    inputs: SharedInputs | None = None
    ready: bool = False

    @classmethod
    def start(cls, context: ForkServerContext | SpawnContext) -> _Worker:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs,), name="fedfuse-worker", daemon=True)
        with start_conditions():
            process.start()
        theirs.close()  # so that the wire ends when the worker does
        return cls(process, ours)

    def send(self, task: PoolTask) -> None:
        """Send a task, after its inputs if they differ from the last ones; raises OSError if the worker has died."""
        # both before the first byte goes: what cannot be pickled must not leave the worker waiting for its other half
        fresh = b"" if self.inputs is task.inputs else task.inputs.to_bytes()
        turn = task.to_bytes()
        self.inputs, self.task = task.inputs, task
        self.wire.send_bytes(fresh)
        self.wire.send_bytes(turn)

    def receive(self) -> ClientResult | None:
        """How its task ended, or None for any other message; raises EOFError or OSError if it died."""
        word = self.wire.recv_bytes()
        if word == READY:
            self.ready = True
            return None
        facts = json.loads(word)
        if "error" in facts:
            self.inputs = self.task = None
            raise USERS_FAULT[facts["error"]](facts["text"])
        # beside the JSON, not in it: tensors are never parsed as text, and never unpickled
        payload, memory = self.wire.recv_bytes(), self.wire.recv_bytes()
        return ClientResult(None if facts["dropped"] else payload, dict(decode(memory).tensors), **facts)

    def end(self) -> None:
        """Stop the process at once: it holds nothing worth waiting for."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.wire.close()


def count_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _end_workers(workers: list[_Worker], row_files: RowFiles, owner: int) -> None:
    """End a pool; a forked copy of its process must not."""
    if os.getpid() != owner:
        return
    while workers:
        workers.pop().end()
    row_files.clear()


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
    if not isinstance(done.payload, bytes):
        question = task.inputs.packed
        return ask_in_batches(question.ask, question.model, rows.x[task.start : task.stop], batch)
    return decode(done.payload).tensors["outputs"]
