"""The projection head of MOON, which SWA's comparisons keep."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from fedfuse.errors import ConfigError
from fedfuse.models.layers import stack, whole


def add_projection(model: nn.Module, hidden: int | None = None, out: int = 256) -> nn.Module:
    """Put a two-layer projection between a model's representation and its classifier.

    The last linear layer d → classes becomes d → hidden, ReLU, hidden → out, out → classes (Li et al.,
    "Model-Contrastive Federated Learning", 2021, section 3.2), so what the new classifier reads is the
    projection. The model is changed in place; a model that is itself one linear layer is replaced.

    Args:
        model: any module whose last registered `nn.Linear` is its classifier.
        hidden: units of the projection's inner layer; d when not given.
        out: length of the projection.

    Returns:
        The model with the head; its new layers have biases if the old classifier had one.

    Example:
        >>> add_projection(nn.Sequential(nn.Flatten(), nn.Linear(84, 10)))[-1].logits
        Linear(in_features=256, out_features=10, bias=True)
    """
    name, last = _last_linear(model)
    hidden = last.in_features if hidden is None else whole("add_projection", "hidden", hidden)
    out = whole("add_projection", "out", out)
    head = _head((last.in_features, hidden, out, last.out_features), last).train(last.training)
    if not name:
        return head
    model.set_submodule(name, head)
    return model


def with_head(model: nn.Module, head: int) -> nn.Module:
    """The model with a projection of length `head`, or as it is when `head` is 0."""
    return add_projection(model, out=head) if head else model


def _last_linear(model: nn.Module) -> tuple[str, nn.Linear]:
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise ConfigError(
            f"add_projection: {type(model).__name__} has no linear layer, expected one as its classifier; "
            "give the model a torch.nn.Linear at its end"
        )
    return linears[-1]


def _head(widths: tuple[int, int, int, int], like: nn.Linear) -> nn.Sequential:
    """The three linear layers, where the old classifier lived."""
    inner, projection, logits = (
        nn.Linear(inputs, outputs, like.bias is not None, like.weight.device, like.weight.dtype)
        for inputs, outputs in pairwise(widths)
    )
    return stack(("inner", inner), ("inner_relu", nn.ReLU()), ("projection", projection), ("logits", logits))
