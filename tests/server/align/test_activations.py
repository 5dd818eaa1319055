"""Matching by activations: the likenesses are numpy's, the inputs the server's or noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from builders import net_of, rows
from fedfuse.core.inputs import InputForm
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.server.align.activations import ByActivations, PairMoments, cross_moments, probes
from fedfuse.server.align.nets import Net

LENET = Spec("lenet", {"size": 8, "maps": [3, 4], "hidden": [6], "classes": 2})


def test_moments_give_numpys_correlation_and_distance() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 50, generator=draw), torch.randn(4, 50, generator=draw) + 2
    seen = PairMoments.empty(3, 4)
    for part_a, part_b in zip(a.split(20, 1), b.split(20, 1), strict=True):
        seen.add(part_a, part_b)
    want = np.corrcoef(a.numpy(), b.numpy())[:3, 3:]
    assert np.allclose(seen.correlation().numpy(), want, atol=1e-5)
    apart = np.linalg.norm(a.numpy()[:, None] - b.numpy()[None], axis=2) / np.sqrt(50)
    assert np.allclose(seen.distance().numpy(), apart, atol=1e-5)


def test_a_unit_that_always_answers_the_same_is_like_nobody() -> None:
    seen = PairMoments.empty(2, 2)
    seen.add(torch.tensor([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]]), torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]]))
    assert torch.allclose(seen.correlation(), torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64))


def test_layers_are_heard_before_their_relu_over_all_positions() -> None:
    a, b = net_of(LENET, (1, 8, 8), 0), net_of(LENET, (1, 8, 8), 1)
    x = rows(70, 1, 8, 8, classes=2).x  # more than one batch
    seen = cross_moments(a, b, x)
    outs = [torch.nn.functional.conv2d(x, n.params["conv1.weight"], n.params["conv1.bias"], padding=1) for n in (a, b)]
    mine, theirs = (out.transpose(0, 1).reshape(3, -1).numpy() for out in outs)
    assert seen["conv1"].count == 70 * 64
    assert np.allclose(seen["conv1"].correlation().numpy(), np.corrcoef(mine, theirs)[:3, 3:], atol=1e-4)
    assert list(seen) == ["conv1", "conv2", "fc1"]
    assert not LENET.skeleton().conv1._forward_hooks


@pytest.mark.parametrize("likeness", ["correlation", "distance"])
def test_any_scale_of_a_unit_is_the_same_to_correlation_alone(likeness: str) -> None:
    """Correlation finds a unit whose weights were doubled; distance compares sizes."""
    one = net_of(LENET, (1, 8, 8), 0)
    order = torch.tensor([2, 0, 1])
    params = {n: t.clone() for n, t in one.params.items()}
    params["conv1.weight"], params["conv1.bias"] = params["conv1.weight"][order], params["conv1.bias"][order]
    params["conv2.weight"] = params["conv2.weight"][:, order]
    if likeness == "correlation":
        params["conv1.weight"], params["conv1.bias"] = 7 * params["conv1.weight"], 7 * params["conv1.bias"]
        params["conv2.weight"] = params["conv2.weight"] / 7
    other = Net("other", LENET, one.groups, params)
    (moves,) = ByActivations(likeness)([other], one, Bench(rows(40, 1, 8, 8, classes=2)))  # type: ignore[arg-type]
    assert {n: o.tolist() for n, o in moves.items()} == {  # type: ignore[union-attr]
        "conv1": [1, 2, 0],
        "conv2": [0, 1, 2, 3],
        "fc1": [0, 1, 2, 3, 4, 5],
    }


def test_inputs_are_the_servers_spread_evenly_or_noise() -> None:
    one, own = net_of(LENET, (1, 8, 8), 0), rows(100, 1, 8, 8, classes=2)
    assert probes(one, Bench(own), "auto", 10).equal(own.x[::10])
    assert probes(one, Bench(unlabelled=own.x), "auto", 1000).equal(own.x)
    noise = probes(one, Bench(own, inputs=InputForm((1, 8, 8), (2.0,), (3.0,))), "synthetic", 5)
    assert noise.shape == (5, 1, 8, 8)
    assert 2 <= float(noise.min()) < float(noise.max()) <= 3
    assert probes(one, Bench(), "auto", 5).shape == (5, 1, 8, 8)
    with pytest.raises(RecipeError, match="server's own rows and there are none"):
        probes(one, Bench(), "server", 5)
    with pytest.raises(ConfigError, match="rows is 0"):
        ByActivations(rows=0)
