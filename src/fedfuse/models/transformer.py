"""Small transformers that read tokens: one that tells the next token, and one that tells a text's class."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.models.layers import default_init, flag, initialize, reject, share, whole
from fedfuse.tasks.language import PADDING


class Attention(nn.Module):
    """Attention by several heads: each output is a mean of values v_s with weights softmax(q_t · k_s / √d)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """What each position gathers from those it sees: `seen` is true there, of shape (…, positions, positions)."""
        q, k, v = (self._by_head(layer(x)) for layer in (self.query, self.key, self.value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        mixed = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        out: Tensor = self.out(mixed.transpose(-3, -2).flatten(-2))
        return out

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1).transpose(-3, -2)


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), and to that the same with two linear layers: norms come first."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """The stream, with what this block adds to it."""
        x = x + self.dropout(self.attention(self.attention_norm(x), seen))
        added: Tensor = self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return x + added


class Transformer(nn.Module):
    """Learned embeddings of tokens and positions, blocks, a norm and a linear layer.

    A causal one sees no later position and answers at every one; another sees all but padding and answers once, by the
    mean over its positions.
    """

    def __init__(
        self, tokens: int, length: int, outputs: int, width: int, heads: int, depth: int, dropout: float, causal: bool
    ) -> None:
        super().__init__()
        self.causal = causal
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, 4 * width, dropout) for _ in range(depth))
        self.norm, self.classifier = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (rows, positions, tokens), or (rows, classes)."""
        places = torch.arange(x.shape[-1], device=x.device).expand(x.shape)  # each row's own, so that gradients are too
        stream = self.tokens(x) + self.positions(places)
        known = x != PADDING
        seen = places[..., None] >= places[..., None, :] if self.causal else _seen_by_all(known)
        for block in self.blocks:
            stream = block(stream, seen[..., None, :, :])
        stream = self.norm(stream)
        if not self.causal:
            share_of_each = known.to(stream) / known.sum(-1, keepdim=True).clamp(min=1)
            stream = (stream * share_of_each[..., None]).sum(-2)
        logits: Tensor = self.classifier(stream)
        return logits


def _seen_by_all(known: Tensor) -> Tensor:
    """Every position sees the known ones, and the first: a text of padding alone sees something too."""
    first = torch.zeros_like(known)
    first[..., 0] = True
    return (known | first)[..., None, :].expand(*known.shape, known.shape[-1])


def transformer(
    tokens: int = 66,
    length: int = 80,
    width: int = 64,
    heads: int = 4,
    depth: int = 2,
    dropout: float = 0.0,
    tied: bool = False,
) -> nn.Module:
    """A causal transformer that tells the next token at every position, as GPT-2 does.

    Args:
        tokens: how many there are; the first stands for padding and the unknown.
        length: the longest text it reads.
        width: of the stream.
        heads: of each attention; they share the width.
        depth: blocks.
        dropout: share of each block's addition that is dropped in training.
        tied: whether tokens are told by the weights that read them.

    Example:
        >>> transformer(tokens=10, length=5, width=8, heads=2)(torch.ones(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 5, 10])
    """
    net = _build("transformer", tokens, length, tokens, width, heads, depth, dropout, causal=True)
    if flag("transformer", "tied", tied):
        net.classifier.weight = net.tokens.weight
    return net


def text_classifier(
    tokens: int = 66,
    length: int = 80,
    classes: int = 2,
    width: int = 64,
    heads: int = 4,
    depth: int = 2,
    dropout: float = 0.0,
) -> nn.Module:
    """A transformer that tells a text's class by the mean over its positions; padding is not seen.

    Args:
        tokens: how many there are; the first stands for padding and the unknown.
        length: the longest text it reads.
        classes: how many classes it tells apart, or how many outputs it has for another task.
        width: of the stream.
        heads: of each attention; they share the width.
        depth: blocks.
        dropout: share of each block's addition that is dropped in training.

    Example:
        >>> text_classifier(tokens=10, length=5, width=8, heads=2)(torch.ones(3, 5, dtype=torch.int64)).shape
        torch.Size([3, 2])
    """
    return _build("text_classifier", tokens, length, classes, width, heads, depth, dropout, causal=False)


def _build(
    who: str,
    tokens: int,
    length: int,
    outputs: int,
    width: int,
    heads: int,
    depth: int,
    dropout: float,
    *,
    causal: bool,
) -> Transformer:
    sizes = {"tokens": tokens, "length": length, "classes": outputs, "width": width, "heads": heads, "depth": depth}
    sizes = {name: whole(who, name, value) for name, value in sizes.items()}
    if sizes["width"] % sizes["heads"]:
        reject(who, "heads", heads, f"a number that divides the width {width}")
    kept = share(who, "dropout", dropout)
    outputs = sizes.pop("classes")
    with torch.device("meta"):
        net = Transformer(outputs=outputs, dropout=kept, causal=causal, **sizes)
    initialize(net, _init)
    return net


@torch.no_grad()
def _init(module: nn.Module) -> None:
    """Small embeddings, so that blocks are heard; PyTorch's own values for the rest."""
    if isinstance(module, nn.Embedding):
        module.weight.normal_(0.0, 0.02)
    elif isinstance(module, nn.LayerNorm):
        module.reset_parameters()
    else:
        default_init(module)
