"""What training costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedfuse.core.messages import Brief, ClientUpdate
from fedfuse.core.posterior import Posterior
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.nets.cost import cohort_flops, density, layer_costs, sparse_savings, training_flops

SHAPES = {
    "lenet": (Spec("lenet"), (1, 28, 28)),
    "vgg11": (Spec("vgg11", {"widths": 0.1}), (3, 32, 32)),
    "resnet18": (Spec("resnet18", {"widths": 0.125}), (3, 32, 32)),
    "grouped": (
        Spec.of(nn.Sequential(nn.Conv2d(4, 8, 3, stride=2, groups=4), nn.Flatten(), nn.Linear(8, 2))),
        (4, 4, 4),
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_forward_flops_are_those_torch_counts(name: str) -> None:
    spec, shape = SHAPES[name]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        spec.skeleton()(torch.zeros(1, *shape))
    assert training_flops(spec, shape) == 3 * counter.get_total_flops()


def test_a_convolutions_weight_is_used_once_per_pixel() -> None:
    costs = layer_costs(Spec("lenet"), (1, 28, 28))
    assert {name: cost.positions for name, cost in costs.items()} == {
        "conv1": 576,
        "conv2": 64,
        "fc1": 1,
        "fc2": 1,
        "classifier": 1,
    }
    assert costs["conv1"].products == 576 * 150


def test_a_round_costs_what_its_clients_saw() -> None:
    spec, shape = SHAPES["lenet"]
    each = training_flops(spec, shape)
    one = ClientUpdate("a", Posterior({}), num_examples=25.0, steps=6, spec=spec)
    work = Work(LocalSettings(epochs=2, batch_size=10))
    assert cohort_flops([one], work, shape) == (50 * each, 0, 0)
    stopped = replace(one, client="b", steps=3)
    assert cohort_flops([one, stopped], work, shape) == (80 * each, 0, 0)


def test_masks_spare_bytes_and_count_in_the_density() -> None:
    mask = torch.zeros(5, 7, dtype=torch.bool)
    mask[0] = True
    params = {"w": torch.zeros(5, 7, dtype=torch.float64), "b": torch.zeros(5)}
    brief = Brief(0, Spec("mlp"), params, {"mask/w": mask, "other/w": mask})
    assert sparse_savings(brief).up == 28 * 8
    assert sparse_savings(brief).down == 28 * 8 + 35 - 5
    assert sparse_savings(replace(brief, memory={})) == (0, 0)
    assert density(params, brief.memory) == pytest.approx(12 / 40)
    assert density(params, {}) == 1
