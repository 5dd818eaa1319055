"""What is to be fused, opened: tensors, and what a header says of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedfuse.core.messages import Form
from fedfuse.core.params import Params
from fedfuse.core.spec import Spec
from fedfuse.errors import Refused
from fedfuse.server.door.differences import shorten
from fedfuse.wire.codec import Malformed, Packet, forms_of
from fedfuse.wire.folders import check_unpacked, open_weights
from fedfuse.wire.messages import NOTE, split
from fedfuse.wire.table import Altered, Packed

SHARED = ("spec", "layout", "round", "start", "classes", "task", "memory")  # common to all of one fusion
_WHOLE = "the file as it was written; fetch it again"


@dataclass(frozen=True, slots=True)
class Item:
    """Something to fuse.

    Attributes:
        client: who it is from.
        payload: its bytes or file.
        num_examples: how many examples stand behind it, if the user says so.
        spec: its network, for an update that was made in this process.
        packet: what is read instead of the payload, where somebody had to open it before.
    """

    client: str
    payload: bytes | Path
    num_examples: float | None = None
    spec: Spec | None = None
    packet: Packet | None = None


@dataclass(frozen=True, slots=True)
class OpenedItem:
    """An update that could be read: its tensors, and what its header says."""

    item: Item
    packet: Packet
    standing: Params | None = None  # where it stands if it brings no weights, since nobody trained

    @property
    def own(self) -> Params:
        """The model's own tensors: its own, or those it stands at."""
        own = split(self.packet)[0]
        return own if own or self.standing is None else self.standing

    @property
    def forms(self) -> Mapping[str, Form]:
        """The forms of the model's own tensors."""
        return forms_of(self.own)

    @property
    def blank(self) -> Params:
        """Tensors of these forms without numbers, however large."""
        return {name: form.blank() for name, form in self.forms.items()}

    @property
    def has_weights(self) -> bool:
        """Whether it brings weights."""
        return any(not name.startswith(NOTE) for name in self.packet.tensors)

    @property
    def signature(self) -> str:
        """What must agree: the model's tensors, its network, the round, the start and the classes."""
        header = self.packet.header
        return repr((sorted((n, *f) for n, f in self.forms.items()), [header.get(f) for f in SHARED]))

    @property
    def is_plain(self) -> bool:
        """Whether it is a bare set of tensors, which nobody's training wrote for us."""
        return self.packet.header.get("kind") != "reply"

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of evidence it brings."""
        return frozenset(n.removeprefix(NOTE).partition("/")[0] for n in self.packet.tensors if n.startswith(NOTE))


def open_all(items: Sequence[Item], standing: Params | None) -> tuple[list[OpenedItem], list[Refused]]:
    """What can be read of some updates, and a refusal for each that is damaged or packed."""
    opened, refused = [], []
    for item in items:
        try:
            found = OpenedItem(item, item.packet or open_weights(item.payload), standing)
            check_unpacked(found.forms, ours=bool(found.packet.header))
            opened.append(found)
        except Packed as why:
            refused.append(Refused(item.client, shorten(why.tensor), why.got, why.expected))
        except Altered as why:
            refused.append(Refused(item.client, "file", f"damaged or altered: {why.how}", _WHOLE))
        except Malformed as why:
            refused.append(Refused(item.client, "file", f"damaged: {why}", "a safetensors file"))
    return opened, refused


def find_typical(items: Sequence[Item]) -> OpenedItem | None:
    """One of those that share what most have, whichever came first; None where nothing can be read."""
    opened, _ = open_all(items, None)
    signatures = [o.signature for o in opened]
    if not opened:
        return None
    return opened[signatures.index(Counter(signatures).most_common(1)[0][0])]
