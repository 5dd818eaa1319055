"""Rows a client sees beside its own."""

from __future__ import annotations

import torch

from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.engines.memo import Namer
from fedfuse.server.roster import WithShared

BRIEF = Brief(0, Spec("mlp"), {})


def given(value: float) -> Rows:
    return Rows(torch.full((2, 3), value), torch.tensor([1, 0]))


def test_own_rows_come_first_and_shared_ones_take_their_dtype() -> None:
    own = Rows(torch.zeros(1, 3, dtype=torch.float64), torch.tensor([2]))
    seen = WithShared(given(1.0))(own, BRIEF)
    assert seen.y.tolist() == [2, 1, 0]
    assert seen.x.dtype == torch.float64
    assert seen.x[1:].eq(1).all()


def test_views_stack() -> None:
    own = Rows(torch.zeros(1, 3), torch.tensor([2]))
    assert len(WithShared(given(1.0), WithShared(given(2.0)))(own, BRIEF)) == 5


def test_a_work_is_named_after_the_very_rows_it_shares() -> None:
    names = [Namer.of(Work(LocalSettings(), view=WithShared(given(v))), 0) for v in (1.0, 1.0, 2.0)]
    assert names[0] == names[1] != names[2]
    assert names[0] is not None
