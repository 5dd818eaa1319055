"""OTFusion in the hands of users: files of different widths, and `align` before any method."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedfuse.api import fuse, local_update
from fedfuse.api import recipe as method
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError, QuorumLost
from fedfuse.nets.channels import channel_groups, move_units
from fedfuse.server.align.transport import ByTransport
from fedfuse.wire.files import load_model

NARROW = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 3})
WIDE = Spec("mlp", {"inputs": 4, "hidden": [8], "classes": 3})
DEEP = Spec("mlp", {"inputs": 4, "hidden": [5, 5], "classes": 3})
X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def site(client: str, spec: Spec, folder: Path) -> Path:
    torch.manual_seed(len(client))
    update = local_update(spec, (X, Y), client=client, epochs=5, batch_size=8, lr=0.1)
    return update.save(folder / f"{client}.safetensors")


def test_files_of_different_widths_fuse_into_one_network_that_saves_and_loads(tmp_path: Path) -> None:
    files = [site("a", NARROW, tmp_path), site("b", WIDE, tmp_path), site("c", WIDE, tmp_path)]
    fused = fuse(files, "otfusion")
    assert fused.module().fc1.weight.shape == (8, 4)
    again, _ = load_model(fused.save(tmp_path / "fused.safetensors"))
    assert torch.allclose(again.logits(X), fused.logits(X))
    assert fused.facts["moved"]["fc1"].keys() == {"a", "b", "c"}


def test_other_depths_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"b has 2 kinds of hidden units \(fc1, fc2\) and a has 1 \(fc1\)"):
        fuse([site("a", NARROW, tmp_path), site("b", DEEP, tmp_path)], "otfusion")


def test_a_shuffled_copy_is_recognised_by_name_or_by_value() -> None:
    torch.manual_seed(0)
    one = WIDE.build().state_dict()
    (group,) = channel_groups(WIDE, (4,))
    copy = move_units(one, {group: [3, 1, 7, 5, 0, 2, 6, 4]})
    for align in ("weights", "activations", "transport", "graph", ByTransport(ground="activations")):
        fused = fuse([one, copy], "fedavg", model=WIDE, align=align).state_dict()
        assert all(torch.allclose(fused[n], one[n], atol=1e-6) for n in one)


def test_weights_without_a_network_cannot_be_followed() -> None:
    weights = WIDE.build().state_dict()
    with pytest.raises(QuorumLost, match="model-1: network is unknown: plain tensors do not say"):
        fuse([weights, weights], "fedavg", align="weights")


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="option reg is -1"):
        method("otfusion", reg=-1)
