"""Sums over rows: counts and moments as they are, and with the noise of differential privacy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from fedfuse.client.class_sums import LabelCounts, Moments, PrivateMoments, add_noise, collect_sums
from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.model import Single
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError, Refused
from fedfuse.linalg.psd import pack
from fedfuse.linalg.ridge import Sums
from fedfuse.nets.head import linear_layer, moment_notes, sums_in, total_sums
from fedfuse.server.admission.admit import Contract, admit, admit_all
from fedfuse.tasks import REGRESSION
from fedfuse.training.round import client_round
from fedfuse.wire.codec import decode, encode

COUNTED = Spec("mlp", {"inputs": 2, "hidden": [], "classes": 4})
BRIEF = Brief(0, COUNTED, COUNTED.build().state_dict(), classes=4)


def test_counts_are_whole_numbers_that_sum_to_the_mass() -> None:
    rows = Rows(torch.zeros(5, 2), torch.tensor([0, 2, 2, 2, 0]))
    answer = client_round(Work(evidence=(LabelCounts(),)), BRIEF, "a", rows)
    update = admit(Envelope("a", answer.payload), Contract.of(BRIEF, (LabelCounts(),)))
    assert update.notes["counts/labels"].tolist() == [2, 0, 3, 0]
    assert update.num_examples == 5.0


@pytest.mark.parametrize(
    ("counts", "got"),
    [
        ([6, -1, 0, 0], -1),
        ([2, 2, 0, 0], "a sum of 4"),
        ([0, 0, 0, 0], "a sum of 0"),
        ([2**62, 2**62, 2**62, 2**62 + 5], f"a sum of {2**64 + 5}"),  # as int64 this wraps around to 5
    ],
)
def test_counts_that_lie_are_found_out(counts: list[int], got: object) -> None:
    flaw = LabelCounts().check({"counts/labels": torch.tensor(counts)}, 5.0)
    assert flaw is not None
    assert (flaw.field, flaw.got) == ("counts/labels", got)


def test_honest_counts_pass() -> None:
    assert LabelCounts().check({"counts/labels": torch.tensor([5, 0])}, 5.0) is None


MLP = Spec("mlp", {"inputs": 5, "hidden": [4], "classes": 3})


def rows(n: int = 40, seed: int = 0, classes: int = 3) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    return Rows(torch.randn(n, 5, generator=draw), torch.randint(classes, (n,), generator=draw))


def brief_of(spec: Spec) -> Brief:
    torch.manual_seed(0)
    return Brief(0, spec, dict(spec.build().state_dict()), classes=3)


def reply(evidence: Moments, brief: Brief, data: Rows) -> bytes:
    return client_round(Work(LocalSettings(), evidence=(evidence,), trains=False), brief, "site", data).payload


def admitted(evidence: Moments, brief: Brief, data: Rows) -> Any:
    contract = Contract.of(brief, (evidence,), trains=False)
    return admit(Envelope("site", reply(evidence, brief, data)), contract)


@pytest.mark.parametrize("batch", [1, 7, 256])
def test_sums_are_those_of_the_features(batch: int) -> None:
    brief, data = brief_of(MLP), rows()
    update = admitted(Moments(batch=batch), brief, data)
    net = MLP.build()
    net.load_state_dict(dict(brief.params))
    phi = torch.cat([net[:-1](data.x), torch.ones(40, 1)], 1).detach().double()
    sums = sums_in(update.notes)
    assert torch.allclose(sums.gram, phi.mT @ phi, rtol=1e-6, atol=1e-6)
    assert torch.allclose(sums.cross, phi.mT @ F.one_hot(data.y, 3).double(), rtol=1e-6, atol=1e-6)
    assert sums.count == 40
    assert sums.squares.tolist() == data.counts(3).tolist()
    assert update.posterior.mean.keys() == brief.params.keys()


def test_another_layer_by_name() -> None:
    brief, data = brief_of(MLP), rows()
    sums = sums_in(admitted(Moments("fc1"), brief, data).notes)
    phi = torch.cat([data.x, torch.ones(40, 1)], 1).double()
    assert torch.allclose(sums.gram, phi.mT @ phi, rtol=1e-6, atol=1e-6)
    with pytest.raises(ConfigError, match="no linear layer 'fc2'; did you mean 'fc1'?"):
        reply(Moments("fc2"), brief, data)


def test_in_float64_any_split_gives_the_same_sums() -> None:
    brief, data, how = brief_of(MLP), rows(101), Moments(precision="float64", batch=16)
    whole = sums_in(admitted(how, brief, data).notes)
    index = torch.randperm(101, generator=torch.Generator().manual_seed(3))
    parts = [admitted(how, brief, data.take(part)).notes for part in index.split(23)]
    total = total_sums(parts)
    assert torch.allclose(total.gram, whole.gram, rtol=1e-13, atol=1e-12)
    assert torch.allclose(total.cross, whole.cross, rtol=1e-13, atol=1e-12)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, _ = self.lstm(x[..., None])
        return self.head(out[:, -1]), out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(2, 1, batch_first=True)
        self.lift, self.head = nn.Linear(1, 2), nn.Linear(10, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.lift(x[..., None])
        return self.head(input=self.mix(z, z, z, need_weights=False)[0].flatten(1))


NETWORKS: dict[str, Spec] = {
    "tuple output": Spec.of(Recurrent(), 0),
    "attention, keyword call, no bias": Spec.of(Attention()),
    "bfloat16": Spec.of(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).bfloat16()),
    "frozen": Spec.of(nn.Sequential(nn.Linear(5, 4).requires_grad_(False), nn.BatchNorm1d(4), nn.Linear(4, 3))),
    "one layer": Spec.of(nn.Linear(5, 3)),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("precision", ["network", "float64"])
def test_networks_of_many_kinds(name: str, precision: Any) -> None:
    update = admitted(Moments(precision=precision), brief_of(NETWORKS[name]), rows())
    sums = sums_in(update.notes)
    assert sums.count == 40
    assert sums.gram.isfinite().all()


def test_a_layer_that_reads_positions_or_shares_its_weight_says_so() -> None:
    class PerPosition(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(1, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x[..., None]).mean(1)

    with pytest.raises(ConfigError, match=r"one vector per row .* a tensor of shape \(40, 5, 1\)"):
        reply(Moments(), brief_of(Spec.of(PerPosition())), rows())
    tied = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    tied[1].weight = tied[0].weight
    with pytest.raises(ConfigError, match="shares its weight with another part"):
        linear_layer(Spec.of(tied).layout)
    with pytest.raises(ConfigError, match="no linear layer to fit"):
        linear_layer(Spec.of(nn.Sequential(nn.Conv2d(1, 1, 1))).layout)
    with pytest.raises(ConfigError, match="the label 4 and there are 3 classes"):
        collect_sums(nn.Linear(5, 3), "", rows(classes=5), 3)


def forged(brief: Brief | None = None, data: Rows | None = None, **changes: Any) -> Refused:
    brief, evidence = brief or brief_of(MLP), Moments()
    packet = decode(reply(evidence, brief, data or rows()))
    tensors = {name: tensor.clone() for name, tensor in packet.tensors.items()}
    for part, change in changes.items():
        tensors[f"~moments/{part}"] = change(tensors[f"~moments/{part}"])
    envelope, contract = (
        Envelope("site", encode(tensors, packet.header)),
        Contract.of(brief, (evidence,), trains=False),
    )
    with pytest.raises(Refused) as why:
        admit(envelope, contract)
    return why.value


def test_the_door_refuses_what_no_rows_could_give() -> None:
    def more_rows(gram: Tensor) -> Tensor:
        return torch.cat([gram[:-1], gram[-1:] + 1])

    def negative(gram: Tensor) -> Tensor:
        return torch.cat([-gram[:1] - 1, gram[1:]])

    def shifted(cross: Tensor) -> Tensor:
        return torch.cat([cross[:-1], cross[-1:].roll(1, 1)])

    assert "a count of 41" in str(forged(gram=more_rows))
    assert "not positive semi-definite" in str(forged(gram=negative))
    assert "other class counts" in str(forged(cross=shifted))
    assert "target sums beyond the second moments" in str(forged(cross=lambda c: torch.cat([c[:-1] * 100, c[-1:]])))
    assert "a mean square of" in str(forged(gram=lambda g: torch.cat([g[:1] + 1e15, g[1:]])))
    assert "other class counts" in str(forged(squares=lambda s: s + 1))


def test_sums_of_numbers_are_held_to_what_numbers_can_give() -> None:
    brief, data = replace(brief_of(MLP), task=REGRESSION), replace(rows(), y=torch.linspace(-1, 1, 120).reshape(40, 3))
    sums = sums_in(admitted(Moments(), brief, data).notes)
    assert torch.allclose(sums.squares, data.y.double().square().sum(0))
    assert torch.allclose(sums.cross[-1], data.y.double().sum(0))
    assert "target_squares is below zero" in str(forged(brief, data, target_squares=lambda s: -s))
    assert "target sums beyond the second moments" in str(forged(brief, data, cross=lambda c: c * 100))
    forward, far = (
        Moments().influence(admitted(Moments(), brief, d).notes) for d in (data, replace(data, y=9 * data.y))
    )
    assert far["moments/cross"] / forward["moments/cross"] == pytest.approx(9)


def test_influence_is_the_mean_square_of_a_feature() -> None:
    brief, data = brief_of(MLP), rows()
    one = admitted(Moments("fc1"), brief, data).notes
    larger = admitted(Moments("fc1"), brief, replace(data, x=data.x * 10)).notes
    (small,), (large,) = (Moments("fc1").influence(notes).values() for notes in (one, larger))
    assert large / small == pytest.approx(100, rel=0.2)


SPEC = Spec("mlp", {"inputs": 4, "hidden": [], "classes": 3})


def apart_rows(count: int = 60, seed: int = 0) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (count,), generator=draw)
    return Rows(torch.randn(count, 4, generator=draw) + 2 * nn.functional.one_hot(y, 4), y)


def released(sums: Sums, clip: float) -> Tensor:
    """What is told of some rows, in units of the clip and without noise: triangle, table and counts."""
    inner, table = sums.gram[:-1, :-1] / clip**2, sums.cross[:-1] / clip
    return torch.cat([pack(inner), table.flatten(), sums.cross[-1]])


def sums_of(x: Tensor, y: Tensor, clip: float) -> Sums:
    return collect_sums(nn.Linear(4, 3), "", Rows(x, y), 3, Moments(clip=clip))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10_000), st.floats(0.1, 10.0), st.booleans())
def test_one_row_replaced_moves_the_release_no_further_than_its_sensitivity(seed: int, clip: float, same: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    own = apart_rows(5, seed)
    x, y = own.x.clone(), own.y.clone()
    x[2] = 5 * torch.randn(4, generator=draw) * clip
    y[2] = own.y[2] if same else (own.y[2] + 1) % 3
    moved = float((released(sums_of(own.x, own.y, clip), clip) - released(sums_of(x, y, clip), clip)).norm())
    assert moved <= PrivateMoments(1.0, counts="public" if same else "noised").sensitivity + 1e-5


def test_the_sensitivity_cannot_be_smaller() -> None:
    """Two rows at right angles and of other classes, as long as rows may be: only the triangle saves a little."""
    first, second = torch.eye(4)[:1], torch.eye(4)[1:2]
    one, other = (released(sums_of(x, torch.tensor([c]), 1.0), 1.0) for x, c in ((first, 0), (second, 1)))
    assert float((one - other).norm()) == pytest.approx(math.sqrt(6))


def test_noise_has_the_distribution_it_claims() -> None:
    exact = Sums.of(torch.cat([apart_rows().x / 10, torch.ones(60, 1)], 1), nn.functional.one_hot(apart_rows().y, 3))
    sigma, clip = 2.5, 3.0
    draw = torch.Generator().manual_seed(1)
    gaps: dict[str, list[Tensor]] = {"triangle": [], "table": []}
    for _ in range(300):
        noised = add_noise(exact, sigma, clip, "noised", draw)
        assert noised.gram.equal(noised.gram.mT)
        gaps["triangle"].append(pack(noised.gram - exact.gram)[[0, 1, 2, 3, 5, 6, 7, 9, 10, 12]] / (sigma * clip**2))
        gaps["table"].append((noised.cross - exact.cross)[:-1].flatten() / (sigma * clip))
    for found in gaps.values():
        drawn = torch.stack(found)
        assert stats.kstest(drawn.flatten().numpy(), "norm").pvalue > 1e-3
        correlation = torch.corrcoef(drawn.mT) - torch.eye(drawn.shape[1])
        assert float(correlation.abs().max()) < 0.3


def test_what_follows_from_the_release_is_told_and_nothing_else() -> None:
    """The constant's column is the table's sum; counts are counts again; the number of rows stands as it is."""
    exact = sums_of(apart_rows().x, apart_rows().y, 1.0)
    noised = add_noise(exact, 30.0, 1.0, "noised", torch.Generator().manual_seed(0))
    assert torch.allclose(noised.gram[:-1, -1], noised.cross[:-1].sum(1))
    assert noised.count == float(noised.gram[-1, -1]) == 60.0
    assert bool((noised.cross[-1] >= 0).all())
    assert float(noised.cross[-1].sum()) == pytest.approx(60.0)
    public = add_noise(exact, 30.0, 1.0, "public", torch.Generator().manual_seed(0))
    assert public.cross[-1].equal(exact.cross[-1])


def exchange(recipe_options: dict[str, object], count: int = 60, seed: int = 0) -> tuple[ServerState, bytes]:
    recipe = find_method("ridge").recipe(features="given", **recipe_options)
    torch.manual_seed(0)
    state = ServerState(0, Single.of(SPEC.build(), SPEC))
    brief = state.brief((), 3)
    payload = client_round(recipe.work(LocalSettings()), brief, "a", apart_rows(count), seed=seed).payload
    admission = admit_all([Envelope("a", payload)], brief, recipe.evidence, ("a",), trains=False)
    assert not admission.refused
    return recipe.aggregate(admission.cohort, state, Bench(classes=3)), payload


def test_the_door_lets_noise_in_and_a_large_epsilon_changes_little() -> None:
    exact, _ = exchange({"penalty": 1e-3})
    private, _ = exchange({"penalty": 1e-3, "epsilon": 1e12, "clip": 10.0, "reproducible": True})
    a, b = (s.single.posterior.mean["classifier.weight"] for s in (exact, private))
    assert torch.allclose(a, b, atol=0.05)
    assert exchange({"epsilon": 1.0})[0].facts["penalty"] > 0


def test_noise_comes_from_the_operating_system_unless_a_simulation_asks_for_the_seed() -> None:
    secret = [exchange({"epsilon": 1.0})[1] for _ in range(2)]
    known = [exchange({"epsilon": 1.0, "reproducible": True})[1] for _ in range(2)]
    assert secret[0] != secret[1]
    assert known[0] == known[1]


def test_the_penalty_is_no_smaller_than_what_noise_looks_like() -> None:
    noise = PrivateMoments(1.0).sigma
    state, _ = exchange({"epsilon": 1.0, "penalty": 0.0, "reproducible": True})
    sums = sums_in(PrivateMoments(1.0, reproducible=True)(local()))
    assert state.facts["penalty"] * sums.scale == pytest.approx(2 * noise * math.sqrt(5), rel=1e-6)


def local():  # type: ignore[no-untyped-def]
    from fedfuse.training.round import _prepare_local

    torch.manual_seed(0)
    brief = ServerState(0, Single.of(SPEC.build(), SPEC)).brief((), 3)
    recipe = find_method("ridge").recipe(features="given", epsilon=1.0, reproducible=True)
    return _prepare_local(recipe.work(LocalSettings()), brief, "a", apart_rows(), {}, 0)


def test_a_file_says_how_private_it_is() -> None:
    (words,) = find_method("ridge").recipe(epsilon=0.5, delta=1e-6).reveals
    assert "ε = 0.5, δ = 1e-06" in words
    assert "the number of rows, exactly" in words
    assert "rows of each class" in find_method("ridge").recipe(epsilon=0.5, counts="public").reveals[0]


def test_layers_are_not_refitted_half_privately() -> None:
    with pytest.raises(RecipeError, match="without noise"):
        find_method("refit").recipe(epsilon=1.0, layers=True)


@pytest.mark.parametrize("clip", [0.5, 3.0])
@pytest.mark.parametrize("count", [1, 60])
def test_sums_longer_than_any_clipped_rows_with_noise_are_refused(count: int, clip: float) -> None:
    """Noise hides that sums are not of rows, so a table times a million passed; how long it can be is known still."""
    told = PrivateMoments(1.0, clip=clip)
    for seed in range(20):
        exact = sums_of(apart_rows(count, seed).x, apart_rows(count, seed).y, clip)
        noised = add_noise(exact, told.sigma, clip, "noised", torch.Generator().manual_seed(seed))
        assert told.check(moment_notes(noised), count) is None
    far = 1e6 * clip
    table = replace(noised, cross=torch.cat([noised.cross[:-1] + far, noised.cross[-1:]]))
    gram = noised.gram.clone()
    gram[0, 0] += far * clip
    for lie, field in ((table, "moments/cross"), (replace(noised, gram=gram), "moments/gram")):
        flaw = told.check(moment_notes(lie), count)
        assert flaw is not None
        assert flaw.field == field
