"""Files and state dicts to be fused, opened: their tensors, what their headers say, and which of them come twice.

Nothing here is trusted yet: what can be read goes to `updates`, which finds the brief it might have answered, and then
through the same door as a live reply (`admit`). A damaged or packed file is refused by name and the others go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedfuse.core.messages import Form, Message
from fedfuse.core.metadata import names_text
from fedfuse.core.params import Params
from fedfuse.core.spec import Spec
from fedfuse.errors import Refused
from fedfuse.server.admission.values import form_words
from fedfuse.wire.codec import Altered, Malformed, Packed, Packet, fingerprint, forms_of
from fedfuse.wire.folders import check_unpacked, is_folder, open_weights
from fedfuse.wire.messages import NOTE, split
from fedfuse.wire.sums import SUM_NAME

SHARED = ("spec", "layout", "round", "start", "classes", "task", "memory")  # header entries that one fusion has alike
_LONGEST_NAME = 1000  # characters of a site's name
_LONGEST_PATH = 110  # characters of a path in a sentence


@dataclass(frozen=True, slots=True)
class Item:
    """Something to fuse.

    Attributes:
        client: the site it is from: as its header says, else as its file is called.
        payload: the message itself, its bytes or its file.
        num_examples: how many examples stand behind it, if the user says so.
        spec: its network, for an update that was made in this process.
        packet: what is read instead of the payload, where it was opened before.
        place: where it lies: its file, or which of the updates it is.
        called: what it is called there.
        named: whether its header says which site it is from.
    """

    client: str
    payload: Message | bytes | Path
    num_examples: float | None = None
    spec: Spec | None = None
    packet: Packet | None = None
    place: str = ""
    called: str = ""
    named: bool = False

    @property
    def is_folder(self) -> bool:
        """Whether it is a checkpoint folder."""
        return isinstance(self.payload, Path) and is_folder(self.payload)

    @property
    def file(self) -> str:
        """Where it lies, if it is called otherwise there than its site."""
        place = self.payload.name if isinstance(self.payload, Path) else self.place
        return place if self.named and self.called != self.client else ""


@dataclass(frozen=True, slots=True)
class OpenedItem:
    """An update that could be read: its tensors, and what its header says.

    Attributes:
        item: where it came from.
        packet: its tensors and header.
        standing: where it stands if it brings no weights, where clients do not train.
        own: the model's own tensors: those it brings, or those it stands at.
        forms: their forms.
        signature: what updates must share to be fused: tensors, network, round, start and classes.
    """

    item: Item
    packet: Packet
    standing: Params | None = None
    own: Params = field(init=False, repr=False, compare=False)
    forms: Mapping[str, Form] = field(init=False, repr=False, compare=False)
    signature: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Found once, for signatures are compared many times; `replace` with another packet finds them again.
        own = split(self.packet)[0]
        own_or_standing: Params = own if own or self.standing is None else self.standing
        forms, header = forms_of(own_or_standing), self.packet.header
        said = (sorted((n, *f) for n, f in forms.items()), [header.get(key) for key in SHARED])
        for name, value in (("own", own_or_standing), ("forms", forms), ("signature", repr(said))):
            object.__setattr__(self, name, value)

    @property
    def blank(self) -> Params:
        """Tensors of these forms without numbers, however large."""
        return {name: form.blank() for name, form in self.forms.items()}

    @property
    def has_weights(self) -> bool:
        """Whether it brings weights."""
        return any(not name.startswith(NOTE) for name in self.packet.tensors)

    @property
    def is_plain(self) -> bool:
        """Whether it is a bare set of tensors, not an update that fedfuse wrote."""
        return self.packet.header.get("kind") != "reply"

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of evidence it brings."""
        return frozenset(n.removeprefix(NOTE).partition("/")[0] for n in self.packet.tensors if n.startswith(NOTE))


def site_of(header: Mapping[str, Any]) -> str | None:
    """The site that an update's header says it is from, None where it does not say.

    Example:
        >>> site_of({"kind": "reply", "client": "north"}), site_of({})
        ('north', None)
    """
    client = header.get("client") if header.get("kind") == "reply" else None
    fit = isinstance(client, str) and len(client) <= _LONGEST_NAME and client not in ("", SUM_NAME)
    return client if fit else None  # the door refuses a header with another kind of name


def open_all(items: Sequence[Item], standing: Params | None) -> tuple[list[OpenedItem], list[Refused]]:
    """What can be read of some updates, and a refusal for each that is damaged or packed."""
    opened, refused, whole = [], [], "the file as it was written; fetch it again"
    for item in items:
        try:
            found = OpenedItem(item, item.packet or open_weights(item.payload), standing)
            check_unpacked(found.forms, ours=bool(found.packet.header))
            opened.append(found)
        except Packed as why:
            refused.append(Refused(item.client, shorten(why.tensor), why.got, why.expected))
        except Altered as why:
            refused.append(Refused(item.client, "file", f"damaged or altered: {why.how}", whole))
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


def refuse_twins(opened: Sequence[OpenedItem], refused: list[Refused]) -> list[OpenedItem]:
    """Those that come once: of equal updates the first, and of several updates of one site none.

    Which of two updates is the site's own word cannot be seen from them; both files are named.
    """
    firsts, contents = dict[tuple[str, str], OpenedItem](), Counter(_content(o) for o in opened)
    different = []
    for o in opened:
        said = _content(o)
        key = said, fingerprint(o.packet.tensors) if said and contents[said] > 1 else o.item.place
        first = firsts.setdefault(key, o) if said else o
        if first is o:
            different.append(o)
            continue
        other = f"{_end_of(first.item.place)} is the same, of {shorten(first.item.client)}"
        words = f"each update once, and {other}; leave one out"
        refused.append(Refused(o.item.client, "update", _end_of(o.item.place), words))
    sites: dict[str, list[OpenedItem]] = {}
    for o in different:
        sites.setdefault(o.item.client, []).append(o)
    for client, twins in sites.items():
        for o in twins if len(twins) > 1 else ():
            others = names_text([_end_of(t.item.place) for t in twins if t is not o], most=3)
            words = f"one update of each site, and {others} is of {shorten(client)} too; leave one out"
            refused.append(Refused(client, "file", _end_of(o.item.place), words))
    return [o for o in different if len(sites[o.item.client]) == 1]


def _end_of(place: str) -> str:
    """A path as it ends, where it is too long for a sentence."""
    return place if len(place) <= _LONGEST_PATH else f"…{place[-_LONGEST_PATH:]}"


def _content(opened: OpenedItem) -> str:
    """What an update says of itself but for its site; nothing of plain tensors, which may be fused twice."""
    header = {key: value for key, value in opened.packet.header.items() if key != "client"}
    forms = sorted((name, *form) for name, form in opened.packet.tensors.forms.items())
    return "" if opened.is_plain or opened.item.is_folder else repr((sorted(header.items()), forms))


def first_difference(got: Mapping[str, Form], expected: Mapping[str, Form]) -> tuple[str, str, str] | None:
    """The first tensor in which two layouts differ, and how it is in each, in words."""
    for name in sorted(got.keys() | expected.keys()):
        if got.get(name) != expected.get(name):
            here, there = (form_words(forms[name]) if name in forms else "missing" for forms in (got, expected))
            return shorten(name), here, there
    return None


def shorten(text: object) -> str:
    """A word from a file, fit for a terminal."""
    return ascii(text)[:80] if not str(text).isprintable() else str(text)[:80]
