"""Updates without a brief: files and state dicts, whose majority says what the contract is."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedfuse.core.messages import Brief, Envelope, Form, Start
from fedfuse.core.params import Layout, Params
from fedfuse.core.seams import Evidence
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError, QuorumLost, Refused
from fedfuse.server.admit import Admission, Rules, admit_all, form_words
from fedfuse.wire.codec import Malformed, Packet, decode, encode, forms_of, read
from fedfuse.wire.messages import NOTE, reply_header, split

_SHARED = ("spec", "round", "start")  # what a header says that all updates of one fusion have in common


@dataclass(frozen=True, slots=True)
class Item:
    """Something to fuse: who it is from, its bytes or file, and a mass if the user gave one."""

    client: str
    payload: bytes | Path
    mass: float | None = None


class Bundle(nn.Module):
    """Names and tensors without a network: what a plain state dict is."""

    def __init__(self, forms: Mapping[str, Form]) -> None:
        super().__init__()
        # on the meta device: shapes without numbers, however large the model
        self.tensors = {n: torch.empty(f.shape, dtype=f.dtype, device="meta") for n, f in forms.items()}
        self.layout = Layout.guess(self.tensors)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """The tensors under their names."""
        return dict(self.tensors)


@dataclass(frozen=True, slots=True)
class _Opened:
    item: Item
    packet: Packet

    @property
    def forms(self) -> Mapping[str, Form]:
        """The model's own tensors."""
        return {n: f for n, f in self.packet.tensors.forms.items() if not n.startswith(NOTE)}

    @property
    def signature(self) -> str:
        """What must agree: the model's tensors, its network, the round and the start."""
        header = self.packet.header
        return repr((sorted((n, *f) for n, f in self.forms.items()), [header.get(f) for f in _SHARED]))


def gather(
    items: Sequence[Item],
    evidence: tuple[Evidence, ...],
    start: Params | None,
    spec: Spec | None,
    rules: Rules,
    mixed: bool = False,
) -> tuple[Admission, Brief]:
    """Let the items through the door under the contract most of them share.

    Evidence that the method does not ask for is left unread, so that updates made for one method can be fused by
    another.

    Args:
        items: what came.
        evidence: what the method asks for beside the weights.
        start: the weights all began with, if they are known.
        spec: the network, if the user named it.
        rules: the quorum, and which networks may be built.
        mixed: everybody may have a network of its own, and then there is no majority to agree with.

    Raises:
        QuorumLost: when too few can be read, agree and pass the door; every refusal is told.
        ConfigError: when what they agree on does not fit the network or the start that was named.
    """
    opened, refused = _open_all(items)
    chosen = opened if mixed else _majority(opened, refused)
    _check_quorum(len(chosen), len(items), rules.quorum, refused)
    briefs = {o.signature: _brief(o, start, spec, rules, mixed) for o in reversed(chosen)}
    brief = briefs[chosen[0].signature]
    own = {o.item.client: Start(b.spec, b.params) for o in chosen if (b := briefs[o.signature]) is not brief}
    brief = replace(brief, own=own, classes=max(b.classes for b in briefs.values()))
    replies = {o.item.client: _reply(o, brief.to(o.item.client), evidence) for o in chosen}
    envelopes = [Envelope(o.item.client, o.item.payload) for o in chosen]
    admission = admit_all(envelopes, brief, evidence, list(replies), rules, opened=replies)
    admission.refused = [r.facts() for r in refused] + admission.refused
    everybody = [Refused(**told) for told in admission.refused]
    _check_quorum(len(admission.cohort), len(items), rules.quorum, everybody)
    return admission, brief


def _majority(opened: Sequence[_Opened], refused: list[Refused]) -> list[_Opened]:
    """Those who share what more than half have; the others are refused."""
    if not opened:
        return []
    winner, count = Counter(o.signature for o in opened).most_common(1)[0]
    if count * 2 <= len(opened):
        raise QuorumLost(f"no layout is shared by more than half of the updates: {_differences(opened)}")
    chosen = [o for o in opened if o.signature == winner]
    refused.extend(_odd(o, chosen[0]) for o in opened if o.signature != winner)
    return chosen


def _check_quorum(got: int, asked: int, quorum: float, refused: Sequence[Refused]) -> None:
    if not got or got < quorum * asked:
        why = "; ".join(str(r) for r in refused)
        raise QuorumLost(f"{got} of {asked} updates can be fused and the quorum is {quorum:.0%}; {why}")


def _open_all(items: Sequence[Item]) -> tuple[list[_Opened], list[Refused]]:
    opened, refused = [], []
    for item in items:
        try:
            packet = decode(item.payload) if isinstance(item.payload, bytes) else read(item.payload)
            opened.append(_Opened(item, packet))
        except Malformed as why:
            refused.append(Refused(item.client, "file", f"damaged: {why}", "a safetensors file"))
    return opened, refused


