"""Statistics of a merged network: running statistics estimated again, and its parents' restored (REPAIR)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fedfuse.core.messages import Cohort
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.nets.units import mean_statistics, repairable_layers, rescale_units, unit_statistics
from fedfuse.server.steps.synthesize import server_inputs

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
        values = dict(module.state_dict())
        floats = {n for n, role in single.spec.layout.roles.items() if role == "statistic"}
        mean = {n: values[n].clone() if n in floats else t for n, t in single.posterior.mean.items()}
        return state.fused(mean, single.posterior.geometry, single.spec)


@dataclass(frozen=True, slots=True)
class Repair(ServerPart):
    """Rescale every hidden unit so that its mean and deviation are the parents' (Jordan et al., "REPAIR", ICLR 2023).

    A mean of networks has units of smaller variance than its parents, the more so the less they are alike, and layer
    after layer it fades. With μ_k and σ_k the statistics of a unit before its activation in parent k, μ and σ those in
    the merged network, and w_k the parents' shares, the unit's weights become (σ*/σ) W and its bias
    (σ*/σ)(b − μ) + μ*, where μ* = Σ_k w_k μ_k and σ* = Σ_k w_k σ_k. Layers go in the order in which they run, each seen
    behind those already repaired. A layer with a norm behind it is left alone (see `RestateNorms`), as are the outputs
    and layers without a bias, which are named. Without rows at the server, clients' own do: `RepairUnits`.

    Attributes:
        uniform: whether parents count alike, or by their examples; as the merge did.
        count: at most so many of the server's rows are looked at.
    """

    uniform: bool = False
    count: int = 2000
    needs: ClassVar[frozenset[str]] = frozenset({"server_rows", "network"})

    def __call__(self, state: ServerState, cohort: Cohort, bench: Bench) -> ServerState:
        """Layer by layer, on the server's rows."""
        bench.need_rows("estimating activation statistics")
        found = server_inputs(bench, self.count, "repair", state.round)
        assert found is not None  # there are rows
        x, single = found[0], state.single
        layers, others = repairable_layers(single.spec, tuple(x.shape[1:]))
        params = dict(single.posterior.mean)
        parents = [unit_statistics(update.spec, update.posterior.mean, layers, x) for update in cohort]
        shares = torch.full_like(cohort.weights, 1 / len(cohort)) if self.uniform else cohort.weights
        for layer in layers:
            goal = mean_statistics([found[layer.name] for found in parents], shares)
            now = unit_statistics(single.spec, params, [layer], x)[layer.name]
            params |= rescale_units(layer, params, now, goal)
        facts = {"repaired": [layer.name for layer in layers], "not_repaired": others}
        return state.fused(params, single.posterior.geometry, single.spec).noting(repair=facts)
