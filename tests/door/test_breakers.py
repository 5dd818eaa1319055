"""Replies that once ended a round: each is named, the honest are kept, and the round goes on.

Each is tried at the door as it stands, and with bounds so wide that only the look at the fused model is left.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mutants import LIAR, LOCAL, world
from torch import Tensor

from fedfuse.core.messages import Envelope
from fedfuse.core.model import Answering
from fedfuse.core.registry import find_method
from fedfuse.core.settings import Bounds
from fedfuse.nets.mixture import Mixture, TopLogit
from fedfuse.server.admission.admit import Rules, admit_all
from fedfuse.server.round import fuse_admitted
from fedfuse.wire.codec import decode, encode

Tensors = dict[str, Tensor]
WIDE = Bounds(ratio=1e300, few=1e300, margin=1e300)


def packed_diagonal(size: int, first: float, others: float) -> Tensor:
    """The upper triangle, row by row, of diag(first, others, …)."""
    values = torch.full((size,), others)
    values[0] = first
    rows, columns = torch.triu_indices(size, size)
    return torch.diag(values)[rows, columns]


def indefinite_factors(tensors: Tensors) -> Tensors:
    sides = {"~kron/fc1/in": 7, "~kron/fc1/out": 5, "~kron/classifier/in": 6, "~kron/classifier/out": 3}
    return {name: packed_diagonal(size, 1e6, -0.9).to(tensors[name].dtype) for name, size in sides.items()}


def set_weight(value: float, log_variance: float | None = None) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        weight = tensors["net.classifier.weight"].clone()
        weight[0, 0] = value
        other = {} if log_variance is None else {"net.classifier.log_variance": torch.full_like(weight, log_variance)}
        return {"net.classifier.weight": weight, **other}

    return change


def scale_weights(factor: float) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        n: t * factor for n, t in tensors.items() if not n.startswith("~") and t.is_floating_point()
    }


BREAKERS: dict[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    "indefinite factors": ("fedlpa", indefinite_factors),
    "a sure weight of 1e26": ("rklb", set_weight(1e26, -30.0)),
    "a weight of 2e19": ("fklb", set_weight(2e19)),
    "alpha with 1e12": ("alpha", set_weight(1e12)),
    "fedap with 1e20": ("fedap", scale_weights(1e20)),
    "gamf with 1e38": ("gamf", scale_weights(1e38)),
    "dense with 1e19": ("dense", scale_weights(1e19)),
    "a member times 1e37": ("ensemble", scale_weights(1e37)),
    "a chosen member times 1e37": ("ams", scale_weights(1e37)),
}


@pytest.mark.parametrize("bounds", [Bounds(), WIDE], ids=["bounds", "none"])
@pytest.mark.parametrize("case", BREAKERS)
def test_who_breaks_a_fusion_is_named_and_the_round_goes_on(case: str, bounds: Bounds) -> None:
    method, change = BREAKERS[case]
    recipe, state, bench, brief, sent = world(method)
    packet = decode(sent[LIAR])
    lie = encode({**packet.tensors, **change(dict(packet.tensors))}, packet.header)
    envelopes = [Envelope(c, lie if c == LIAR else p) for c, p in sent.items()]
    rules = Rules(bounds=bounds)
    seen = admit_all(envelopes, brief, recipe.evidence, list(sent), rules, training=LOCAL, trains=recipe.trains)
    after = fuse_admitted(recipe, seen, state, bench)
    named = {entry["client"] for entry in [*seen.refused, *seen.clipped]}
    assert named <= {LIAR}
    assert named or bounds is WIDE, "what the fusion can bear may pass where nothing is bounded"
    assert set(seen.cohort.clients) >= set(sent) - {LIAR}
    for member in after.model.members:
        assert all(torch.isfinite(t).all() for t in member.posterior.mean.values())
    if isinstance(after.model, Answering):
        assert torch.isfinite(after.model.logits(bench.need_rows("a test").x)).all()


def test_calibrated_on_the_servers_rows_no_network_is_chosen_for_shouting() -> None:
    """AMS lets the most confident network answer: times a million, a liar's answered everything."""
    recipe = find_method("ams").recipe(calibrate="zscore", fitted="server", disturbance=False)
    _, state, bench, brief, sent = world("ams")
    packet, chosen = decode(sent[LIAR]), []
    for factor in (1.0, 1e6):
        loud = {n: factor * t for n, t in packet.tensors.items() if n.startswith("classifier.")}
        replies = sent | {LIAR: encode({**packet.tensors, **loud}, packet.header)}
        envelopes = [Envelope(c, p) for c, p in replies.items()]
        seen = admit_all(envelopes, brief, (), list(sent), Rules(bounds=WIDE), training=LOCAL)
        mixture = fuse_admitted(recipe, seen, state, bench).model
        assert isinstance(mixture, Mixture)
        assert isinstance(mixture.combine, TopLogit)
        x = bench.need_rows("a test").x
        logits = torch.stack([member.logits(x) for member in mixture.members])
        chosen.append(mixture.combine.choose_members(logits))
    assert torch.equal(*chosen)
    assert not chosen[1][-1].all()


def test_standardized_answers_give_a_shouting_network_one_vote_of_many() -> None:
    """Without rows of the server: in a sum of standardized answers, times a million is times one."""
    recipe = find_method("ams").recipe(k="all", calibrate="answers", disturbance=False)
    _, state, bench, brief, sent = world("ams")
    packet, answers = decode(sent[LIAR]), []
    for factor in (1.0, 1e6):
        loud = {n: factor * t for n, t in packet.tensors.items() if n.startswith("classifier.")}
        replies = sent | {LIAR: encode({**packet.tensors, **loud}, packet.header)}
        envelopes = [Envelope(c, p) for c, p in replies.items()]
        seen = admit_all(envelopes, brief, (), list(sent), Rules(bounds=Bounds(over="off")), training=LOCAL)
        mixture = fuse_admitted(recipe, seen, state, bench).model
        assert isinstance(mixture, Mixture)
        answers.append(mixture.logits(bench.need_rows("a test").x))
    assert torch.allclose(*answers, atol=1e-4)


def test_a_shouting_network_is_seen_at_the_door() -> None:
    """The bound on a layer's move is a bound on its logits' scale."""
    _, _, _, brief, sent = world("ams")
    packet = decode(sent[LIAR])
    for factor, named in ((1e6, "refused"), (1.1, "clipped")):
        loud = {n: factor * t for n, t in packet.tensors.items() if n.startswith("classifier.")}
        replies = sent | {LIAR: encode({**packet.tensors, **loud}, packet.header)}
        seen = admit_all([Envelope(c, p) for c, p in replies.items()], brief, (), list(sent), training=LOCAL)
        assert {entry["client"] for entry in getattr(seen, named)} == {LIAR}
        assert all("classifier" in entry["field"] or "step" in entry["field"] for entry in getattr(seen, named))
