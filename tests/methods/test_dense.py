"""DENSE: nothing but weights leaves the clients, and one network comes back."""

from __future__ import annotations

import torch

from builders import drawn
from fedfuse.api import fuse
from fedfuse.api import recipe as method
from fedfuse.core.spec import Spec


def test_generated_inputs_teach_one_network_without_rows_or_evidence() -> None:
    recipe = method("dense", epochs=1, steps=1, batch=4, latent=4)
    assert recipe.needs == {"network"}
    assert recipe.reveals == ()
    spec = Spec("lenet", {"channels": 1, "size": 16, "classes": 3})
    fused = fuse([drawn(spec, seed) for seed in range(2)], recipe, model=spec)
    assert fused.state_dict().keys() == drawn(spec).keys()
    assert all(torch.isfinite(t).all() for t in fused.state_dict().values())
