"""DENSE with the published numbers."""

from __future__ import annotations

from fedfuse.api import recipe as method
from fedfuse.core.settings import Optimizer
from fedfuse.nets.mixture import MeanLogit
from fedfuse.server.aggregate.ensemble import KeepAll
from fedfuse.server.steps.distill import Distill
from fedfuse.server.steps.synthesize import Generate


def test_published_settings() -> None:
    recipe = method("dense")
    assert recipe.aggregate == KeepAll(MeanLogit())
    generate = Generate(batch=256, latent=256, steps=30, lr=1e-3, oh=1.0, bn=1.0, adv=1.0, width=64)
    student = Optimizer(name="sgd", lr=0.005, momentum=0.9)
    assert recipe.steps == (
        Distill(generate, temperature=20.0, epochs=200, batch=256, optimizer=student, begin="fresh"),
    )
    assert recipe.result == "single"
    assert recipe.needs == {"network"}
    assert recipe.reveals == ()
