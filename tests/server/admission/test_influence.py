"""Bounds: what one admitted client may do, lever by lever, and that honest clients of every kind pass."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from builders import UNLIKE, digits, update_of
from fedfuse.client.fisher import FisherDiagonal
from fedfuse.client.kfac import KroneckerFactors
from fedfuse.core.messages import Brief, ClientUpdate, Envelope
from fedfuse.core.model import Single
from fedfuse.core.posterior import Kron, Posterior
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Evidence
from fedfuse.core.settings import Bounds, LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.data.schemes import Dirichlet
from fedfuse.methods._pruning import CurvatureSpectrum
from fedfuse.methods.prunefl import SquaredGradients
from fedfuse.methods.qfedavg import StartLoss
from fedfuse.methods.scaffold import ControlDelta
from fedfuse.models.bayes import BayesianLayers
from fedfuse.server.admission.admit import Admission, Rules, admit_all
from fedfuse.server.admission.influence import Claims, keep_within_bounds, measure
from fedfuse.server.round import fuse_round
from fedfuse.training.round import client_round
from fedfuse.wire.codec import decode, encode
from fedfuse.wire.messages import NOTE, encode_reply

MODULE = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
SPEC = Spec.of(MODULE)
START = {n: t.detach().clone() for n, t in MODULE.state_dict().items()}
BRIEF = Brief(0, SPEC, START, classes=2)
HONEST = tuple(f"c{i}" for i in range(9))
LOCAL = LocalSettings(epochs=2, batch_size=5)


def moved(by: float, brief: Brief = BRIEF, only: str = "") -> dict[str, Tensor]:
    """The brief's weights, each tensor moved by so much in all."""
    lengths = {n: by if n.startswith(only) else 1.0 for n in brief.params}
    return {
        n: t + lengths[n] / math.sqrt(t.numel()) if t.is_floating_point() else t + 4 for n, t in brief.params.items()
    }


def door(liar: bytes, brief: Brief = BRIEF, evidence: tuple[Evidence, ...] = (), **how: Any) -> Admission:
    """Nine honest clients and one more."""
    sent = [Envelope(c, honest(1 + 0.01 * i, brief)) for i, c in enumerate(HONEST)] + [Envelope("m", liar)]
    enrolled = dict.fromkeys((*HONEST, "m"), 1000)
    return admit_all(sent, brief, evidence, (*HONEST, "m"), **{"enrolled": enrolled, "training": LOCAL} | how)


def honest(by: float = 1.0, brief: Brief = BRIEF, num_examples: float = 10.0, steps: int = 4) -> bytes:
    return encode_reply(brief, moved(by, brief), {}, num_examples=num_examples, steps=steps, facts={})


def fields(admission: Admission) -> list[tuple[str, str]]:
    return [(r["client"], r["field"]) for r in admission.refused]


def test_a_limit_follows_how_different_clients_are() -> None:
    bounds = Bounds(ratio=6.0, spread=7.0)
    assert bounds.limit([1.0] * 9 + [1e9]) == 6.0
    spread = [10.0**i for i in range(-4, 5)]
    assert bounds.limit(spread) == pytest.approx(math.exp(7 * 1.4826 * math.log(100)))
    assert bounds.limit([0.0] * 6 + [1.0] * 3) == math.inf, "where most have nothing there is no centre"
    assert bounds.limit([2.0, 2.0, math.inf, 2.0, 2.0]) == 12.0


def test_where_most_know_their_rows_by_heart_who_still_learns_is_no_outlier() -> None:
    """Dirichlet 0.01 after some rounds: Fisher diagonals of 1e-11, and an honest one of 0.02, once refused."""
    assert Bounds().limit([7e-12] * 9 + [0.02]) == math.inf


def test_few_clients_are_held_to_the_brief() -> None:
    bounds = Bounds(few=100)
    assert bounds.limit([1.0, 1e9], expected=3.0) == 300.0
    assert bounds.limit([1.0, 2.0, 1e9]) == 200.0
    assert bounds.limit([1.0, 1e9]) == math.inf


