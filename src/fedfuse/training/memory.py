"""What a client remembers from round to round, while the network it remembers may have changed its shape."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedfuse.core.messages import Brief
from fedfuse.core.params import Params
from fedfuse.core.state import entries_of, with_kind
from fedfuse.nets.carry import carry_over
from fedfuse.wire.codec import forms_of

CHANNELS = "channels"  # of a pruned network: which of its original channels the remembered tensors have


def fit_memory(memory: Params, brief: Brief, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """A client's memory as it fits the network of a brief, and what had to be done, as facts for the reply.

    Control variates and last models are kept by tensor. Where a pruning has taken channels since, those of the others
    are carried over; where nobody can tell which those are, everything of that kind is forgotten together, so that a
    control variate is zero again and there is no last model.

    Args:
        memory: what the client kept.
        brief: what the server sent.
        shape: the shape of one of its inputs.
    """
    fitted, facts = dict(memory), dict[str, float]()
    before = {layer: t.tolist() for layer, t in entries_of(memory, CHANNELS).items()}
    for kind in sorted({name.partition("/")[0] for name in memory} - {CHANNELS}):
        own = entries_of(memory, kind)
        if _fits(own, brief):
            continue
        moved = carry_over(own, before, brief.spec, shape)
        fitted = {n: t for n, t in fitted.items() if not n.startswith(f"{kind}/")} | with_kind(kind, moved or {})
        facts[f"{'forgot' if moved is None else 'carried over'} {kind}"] = float(len(own))
    return fitted, facts


def with_channels(memory: Mapping[str, Tensor], brief: Brief) -> dict[str, Tensor]:
    """The memory after a round, with the channels of the network it is of, if that was pruned."""
    rest = {n: t for n, t in memory.items() if not n.startswith(f"{CHANNELS}/")}
    kept = {layer: torch.tensor(units) for layer, units in brief.spec.kept.items()}
    return rest | with_kind(CHANNELS, kept) if rest else {}


def _fits(own: Params, brief: Brief) -> bool:
    """Whether what is remembered by tensor has the network's names and shapes; other things have names of their own."""
    forms = forms_of(brief.params)
    known = [name for name in own if name in forms]
    return not known or (len(known) == len(own) and all(own[n].shape == forms[n].shape for n in known))
