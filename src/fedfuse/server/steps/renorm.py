"""Running statistics estimated anew: what BatchNorm should expect of weights that nobody trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fedfuse.core.messages import Cohort
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState

_NORMS = (nn.modules.batchnorm._BatchNorm,)


@dataclass(frozen=True, slots=True)
class RestateNorms(ServerPart):
    """Replace every BatchNorm's running mean and variance by those over the server's rows.

    A mean of weights has other activations than its parents: their variances shrink, and the parents' statistics no
    longer fit (Jordan et al., "REPAIR", 2023). One pass in training mode over the rows, averaged over batches, sets
    them right; nothing is learnt. A network without BatchNorm stays as it is.

    Attributes:
        batch: rows per pass; the last batch may be up to half larger, so that none is tiny.
    """

    batch: int = 256
    needs: ClassVar[frozenset[str]] = frozenset({"server_rows", "network"})

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:  # noqa: ARG002
        """One pass over the rows."""
        single = state.single
        module = single.spec.build().eval()
        module.load_state_dict(dict(single.posterior.mean))
        norms = [part for part in module.modules() if isinstance(part, _NORMS) and part.track_running_stats]
        if not norms:
            return state
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain average over batches
            norm.train()
        x = bench.need_rows("estimating BatchNorm's statistics").x
        with torch.no_grad():
            for part in x.tensor_split(max(1, round(len(x) / self.batch))):
                module(single.spec.cast(part).to(next(module.parameters()).device))
        told = dict(module.state_dict())
        floats = {n for n, role in single.spec.layout.roles.items() if role == "statistic"}
        mean = {n: told[n].clone() if n in floats else t for n, t in single.posterior.mean.items()}
        return state.fused(mean, single.posterior.geometry, single.spec)
