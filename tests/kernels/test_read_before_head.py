"""A compiled pass forward gives what torch's gives, for the networks that do the same in training and evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedfuse.client.class_sums import collect_sums
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.kernels import inputs_of_head, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason="nothing can be compiled here")


def rows(count: int, *shape: int) -> Rows:
    draw = torch.Generator().manual_seed(count)
    return Rows(torch.randn(count, *shape, generator=draw), torch.randint(3, (count,), generator=draw))


@pytest.mark.parametrize("count", [1, 64, 65, 200])
@pytest.mark.parametrize("last", [False, True])
def test_sums_agree_with_torch(count: int, last: bool) -> None:
    net, own = Spec("lenet").build().eval(), rows(count, 1, 28, 28)
    if last:
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        own = Rows(own.x.contiguous(memory_format=torch.channels_last), own.y)
    seen = inputs_of_head(net, own, "auto", "classifier")
    assert seen is not None
    ours, theirs = collect_sums(net, "classifier", own, 10, inputs=seen), collect_sums(net, "classifier", own, 10)
    assert torch.allclose(ours.gram, theirs.gram, rtol=1e-5, atol=1e-5 * theirs.scale)
    assert torch.allclose(ours.cross, theirs.cross, rtol=1e-5, atol=1e-4)
    assert ours.count == theirs.count == count


@pytest.mark.parametrize("last", [False, True])
def test_a_head_behind_flattened_images_reads_them_in_torchs_order(last: bool) -> None:
    """Chains keep channels last: the head's weights are turned when they are loaded, and what it reads must be too."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(100, 3)).eval()
    own = rows(70, 1, 12, 12)
    x = own.x.contiguous(memory_format=torch.channels_last) if last else own.x
    seen = inputs_of_head(net, Rows(x, own.y), "auto", "4")
    assert seen is not None
    assert torch.allclose(torch.cat(list(seen)), net[:4](own.x), atol=1e-5)


def test_torch_does_it_where_training_and_evaluation_differ_or_the_user_says_so() -> None:
    own = rows(20, 1, 28, 28)
    lenet = Spec("lenet").build().eval()
    assert inputs_of_head(lenet, own, "torch", "classifier") is None
    assert inputs_of_head(lenet, own, "auto", "fc2") is None
    normed = nn.Sequential(nn.Flatten(), nn.Linear(784, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).eval()
    assert inputs_of_head(normed, own, "auto", "4") is None
    odd = nn.Sequential(nn.Flatten(), nn.Linear(784, 5), nn.GELU(), nn.Linear(5, 3)).eval()
    assert inputs_of_head(odd, own, "auto", "3") is None
