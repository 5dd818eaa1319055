"""A server that trains: as a client would, and under the masks that everybody is told of."""

from __future__ import annotations

from fedfuse.client.projections import Masked
from fedfuse.client.work import Learned, learned
from fedfuse.core.cost import MASK
from fedfuse.core.messages import Brief
from fedfuse.core.recipe import Work
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.state import Bench, ServerState, filed, part


def train_on(rows: Rows, state: ServerState, settings: LocalSettings, bench: Bench, who: str = "server") -> Learned:
    """What the state's network becomes on some rows of the server's; weights that a mask leaves out stay zero.

    Args:
        rows: what to train on.
        state: the network, and the masks in its memory.
        settings: how to train.
        bench: the run's seed and number of classes.
        who: whose random streams are used.
    """
    model, masks = state.single, part(state.memory, MASK)
    brief = Brief(state.round, model.spec, model.posterior.mean, filed(MASK, masks), classes=bench.classes)
    work = Work(settings, project=Masked()) if masks else Work(settings)
    return learned(work, brief, who, rows, seed=bench.seed)
