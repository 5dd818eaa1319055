"""What every layer of a network reads, and a place to find the gradients that come back to it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.core.inputs import HidePadding, padding_of
from fedfuse.core.rows import Rows
from fedfuse.core.torch_utils import forward_hooks, in_full
from fedfuse.kernels import readings_of_layers
from fedfuse.nets.kronecker import Block
from fedfuse.tasks import Classification, Task

if TYPE_CHECKING:
    from fedfuse.kernels.chain.network import LayerReading


@dataclass(frozen=True, slots=True, eq=False)
class LayerCall:
    """One use of a layer in a forward pass; the gradient at the probe is the gradient at the layer's output.

    Attributes:
        block: the layer.
        module: what was called.
        x: what it read.
        probe: zeros that were added to its output.
        group: which of the block's matrices read it, where each has inputs of its own; None for all of them.
        known: where its output belongs to no padding, if some does: x has those positions alone.
    """

    block: Block
    module: nn.Module
    x: Tensor
    probe: Tensor
    group: int | None = None
    known: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Recorder:
    """Notes a layer's input and adds a probe of zeros to its output.

    The probe also shields the gradient from whatever is done to the output in place, and gives it a graph even where
    no weight asks for one.
    """

    block: Block
    calls: list[LayerCall]
    group: int | None = None
    padding: HidePadding | None = None
    batch: list[int] = field(default_factory=list)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        return self.note(module, args[0] if args else kwargs["input"], output)

    def note(self, module: nn.Module, x: Tensor, output: Tensor) -> Tensor:
        if isinstance(module, nn.Embedding) and self.batch and len(x) == 1 < self.batch[-1]:
            # places that all rows share are read once: every row reads them, and has a gradient of its own
            x, output = x.expand(self.batch[-1], *x.shape[1:]), output.expand(self.batch[-1], *output.shape[1:])
        # one zero that stands everywhere: it takes no memory, and its gradient is as large as the output
        probe = output.new_zeros((), requires_grad=True).expand_as(output)
        known = self._real_places(x, output)
        seen = x.detach() if known is None else x.detach()[known]
        self.calls.append(LayerCall(self.block, module, seen, probe, self.group, known))
        return output + probe

    def _real_places(self, x: Tensor, output: Tensor) -> Tensor | None:
        """Where there is no padding, if a layer reads one thing for every token."""
        known = None if self.padding is None else self.padding.known
        fits = known is not None and x.shape[:2] == known.shape == output.shape[:2]
        return known if fits else None


@contextmanager
def record_calls(module: nn.Module, blocks: Sequence[Block]) -> Iterator[list[LayerCall]]:
    """The list into which every use of these layers is written; norms are not watched."""
    calls: list[LayerCall] = []
    by_weight = {block.weight: block for block in blocks if block.kind != "norm"}
    attentions = dict(_attentions(module))
    within = {
        f"{path}.{leaf}".removeprefix(".") for path in attentions for leaf in ("in_proj_weight", "out_proj.weight")
    }
    watched = [b for weight, b in by_weight.items() if weight not in within and b.kind != "attention"]
    padding, batch = padding_of(module), list[int]()
    hooks = (
        (module.get_submodule(b.weight.rpartition(".")[0]), _Recorder(b, calls, None, padding, batch)) for b in watched
    )
    with ExitStack() as stack:
        stack.enter_context(plain_attention())
        for path, attention in attentions.items():
            stack.enter_context(_spread_attention(attention, path, by_weight, calls))
        stack.enter_context(forward_hooks(hooks, with_kwargs=True))
        stack.enter_context(forward_hooks([(module, _count_rows(batch))], before=True, with_kwargs=True))
        yield calls


def _count_rows(batch: list[int]) -> Callable[..., None]:
    """A hook that notes how many rows a network is given."""

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()), None)
        batch[:] = [len(x)] if isinstance(x, Tensor) and x.ndim else []

    return note


def _attentions(module: nn.Module) -> Iterator[tuple[str, nn.MultiheadAttention]]:
    """Attention blocks that torch's own forward computes."""
    for path, part in module.named_modules():
        if isinstance(part, nn.MultiheadAttention) and type(part).forward is nn.MultiheadAttention.forward:
            yield path, part


@contextmanager
def _spread_attention(
    attention: nn.MultiheadAttention, path: str, blocks: Mapping[str, Block], calls: list[LayerCall]
) -> Iterator[None]:
    """Within, the attention's projections are layers that can be watched: torch computes them all in one go."""
    prefix = f"{path}." if path else ""
    packed, last = blocks.get(f"{prefix}in_proj_weight"), blocks.get(f"{prefix}out_proj.weight")
    if packed is None and last is None:
        yield
        return
    attention.forward = partial(_attend, attention, packed, last, calls)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del attention.forward


def _attend(
    attention: nn.MultiheadAttention,
    packed: Block | None,
    last: Block | None,
    calls: list[LayerCall],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What the attention answers, its projections done here and watched.

    Torch then gets identities for projections, and does all the rest as ever: masks, heads, biases of keys and values.
    """
    inputs, size = (query, key, value), attention.embed_dim
    weights = _projections(attention)
    biases = (None,) * 3 if attention.in_proj_bias is None else attention.in_proj_bias.chunk(3)
    projected = [F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True)]
    if packed is not None:
        notes: list[Callable[..., Tensor]] = [_Recorder(packed, calls, group).note for group in range(3)]
        projected = [note(attention, x, out) for note, x, out in zip(notes, inputs, projected, strict=True)]
    flip = attention.batch_first and query.ndim == 3
    q, k, v = (t.transpose(0, 1) for t in projected) if flip else projected
    same = torch.eye(size, dtype=query.dtype, device=query.device)
    mixed, shares = F.multi_head_attention_forward(
        q,
        k,
        v,
        embed_dim_to_check=size,
        num_heads=attention.num_heads,
        in_proj_weight=None,
        in_proj_bias=None,
        bias_k=attention.bias_k,
        bias_v=attention.bias_v,
        add_zero_attn=attention.add_zero_attn,
        dropout_p=0.0,
        out_proj_weight=same,
        out_proj_bias=None,
        training=False,
        key_padding_mask=key_padding_mask,
        need_weights=need_weights,
        attn_mask=attn_mask,
        use_separate_proj_weight=True,
        q_proj_weight=same,
        k_proj_weight=same,
        v_proj_weight=same,
        average_attn_weights=average_attn_weights,
        is_causal=is_causal,
    )
    mixed = mixed.transpose(0, 1) if flip else mixed
    answer = F.linear(mixed, attention.out_proj.weight, attention.out_proj.bias)
    return answer if last is None else _Recorder(last, calls).note(attention.out_proj, mixed, answer), shares


def _projections(attention: nn.MultiheadAttention) -> Sequence[Tensor]:
    """The weights of queries, keys and values."""
    if attention._qkv_same_embed_dim:
        return attention.in_proj_weight.chunk(3)
    return attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention by its plain formula: the fast one knows no gradients, and takes weights under vmap for constants."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")  # slower than elsewhere, and right
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


Passes: TypeAlias = Iterator[tuple[list[tuple[LayerCall, Tensor]], int]]
"""For each batch every use of a layer with the gradient at its output, and how many examples there are."""

Draw: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From a network's answer and the rows' labels, labels in their place."""

BATCH, _MOST_ROWS = 128, 512  # rows per pass, at least and at most
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
