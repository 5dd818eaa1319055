import itertools

import pytest
import torch
from torch import nn

from fedfuse.client import second_moments
from fedfuse.client.second_moments import input_moments, output_moments

CONVS = {
    "plain": nn.Conv2d(3, 4, 3),
    "stride": nn.Conv2d(3, 4, 3, stride=2),
    "stride beyond kernel": nn.Conv2d(2, 3, 2, stride=3),
    "padding": nn.Conv2d(3, 4, (3, 2), padding=(1, 2)),
    "dilation": nn.Conv2d(3, 4, 3, dilation=2),
    "all at once": nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2), groups=2),
    "depthwise": nn.Conv2d(4, 8, 3, padding=1, groups=4),
    "no bias": nn.Conv2d(3, 4, 3, bias=False),
    "one by one": nn.Conv2d(3, 4, 1),
    "same, even kernel": nn.Conv2d(3, 4, 4, padding="same"),
    "valid": nn.Conv2d(3, 4, 3, padding="valid"),
    "reflect": nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
    "circular": nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
    "sequence": nn.Conv1d(3, 4, 3, stride=2, padding=1, dilation=2),
    "grouped sequence": nn.Conv1d(4, 4, 2, groups=2),
    "volume": nn.Conv3d(2, 3, (2, 3, 2), stride=(1, 2, 1), padding=1),
}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def patches(conv: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """(groups, patches, in): which inputs each output reads, found by asking the convolution itself.

    With an identity kernel, output channel j of a group is entry j of the patch.
    """
    width = conv.weight[0].numel()
    probe = type(conv)(
        conv.in_channels,
        width * conv.groups,
        conv.kernel_size,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
        bias=False,
        padding_mode=conv.padding_mode,
        dtype=torch.float64,
    )
    eye = torch.eye(width, dtype=torch.float64).repeat(conv.groups, 1)
    probe.weight.data = eye.view(probe.weight.shape)
    read = probe(x)
    return read.unflatten(1, (conv.groups, width)).movedim((1, 2), (0, -1)).reshape(conv.groups, -1, width).detach()


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's own, about a copy it makes
@pytest.mark.parametrize("name", CONVS)
def test_patch_moments_equal_those_of_the_patches_laid_out(name: str) -> None:
    conv = CONVS[name]
    side = {1: (11,), 2: (9, 8), 3: (5, 6, 5)}[len(conv.kernel_size)]
    x = draw(3, conv.in_channels, *side)
    rows = patches(conv, x)
    if conv.bias is not None:
        rows = torch.cat([rows, torch.ones(*rows.shape[:2], 1)], -1)
    assert torch.allclose(input_moments(conv, x, conv.bias is not None), rows.mT @ rows, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wide", [1, 2, 3, 6])
@pytest.mark.parametrize("kind", ["plain", "stride along", "dilation along", "grouped", "volume"])
def test_windows_of_several_patches_give_the_same_moments(
    kind: str, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv, side = {
        "plain": (nn.Conv2d(3, 4, 3), (7, 8)),
        "stride along": (nn.Conv2d(2, 4, (2, 3), stride=(1, 2)), (7, 13)),
        "dilation along": (nn.Conv2d(2, 4, 3, dilation=(2, 2)), (7, 10)),
        "grouped": (nn.Conv2d(4, 4, 3, groups=2), (7, 8)),
        "volume": (nn.Conv3d(2, 3, (2, 2, 3), stride=(1, 2, 1)), (4, 5, 8)),
    }[kind]
    monkeypatch.setattr(second_moments, "_patches_per_window", lambda *_: wide)
    x = draw(3, conv.in_channels, *side)
    rows = patches(conv, x)
    rows = torch.cat([rows, torch.ones(*rows.shape[:2], 1)], -1)
    assert torch.allclose(input_moments(conv, x, one=True), rows.mT @ rows, rtol=1e-12, atol=1e-12)


def test_a_window_is_as_wide_as_products_and_copies_are_fewest() -> None:
    assert (
        second_moments._patches_per_window(12, 5, 1, 1, 6) == 4
    )  # 2 x 48 numbers with 48 each, where patches have 8 x 30
    assert second_moments._patches_per_window(16, 3, 2, 1, 64) == 1  # patches that overlap little


def test_channels_last_and_narrow_inputs_are_the_same_to_rounding() -> None:
    conv, x = CONVS["all at once"], draw(3, 4, 9, 8)
    narrow = x.float().contiguous(memory_format=torch.channels_last)
    assert input_moments(conv, narrow, conv.bias is not None).dtype == torch.float64
    assert torch.allclose(
        input_moments(conv, narrow, conv.bias is not None),
        input_moments(conv, x, conv.bias is not None),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("shape", [(5, 4), (5, 3, 4), (5, 2, 3, 4)])
def test_a_linear_layer_reads_every_vector(shape: tuple[int, ...]) -> None:
    x = draw(*shape)
    rows = torch.cat([x.reshape(-1, 4), torch.ones(x.numel() // 4, 1)], 1)
    assert torch.allclose(input_moments(nn.Linear(4, 2), x, one=True)[0], rows.mT @ rows)
    assert torch.allclose(input_moments(nn.Linear(4, 2, bias=False), x, one=False)[0], (rows.mT @ rows)[:-1, :-1])


def test_output_moments_run_over_examples_and_positions() -> None:
    conv, grad = CONVS["all at once"], draw(2, 6, 3, 5)
    found, columns = output_moments(conv, grad)
    expected = torch.zeros(2, 3, 3, dtype=torch.float64)
    for n, y, x, group in itertools.product(range(2), range(3), range(5), range(2)):
        g = grad[n, 3 * group : 3 * group + 3, y, x]
        expected[group] += torch.outer(g, g)
    assert columns == 2 * 3 * 5
    assert torch.allclose(found, expected)
    flat = draw(4, 3, 2)
    found, columns = output_moments(nn.Linear(1, 2), flat)
    assert columns == 12
    assert torch.allclose(found[0], flat.reshape(-1, 2).mT @ flat.reshape(-1, 2))


def test_squares_that_no_float32_holds_are_not_lost() -> None:
    grad = draw(6, 3)
    for size in (1e-3, 1e-18, 1e-30):
        found, _ = output_moments(nn.Linear(1, 3), (grad * size).float())
        assert torch.allclose(found[0] / size**2, grad.mT @ grad, rtol=1e-5)
    assert torch.count_nonzero(output_moments(nn.Linear(1, 3), torch.zeros(6, 3))[0]) == 0
