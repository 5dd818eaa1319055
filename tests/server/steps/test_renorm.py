"""Statistics estimated anew are those of the rows."""

from __future__ import annotations

import torch
from torch import nn

from fedfuse.core.messages import Cohort
from fedfuse.core.model import Single
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.server.steps.repair import RestateNorms

ROWS = Rows(torch.randn(60, 4, generator=torch.Generator().manual_seed(0)) * 3 + 1, torch.zeros(60, dtype=torch.long))


def restated(net: nn.Module, batch: int = 256) -> tuple[Single, Single]:
    spec = Spec.of(net)
    before = Single.of(net, spec)
    return before, RestateNorms(batch)(ServerState(0, before), Cohort(()), Bench(ROWS)).single


def test_running_statistics_become_those_of_the_rows_layer_by_layer() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    before, after = restated(net)
    assert torch.allclose(after.posterior.mean["0.running_mean"], ROWS.x.mean(0), atol=1e-5)
    assert torch.allclose(after.posterior.mean["0.running_var"], ROWS.x.var(0), rtol=1e-5)
    normed = (ROWS.x - ROWS.x.mean(0)) / (ROWS.x.var(0, unbiased=False) + 1e-5).sqrt()
    middle = net[2](normed).detach()
    assert torch.allclose(after.posterior.mean["3.running_mean"], middle.mean(0), atol=1e-5)
    for name in ("2.weight", "3.weight", "0.num_batches_tracked"):
        assert after.posterior.mean[name].equal(before.posterior.mean[name])


def test_batches_are_averaged_and_inputs_left_alone() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    _, after = restated(net, batch=20)
    variance = torch.stack([part.var(0) for part in ROWS.x.split(20)]).mean(0)
    assert torch.allclose(after.posterior.mean["0.running_var"], variance, rtol=1e-5)
    assert net[0].running_mean.equal(torch.zeros(4))


def test_without_norms_nothing_happens() -> None:
    before, after = restated(nn.Linear(4, 2))
    assert after is before
