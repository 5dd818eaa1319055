"""Rows passed through a network: what its layers read, and the gradients that come back to them, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from fedfuse.client.recording import LayerCall, record_calls
from fedfuse.core.precision import in_full
from fedfuse.core.rows import Rows
from fedfuse.kernels import readings_of_layers
from fedfuse.nets.blocks import Block
from fedfuse.tasks import Classification, Task

if TYPE_CHECKING:
    from fedfuse.kernels.chain.network import LayerReading

Passes: TypeAlias = Iterator[tuple[list[tuple[LayerCall, Tensor]], int]]
"""For each batch every use of a layer with the gradient at its output, and how many examples there are."""

Draw: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From a network's answer and the rows' labels, labels in their place."""

BATCH, _MOST_ROWS = 128, 512  # rows per pass: so few at least, and so many at most
_RECORDED = 1 << 22  # numbers that layers may read and answer in a pass of more than the least


def layer_passes(
    module: nn.Module,
    blocks: Sequence[Block],
    rows: Rows,
    task: Task,
    draw: Draw | None = None,
    batch: int | None = None,
    kernel: str = "torch",
) -> Passes:
    """One pass over the rows; gradients are of the sum of the batch's losses, so that each row's is its own.

    Args:
        module: the network, in evaluation mode.
        blocks: which layers; norms are not watched.
        rows: the examples.
        task: whose loss it is.
        draw: labels in the place of the rows' own.
        batch: rows per pass; by default 128 to begin with, and more where layers are small.
        kernel: "torch", or anything else for compiled kernels where they know the network and what is asked.
    """
    if draw is None and batch is None and isinstance(task, Classification):
        compiled = _compiled_passes(module, blocks, rows, kernel)
        if compiled is not None:
            return compiled
    return _torch_passes(module, blocks, rows, task, draw, batch)


def _torch_passes(
    module: nn.Module, blocks: Sequence[Block], rows: Rows, task: Task, draw: Draw | None, batch: int | None
) -> Passes:
    """By autograd, through any network."""
    with record_calls(module, blocks) as calls:
        for begin, end in _runs(len(rows) if blocks else 0, batch, calls):
            x, y = rows.x[begin:end], rows.y[begin:end]
            calls.clear()
            with torch.enable_grad():
                logits = in_full(module(x))
                labels = y if draw is None else draw(logits.detach(), y)
                loss = task.loss(logits, labels, "sum")
                grads = torch.autograd.grad(loss, [c.probe for c in calls], materialize_grads=True) if calls else ()
            yield list(zip(calls, grads, strict=True)), end - begin


def _compiled_passes(module: nn.Module, blocks: Sequence[Block], rows: Rows, kernel: str) -> Passes | None:
    """By compiled kernels, which then take no weights' gradients; None where torch does it."""
    by_path = {block.weight.rpartition(".")[0]: block for block in blocks}
    readings = readings_of_layers(module, rows, kernel, by_path.keys()) if by_path else None
    if readings is None:
        return None
    parts = {path: module.get_submodule(path) for path in by_path}

    def as_calls(batch: Sequence[LayerReading]) -> Iterator[tuple[LayerCall, Tensor]]:
        for path, x, gradients in batch:
            if path in by_path:
                yield LayerCall(by_path[path], parts[path], x, gradients), gradients

    return ((list(as_calls(batch)), len(batch[0].inputs)) for batch in readings)


def _runs(rows: int, batch: int | None, calls: Sequence[LayerCall]) -> Iterator[tuple[int, int]]:
    """Runs of rows; without a size, as long as what layers read and answer stays small, once that is seen."""
    begin, size = 0, batch or BATCH
    while begin < rows:
        end = min(rows, begin + size)
        yield begin, end
        if batch is None and begin == 0:
            numbers = sum(call.x.numel() + call.probe.numel() for call in calls)
            size = max(BATCH, min(_MOST_ROWS, _RECORDED * end // max(1, numbers) // BATCH * BATCH))
        begin = end
