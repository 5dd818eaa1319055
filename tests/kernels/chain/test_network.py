"""Chains against autograd in float64: every layer's gradients, whole chains over steps, and every size of batch."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plain_training import by_chain, by_torch, error, rows, seeded, step_error
from torch import nn

from fedfuse.core.settings import LocalSettings
from fedfuse.kernels.chain.network import Chain
from fedfuse.kernels.chain.trace import chain_of

IMAGE = (3, 9, 8)


def between(*middle: nn.Module, features: int) -> Callable[[], nn.Module]:
    """Layers between others with weights, so that gradients must come through them."""
    return lambda: nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), *middle, nn.Flatten(), nn.Linear(features, 3))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "1x1": between(nn.Conv2d(5, 7, 1), features=7 * 72),
    "3x3": between(nn.Conv2d(5, 13, 3), features=13 * 42),
    "3x3 padded": between(nn.Conv2d(5, 4, 3, padding=1), features=4 * 72),
    "5x5 padded": between(nn.Conv2d(5, 2, 5, padding=2), features=2 * 72),
    "stride 2": between(nn.Conv2d(5, 6, 3, stride=2, padding=1), features=6 * 20),
    "stride 3, no bias": between(nn.Conv2d(5, 6, 2, stride=3, bias=False), features=6 * 9),
    "two in a row": between(nn.Conv2d(5, 6, 3), nn.Conv2d(6, 17, 3, padding=2), features=17 * 72),
    "relu": between(nn.ReLU(), nn.Conv2d(5, 4, 3), features=4 * 42),
    "leaky relu": between(nn.LeakyReLU(0.2), features=5 * 72),
    "tanh": between(nn.Tanh(), nn.Conv2d(5, 4, 3, padding=1), features=4 * 72),
    "max 2": between(nn.MaxPool2d(2), features=5 * 16),
    "max 3 by 2": between(nn.MaxPool2d(3, 2), features=5 * 12),
    "max 3 by 2 padded": between(nn.MaxPool2d(3, 2, 1), nn.Conv2d(5, 4, 3, padding=1), features=4 * 20),
    "relu and max": between(nn.ReLU(), nn.MaxPool2d(2), features=5 * 16),
    "mean 2": between(nn.AvgPool2d(2), features=5 * 16),
    "mean 3 by 1": between(nn.AvgPool2d(3, 1), features=5 * 42),
    # a bias before a norm has no gradient but rounding
    "batch norm": between(
        *(nn.Tanh(), nn.Conv2d(5, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)), features=4 * 42
    ),
    "batch norm of rows": lambda: nn.Sequential(
        *(nn.Conv2d(3, 4, 3, bias=False), nn.Flatten(), nn.BatchNorm1d(168), nn.Tanh(), nn.Linear(168, 20, bias=False)),
        *(nn.BatchNorm1d(20), nn.Linear(20, 3)),
    ),
    "linear only": lambda: nn.Sequential(nn.Flatten(), nn.Linear(216, 37), nn.Tanh(), nn.Linear(37, 3, bias=False)),
    "softmax regression": lambda: nn.Sequential(nn.Flatten(), nn.Linear(216, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_has_autograds_gradients(name: str) -> None:
    """With a rate of 1 a step is a gradient; 23 rows fill one block of lanes and a part of the next."""
    assert step_error(seeded(LAYERS[name]), rows(IMAGE, 23), 23) < 5e-5


def test_adaptive_pooling_that_divides_is_plain_pooling() -> None:
    for pool in (nn.AdaptiveAvgPool2d(2), nn.AdaptiveMaxPool2d(4), nn.AdaptiveAvgPool2d(1)):
        side = int(pool.output_size)  # type: ignore[arg-type]
        net = seeded(lambda p=pool, s=side: nn.Sequential(nn.Conv2d(1, 4, 1), p, nn.Flatten(), nn.Linear(4 * s * s, 3)))
        assert step_error(net, rows((1, 8, 8), 9), 9) < 5e-5


def small_lenet(act: type[nn.Module] = nn.ReLU, pool: type[nn.Module] = nn.MaxPool2d) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        *(nn.Conv2d(1, 6, 3, padding=1), act(), pool(2), nn.Conv2d(6, 10, 3), act(), pool(2)),  # type: ignore[call-arg]
        *(nn.Flatten(), nn.Linear(40, 20), act(), nn.Linear(20, 3)),
    )


@pytest.mark.parametrize("count", range(1, 71))
def test_batches_of_every_size(count: int) -> None:
    assert (
        step_error(seeded(small_lenet(nn.Tanh, nn.AvgPool2d), count), rows((1, 12, 12), count, seed=count), 70) < 5e-5
    )


@pytest.mark.parametrize("count", [7, 64, 65, 70, 127])
def test_the_rest_of_an_epoch_is_a_smaller_batch(count: int) -> None:
    """65 leaves a batch of one, which a batch norm passes by its running statistics."""
    net = seeded(LAYERS["batch norm of rows"])
    data = rows(IMAGE, count)
    mine, theirs = by_chain(net, data, 32, lr=0.01), by_torch(net, data, 32, lr=0.01)
    assert error(mine, theirs) < 2e-5
    assert mine["2.num_batches_tracked"] == theirs["2.num_batches_tracked"] > 0


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_twenty_smooth_steps_are_as_near_to_float64_as_torchs(momentum: float) -> None:
    net, data = seeded(small_lenet(nn.Tanh, nn.AvgPool2d)), rows((1, 12, 12), 20 * 24)
    exact = by_torch(net, data, 24, 0.05, momentum)
    mine = error(by_chain(net, data, 24, 0.05, momentum), exact)
    assert mine < max(1e-6, 2 * error(by_torch(net, data, 24, 0.05, momentum, torch.float32), exact))


def test_twenty_steps_with_kinks_are_as_near_in_the_median() -> None:
    """A ReLU or a maximum that falls to the other side moves everything after it, in float32 by whichever way."""
    mine, theirs = [], []
    for seed in range(9):
        net, data = seeded(small_lenet(), seed), rows((1, 12, 12), 20 * 24, seed=seed)
        exact = by_torch(net, data, 24, 0.05, 0.9)
        mine.append(error(by_chain(net, data, 24, 0.05, 0.9), exact))
        theirs.append(error(by_torch(net, data, 24, 0.05, 0.9, torch.float32), exact))
    assert statistics.median(mine) < max(1e-6, 3 * statistics.median(theirs))


def test_what_was_in_the_lanes_before_does_not_matter() -> None:
    """A chain is used again for the next client: rows of another, even broken ones, leave no trace."""
    net = seeded(small_lenet())
    chain, settings = Chain(chain_of(net, (1, 12, 12)), (1, 12, 12), 40), LocalSettings(batch_size=40)

    def train(count: int, scale: float) -> dict[str, torch.Tensor]:
        own, data = seeded(small_lenet()), rows((1, 12, 12), count)
        round_ = chain.begin(own, settings, 0.0, {}, {})
        chain.batches(round_, scale * data.x, data.y, torch.arange(count), 0.1, torch.Generator())
        chain.finish(own)
        return dict(own.state_dict())

    fresh = train(5, 1.0)
    train(40, float("nan"))
    again = train(5, 1.0)
    assert all(again[n].equal(fresh[n]) for n in fresh)


def test_what_is_not_a_number_stays_so() -> None:
    """A diverged client must be seen to have diverged: no ReLU and no maximum may heal it."""
    data = rows((1, 12, 12), 8)
    data.x[3, 0, 5, 5] = float("nan")
    assert by_chain(seeded(small_lenet()), data, 8)["0.weight"].isnan().any()


@pytest.mark.slow
def test_longer_vectors_give_the_same_gradients(tmp_path: Path) -> None:
    """The lanes a processor with longer registers gets; whatever has shorter ones cuts them up."""
    script = (
        "import numba, sys, llvmlite.binding as b; real = b.get_host_cpu_features\n"
        "b.get_host_cpu_features = lambda: {'avx512f': True}\n"
        "from fedfuse.kernels.target import LANES; assert LANES == 32\n"
        "b.get_host_cpu_features = real\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]\n"
        "import test_network as t\n"
        "for name in t.LAYERS: t.test_every_layer_has_autograds_gradients(name)\n"
        "for n in range(1, 71): t.test_batches_of_every_size(n)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
