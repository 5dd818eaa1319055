"""The door, check by check: each refusal names client, field, what came and what was expected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedfuse.client.class_sums import LabelCounts
from fedfuse.core.messages import Brief, Envelope, Flaw, Form, Start
from fedfuse.core.model import Single
from fedfuse.core.params import Params
from fedfuse.core.posterior import Diag, Flat, Geometry
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.errors import NotConverged, Refused
from fedfuse.models.bayes import BayesianLayers
from fedfuse.server.admission.admit import Contract, Rules, admit, admit_all
from fedfuse.server.admission.values import LEAST_LOG_VARIANCE, form_words, is_finite
from fedfuse.wire.codec import encode, read
from fedfuse.wire.messages import encode_reply, mark_notes, reply_header

MODULE = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
SPEC = Spec.of(MODULE)
PARAMS = {n: t.detach().clone() for n, t in MODULE.state_dict().items()}
BRIEF = Brief(2, SPEC, PARAMS, classes=2)
CONTRACT = Contract.of(BRIEF, ())


def reply(brief: Brief = BRIEF, notes: Params | None = None, **header: Any) -> bytes:
    """An honest reply but for what is said otherwise; a keyword set to `...` is left out."""
    told = reply_header(brief, num_examples=10.0, steps=3, facts={"loss": 0.5}) | header
    plain = {k: v for k, v in told.items() if v is not ...}
    return encode({**brief.params, **mark_notes(notes or {})}, plain)


def refusal(payload: bytes | Path | None, contract: Contract = CONTRACT) -> Refused:
    with pytest.raises(Refused) as why:
        admit(Envelope("site-3", payload), contract)
    assert why.value.client == "site-3"
    return why.value


def test_an_honest_reply_becomes_an_update() -> None:
    update = admit(Envelope("site-3", reply()), CONTRACT)
    assert (update.client, update.num_examples, update.steps, update.spec) == ("site-3", 10.0, 3, SPEC)
    assert update.facts == {"loss": 0.5}
    assert all(update.posterior.mean[n].equal(PARAMS[n]) for n in PARAMS)
    assert update.posterior.geometry == Flat()


def test_a_file_is_as_good_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(reply())
    update = admit(Envelope("site-3", tmp_path / "r"), CONTRACT)
    assert update.posterior.mean["0.weight"].equal(PARAMS["0.weight"])


HEADERS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "brief"}, "message"),
    ({"kind": ...}, "message"),
    ({"version": 2}, "message"),
    ({"round": 1}, "round"),
    ({"round": "2"}, "round"),
    ({"round": None}, "round"),
    ({"spec": ...}, "spec"),
    ({"spec": {"factory": "os:system"}}, "spec"),
    ({"spec": Spec("mlp").to_json()}, "spec"),
    ({"spec": SPEC.to_json() | {"options": {"bias": False}}}, "spec"),
    ({"spec": SPEC.to_json() | {"surgery": {"0.weight": [1, 3]}}}, "spec"),
    ({"spec": SPEC.to_json() | {"prototype": 1}}, "spec"),
    *[({"num_examples": m}, "num_examples") for m in (0, -9, 0.0, -0.0, 1e13, 10**400, True, "10", None, [], {}, ...)],
    *[({"steps": s}, "steps") for s in (0, -1, 1.0, 10**10, 10**400, True, "3", None, [3], ...)],
]


@pytest.mark.parametrize(("header", "field"), HEADERS, ids=[str(h)[:50] for h, _ in HEADERS])
def test_a_header_that_breaks_the_contract(header: dict[str, Any], field: str) -> None:
    why = refusal(reply(**header))
    assert why.field == field
    assert len(str(why)) < 600


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_masses_that_only_python_calls_json(word: str) -> None:
    assert refusal(reply(num_examples=1234567.5).replace(b"1234567.5", word.ljust(9).encode())).field == "num_examples"


def mutated(name: str, value: Tensor | None, **more: Tensor) -> bytes:
    tensors = {n: t for n, t in {**PARAMS, name: value, **more}.items() if t is not None}
    return encode(tensors, reply_header(BRIEF, num_examples=10.0, steps=3, facts={}))


def filled(name: str, value: float) -> Tensor:
    tensor = PARAMS[name].clone()
    tensor.view(-1)[-1] = value
    return tensor


TENSORS: list[tuple[str, Tensor | None, str, str]] = [
    ("0.weight", None, "missing", "2×3 float32"),
    ("0.weight", torch.ones(3, 2), "3×2 float32", "2×3 float32"),
    ("0.weight", torch.ones(1, 3), "1×3 float32", "2×3 float32"),
    ("0.weight", torch.ones(6), "6 float32", "2×3 float32"),
    ("0.bias", torch.ones(()), "a scalar float32", "2 float32"),
    ("0.weight", torch.ones(2, 3).double(), "2×3 float64", "2×3 float32"),
    ("0.weight", torch.ones(2, 3).bfloat16(), "2×3 bfloat16", "2×3 float32"),
    ("0.weight", torch.ones(2, 3).int(), "2×3 int32", "2×3 float32"),
    ("1.num_batches_tracked", torch.tensor(1.0), "a scalar float32", "a scalar int64"),
    ("0.weight", filled("0.weight", float("nan")), "not finite", "finite numbers"),
    ("0.bias", filled("0.bias", float("inf")), "not finite", "finite numbers"),
    ("1.running_mean", filled("1.running_mean", float("-inf")), "not finite", "finite numbers"),
    ("1.running_var", filled("1.running_var", -1.0), "-1.0", "variances ≥ 0"),
    ("1.num_batches_tracked", torch.tensor(-1), "[-1, -1]", "counts from 0 to 300"),
    ("1.num_batches_tracked", torch.tensor(2**63 - 1), f"[{2**63 - 1}, {2**63 - 1}]", "counts from 0"),
    ("2.weight", torch.ones(1), "sent unasked", "only what was asked for"),
    ("~counts/labels", torch.ones(1), "sent unasked", "only what was asked for"),
]


@pytest.mark.parametrize(("name", "value", "got", "expected"), TENSORS, ids=[f"{n}: {g}" for n, _, g, _ in TENSORS])
def test_a_tensor_that_breaks_the_contract(name: str, value: Tensor | None, got: str, expected: str) -> None:
    why = refusal(mutated(name, value))
    assert (why.field, why.got) == (name.removeprefix("~"), got)
    assert why.expected.startswith(expected)


def test_hostile_names_do_not_reach_the_log_as_they_are() -> None:
    for name in ("x" * 5000, "a\nb\x1b[2J", "\ud800"):
        why = refusal(mutated(name, torch.ones(1)))
        assert len(why.field) <= 80
        assert why.field.isprintable()


def test_nothing_and_garbage() -> None:
    assert refusal(None).got == "nothing"
    assert "too short" in refusal(b"").got
    assert "cannot read" in refusal(Path("no-such-file")).got


def test_a_reply_may_be_no_longer_than_a_good_one_can_be() -> None:
    limits = CONTRACT.limits
    assert len(reply()) <= limits.bytes
    why = refusal(reply() + b"\0" * limits.bytes)
    assert "that fit here" in why.got
    assert "that fit here" in refusal(b"\0" * (limits.bytes + 1)).got


def test_a_file_that_changes_on_the_way_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_bytes(reply())
    packet = read(path)
    path.write_bytes(reply()[:-4])
    with pytest.raises(Refused, match="changed while it was read"):
        admit(Envelope("site-3", path), CONTRACT, packet)


def test_facts_are_plain_numbers_or_nothing() -> None:
    facts = {"loss": 1.5, "steps": True, "name": "x", "big": 1e305, "n": 3, "k" * 99: 2, "list": [1]}
    update = admit(Envelope("a", reply(facts=facts)), CONTRACT)
    assert update.facts == {"loss": 1.5, "n": 3.0, "k" * 40: 2.0}
    assert admit(Envelope("a", reply(facts=[1, 2])), CONTRACT).facts == {}
    assert len(admit(Envelope("a", reply(facts={str(i): i for i in range(99)})), CONTRACT).facts) == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.bfloat16])
def test_finite_is_finite_even_where_sums_overflow(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    assert is_finite(torch.tensor([top, top, -top, -top, top], dtype=dtype))
    assert is_finite(torch.empty(0, dtype=dtype))
    for bad in (float("nan"), float("inf"), -float("inf")):
        assert not is_finite(torch.tensor([0.0, bad, 1.0], dtype=dtype))
    assert not is_finite(torch.tensor([float("inf"), -float("inf")], dtype=dtype))


def test_form_words() -> None:
    contract = Contract.of(BRIEF, (LabelCounts(),))
    assert form_words(contract.forms["~counts/labels"]) == "2 int64"


def test_evidence_is_checked_by_the_evidence_that_asked_for_it() -> None:
    contract = Contract.of(BRIEF, (LabelCounts(),))
    good = admit(Envelope("a", reply(notes={"counts/labels": torch.tensor([4, 6])})), contract)
    assert good.notes["counts/labels"].tolist() == [4, 6]
    assert refusal(reply(), contract).field == "counts/labels"
    why = refusal(reply(notes={"counts/labels": torch.tensor([4, 7])}), contract)
    assert (why.field, why.got, why.expected) == ("counts/labels", "a sum of 11", "the num_examples 10")
    assert refusal(reply(notes={"counts/labels": torch.tensor([4, 6])})).got == "sent unasked"


@dataclass(frozen=True, slots=True)
class Fragile(LabelCounts):
    """Evidence whose check fails in every way a solver can."""

    error: type[Exception] = RuntimeError
    name: ClassVar[str] = "counts"

    def check(self, notes: Params, num_examples: float) -> Flaw | None:
        raise self.error("no good")


@dataclass(frozen=True, slots=True)
class Spread(LabelCounts):
    """Evidence that gives the posterior a geometry."""

    def expects(self, brief: Brief) -> Mapping[str, Any]:
        return {}

    def check(self, notes: Params, num_examples: float) -> Flaw | None:
        return None

    def geometry(self, notes: Params) -> Geometry | None:
        return Diag({"0.weight": torch.ones(2, 3)})


@pytest.mark.parametrize("error", [RuntimeError, ZeroDivisionError, NotConverged, torch.linalg.LinAlgError])
def test_evidence_that_cannot_be_used_is_refused(error: type[Exception]) -> None:
    contract = Contract.of(BRIEF, (Fragile(error),))
    why = refusal(reply(notes={"counts/labels": torch.tensor([4, 6])}), contract)
    assert (why.field, why.got) == ("counts", "not usable (no good)")


def test_evidence_may_give_the_posterior_its_geometry() -> None:
    update = admit(Envelope("a", reply()), Contract.of(BRIEF, (Spread(),)))
    assert isinstance(update.posterior.geometry, Diag)


def door(*envelopes: Envelope, asked: tuple[str, ...] = ("a", "b", "c", "d", "e"), **how: Any) -> Any:
    return admit_all(envelopes, BRIEF, (), asked, **how)


def told(admission: Any) -> list[tuple[str, str]]:
    return [(r["client"], r["field"]) for r in admission.refused]


def test_one_clients_fault_never_ends_a_round() -> None:
    admission = door(
        Envelope("b", reply(), seconds=1.0),
        Envelope("a", reply(num_examples=-1), seconds=2.0),
        Envelope("c", None, dropped="no answer"),
        Envelope("d", reply(), remembered=True),
        Envelope("b", reply()),
        Envelope("zoe", reply()),
    )
    assert admission.cohort.clients == ("b", "d")
    assert told(admission) == [("a", "num_examples"), ("b", "reply"), ("zoe", "client")]
    assert admission.dropped == [{"client": "c", "reason": "no answer"}]
    assert (admission.seconds, admission.trained, admission.remembered) == (3.0, 4, 1)
    assert admission.bytes_up == 4 * len(reply()) + len(reply(num_examples=-1))
    assert admission.refused[0]["got"] == "-1"


def test_a_client_that_began_elsewhere_has_a_contract_of_its_own() -> None:
    other = Spec("mlp", {"inputs": 2, "hidden": [], "classes": 2})
    brief = replace(BRIEF, own={"a": Start(other, other.build().state_dict())})
    mine = encode_reply(brief.to("a"), brief.to("a").params, {}, num_examples=1.0, steps=1, facts={})
    admission = admit_all([Envelope("a", mine), Envelope("b", reply())], brief, (), ("a", "b"))
    assert [u.spec for u in admission.cohort] == [other, SPEC]
    swapped = admit_all([Envelope("b", mine), Envelope("a", reply())], brief, (), ("a", "b"))
    assert [client for client, _ in told(swapped)] == ["b", "a"]


def test_an_enrolled_count_is_the_most_a_client_may_claim() -> None:
    enrolled = {"a": 10, "b": 9, "c": 10**6}
    admission = door(*(Envelope(c, reply()) for c in "abc"), enrolled=enrolled)
    assert told(admission) == [("b", "num_examples")]
    huge = door(Envelope("a", reply()), Envelope("c", reply(num_examples=10**6, steps=300_000)), enrolled=enrolled)
    assert huge.cohort.clients == ("a", "c"), "who enrolled with much may claim much, and the steps that go with it"


def test_without_an_enrolled_count_the_median_is_the_measure() -> None:
    num_examples = {"a": 10, "b": 12, "c": 14, "d": 119, "e": 141}
    admission = door(*(Envelope(c, reply(num_examples=m)) for c, m in num_examples.items()))
    assert admission.cohort.clients == ("a", "b", "c", "d")
    assert admission.refused == [
        {"client": "e", "field": "num_examples", "got": "141.0", "expected": "at most 140, 10 times the median"}
    ]
    strict = door(*(Envelope(c, reply(num_examples=m)) for c, m in num_examples.items()), rules=Rules(examples_ratio=5))
    assert told(strict) == [("d", "num_examples"), ("e", "num_examples")]


def test_steps_far_above_the_others_are_refused() -> None:
    """FedNova divides by steps: one client that claims a billion would throw the model far away."""
    steps = {"a": 3, "b": 4, "c": 5, "d": 50}
    assert told(door(*(Envelope(c, reply(steps=s)) for c, s in steps.items()))) == [("d", "steps")]
    assert told(door(*(Envelope(c, reply(steps=min(s, 45))) for c, s in steps.items()))) == []


def test_nobody_answered() -> None:
    assert len(door().cohort) == 0


def test_beyond_the_memory_limit_updates_wait_in_files_and_are_the_same() -> None:
    envelopes = [Envelope(c, reply(num_examples=m)) for c, m in (("a", 1), ("b", 2), ("c", 3))]
    held, filed = door(*envelopes), door(*envelopes, rules=Rules(memory=len(reply())))
    assert filed.spool._folder is not None
    for mine, theirs in zip(held.cohort, filed.cohort, strict=True):
        assert (mine.client, mine.num_examples) == (theirs.client, theirs.num_examples)
        assert all(mine.posterior.mean[n].equal(theirs.posterior.mean[n]) for n in PARAMS)


BAYES = BayesianLayers(bias=True)(Single.of(MODULE[0], Spec.of(MODULE[0])), 2, seed=0)
BELIEF = Brief(2, BAYES.spec, BAYES.posterior.mean, classes=2)


@pytest.mark.parametrize(
    ("name", "value", "got", "expected"),
    [
        ("net.log_variance", float("nan"), "not finite", "finite numbers"),
        ("net.log_variance", float("-inf"), "not finite", "finite numbers"),  # a variance of zero
        ("net.bias_log_variance", 20.5, "20.5", "log-variances up to 20"),
    ],
)
def test_impossible_variances_are_refused_by_name(name: str, value: float, got: str, expected: str) -> None:
    wrong = BELIEF.params[name].clone()
    wrong.view(-1)[1] = value
    why = refusal(reply(replace(BELIEF, params={**BELIEF.params, name: wrong})), Contract.of(BELIEF, ()))
    assert (why.field, why.got, why.expected) == (name, got, expected)


def test_missing_variances_are_refused_by_name() -> None:
    less = {n: t for n, t in BELIEF.params.items() if n != "net.log_variance"}
    why = refusal(reply(replace(BELIEF, params=less)), Contract.of(BELIEF, ()))
    assert (why.field, why.got) == ("net.log_variance", "missing")


def test_variances_whose_precision_would_drown_the_others_are_raised_and_counted() -> None:
    tiny = BELIEF.params["net.log_variance"].clone()
    tiny.view(-1)[:2] = -1e9
    sent = {**BELIEF.params, "net.log_variance": tiny}
    update = admit(Envelope("site-3", reply(replace(BELIEF, params=sent))), Contract.of(BELIEF, ()))
    assert update.facts["raised_variances"] == 2
    found = update.posterior.mean["net.log_variance"]
    assert found.view(-1).tolist() == [LEAST_LOG_VARIANCE] * 2 + tiny.view(-1)[2:].tolist()
    assert all(update.posterior.mean[n].equal(sent[n]) for n in sent if n != "net.log_variance")
    untouched = admit(Envelope("site-3", reply(BELIEF)), Contract.of(BELIEF, ()))
    assert "raised_variances" not in untouched.facts


RESTING = Contract.of(BRIEF, (LabelCounts(),), trains=False)


def evidence_alone(**header: Any) -> bytes:
    told = reply_header(BRIEF, num_examples=10.0, steps=0, facts={}) | header
    return encode(mark_notes({"counts/labels": torch.tensor([4, 6])}), told)


def test_who_was_not_asked_to_train_stands_at_the_briefs_weights() -> None:
    update = admit(Envelope("site-3", evidence_alone()), RESTING)
    assert update.steps == 0
    assert all(update.posterior.mean[n] is PARAMS[n] for n in PARAMS)
    assert refusal(evidence_alone(steps=1), RESTING).facts()["expected"] == "0, for there was nothing to train"
    with_weights = refusal(reply(notes={"counts/labels": torch.tensor([4, 6])}), RESTING)
    assert with_weights.facts()["got"] == "8 tensors are more than the 2 allowed"
    assert refusal(evidence_alone(), Contract.of(BRIEF, (LabelCounts(),))).facts()["got"] == "missing"


@dataclass(frozen=True, slots=True)
class Sums(LabelCounts):
    """Evidence of floating numbers."""

    def expects(self, brief: Brief) -> Mapping[str, Any]:
        return {"counts/labels": Form((2,), torch.float32)}

    def check(self, notes: Params, num_examples: float) -> Flaw | None:
        return None


def test_evidence_alone_is_measured_where_no_start_is_known() -> None:
    """No weights came, so the reply's own numbers say nothing of the length of the weights it stands at."""
    told = reply_header(BRIEF, num_examples=10.0, steps=0, facts={})
    payload = encode(mark_notes({"counts/labels": torch.ones(2)}), told)
    sent = [Envelope(c, payload) for c in "abc"]
    found = admit_all(sent, BRIEF, (Sums(),), "abc", trains=False, anchored=False)
    assert (found.cohort.clients, found.refused) == (("a", "b", "c"), [])


def test_no_steps_are_admitted_where_the_settings_have_no_epochs() -> None:
    rests = LocalSettings(epochs=0)
    assert admit(Envelope("a", reply(steps=0, training=rests.to_json())), CONTRACT).steps == 0
    assert refusal(reply(steps=0)).facts()["field"] == "steps"
    assert refusal(reply(steps=2, training=rests.to_json())).facts()["field"] == "steps"
