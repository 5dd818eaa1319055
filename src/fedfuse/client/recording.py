"""What every layer of a network reads, and a place to find the gradients that come back to it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.core.hooks import forward_hooks
from fedfuse.core.padding import HidePadding, padding_of
from fedfuse.nets.blocks import Block


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