@pytest.mark.parametrize("factor", [1e4, 1e6, 1e19, 1e37])
@pytest.mark.parametrize("only", ["", "0", "1.running"])
def test_a_long_move_is_refused_by_its_layer(factor: float, only: str) -> None:
    payload = encode_reply(BRIEF, moved(factor, only=only), {}, num_examples=10.0, steps=4, facts={})
    found = door(payload)
    assert found.cohort.clients == HONEST
    name = "move of 0" + (" statistics" if only == "1.running" else "")
    assert fields(found) == [("m", name)]
    assert "going by the round's other clients" in found.refused[0]["expected"]


def test_a_move_beyond_its_bound_is_weakened_to_it_before_anybody_is_refused() -> None:
    found = door(honest(10.0))
    assert not found.refused
    assert {r["client"] for r in found.clipped} == {"m"}
    lengths = {u.client: measure(u, BRIEF, ())["move of 0"].value for u in found.cohort}
    assert lengths["m"] <= 2.7 * lengths["c0"]
    assert fields(door(honest(10.0), rules=Rules(bounds=Bounds(margin=1.0)))) == [("m", "move of 0")]


def test_two_clients_are_held_to_the_briefs_own_length() -> None:
    sent = [Envelope("a", honest()), Envelope("m", honest(1e6))]
    assert fields(admit_all(sent, BRIEF, (), ("a", "m"))) == [("m", "move of 0")]


def test_an_operator_may_clip_instead() -> None:
    found = door(honest(1e6), rules=Rules(bounds=Bounds(over="clip")))
    assert found.cohort.clients == (*HONEST, "m")
    assert {(c["client"], c["field"]) for c in found.clipped} >= {("m", "move of 0"), ("m", "move per step")}
    update = found.cohort.updates[-1]
    length = math.sqrt(sum(float((update.posterior.mean[n] - START[n]).square().sum()) for n in ("0.weight", "0.bias")))
    assert length < 20


@pytest.mark.parametrize(("steps", "refused"), [(1, True), (2, False), (8, False), (9, True), (10**6, True)])
def test_steps_follow_from_examples_where_the_server_said_how_to_train(steps: int, refused: bool) -> None:
    """FedNova divides a move by its steps: one that claims a single step counts as many clients."""
    found = door(honest(num_examples=10, steps=steps))
    assert fields(found) == ([("m", "steps")] if refused else [])


def test_a_single_step_for_a_long_move_is_seen_without_settings_too() -> None:
    sent = [Envelope(c, honest(steps=40)) for c in HONEST] + [Envelope("m", honest(steps=1))]
    strict = Rules(bounds=Bounds(margin=1.0))
    assert fields(admit_all(sent, BRIEF, (), (*HONEST, "m"), strict)) == [("m", "move per step")]


def test_a_counter_goes_on_from_the_brief() -> None:
    """One client's 2**53 must not lock everybody else out of the next round."""
    name = "1.num_batches_tracked"
    lie = encode_reply(BRIEF, moved(1.0) | {name: torch.tensor(2**53)}, {}, num_examples=10.0, steps=4, facts={})
    assert fields(door(lie)) == [("m", name)]
    late = replace(BRIEF, params={**START, name: torch.tensor(2**53)})
    later = encode_reply(
        late, moved(1.0, late) | {name: torch.tensor(2**53 + 4)}, {}, num_examples=10.0, steps=4, facts={}
    )
    assert fields(door(later, late)) == []


def test_without_a_start_a_counter_is_compared_with_the_others() -> None:
    name = "1.num_batches_tracked"
    lie = encode_reply(BRIEF, moved(1.0) | {name: torch.tensor(2**53)}, {}, num_examples=10.0, steps=4, facts={})
    assert fields(door(lie, anchored=False)) == [("m", f"count of {name}")]


BAYES = BayesianLayers(bias=True)(Single.of(MODULE[0], Spec.of(MODULE[0])), 2, seed=0)
BELIEF = Brief(0, BAYES.spec, BAYES.posterior.mean, classes=2)


