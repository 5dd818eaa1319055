"""Every layer's gradient is the sum over its positions of what came back times what it read."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedfuse.client.recording import record_calls
from fedfuse.client.second_moments import input_moments, input_sums, outer_sum, output_moments, output_sums
from fedfuse.core.spec import Spec
from fedfuse.nets.kronecker import blocks_of


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Attending(nn.Module):
    def __init__(self, batch_first: bool = True, **options: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=batch_first, dropout=0.5, **options)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        turned = x if self.attention.batch_first else x.transpose(0, 1)
        mixed = self.attention(turned, turned * 2, turned + 1, attn_mask=mask, need_weights=False)[0]
        return self.last(mixed.mean(1 if self.attention.batch_first else 0))


ATTENTIONS = [
    lambda: Attending(),
    lambda: Attending(batch_first=False),
    lambda: Attending(bias=False),
    lambda: Attending(add_bias_kv=True, add_zero_attn=True),
]


@pytest.mark.parametrize("make", ATTENTIONS)
def test_an_attentions_projections_are_layers(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module, x, weights = make().double().eval(), drawn(4, 5, 6), drawn(4, 3, seed=1)
    expected = module(x)
    blocks = blocks_of(Spec.of(module))
    with record_calls(module, blocks) as calls:
        answer = module(x)
        grads = torch.autograd.grad((answer * weights).sum(), [c.probe for c in calls])
    assert torch.allclose(answer, expected, atol=1e-12)
    assert "forward" not in vars(module.attention)
    assert torch.allclose(module(x), expected)
    assert [b.name for b in blocks][:2] == ["attention.in_proj_weight", "attention.out_proj"]
    params = dict(module.named_parameters())
    slopes = dict(zip(params, torch.autograd.grad((module(x) * weights).sum(), list(params.values())), strict=True))
    for block in blocks:
        one = block.bias is not None
        expected = block.matrices(slopes)
        found = torch.zeros_like(expected)
        for call, grad in zip(calls, grads, strict=True):
            if call.block is block:
                rows = call.x.reshape(-1, call.x.shape[-1])
                rows = torch.cat([rows, torch.ones(len(rows), 1).double()], 1) if one else rows
                found[call.group or 0] += grad.reshape(-1, grad.shape[-1]).mT @ rows
        assert torch.allclose(found, expected, atol=1e-12)


def test_an_encoder_of_torchs_own_is_watched_too() -> None:
    """In evaluation mode torch would run it as one kernel that no hook sees."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    module = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(30, 2)).double().eval()
    blocks = blocks_of(Spec.of(module))
    with record_calls(module, blocks) as calls:
        module(drawn(3, 5, 6))
    assert {c.block.name for c in calls} == {b.name for b in blocks if b.kind != "norm"}


def test_attention_of_a_users_own_is_left_alone() -> None:
    class Mine(nn.MultiheadAttention):
        def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:  # type: ignore[override]
            return x

    module = nn.Sequential(Mine(4, 1), nn.Linear(4, 2)).double()
    with record_calls(module, blocks_of(Spec.of(module))) as calls:
        module(drawn(2, 4))
    assert [c.block.name for c in calls] == ["1"]


CONVOLUTIONS = [
    (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2, padding=1, output_padding=1), (3, 5)),
    (lambda: nn.ConvTranspose2d(4, 6, (2, 3), stride=(1, 2), groups=2), (4, 4, 3)),
    (lambda: nn.ConvTranspose2d(2, 3, 2, stride=3, dilation=2, bias=False), (2, 3, 3)),
    (lambda: nn.ConvTranspose2d(2, 3, 2, padding=2), (2, 6, 5)),
    (lambda: nn.Conv2d(4, 6, (3, 2), stride=2, padding=1, dilation=(1, 2), groups=2), (4, 6, 7)),
    (lambda: nn.Conv1d(2, 3, 3, padding="same", padding_mode="circular"), (2, 5)),
]


@pytest.mark.parametrize(("make", "shape"), CONVOLUTIONS)
def test_sums_over_positions_give_the_gradient_of_an_even_loss(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """With the same gradient v at every position, ∂L/∂M = v (Σ a)ᵀ: whatever a patch is, autograd knows."""
    torch.manual_seed(0)
    layer = make().double()
    (block,) = blocks_of(Spec.of(layer))
    x, one = drawn(1, *shape), layer.bias is not None
    out = layer(x)
    v = drawn(out.shape[1])
    spread = v.view(1, -1, *(1,) * (out.ndim - 2)).expand_as(out)
    params = dict(layer.named_parameters())
    slopes = dict(zip(params, torch.autograd.grad((out * spread).sum(), list(params.values())), strict=True))
    gradients, positions = output_sums(layer, spread)
    ins = input_sums(layer, x, one)
    expected = block.matrices(slopes)
    found = gradients[0][..., None] / positions * ins[0][:, None]
    assert torch.allclose(found, expected, atol=1e-12)
    weights = {n: p.detach() for n, p in params.items()}
    again = block.split(block.matrices(weights), weights)
    assert all(torch.equal(again[n], weights[n]) for n in weights)


@pytest.mark.parametrize(("make", "shape"), CONVOLUTIONS)
def test_moments_are_those_of_the_patches_that_make_the_output(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """Σ_s (M a_s)(M a_s)ᵀ = M (Σ a aᵀ) Mᵀ is the second moment of the layer's output."""
    torch.manual_seed(0)
    layer, x = make().double(), drawn(3, *shape)
    (block,) = blocks_of(Spec.of(layer))
    M = block.matrices(dict(layer.named_parameters())).detach()
    found = M @ input_moments(layer, x, layer.bias is not None) @ M.mT
    expected, columns = output_moments(layer, layer(x).detach())
    assert torch.allclose(found, expected, rtol=1e-10)
    assert columns == layer(x).flatten(2).shape[-1] * 3
    sums = input_sums(layer, x, layer.bias is not None)
    turned = torch.einsum("gof,ngf->ngo", M, sums)
    assert torch.allclose(turned.flatten(1), layer(x).flatten(2).sum(-1))
    assert torch.allclose(outer_sum(sums), torch.einsum("ngi,ngj->gij", sums, sums))
