"""Updates without a brief: files and state dicts, whose majority says what the contract is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedfuse.core.messages import Brief, Envelope, Form
from fedfuse.core.params import Layout, Params
from fedfuse.core.recipe import Evidence
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError, RecipeError, Refused
from fedfuse.server.admit import Admission, Rules, admit_all, form_words
from fedfuse.wire.codec import Malformed, Packet, decode, encode, read
from fedfuse.wire.messages import NOTE, reply_header, split


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
        self.tensors = {n: torch.zeros(f.shape, dtype=f.dtype) for n, f in forms.items()}
        self.layout = Layout.guess(self.tensors)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """The tensors under their names."""
        return dict(self.tensors)

    def forward(self, x: Tensor) -> Tensor:  # noqa: ARG002 - every module's signature
        """A bundle cannot run."""
        raise RecipeError("plain state dicts say nothing of their network; pass model= to run what was fused")


@dataclass(frozen=True, slots=True)
class _Opened:
    item: Item
    packet: Packet

    @property
    def signature(self) -> tuple[object, ...]:
        """What must agree: the model's tensors, its network, the round and the start."""
        own = split(self.packet)[0]
        header = self.packet.header
        forms = tuple(sorted((n, *f) for n, f in own.forms.items()))  # type: ignore[attr-defined]
        return (forms, str(header.get("spec")), header.get("round"), header.get("start"))


def gather(
    items: Sequence[Item],
    evidence: tuple[Evidence, ...],
    start: Params | None,
    spec: Spec | None,
    rules: Rules,
) -> tuple[Admission, Brief]:
    """Let the items through the door under the contract most of them share.

    Raises:
        ConfigError: when no layout is shared by more than half of them; the differences are shown.
    """
    opened, refused = _open_all(items)
    votes = Counter(o.signature for o in opened)
    if not opened:
        raise ConfigError(f"none of the {len(items)} updates can be read: {refused[0]}")
    winner, count = votes.most_common(1)[0]
    if count * 2 <= len(opened):
        raise ConfigError(f"no layout is shared by more than half of the updates: {_differences(opened)}")
    chosen = [o for o in opened if o.signature == winner]
    refused += [_odd(o, chosen[0]) for o in opened if o.signature != winner]
    brief = _brief(chosen[0].packet, start, spec, rules)
    envelopes = [Envelope(o.item.client, _reply(o, brief)) for o in chosen]
    admission = admit_all(envelopes, brief, evidence, [i.client for i in items], rules)
    admission.refused = [r.facts() for r in refused] + admission.refused
    return admission, brief


def _open_all(items: Sequence[Item]) -> tuple[list[_Opened], list[Refused]]:
    opened, refused = [], []
    for item in items:
        try:
            packet = decode(item.payload) if isinstance(item.payload, bytes) else read(item.payload)
            opened.append(_Opened(item, packet))
        except Malformed as why:
            refused.append(Refused(item.client, "file", str(why), "a safetensors file"))
    return opened, refused


def _brief(packet: Packet, start: Params | None, spec: Spec | None, rules: Rules) -> Brief:
    """The brief these updates might have answered."""
    header, own = packet.header, split(packet)[0]
    if spec is None and "spec" in header:
        spec = Spec.from_json(header["spec"], rules.trusted)
    if spec is None:
        spec = Spec("state-dict", prototype=Bundle(own.forms))  # type: ignore[attr-defined]
    round_, classes = header.get("round", 0), header.get("classes", 0)
    if not all(isinstance(n, int) and 0 <= n < 10**6 for n in (round_, classes)):
        raise ConfigError("the updates' headers name an impossible round or number of classes")
    return Brief(round_, spec, own if start is None else start, classes=classes)


def _reply(opened: _Opened, brief: Brief) -> bytes | Path:
    """The item as a reply to the brief; only plain state dicts and given masses need a new header."""
    header = opened.packet.header
    if header.get("kind") == "reply" and opened.item.mass is None and _same_spec(header, brief):
        return opened.item.payload
    facts = reply_header(brief, mass=1.0, steps=1, facts={})
    mine = {k: header[k] for k in ("mass", "steps", "facts") if header.get("kind") == "reply" and k in header}
    given = {} if opened.item.mass is None else {"mass": opened.item.mass}
    return encode(opened.packet.tensors, facts | mine | given)


def _same_spec(header: Mapping[str, Any], brief: Brief) -> bool:
    return header.get("spec") == brief.spec.to_json()


def _odd(odd: _Opened, good: _Opened) -> Refused:
    """Why an update is not like the others, by its first difference."""
    got, expected = odd.packet.tensors.forms, good.packet.tensors.forms
    for name in sorted(got.keys() | expected.keys()):
        if name.startswith(NOTE) or got.get(name) == expected.get(name):
            continue
        came = form_words(got[name]) if name in got else "missing"
        wanted = form_words(expected[name]) if name in expected else "no such tensor"
        return Refused(odd.item.client, name, came, f"{wanted}, as most have")
    for field, words in (("spec", "network"), ("round", "round"), ("start", "start")):
        theirs, most = odd.packet.header.get(field), good.packet.header.get(field)
        if theirs != most:
            return Refused(odd.item.client, words, theirs, f"{most}, as most have")
    return Refused(odd.item.client, "layout", "another order", "the layout most have")


def _differences(opened: Sequence[_Opened]) -> str:
    first = opened[0]
    odd = [_odd(o, first) for o in opened[1:] if o.signature != first.signature]
    return f"compared with {first.item.client}, " + "; ".join(str(o).replace(", as most have", "") for o in odd[:3])
