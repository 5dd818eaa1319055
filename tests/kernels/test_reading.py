"""What layers read and the gradients that come back, by compiled passes: what torch gives, layer by layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from plain_training import rows, seeded
from torch import nn

from fedfuse.client.class_sums import collect_sums
from fedfuse.client.kfac import kronecker_factors
from fedfuse.client.recording import record_calls
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.kernels import chain_for, inputs_of_head, readings_of_layers, why_not
from fedfuse.nets.kronecker import Block, blocks_of

pytestmark = pytest.mark.skipif(bool(why_not()), reason="nothing can be compiled here")

SHAPE = (2, 9, 8)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "padded and strided": lambda: nn.Sequential(
        *(nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 4, 2, stride=2, bias=False)),
        *(nn.Tanh(), nn.Flatten(), nn.Linear(16, 7), nn.LeakyReLU(0.1), nn.Linear(7, 3)),
    ),
    "a head behind images": lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(126, 3)),
    "rows alone": lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 20, bias=False), nn.Tanh(), nn.Linear(20, 3)),
}


def by_autograd(net: nn.Module, data: Rows) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    blocks = list(blocks_of(Spec.of(net)))
    with record_calls(net, blocks) as calls:
        loss = nn.functional.cross_entropy(net(data.x), data.y, reduction="sum")
        grads = torch.autograd.grad(loss, [call.probe for call in calls])
    return {call.block.name: (call.x, grad) for call, grad in zip(calls, grads, strict=True)}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("count", [1, 64, 150])
@pytest.mark.parametrize("name", NETWORKS)
def test_readings_are_autograds(name: str, count: int, last: bool) -> None:
    net, data = seeded(NETWORKS[name]).eval(), rows(SHAPE, count)
    ours = Rows(data.x.contiguous(memory_format=torch.channels_last), data.y) if last else data
    expected = by_autograd(net, data)
    readings = readings_of_layers(net, ours, "auto", expected.keys(), batch=64)
    assert readings is not None
    batches = list(readings)
    assert [len(batch[0].gradients) for batch in batches] == [64] * (count // 64) + [count % 64] * (count % 64 > 0)
    for at, (layer, (x, grad)) in enumerate(expected.items()):
        assert {batch[at].name for batch in batches} == {layer}
        torch.testing.assert_close(torch.cat([batch[at].inputs for batch in batches]), x, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.cat([batch[at].gradients for batch in batches]), grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", NETWORKS)
def test_factors_are_the_same_by_both(name: str, sharing: str) -> None:
    net, data = seeded(NETWORKS[name]).eval(), rows(SHAPE, 150)
    blocks = blocks_of(Spec.of(net))
    compiled, plain = (
        kronecker_factors(net, blocks, data, sharing=sharing, kernel=kernel)  # type: ignore[arg-type]
        for kernel in ("auto", "torch")
    )
    assert list(compiled) == list(plain)
    for layer in plain:
        for mine, theirs in zip(compiled[layer], plain[layer], strict=True):
            assert float((mine - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())  # type: ignore[operator]


def test_some_layers_may_be_asked_for() -> None:
    """A client whose factors do not fit its memory goes through its rows several times, for some layers each."""
    net, data = seeded(NETWORKS["padded and strided"]).eval(), rows(SHAPE, 90)
    some = [block for block in blocks_of(Spec.of(net)) if block.name in ("3", "8")]
    found, whole = (kronecker_factors(net, blocks, data, kernel="auto") for blocks in (some, blocks_of(Spec.of(net))))
    assert list(found) == ["3", "8"]
    assert all(found[layer][1].equal(whole[layer][1]) for layer in found)  # type: ignore[union-attr, arg-type]


def test_torch_does_it_where_evaluation_differs_or_the_user_says_so() -> None:
    data = rows(SHAPE, 20)
    net = seeded(NETWORKS["rows alone"]).eval()
    assert readings_of_layers(net, data, "torch", {"1"}) is None
    assert readings_of_layers(net, data, "auto", {"2"}) is None
    for odd in (nn.BatchNorm1d(5), nn.GELU()):
        other = nn.Sequential(nn.Flatten(), nn.Linear(144, 5), odd, nn.Linear(5, 3)).eval()
        assert readings_of_layers(other, data, "auto", {"1"}) is None
    dropped = nn.Sequential(nn.Flatten(), nn.Linear(144, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    assert readings_of_layers(dropped.train(), data, "auto", {"1"}) is None
    assert readings_of_layers(dropped.eval(), data, "auto", {"1"}) is not None
    assert readings_of_layers(net, rows(SHAPE, 0), "auto", {"1"}) is None


def test_labels_that_are_drawn_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    net, data = seeded(NETWORKS["rows alone"]).eval(), rows(SHAPE, 20)
    monkeypatch.setattr("fedfuse.client.recording.readings_of_layers", lambda *_: pytest.fail("asked"))
    draw = torch.Generator().manual_seed(0)
    block = Block("1", "linear", "1.weight")
    kronecker_factors(net, [block], data, fisher="sampled", generator=draw, kernel="auto")
    kronecker_factors(net, [block], data, batch=7, kernel="auto")


def test_a_client_that_diverged_leaves_nothing_for_the_next_ones_readings() -> None:
    """Evidence may be brought to a remembered training by the very chain in which another client diverged."""
    net, data = seeded(NETWORKS["padded and strided"]), rows(SHAPE, 64)
    settings, live = LocalSettings(batch_size=64), {name for name, _ in net.named_parameters()}

    def read() -> list[torch.Tensor]:
        readings = readings_of_layers(net.eval(), data, "auto", {"0"}, batch=64)
        assert readings is not None
        return [seen.gradients for batch in readings for seen in batch]

    fresh, chain = read(), chain_for(net.eval(), data, settings, live)
    assert chain is not None
    broken = torch.full_like(data.x, float("nan"))
    chain.batches(chain.begin(net, settings, 0.0, {}, {}), broken, data.y, torch.arange(64), 0.1, torch.Generator())
    assert all(again.equal(before) for again, before in zip(read(), fresh, strict=True))


def test_rows_on_another_device_are_torchs() -> None:
    net, data = seeded(NETWORKS["rows alone"]).eval(), rows(SHAPE, 20)
    assert readings_of_layers(net, Rows(data.x.to("meta"), data.y), "auto", {"1"}) is None


@pytest.mark.parametrize("count", [1, 64, 65, 200])
@pytest.mark.parametrize("last", [False, True])
def test_sums_agree_with_torch(count: int, last: bool) -> None:
    net, own = Spec("lenet").build().eval(), rows((1, 28, 28), count)
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
    own = rows((1, 12, 12), 70)
    x = own.x.contiguous(memory_format=torch.channels_last) if last else own.x
    seen = inputs_of_head(net, Rows(x, own.y), "auto", "4")
    assert seen is not None
    assert torch.allclose(torch.cat(list(seen)), net[:4](own.x), atol=1e-5)


def test_torch_does_it_where_training_and_evaluation_differ_or_the_user_says_so() -> None:
    own = rows((1, 28, 28), 20)
    lenet = Spec("lenet").build().eval()
    assert inputs_of_head(lenet, own, "torch", "classifier") is None
    assert inputs_of_head(lenet, own, "auto", "fc2") is None
    normed = nn.Sequential(nn.Flatten(), nn.Linear(784, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).eval()
    assert inputs_of_head(normed, own, "auto", "4") is None
    odd = nn.Sequential(nn.Flatten(), nn.Linear(784, 5), nn.GELU(), nn.Linear(5, 3)).eval()
    assert inputs_of_head(odd, own, "auto", "3") is None
