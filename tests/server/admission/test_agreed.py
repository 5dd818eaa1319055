"""Class names and forms of rows across files: mapped where that is exact, else refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedfuse
from builders import initial
from fedfuse.api import Update
from fedfuse.core.inputs import PictureForm
from fedfuse.core.model import Single
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError, QuorumLost
from fedfuse.server.admission.agreed import reorder_outputs
from fedfuse.wire.codec import Packet, decode

SPEC = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 3})
START = initial(SPEC)
NAMES = ("benign", "malignant", "normal")


def update(client: str, names: tuple[str, ...] | None = NAMES, method: str = "fedavg", seed: int = 0) -> Update:
    """A site's update on the same rows whatever the order of its classes: label k stands for names[k]."""
    draw = torch.Generator().manual_seed(seed)
    x, truth = torch.randn(24, 4, generator=draw), torch.arange(24) % 3
    order = names if names is not None and set(names) == set(NAMES) else NAMES
    y = torch.tensor([order.index(NAMES[t]) for t in truth])
    return fedfuse.local_update(SPEC, (x, y), method, client=client, start=START, classes=names, epochs=2, lr=0.1)


def test_names_travel_into_the_fused_model() -> None:
    fused = fedfuse.fuse([update("a"), update("b")])
    assert fused.about.class_names == NAMES
    assert [(s.client, s.num_examples) for s in fused.about.sites] == [("a", 24.0), ("b", 24.0)]
    assert (fused.about.method, fused.remarks) == ("fedavg", ())
    assert fused.about.versions["fedfuse"] == fedfuse.__version__


def test_other_classes_are_refused_by_name() -> None:
    strange = update("c", ("aaa", "benign", "normal"))
    fused = fedfuse.fuse([update("a"), update("b"), strange])
    (refusal,) = fused.refused
    assert (refusal["client"], refusal["field"]) == ("c", "classes")
    assert refusal["got"] == "aaa, benign, normal (with aaa, without malignant)"
    assert refusal["expected"].startswith("benign, malignant, normal as most have; make one federation file")
    assert [dict(r) for r in fused.about.refused] == [dict(refusal)]
    with pytest.raises(QuorumLost, match="no classes are shared .* a has benign, malignant, normal; c has aaa"):
        fedfuse.fuse([update("a"), strange])


def test_weights_trained_in_another_order_are_refused() -> None:
    turned = update("c", ("normal", "benign", "malignant"), "fedlpa")
    fused = fedfuse.fuse([update("a", method="fedlpa"), update("b", method="fedlpa"), turned], "fedlpa")
    (refusal,) = fused.refused
    assert (refusal["client"], refusal["field"], refusal["got"]) == (
        "c",
        "the order of classes",
        "normal, benign, malignant",
    )


@given(st.permutations(NAMES))
@settings(max_examples=6, deadline=None)
def test_an_ensemble_answers_alike_whatever_the_order_of_a_sites_classes(order: list[str]) -> None:
    x = torch.randn(7, 4)
    other = update("c", tuple(order), seed=3)
    direct = Single(SPEC, fedfuse.fuse([other], "fedavg").model.posterior)  # type: ignore[attr-defined]
    answer = fedfuse.fuse([update("a"), update("b"), other], "ensemble").model.members[2].logits(x)
    assert torch.allclose(answer, direct.logits(x)[:, [order.index(n) for n in NAMES]], atol=1e-6)


def test_files_without_names_are_taken_at_their_word_with_a_sentence() -> None:
    plain = fedfuse.local_update(SPEC, (torch.randn(9, 4), torch.arange(9) % 3), client="old", start=START, epochs=1)
    fused = fedfuse.fuse([update("a"), update("b"), plain])
    assert fused.refused == ()
    assert fused.remarks == ("old does not name the classes: their order is taken to be benign, malignant, normal",)
    assert fedfuse.fuse([plain, plain]).remarks == ()


