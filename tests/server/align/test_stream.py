"""Residual streams that were turned come back: the symmetry first, then networks, then those that have none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedfuse
import tiny_checkpoints as tiny
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.nets.channels import channel_groups, move_units
from fedfuse.nets.streams import find_streams, nearest_turn, turn_stream

TOKENS = torch.randint(5, 14, (12, 7), generator=torch.Generator().manual_seed(0))
PICTURES = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
ALIGN = {"name": "weights", "stream": True}


class PlainNorm(nn.Module):
    """A norm by length alone, as Llama has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Block(nn.Module):
    """A gated block that reads the stream behind a norm and adds to it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = PlainNorm(width)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        answer: Tensor = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return answer


class Gated(nn.Module):
    """A small network with a stream that nobody of `transformers` wrote."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.enter = nn.Linear(9, width)
        self.blocks = nn.Sequential(Block(width, 10), Block(width, 10))
        self.norm, self.head = PlainNorm(width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(self.norm(self.blocks(self.enter(x))))
        return answer


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        **tiny.SMALL, num_key_value_heads=2, intermediate_size=12, max_position_embeddings=16, tie_word_embeddings=False
    )
    network: nn.Module = transformers.LlamaForCausalLM(config)
    return network.eval()


def ours() -> nn.Module:
    return Spec("transformer", {"tokens": 14, "length": 7, "width": 8, "heads": 2}).build().eval()


NETWORKS: dict[str, tuple[Any, Tensor, bool]] = {
    "gated": (Gated, torch.rand(12, 9, generator=torch.Generator().manual_seed(0)), False),
    "ours": (ours, TOKENS, True),
    "llama": (llama, TOKENS, False),
    "vit": (tiny.vit, PICTURES, True),
}


def network(name: str) -> tuple[nn.Module, Tensor]:
    if name == "vit":
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    make, x, _ = NETWORKS[name]
    net = make()
    with torch.no_grad():
        for parameter in net.parameters():  # norms and biases that stand in the way
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net, x


def answers(net: nn.Module, state: dict[str, Tensor], x: Tensor) -> Tensor:
    twin = copy.deepcopy(net)
    twin.load_state_dict(state)
    with torch.no_grad():
        out = twin(x)
    logits: Tensor = getattr(out, "logits", out)
    return logits


def drawn_turn(size: int, keeps_mean: bool) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return nearest_turn(torch.randn(size, size, generator=draw, dtype=torch.float64), keeps_mean)


def test_the_nearest_turn_solves_procrustes_problem() -> None:
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(5, 40, generator=draw, dtype=torch.float64)
    for keeps_mean in (False, True):
        turn = drawn_turn(5, keeps_mean)
        torch.testing.assert_close(turn @ turn.mT, torch.eye(5, dtype=torch.float64))
        torch.testing.assert_close(nearest_turn((turn @ points) @ points.mT, keeps_mean), turn)
    ones = torch.ones(5, dtype=torch.float64)
    torch.testing.assert_close(drawn_turn(5, keeps_mean=True) @ ones, ones)


@pytest.mark.parametrize("by", ["weights", "activations"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_turned_stream_with_permuted_units_answers_alike_and_comes_back(name: str, by: str) -> None:
    net, x = network(name)
    state = {n: t.clone() for n, t in net.state_dict().items()}
    spec, shape = Spec.of(net), tuple(x.shape[1:])
    (stream,), refused = find_streams(spec, shape)
    assert refused == ()
    assert stream.keeps_mean is NETWORKS[name][2], "a norm that takes off the mean allows maps that keep it"
    draw = torch.Generator().manual_seed(1)
    others = {n: t * (0.5 + torch.rand(t.shape, generator=draw)) for n, t in state.items()}  # other scales and shifts
    turned = turn_stream(state, others, stream, drawn_turn(stream.group.size, stream.keeps_mean))
    groups = channel_groups(spec, shape)
    turned = move_units(turned, {g: torch.randperm(g.size, generator=draw) for g in groups})
    torch.testing.assert_close(answers(net, turned, x), answers(net, state, x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(turned[stream.norms[0].scale], state[stream.norms[0].scale])
    align = {"name": "weights", "stream": by}
    fused = fedfuse.fuse([state, turned], "fedavg", align=align, model=net, unlabelled=x).state_dict()
    room = 1e-5 if by == "weights" else 1e-4  # activations are in single precision
    for n, t in fused.items():
        torch.testing.assert_close(t, state[n], rtol=room, atol=room, msg=n)
    plain = fedfuse.fuse([state, turned], "fedavg", align="weights", model=net, unlabelled=x).state_dict()
    assert not all(torch.allclose(plain[n], state[n], atol=1e-3) for n in state), "orders alone do not undo a turn"


def test_the_stream_of_llama_is_found_though_its_norms_compute_in_single_precision() -> None:
    sizes = [group.size for group in channel_groups(Spec.of(llama()), (7,))]
    assert sizes.count(8) == 1


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: tiny.bert("ForSequenceClassification", num_labels=3), "norms stand on the stream itself"),
        (tiny.gpt2, "'lm_head.weight', which reads it, no bias"),
        (
            lambda: nn.Sequential(nn.Embedding(14, 6), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)),
            "no norm stands between",
        ),
        (lambda: Spec("text_classifier", {"tokens": 14, "length": 7}).build(), "read by something else than a layer"),
    ],
)
def test_a_stream_that_cannot_be_turned_is_refused_with_the_reason(make: Any, why: str) -> None:
    pytest.importorskip("transformers")
    net = make()
    with pytest.raises(ConfigError, match=why):
        fedfuse.fuse([net.state_dict()] * 2, "fedavg", align=ALIGN, model=net, unlabelled=TOKENS)


def test_evidence_and_scales_of_zero_are_refused() -> None:
    net, x = network("gated")
    rows = (x, torch.arange(12) % 4)
    updates = [fedfuse.bring_evidence(net, rows, "fisher", client=who) for who in "ab"]
    with pytest.raises(ConfigError, match="b brings evidence about its weights, which does not turn"):
        fedfuse.fuse(updates, "fisher", align=ALIGN, model=net)
    state = net.state_dict() | {"norm.weight": torch.zeros(6)}
    with pytest.raises(ConfigError, match=r"'norm.weight' has a zero"):
        fedfuse.fuse([state, net.state_dict()], "fedavg", align=ALIGN, model=net)


def test_a_stream_is_turned_by_weights_or_by_activations() -> None:
    net, x = network("gated")
    with pytest.raises(ConfigError, match="stream"):
        fedfuse.fuse([net.state_dict()] * 2, "fedavg", align={"name": "weights", "stream": "sums"}, model=net)
    fused = fedfuse.fuse(
        [net.state_dict()] * 2, "fedavg", align={"name": "activations", "stream": "activations"}, model=net
    )
    torch.testing.assert_close(answers(net, fused.state_dict(), x), answers(net, net.state_dict(), x))


def test_a_permuted_stream_of_bert_comes_back_where_it_cannot_be_turned() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    net = tiny.bert("ForSequenceClassification", num_labels=3)
    groups = channel_groups(Spec.of(net), (7,))
    assert 8 in {g.size for g in groups}
    draw = torch.Generator().manual_seed(1)
    moved = move_units(net.state_dict(), {g: torch.randperm(g.size, generator=draw) for g in groups})
    fused = fedfuse.fuse([net.state_dict(), moved], "fedavg", align="weights", model=net, unlabelled=TOKENS)
    for n, t in fused.state_dict().items():
        torch.testing.assert_close(t, net.state_dict()[n], msg=n)
