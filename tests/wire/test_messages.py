"""Briefs and replies as bytes."""

from __future__ import annotations

import pytest
import torch

from fedfuse.core.messages import Brief, Start
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.wire.codec import Malformed, decode, encode
from fedfuse.wire.messages import brief_size, decode_brief, encode_brief, encode_reply, noted, split

SPEC = Spec("mlp", {"inputs": 2, "hidden": []})
BRIEF = Brief(3, SPEC, {"w": torch.randn(2, 2), "n": torch.tensor(4)}, {"control/w": torch.ones(2, 2)}, classes=5)


def test_a_brief_survives_the_wire() -> None:
    back = decode_brief(encode_brief(BRIEF))
    assert (back.round, back.spec, back.classes, back.own) == (3, SPEC, 5, {})
    assert all(back.params[n].equal(BRIEF.params[n]) for n in BRIEF.params)
    assert set(back.params) == {"w", "n"}
    assert back.memory["control/w"].equal(torch.ones(2, 2))


def test_the_size_of_a_brief_is_known_without_writing_it() -> None:
    assert brief_size(BRIEF) == len(encode_brief(BRIEF))
    own = Brief(0, SPEC, {}, own={"a": Start(SPEC, {"w": torch.ones(100)})})
    assert brief_size(own.to("a")) - brief_size(own.to("b")) > 400


def test_a_client_builds_only_what_its_user_named() -> None:
    evil = Brief(0, Spec("os:system", {"command": "true"}), {})
    with pytest.raises(ConfigError, match="not named here"):
        decode_brief(encode_brief(evil))
    assert decode_brief(encode_brief(evil), trusted={"os:system"}).spec == evil.spec


@pytest.mark.parametrize(
    "header",
    [{}, {"kind": "reply"}, {"kind": "brief", "version": 2}, {"kind": "brief", "version": 1, "round": "0"}],
)
def test_what_is_no_brief_is_called_out(header: dict[str, object]) -> None:
    with pytest.raises(Malformed, match="expected a brief"):
        decode_brief(encode({}, header))


def test_a_reply_says_round_network_mass_and_steps_and_drops_what_is_not_finite() -> None:
    facts = {"loss": float("nan"), "lr": 0.1, "gap": float("inf")}
    packet = decode(
        encode_reply(BRIEF, BRIEF.params, {"counts/labels": torch.ones(5)}, num_examples=7.0, steps=2, facts=facts)
    )
    header = packet.header
    assert (header["round"], header["num_examples"], header["steps"], header["facts"]) == (3, 7.0, 2, {"lr": 0.1})
    assert Spec.from_json(header["spec"]) == SPEC
    own, notes = split(packet)
    assert set(own) == {"w", "n"}
    assert list(notes) == ["counts/labels"]


def test_notes_never_collide_with_the_models_own_names() -> None:
    assert list(noted({"w": torch.ones(1)})) == ["~w"]
