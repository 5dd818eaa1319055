"""Chains with Gaussian weights against autograd: one draw of the noise for both, so that only rounding differs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from plain_training import error, rows, seeded, trained
from torch import nn

from fedfuse.client.elbo import Elbo
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.errors import ConfigError
from fedfuse.kernels.chain.tables import write_variances
from fedfuse.methods.pvi import Cavity, KeepFactor
from fedfuse.models.bayes import bayesian

IMAGE = (1, 12, 12)


def net(last: int, noise: bool = True, **options: object) -> nn.Module:
    """A tiny convolutional network with Gaussian last layers, no kinks."""

    def make() -> nn.Module:
        plain = nn.Sequential(
            *(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()),
            *(nn.Linear(100, 20), nn.Tanh(), nn.Linear(20, 9, bias=False), nn.Tanh(), nn.Linear(9, 3)),
        )
        return bayesian(plain, last, log_variance=-4.0, noise=noise, **options)  # type: ignore[arg-type]

    return seeded(make)


def settings(**changes: object) -> LocalSettings:
    optimizer = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}
    return LocalSettings.model_validate({"batch_size": 16, "epochs": 2, "optimizer": optimizer, **changes})


def both(work: Work, module: nn.Module, round_: int = 0) -> tuple[float, dict[str, object], dict[str, object]]:
    """The largest difference of what clients send by either kernel, and their headers."""
    data = rows(IMAGE, 70)  # the last batch has six
    mine, header = trained(work, module, data, "compiled", seed=3, round_=round_)
    theirs, other = trained(work, module, data, "torch", seed=3, round_=round_)
    return error(mine, theirs), header, other


@pytest.mark.parametrize("last", [1, 2, 3])
@pytest.mark.parametrize("prior", ["start", "fan-in", "standard", "global"])
def test_every_prior_and_depth_learns_as_by_autograd(last: int, prior: str) -> None:
    work = Work(objective=Elbo("share", prior), settings=settings())  # type: ignore[arg-type]
    apart, header, other = both(work, net(last), round_=1)
    assert apart < 2e-5
    assert header["facts"]["compiled"] == 1.0  # type: ignore[index]
    assert math.isclose(header["facts"]["loss"], other["facts"]["loss"], rel_tol=1e-5)  # type: ignore[index]


@pytest.mark.parametrize("kl", [0.0, 1.0])
@pytest.mark.parametrize("noise", [True, False])
def test_without_divergence_or_noise(kl: float, noise: bool) -> None:
    work = Work(objective=Elbo(kl, "standard"), settings=settings(clip=0.5, log_variance_lr=2.0))
    assert both(work, net(3, noise=noise))[0] < 2e-5


def test_with_a_cavity_as_prior() -> None:
    """Partitioned inference: the prior is a tensor, and the client's own factor is kept beside."""
    work = Work(objective=Elbo("share", Cavity()), memory=(KeepFactor(1.0, 0.5),), settings=settings())
    assert both(work, net(2), round_=1)[0] < 2e-5


def test_a_client_that_diverged_leaves_nothing_behind() -> None:
    """Rows between tensors are filled with zeros, which a NaN of another client's round must not stay in."""
    work, data = Work(objective=Elbo("share", "start"), settings=settings()), rows(IMAGE, 70)
    first, _ = trained(work, net(3), data, "compiled")
    wild = Work(objective=Elbo("share", "start"), settings=settings(optimizer={"lr": 1e30}))
    trained(wild, net(3), data, "compiled")
    again, _ = trained(work, net(3), data, "compiled")
    assert all(torch.equal(first[n], again[n]) for n in first)


def test_what_is_not_covered_is_named() -> None:
    data, work = rows(IMAGE, 20), Work(objective=Elbo("share", "start"), settings=settings())
    for module, why in (
        (net(1, bias=True), "Gaussian biases"),
        (net(1, released=True), "clamped log-variances"),
        (net(4), "BayesConv2d"),
    ):
        with pytest.raises(ConfigError, match=why):
            trained(work, module, data, "compiled")


def test_exp_is_exact_to_two_units() -> None:
    x = np.linspace(-80, 80, 100_001, dtype=np.float32)
    y = np.empty_like(x)
    write_variances(x, y, 0, len(x))
    assert np.abs(y / np.exp(x.astype(np.float64)) - 1).max() < 2 * 2**-23
    edge = np.array([np.nan, -1000, 1000], np.float32)
    write_variances(edge, edge, 0, 3)
    assert np.isnan(edge[0])
    assert 0 <= edge[1] < 1e-37
    assert edge[2] > 1e38
