"""Transformers with their heads, hidden units and streams in another order come back exactly."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fedfuse
import tiny_checkpoints as tiny
from fedfuse.core.spec import Spec
from fedfuse.nets.channels import channel_groups, move_units

pytest.importorskip("transformers")

TOKENS = torch.randint(5, 14, (12, 7), generator=torch.Generator().manual_seed(0))
PICTURES = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
NETWORKS = {
    "bert": (lambda: tiny.bert("ForSequenceClassification", num_labels=3), TOKENS),
    "gpt2": (tiny.gpt2, TOKENS),
    "vit": (tiny.vit, PICTURES),
}


def network(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, x = NETWORKS[name]
    net = make().double()
    with torch.no_grad():
        for parameter in net.parameters():  # norms and biases that tell units apart
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net, x if x.dtype == torch.int64 else x.double()


def answers(net: nn.Module, state: dict[str, Tensor], x: Tensor) -> Tensor:
    twin = copy.deepcopy(net)
    twin.load_state_dict(state)
    with torch.no_grad():
        logits: Tensor = twin(x).logits
    return logits


@pytest.mark.parametrize("name", NETWORKS)
def test_heads_hidden_units_and_stream_are_found(name: str) -> None:
    net, x = network(name)
    sizes = sorted(group.size for group in channel_groups(Spec.of(net), tuple(x.shape[1:])))
    assert sizes.count(2) == 2, "the two heads of each block, as blocks"
    assert sizes.count(12 if name != "gpt2" else 32) == 2, "the hidden units of each block"
    assert sizes.count(8) >= 1, "the stream"


@pytest.mark.parametrize("name", NETWORKS)
def test_a_permuted_copy_comes_back(name: str) -> None:
    net, x = network(name)
    state = {n: t.clone() for n, t in net.state_dict().items()}
    draw = torch.Generator().manual_seed(1)
    groups = channel_groups(Spec.of(net), tuple(x.shape[1:]))
    moves = {group: torch.randperm(group.size, generator=draw) for group in groups}
    turned = {n: t.clone() for n, t in move_units(state, moves).items()}
    torch.testing.assert_close(answers(net, turned, x), answers(net, state, x))
    assert any(not torch.equal(turned[n], state[n]) for n in state)
    rows = (x, TOKENS.roll(-1, 1) if name == "gpt2" else torch.arange(12) % 3)
    task = "language-model" if name == "gpt2" else "classification"
    updates = [
        fedfuse.local_update(net, rows, client=who, start=start, task=task, epochs=0).telling(start=None)
        for who, start in (("a", state), ("b", turned))
    ]
    fused = fedfuse.fuse(updates, "fedavg", align="weights", model=net)
    for n, t in fused.state_dict().items():
        torch.testing.assert_close(t, state[n], msg=n)
    by_name = fedfuse.fuse([state, turned], "fedavg", align="weights", model=net).state_dict()
    assert all(torch.equal(by_name[n], t) for n, t in fused.state_dict().items()), "plain tensors will do"
    plain = fedfuse.fuse(updates, "fedavg").state_dict()
    assert not all(torch.allclose(plain[n], state[n]) for n in state)