def test_what_one_file_of_many_says_alone_is_not_the_fused_models_word() -> None:
    """One file among silent ones named the classes of all, and said how everybody's rows are scaled."""
    rows = [(torch.randn(9, 4), torch.arange(9) % 3) for _ in range(4)]
    plain = [fedfuse.local_update(SPEC, each, client=f"s{k}", start=START, epochs=1) for k, each in enumerate(rows)]
    bare = [replace(u, packet=Packet.of((p := decode(u.payload)).tensors, _without(p.header, "inputs"))) for u in plain]
    packet = decode(bare[0].payload)
    form = PictureForm(height=2, width=2, channels=1, mean=(0.5,), std=(1e-3,))
    told = {"class_names": ["x", "y", "z"], "inputs": form.model_dump(mode="json")}
    fused = fedfuse.fuse([replace(bare[0], packet=Packet.of(packet.tensors, {**packet.header, **told})), *bare[1:]])
    assert (fused.about.class_names, fused.about.inputs) == ((), None)
    assert [remark.split(" alone")[0] for remark in fused.remarks] == [
        "the names of classes: told by s0",
        "the form of inputs: told by s0",
    ]


def _without(header: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in header.items() if k != key}


def test_other_forms_of_rows_are_refused_by_name() -> None:
    form = PictureForm(height=2, width=2, channels=1)
    scaled = form.model_copy(update={"mean": (0.5,), "std": (0.2,)})
    x, y = torch.rand(6, 1, 2, 2), torch.arange(6) % 3

    def made(client: str, inputs: PictureForm | None) -> Update:
        return fedfuse.local_update(SPEC, (x, y), client=client, start=START, classes=NAMES, inputs=inputs)

    fused = fedfuse.fuse([made("a", form), made("arrays", None), made("scaled", scaled)])
    assert [(r["client"], r["got"]) for r in fused.refused] == [("scaled", "2×2 grey, normalized")]
    assert fused.about.inputs == form


def test_a_header_that_lies_about_its_names_is_refused() -> None:
    liar = update("c")
    packet = decode(liar.payload)
    lies = replace(liar, packet=Packet.of(packet.tensors, {**packet.header, "class_names": ["a", "b"]}))
    deep = replace(liar, packet=Packet.of(packet.tensors, {**packet.header, "client": "d", "class_names": [["a"]]}))
    fused = fedfuse.fuse([update("a"), update("b"), update("b2"), lies, deep])
    assert [(r["client"], r["field"]) for r in fused.refused] == [("c", "header"), ("d", "header")]
    assert "2 names for 3 classes" in fused.refused[0]["got"]


class Twisted(nn.Module):
    """Its last linear layer is not where its outputs come from."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.side = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(x) * self.side(x).sum(-1, keepdim=True)


def test_outputs_that_cannot_be_seen_to_move_are_not_moved() -> None:
    spec = Spec.of(Twisted())
    with pytest.raises(ConfigError, match="cannot be seen to be those of its last linear layer"):
        reorder_outputs(Single.of(Twisted(), spec), (1, 2, 0), (4,))
    with pytest.raises(ConfigError, match="cannot be seen"):
        reorder_outputs(Single.of(SPEC.build(), SPEC), (1, 2, 0), None)


def test_who_cannot_be_put_in_order_is_refused_alone() -> None:
    x, y = torch.randn(9, 4), torch.arange(9) % 3
    each = [
        fedfuse.local_update(Twisted(), (x, y), client=c, classes=n, epochs=1) for c, n in (("a", NAMES), ("b", NAMES))
    ]
    odd = fedfuse.local_update(Twisted(), (x, y), client="odd", classes=NAMES[::-1], epochs=1)
    fused = fedfuse.fuse([*each, odd], "ensemble")
    assert [(r["client"], r["field"]) for r in fused.refused] == [("odd", "the order of classes")]
    assert len(fused.model.members) == 2