@pytest.mark.parametrize(("by", "field"), [(-12.0, "precision"), (12.0, "variance")])
@pytest.mark.parametrize("over", ["refuse", "clip"])
def test_a_belief_far_surer_or_vaguer_than_all_others(by: float, field: str, over: Any) -> None:
    name = "net.log_variance"
    sent = moved(1.0, BELIEF)
    sent |= {name: BELIEF.params[name] + by, "net.bias_log_variance": BELIEF.params["net.bias_log_variance"]}
    honest_belief = moved(1.0, BELIEF) | {n: BELIEF.params[n] for n in (name, "net.bias_log_variance")}
    envelopes = [
        Envelope(c, encode_reply(BELIEF, m, {}, num_examples=10.0, steps=4, facts={}))
        for c, m in [*((c, honest_belief) for c in HONEST), ("m", sent)]
    ]
    rules = Rules(bounds=Bounds(over=over))
    found = admit_all(envelopes, BELIEF, (), (*HONEST, "m"), rules, dict.fromkeys((*HONEST, "m"), 10))
    told = found.refused if over == "refuse" else found.clipped
    assert [(r["client"], r["field"]) for r in told] == [("m", f"{field} of {name}")]
    if over == "clip":
        kept = found.cohort.updates[-1].posterior.mean[name]
        assert torch.allclose(kept, BELIEF.params[name] + math.copysign(math.log(2.0), by), atol=1e-4)


def test_a_share_by_ones_own_word_is_capped() -> None:
    """One of four claims a billion rows; one of ten claims ninety-nine times the median."""
    for others, claim in ((3, 1e9), (9, 99.0)):
        clients = (*HONEST[:others], "m")
        sent = [Envelope(c, honest()) for c in clients[:-1]] + [Envelope("m", honest(num_examples=claim))]
        found = admit_all(sent, BRIEF, (), clients)
        shares = dict(zip(found.cohort.clients, found.cohort.weights.tolist(), strict=True))
        assert shares.get("m", 0.0) <= 0.5
        assert [c["client"] for c in (*found.refused, *found.clipped)] == ["m"]


def test_who_an_operator_vouches_for_may_have_most_examples() -> None:
    sizes = {"a": 600.0, "b": 150.0, "c": 150.0}
    sent = [Envelope(c, honest(num_examples=n)) for c, n in sizes.items()]
    vouched = admit_all(sent, BRIEF, (), "abc", enrolled={c: int(n) for c, n in sizes.items()})
    assert [u.num_examples for u in vouched.cohort] == [600.0, 150.0, 150.0]
    doubted = admit_all(sent, BRIEF, (), "abc", enrolled={c: int(n) for c, n in sizes.items()}, own_word={"a"})
    assert [u.num_examples for u in doubted.cohort] == [300.0, 150.0, 150.0]
    assert doubted.clipped[0]["field"] == "num_examples"
    alone = admit_all(sent[:2], BRIEF, (), "ab")
    assert [u.num_examples for u in alone.cohort] == [600.0, 150.0], "of two, one always has half"


ALL_EVIDENCE: tuple[Evidence, ...] = (
    KroneckerFactors(choose=True),
    FisherDiagonal(),
    ControlDelta(),
    StartLoss(),
    SquaredGradients(1),
    CurvatureSpectrum(),
)
MLP = Spec("mlp", {"inputs": 64, "hidden": [16], "classes": 10})


def answers(
    method: str, rows: dict[str, Rows], settings: LocalSettings
) -> tuple[Brief, dict[str, bytes], tuple[Evidence, ...]]:
    recipe = find_method(method).recipe()
    if method == "fedavg":
        recipe = replace(recipe, evidence=ALL_EVIDENCE)
    torch.manual_seed(0)
    bench = Bench(population=len(rows), classes=10, local=settings)
    brief = recipe.begin_round(ServerState(0, Single.of(MLP.build(), MLP)), bench).brief(recipe.publishes, 10)
    sent = {c: client_round(recipe.work(settings), brief, c, r).payload for c, r in rows.items()}
    return brief, sent, recipe.evidence


@pytest.mark.parametrize(
    "epochs", [1, pytest.param(200, marks=pytest.mark.slow)], ids=["one epoch", "two hundred epochs"]
)
@pytest.mark.parametrize("method", ["fedavg", "rklb"])
@pytest.mark.parametrize("regime", UNLIKE)
def test_honest_clients_pass_however_different_they_are(regime: str, method: str, epochs: int) -> None:
    settings = LocalSettings(epochs=epochs, batch_size=32, optimizer={"lr": 0.05, "momentum": 0.9})
    rows = digits(*UNLIKE[regime])
    brief, sent, evidence = answers(method, rows, settings)
    enrolled = {c: len(r) for c, r in rows.items()}
    found = admit_all(
        [Envelope(c, p) for c, p in sent.items()], brief, evidence, list(sent), enrolled=enrolled, training=settings
    )
    assert found.refused == []
    assert len({r["client"] for r in found.clipped}) <= 3


