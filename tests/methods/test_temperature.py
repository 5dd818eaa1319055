"""Temperature scaling: the likeliest T on the server's rows, and nothing but how sure the network is changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import nn

from fedfuse.core.messages import Cohort
from fedfuse.core.model import Single
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError
from fedfuse.methods.temperature import Temperature, best_temperature
from fedfuse.server.judge import answers

NOBODY = Cohort(())


def too_sure() -> tuple[ServerState, Bench]:
    """A network ten times as sure as its rows allow."""
    torch.manual_seed(0)
    spec = Spec("mlp", {"inputs": 4, "hidden": [6], "classes": 3})
    model = Single.of(spec.build(), spec)
    x = torch.randn(400, 4)
    y = torch.distributions.Categorical(logits=answers(model, x)).sample()
    mean = {n: 10 * t if n.startswith("classifier") else t for n, t in model.posterior.mean.items()}
    state = ServerState(0, model).fused(mean)
    return state, Bench(Rows(x, y), classes=3)


@pytest.mark.parametrize("sharpness", [0.2, 1.0, 7.0])
def test_the_temperature_is_the_best_there_is(sharpness: float) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 4, generator=draw, dtype=torch.float64)
    y = (logits + torch.randn(300, 4, generator=draw)).argmax(1)

    def loss(log_t: float) -> float:
        return float(F.cross_entropy(sharpness * logits / torch.tensor(log_t).exp(), y))

    best = minimize_scalar(loss, bounds=(-5, 5), method="bounded", options={"xatol": 1e-9}).x
    assert best_temperature(sharpness * logits, y) == pytest.approx(float(torch.tensor(best).exp()), rel=1e-4)


def test_answers_stay_and_the_next_round_begins_with_the_network_as_it_was() -> None:
    state, bench = too_sure()
    after = Temperature()(state, NOBODY, bench)
    found = after.facts["temperature"]
    assert 5 < found < 20
    x = torch.randn(50, 4)
    torch.testing.assert_close(answers(after.model, x), answers(state.model, x) / found, rtol=1e-5, atol=1e-5)
    assert all(after.start.params[n].equal(t) for n, t in state.single.posterior.mean.items())


def test_a_network_without_a_linear_end_is_refused_by_a_sentence() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten())
    state = ServerState(0, Single.of(module, Spec.of(module)))
    bench = Bench(Rows(torch.randn(5, 1, 2, 2), torch.arange(5) % 2), classes=2)
    with pytest.raises(ConfigError, match="does not end with a linear one; give it a linear classifier"):
        Temperature()(state, NOBODY, bench)
