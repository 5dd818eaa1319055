"""FedOV: the published numbers, one output more in every round, and files of sites that never met."""

from __future__ import annotations

import torch

from fedfuse.api import fuse, local_update
from fedfuse.api import recipe as method
from fedfuse.core.model import Single, outputs
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines.local import InProcess, Population
from fedfuse.methods.fedov import OpenSet
from fedfuse.nets.head import UnknownClass
from fedfuse.nets.mixture import Mixture, OpenSetVote
from fedfuse.server.aggregate.ensemble import KeepAll
from fedfuse.server.loop import RunPlan, run

SPEC = Spec("mlp", {"inputs": 36, "hidden": [6], "classes": 3})


def rows(seed: int, classes: tuple[int, ...], n: int = 24) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    y = torch.tensor(classes)[torch.randint(len(classes), (n,), generator=draw)]
    x = 0.2 * torch.rand(n, 1, 6, 6, generator=draw)
    x[torch.arange(n), 0, 2 * y] += 0.8  # each class lights another line
    return Rows(x, y)


def test_published_settings() -> None:
    recipe = method("fedov")
    assert recipe.objective == OpenSet(steps=5, stride=0.002, reach=0.5, mix=0.01)
    assert recipe.aggregate == KeepAll(OpenSetVote("all"))
    assert recipe.prepare_model == UnknownClass()
    assert recipe.result == "mixture"


def test_rounds_go_on_after_distillation_with_the_output_put_back() -> None:
    people = Population.of({"a": rows(0, (0, 1)), "b": rows(1, (1, 2))})
    local = LocalSettings(batch_size=8, optimizer={"name": "adam", "lr": 0.01})
    bench = Bench(None, rows(2, (0, 1, 2)).x, 2, 3, local)
    recipe = method("fedov", distill="unlabelled", epochs=2)
    state = ServerState(0, Single.of(SPEC.build(), SPEC))
    states = [r.state for r in run(recipe, InProcess(people), bench, None, state, RunPlan(rounds=2))]
    assert [outputs(s.single) for s in states] == [3, 3]
    assert states[-1].single.spec == SPEC


def test_sites_with_files_only() -> None:
    torch.manual_seed(0)
    updates = [
        local_update(
            SPEC,
            rows(i, classes),
            "fedov",
            client=f"s{i}",
            classes=3,
            epochs=40,
            batch_size=8,
            optimizer={"name": "adam", "lr": 0.02},
        )
        for i, classes in enumerate([(0, 1), (1, 2), (2, 0)])
    ]
    fused = fuse(updates, "fedov")
    assert isinstance(fused.model, Mixture)
    assert not fused.refused
    assert [outputs(m) for m in fused.model.members] == [4, 4, 4]
    test = rows(9, (0, 1, 2), 90)
    assert fused.logits(test.x).shape == (90, 3)
    assert (fused.logits(test.x).argmax(-1) == test.y).double().mean() > 0.8