LEVERS = {
    "kron": "kron/",
    "fisher": "fisher/",
    "control": "control/",
    "start_loss": "start_loss/",
    "gradients": "gradients/",
}


@pytest.mark.parametrize("kind", LEVERS)
@pytest.mark.parametrize("over", ["refuse", "clip"])
def test_evidence_far_above_the_others_is_refused_or_weakened(kind: str, over: Any) -> None:
    settings = LocalSettings(batch_size=32, optimizer={"lr": 0.05})
    brief, sent, evidence = answers("fedavg", digits(Dirichlet(alpha=5.0), 6, 40), settings)
    liar, *_ = sent
    packet = decode(sent[liar])
    prefix = NOTE + LEVERS[kind]

    def scale(name: str, note: Tensor) -> Tensor:
        wanted = name.startswith(prefix) and "damping" not in name and "evidence" not in name
        return note * (1e12 if over == "refuse" else 1e5) if wanted else note

    scaled = {n: scale(n, t) for n, t in packet.tensors.items()}
    sent[liar] = encode(scaled, packet.header)
    rules = Rules(bounds=Bounds(over=over))
    found = admit_all([Envelope(c, p) for c, p in sent.items()], brief, evidence, list(sent), rules)
    told = found.refused if over == "refuse" else found.clipped
    assert {r["client"] for r in told} == {liar}
    assert all(r["field"].startswith((kind, "say in ")) for r in told)
    if over == "clip":
        update = next(u for u in found.cohort if u.client == liar)
        levers = measure(update, brief, evidence)
        peers = {u.client: measure(u, brief, evidence) for u in found.cohort}
        again = keep_within_bounds(list(found.cohort), peers, Claims(), Bounds(ratio=2.1, spread=3.1))
        assert not again.refused, levers
        if kind == "kron":
            assert isinstance(update.posterior.geometry, Kron)
            assert (
                update.posterior.geometry.factors["fc1"][0].trace() < 100 * packet.tensors[f"{NOTE}kron/fc1/in"].sum()
            )


def say_of(update: ClientUpdate, layer: str = "0") -> float:
    return update.num_examples * measure(update, BRIEF, ())[f"move of {layer}"].value


@pytest.mark.parametrize(("claimed", "by"), [(19.0, 1.9), (10.0, 1.9), (19.0, 1.0), (9.9, 9.0)])
def test_examples_times_move_is_bounded_where_examples_are_ones_own_word(claimed: float, by: float) -> None:
    """Each lever just within its bound would be nearly four times the median together; together they may be twice."""
    found = door(honest(by, num_examples=claimed, steps=8 if claimed > 10 else 4), enrolled={})
    says = {u.client: say_of(u) for u in found.cohort}
    assert says["m"] <= 2.001 * sorted(says.values())[5]
    together = claimed * min(by, 2.0) / 10 > 2.1
    assert ("say in 0" in {c["field"] for c in found.clipped}) == together


def test_a_small_client_may_move_far_and_a_large_one_that_is_vouched_for_counts() -> None:
    far = door(honest(1.9, num_examples=4.0, steps=2))
    assert (far.refused, far.clipped) == ([], [])
    large = door(honest(1.1, num_examples=900.0, steps=360))
    assert (large.refused, large.clipped) == ([], [])
    assert large.cohort.updates[-1].num_examples == 900.0


def test_evidence_multiplies_with_examples_and_move() -> None:
    """Fisher twice, move twice, examples twice: alone each passes, together it is eight times the median's say."""
    forms = {f"{NOTE}fisher/0.{n}": torch.ones_like(START[f"0.{n}"]) for n in ("weight", "bias")}
    forms |= {f"{NOTE}fisher/1.{n}": torch.ones_like(START[f"1.{n}"]) for n in ("weight", "bias")}

    def sent(factor: float) -> bytes:
        packet = decode(honest(factor, num_examples=10 * factor, steps=round(4 * factor)))
        return encode({**packet.tensors, **{n: factor * t for n, t in forms.items()}}, packet.header)

    envelopes = [Envelope(c, sent(1 + 0.001 * i)) for i, c in enumerate(HONEST)] + [Envelope("m", sent(1.99))]
    found = admit_all(envelopes, BRIEF, (FisherDiagonal(),), (*HONEST, "m"), training=LOCAL)
    assert found.refused == []
    assert {c["client"] for c in found.clipped} == {"m"}
    assert any(c["field"].startswith("say in 0 by ") for c in found.clipped)
    usual = sum(float(u.notes["fisher/0.weight"].mean()) for u in found.cohort) / len(found.cohort)
    after = {u.client: say_of(u) * (usual + float(u.notes["fisher/0.weight"].mean())) for u in found.cohort}
    assert after["m"] <= 2.05 * after["c4"]


