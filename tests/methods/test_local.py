"""Local training: models stay apart."""

from __future__ import annotations

import torch

from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Apart, Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.methods.local import KeepApart

SPEC = Spec("mlp", {"inputs": 1, "hidden": [], "classes": 2})


def cohort(**values: float) -> Cohort:
    return Cohort.of([ClientUpdate(c, Posterior({"w": torch.full((1,), v)}), 1.0, 1, SPEC) for c, v in values.items()])


def test_each_client_gets_its_own_model_back_and_others_keep_theirs() -> None:
    state = ServerState(0, Single(SPEC, Posterior({"w": torch.zeros(1)})))
    first = KeepApart()(cohort(a=1.0, b=2.0), state, Bench())
    second = KeepApart()(cohort(b=3.0, c=4.0), first, Bench())
    values = {c: s.params["w"].item() for c, s in second.starts.items()}
    assert values == {"": 0.0, "a": 1.0, "b": 3.0, "c": 4.0}
    assert isinstance(second.model, Apart)
    assert [m.posterior.mean["w"].item() for m in second.model.members] == [3.0, 4.0]


def test_members_do_not_borrow_the_updates_memory() -> None:
    update = cohort(a=1.0)
    state = KeepApart()(update, ServerState(0, Single(SPEC, Posterior({"w": torch.zeros(1)}))), Bench())
    update.updates[0].posterior.mean["w"].fill_(9.0)
    assert state.starts["a"].params["w"].item() == 1.0
