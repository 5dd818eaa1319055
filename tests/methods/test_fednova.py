"""FedNova: the published formula, what counts as a step, and clients that took none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from builders import drawn, start_of, update_of
from fedfuse.core.messages import Cohort
from fedfuse.core.settings import LocalSettings, effective_steps
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench
from fedfuse.errors import ConfigError
from fedfuse.methods.fednova import NormalizedMean
from fedfuse.server.aggregate.mean import weighted_mean

SPEC = Spec.of(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
EXAMPLES = (10.0, 30.0, 60.0)


def cohort(steps: Sequence[int], **optimizer: Any) -> Cohort:
    """Clients at drawn(SPEC, k) after their steps by an optimizer."""
    settings = LocalSettings.model_validate({"optimizer": optimizer})
    clients = enumerate(zip(steps, EXAMPLES, strict=False))
    return Cohort.of([update_of(f"c{k}", drawn(SPEC, k), SPEC, n, steps=t, training=settings) for k, (t, n) in clients])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_normalized_mean_is_the_published_formula(momentum: float) -> None:
    """d_i = (w₀ − w_i)/a_i;  w = w₀ − (Σ f a) Σ f d; running statistics are averaged as they are."""
    start, states, steps = drawn(SPEC, 9), [drawn(SPEC, k) for k in range(3)], (2, 5, 11)
    after = NormalizedMean()(cohort(steps, momentum=momentum), start_of(SPEC, start), Bench())
    f, a = [0.1, 0.3, 0.6], [effective_steps(t, momentum) for t in steps]
    reach = sum(fi * ai for fi, ai in zip(f, a, strict=True))
    for n in ("0.weight", "0.bias", "1.weight", "1.bias"):
        w0 = start[n].double()
        d = sum(fi * (w0 - s[n].double()) / ai for fi, s, ai in zip(f, states, a, strict=True))
        assert torch.allclose(after.single.posterior.mean[n].double(), w0 - reach * d, atol=1e-6)
    assert after.single.posterior.mean["1.running_var"].equal(weighted_mean(states, f, "1.running_var"))
    assert after.facts["effective_steps"] == pytest.approx(reach)


def test_momentum_is_each_clients_own_unless_it_is_given_and_adam_has_none() -> None:
    def reach(aggregate: NormalizedMean, **optimizer: object) -> float:
        fused = aggregate(cohort((2, 4), **optimizer), start_of(SPEC), Bench())
        return float(fused.facts["effective_steps"])

    own = 0.25 * effective_steps(2, 0.5) + 0.75 * effective_steps(4, 0.5)
    assert reach(NormalizedMean(), momentum=0.5) == pytest.approx(own)
    assert reach(NormalizedMean(0.5)) == pytest.approx(own)
    assert reach(NormalizedMean(), name="adam", momentum=0.5) == pytest.approx(0.25 * 2 + 0.75 * 4)


def test_a_client_without_a_step_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="c0 took no local step"):
        NormalizedMean(0.9)(cohort((0, 3)), start_of(SPEC), Bench())