def _brief(first: _Opened, start: Params | None, given: Spec | None, rules: Rules, mixed: bool) -> Brief:
    """The brief these updates might have answered."""
    header, own = first.packet.header, split(first.packet)[0]
    spec = _network(first, None if mixed and given and _difference(first, given) else given, rules)
    if odd := _difference(first, spec):
        raise ConfigError(
            f"the updates do not fit the network {spec.factory!r}: {odd[0]} is {odd[1]}, and there it is {odd[2]}; "
            "name the network they were made with"
        )
    round_, classes = header.get("round", 0), header.get("classes", 0)
    if not all(type(n) is int and 0 <= n < 10**6 for n in (round_, classes)):
        raise ConfigError("the updates' headers name an impossible round or number of classes")
    return Brief(round_, spec, own if start is None else _checked_start(start, first), classes=classes)


def _difference(first: _Opened, spec: Spec) -> tuple[str, str, str] | None:
    """Where an update and a network differ first."""
    return first_difference(first.forms, {n: Form(*form) for n, form in spec.shapes().items()})


def _network(first: _Opened, given: Spec | None, rules: Rules) -> Spec:
    """The network the user named; with the options the updates were made with, unless it is an object at hand."""
    said = first.packet.header.get("spec")
    theirs = said.get("factory") if isinstance(said, dict) else None
    if given is not None and (given.prototype is not None or theirs != given.factory):
        return given
    if said is not None:
        return Spec.from_json(said, rules.trusted)
    return Spec("state-dict", prototype=Bundle(first.forms))


def _checked_start(start: Params, first: _Opened) -> Params:
    """The start, if it can be the one these updates were trained from."""
    if odd := first_difference(forms_of(start), first.forms):
        raise ConfigError(f"the start does not fit the updates: {odd[0]} is {odd[1]}, and in the updates {odd[2]}")
    said = first.packet.header.get("start")
    if said is not None and said != (mine := fingerprint(start)):
        raise ConfigError(
            f"the updates were trained from other weights ({_short(said)}) than the given start ({mine}); "
            "pass the file the sites began with"
        )
    return start


def fingerprint(params: Params) -> str:
    """A short name for a set of weights, equal for equal weights.

    Example:
        >>> fingerprint({"w": torch.zeros(2)}) == fingerprint({"w": torch.zeros(2)})
        True
    """
    digest = hashlib.sha256()
    for name in sorted(params):
        digest.update(f"{name}{tuple(params[name].shape)}".encode())
        digest.update(encode({"": params[name]}, {}))
    return digest.hexdigest()[:16]


def _reply(opened: _Opened, brief: Brief, evidence: tuple[Evidence, ...]) -> Packet:
    """The item as a reply to the brief: with a header where it has none, and only the evidence asked for."""
    header, tensors = opened.packet.header, opened.packet.tensors
    asked = {NOTE + name for kind in evidence for name in kind.expects(brief)}
    facts = reply_header(brief, mass=1.0, steps=1, facts={})
    if header.get("kind") == "reply":
        facts |= {k: header[k] for k in ("version", "mass", "steps", "facts") if k in header}
    if opened.item.mass is not None:
        facts["mass"] = opened.item.mass
    return Packet(facts, tensors.part(lambda n: not n.startswith(NOTE) or n in asked), opened.packet.size)


def first_difference(got: Mapping[str, Form], expected: Mapping[str, Form]) -> tuple[str, str, str] | None:
    """The first tensor in which two layouts differ, and how it is in each, in words."""
    for name in sorted(got.keys() | expected.keys()):
        if got.get(name) != expected.get(name):
            here, there = (form_words(forms[name]) if name in forms else "missing" for forms in (got, expected))
            return _short(name), here, there
    return None


def _short(text: object) -> str:
    """A word from a file, fit for a terminal."""
    return ascii(text)[:80] if not str(text).isprintable() else str(text)[:80]


def _odd(odd: _Opened, good: _Opened) -> Refused:
    """Why an update is not like the others, by its first difference."""
    if found := first_difference(odd.forms, good.forms):
        name, came, wanted = found
        return Refused(odd.item.client, name, came, f"{wanted}, as most have")
    for field in _SHARED:
        theirs, most = odd.packet.header.get(field), good.packet.header.get(field)
        if theirs != most:
            return Refused(odd.item.client, field, theirs, f"{_short(most)}, as most have")
    return Refused(odd.item.client, "layout", "another one", "the layout most have")


def _differences(opened: Sequence[_Opened]) -> str:
    first = opened[0]
    odd = [_odd(o, first) for o in opened[1:] if o.signature != first.signature]
    return f"compared with {first.item.client}, " + "; ".join(str(o).replace(", as most have", "") for o in odd[:3])
