"""What a federation folder fixes: where there is one, it judges each file, and what most files say does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedfuse.core.inputs import RowForm
from fedfuse.core.messages import Form
from fedfuse.errors import Refused
from fedfuse.server.admission.opened import OpenedItem, first_difference, shorten

BY_FOLDER = "as the federation folder says"
_REMEDY = f"{BY_FOLDER}; train by that folder"


@dataclass(frozen=True, slots=True)
class Agreed:
    """What every file of a federation says alike.

    Attributes:
        class_names: the name of each output, in order.
        inputs: the form of rows, with their scale.
        header: further entries of headers: the task and the number of classes.
        networks: entries about the network, as it is and as methods prepare it; none where another start decides.
    """

    class_names: tuple[str, ...]
    inputs: RowForm
    header: Mapping[str, Any]
    networks: tuple[Mapping[str, Any], ...] = ()

    def find_difference(self, opened: OpenedItem, mixed: bool) -> Refused | None:
        """The first entry in which a file differs, whose network may be one of its own where networks are mixed.

        Names of classes and the form of rows are looked at elsewhere, for some methods put them in order.
        """
        if opened.is_plain:
            return None
        header, client = opened.packet.header, opened.item.client
        if odd := _difference(header, self.header):
            return _refusal(client, header, self.header, odd)
        if mixed or not self.networks or any(_difference(header, one) is None for one in self.networks):
            return None
        near = next((one for one in self.networks if header.get("spec") == one["spec"]), self.networks[0])
        return _refusal(client, header, near, _difference(header, near) or "spec")


def find_other_start(opened: OpenedItem, forms: Mapping[str, Form], start: str) -> Refused | None:
    """Where a file's tensors, or the start that it names, are others than those of the start."""
    client, declared = opened.item.client, opened.packet.header.get("start")
    if opened.has_weights and (odd := first_difference(opened.forms, forms)):
        return Refused(client, odd[0], odd[1], f"{odd[2]}, {_REMEDY}")
    if declared is None or declared == start:
        return None
    words = f"{start}, the weights that the sites began with ({_REMEDY})"
    return Refused(client, "start", shorten(declared), words)


def _difference(header: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    return next((key for key, value in expected.items() if header.get(key) != value), None)


def _refusal(client: str, header: Mapping[str, Any], expected: Mapping[str, Any], key: str) -> Refused:
    return Refused(client, key, header.get(key), f"{shorten(expected[key])}, {_REMEDY}")
