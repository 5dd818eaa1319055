"""Server state, bench, and a client at work."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedfuse.core.messages import Brief, Start
from fedfuse.core.model import Apart, Single
from fedfuse.core.posterior import Diag
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, Local, ServerState, entries_of, live_names, representation, with_kind
from fedfuse.errors import RecipeError
from fedfuse.nets.mixture import MeanProbability, Mixture

SPEC = Spec("mlp", {"inputs": 3, "hidden": [4], "classes": 2})


@pytest.fixture
def single() -> Single:
    return Single.of(SPEC.build(), SPEC)


def local(single: Single, **memory: torch.Tensor) -> Local:
    brief = Brief(1, SPEC, single.posterior.mean, {"control/x": torch.ones(1)}, classes=2)
    rows = Rows(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
    return Local("a", brief, rows, LocalSettings(), SPEC.build(), dict(memory), seed=0)


def test_the_brief_tells_what_is_published_and_no_more(single: Single) -> None:
    memory = {"control/w": torch.ones(1), "momentum/w": torch.ones(1), "control2/w": torch.ones(1)}
    brief = ServerState(4, single, memory).brief(("control",), classes=7)
    assert (brief.round, brief.classes, list(brief.memory)) == (4, 7, ["control/w"])
    assert brief.params is single.posterior.mean


def test_models_that_stay_apart_send_each_client_on_from_its_own(single: Single) -> None:
    mine = Start(SPEC, {n: t + 1 for n, t in single.posterior.mean.items()})
    common = Start(SPEC, single.posterior.mean)
    brief = ServerState(1, Apart((single,)), starts={"": common, "a": mine}).brief(())
    assert brief.to("a").params is mine.params
    assert brief.to("never asked before").params is common.params


def test_a_mixture_cannot_be_briefed(single: Single) -> None:
    state = ServerState(1, Mixture((single,), torch.ones(1), MeanProbability()))
    with pytest.raises(RecipeError, match="mixture, expected one network"):
        state.brief(())


def test_fusing_replaces_the_model_and_the_starts(single: Single) -> None:
    state = ServerState(3, single, {"m/w": torch.ones(1)}, {"a": Start(SPEC, {})}).noting(x=1)
    fused = state.fused({"w": torch.ones(1)}, Diag({"w": torch.ones(1)}))
    assert fused.single.posterior.geometry == Diag(fused.single.posterior.geometry.variance)  # type: ignore[union-attr]
    assert (fused.starts, fused.single.spec, dict(fused.facts), list(fused.memory)) == ({}, SPEC, {"x": 1}, ["m/w"])
    assert state.single is single


def test_a_bench_without_rows_says_who_misses_them() -> None:
    with pytest.raises(RecipeError, match="feddu learns on the server's own rows"):
        Bench().need_rows("feddu")
    with pytest.raises(RecipeError, match="server_fraction"):
        Bench(rows=Rows(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))).need_rows("feddu")
    assert Bench(seed=1).stream("x").initial_seed() != Bench(seed=2).stream("x").initial_seed()


def test_memory_is_filed_and_found_by_kind() -> None:
    memory = with_kind("last", {"a.b": torch.ones(1), "c": torch.zeros(1)})
    assert list(memory) == ["last/a.b", "last/c"]
    assert list(entries_of({**memory, "lasting/d": torch.ones(1)}, "last")) == ["a.b", "c"]


def test_a_client_at_work_knows_its_live_weights_and_where_they_began(single: Single) -> None:
    at_work = local(single, **{"last/w": torch.ones(1)})
    assert set(at_work.live) == set(at_work.anchor) == {n for n, _ in SPEC.build().named_parameters()}
    assert all(at_work.anchor[n].equal(single.posterior.mean[n]) for n in at_work.anchor)
    assert list(at_work.recall("last")) == ["w"]
    x = torch.randn(2, 3)
    assert at_work.predict(x).equal(at_work.module(x))
    assert torch.allclose(at_work.predict(x, single.posterior.mean), single.logits(x))


def test_things_are_made_once_per_round(single: Single) -> None:
    at_work, made = local(single), []
    for _ in range(3):
        at_work.once("thing", lambda l: made.append(l) or 5)  # noqa: E741 - local
    assert len(made) == 1
    frozen = at_work.frozen("global", single.posterior.mean)
    assert frozen is at_work.frozen("global", {})
    assert not frozen.training
    assert frozen(torch.ones(1, 3)).equal(single.logits(torch.ones(1, 3)))


def test_streams_of_a_client_differ_by_round_client_and_purpose(single: Single) -> None:
    at_work = local(single)
    seeds = {at_work.stream(p).initial_seed() for p in ("order", "augment")}
    at_work.client = "b"
    assert len(seeds | {at_work.stream("order").initial_seed()}) == 3


def test_a_representation_is_the_input_of_the_last_linear_layer() -> None:
    net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3))
    x = torch.randn(1, 2)  # a batch of one keeps its axis
    logits, z = representation(net, x)
    assert logits.equal(net(x))
    assert z.equal(net[1](net[0](x)))
    assert not net[2]._forward_pre_hooks
    with pytest.raises(RecipeError, match="no linear layer"):
        representation(nn.Conv1d(1, 1, 1), x)


class Around(nn.Module):
    """Its last linear layer is within the attention, which never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.attend = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(input=x)[:, None]
        return self.attend(h, h, h)[0][:, 0]


def test_a_layer_that_is_never_called_has_no_representation() -> None:
    x = torch.randn(3, 4)
    assert representation(Around(), x)[1].equal(x)
    net = nn.Sequential(nn.Linear(4, 4), nn.Unflatten(0, (1, 3)), nn.Linear(4, 2))
    with pytest.raises(RecipeError, match="does not read one vector per row"):
        representation(net, x)


def test_a_representation_of_few_digits_is_told_in_full() -> None:
    logits, z = representation(nn.Linear(4, 2).bfloat16(), torch.randn(3, 4).bfloat16())
    assert logits.dtype == z.dtype == torch.float32


def test_live_parameters_are_neither_held_nor_frozen() -> None:
    net = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    brief = Brief(0, Spec.of(net), dict(net.state_dict()), {"held/1.bias": torch.ones(())})
    assert live_names(brief) == ("1.weight",)


def test_a_fused_network_keeps_its_ties() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    state = ServerState(0, Single.of(net, Spec.of(net)))
    mean = {n: torch.randn_like(t) for n, t in net.state_dict().items()}
    fused = state.fused(mean).single.posterior.mean
    assert fused["1.weight"].equal(mean["0.weight"])
    assert fused["1.bias"].equal(mean["1.bias"])