@pytest.mark.parametrize("few", [1, 6, 60])
def test_who_claims_everything_about_a_few_weights_may_move_them_less(few: int) -> None:
    """Mean precision, move and examples are the others'; all of the mass is where it moved, and so is all of the move.

    Of d weights it claims m, and there it has the say of r = d/m clients. The mean precision P is 0.9 + r/10 there and
    0.9 elsewhere, with 1 added to each: it brings (r + 1) / (P + 1) of its move, the others 2 / (P + 1) of theirs, and
    it may bring twice what they do. Its move is shortened to that.
    """
    module = nn.Sequential(nn.Linear(30, 20, bias=False))
    spec, size = Spec.of(module), 600
    brief = Brief(0, spec, {"0.weight": torch.zeros(20, 30)}, classes=20)
    recipe = find_method("laplace").recipe(damping=1e-9)
    chosen = torch.zeros(size).index_fill(0, torch.arange(few), 1.0).view(20, 30)
    plain = torch.ones(20, 30)

    def sent(fisher: Tensor, move: Tensor) -> bytes:
        notes = {"fisher/0.weight": fisher}
        return encode_reply(brief, {"0.weight": move}, notes, num_examples=10.0, steps=4, facts={})

    payloads = [sent(plain, plain / math.sqrt(size))] * 9 + [sent(chosen * size / few, -chosen / math.sqrt(few))]
    envelopes = [Envelope(c, p) for c, p in zip((*HONEST, "m"), payloads, strict=True)]
    state = ServerState(0, Single(spec, Posterior(brief.params)))

    def went(bounds: Bounds) -> float:
        found = admit_all(envelopes, brief, recipe.evidence, (*HONEST, "m"), Rules(bounds=bounds), training=LOCAL)
        assert found.refused == []
        after = fuse_round(recipe, found.cohort, state, Bench()).single.posterior.mean["0.weight"]
        return float((after * chosen).sum()) / few

    ratio = size / few
    inside, outside = (2 / (r / 10 + 1.9) for r in (ratio, 0.0))  # what the others bring there, over their move
    theirs = math.sqrt((few * inside**2 + (size - few) * outside**2) / size)
    short = min(1.0, 2 * theirs / ((ratio + 1) / (ratio / 10 + 1.9)))
    usual = 9 / math.sqrt(size)
    assert went(Bounds()) == pytest.approx((usual - short * ratio / math.sqrt(few)) / (9 + ratio), rel=1e-3)
    assert went(Bounds(together=False)) == pytest.approx((usual - ratio / math.sqrt(few)) / (9 + ratio), rel=1e-3)
    assert short < 0.55


def test_networks_of_several_kinds_are_compared_apart() -> None:
    other = Spec("mlp", {"inputs": 3, "hidden": [], "classes": 2})
    updates = [update_of(c, moved(1.0), SPEC) for c in HONEST]
    updates.append(update_of("m", {n: t + 20 for n, t in other.build().state_dict().items()}, other))
    briefs = {SPEC: BRIEF, other: Brief(0, other, other.build().state_dict(), classes=2)}
    levers = {u.client: measure(u, briefs[u.spec], ()) for u in updates}
    assert len(keep_within_bounds(updates, levers, Claims(), Bounds()).updates) == 10


def test_a_copy_of_the_brief_has_no_say_and_is_no_outlier() -> None:
    """Whoever sends back what it was sent brings nothing; there is no bound from below."""
    copy = encode_reply(BRIEF, moved(0.0), {}, num_examples=10.0, steps=4, facts={})
    found = door(copy)
    assert (found.refused, found.clipped) == ([], [])
    assert found.cohort.clients == (*HONEST, "m")
