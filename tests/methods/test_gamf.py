"""GAMF: shuffled copies are one network."""

from __future__ import annotations

import pytest
import torch

from fedfuse.api import fuse
from fedfuse.api import recipe as method
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.nets.channels import channel_groups, move_units

SPEC = Spec("mlp", {"inputs": 4, "hidden": [6, 5], "classes": 3})


def test_shuffled_copies_are_one_network() -> None:
    torch.manual_seed(0)
    one = SPEC.build().state_dict()
    draw = torch.Generator().manual_seed(1)
    groups = channel_groups(SPEC, (4,))
    copies = [move_units(one, {g: torch.randperm(g.size, generator=draw) for g in groups}) for _ in range(3)]
    fused = fuse([one, *copies], "gamf", model=SPEC).state_dict()
    assert all(torch.allclose(fused[n], one[n], atol=1e-6) for n in one)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 < cold ≤ hot"):
        method("gamf", hot=0.01)
