"""Pictures of matching, at a size a test can bear."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings, Optimizer
from fedfuse.core.spec import Spec
from fedfuse.data import load
from fedfuse.errors import ConfigError
from fedfuse.experiment.reproduce import all_figures, experiments_folder, load_figures
from fedfuse.nets.channels import channel_groups, move_units
from fedfuse.server.align.activations import ByActivations
from fedfuse.server.align.weights import ByWeights

FIGURES = experiments_folder() / "figures"
matching: Any = load_figures(FIGURES / "matching.py")

LOCAL = LocalSettings(epochs=8, batch_size=16, optimizer=Optimizer(lr=0.05, momentum=0.9))


@cache
def scene() -> matching.Scene:
    spec = Spec("mlp", {"inputs": 64, "hidden": [24, 16], "classes": 10})
    return matching.Scene("digits", load("digits", train_limit=800, test_limit=200), spec, LOCAL)


@cache
def pair() -> matching.Pair:
    return matching.trained(scene())


def test_matched_units_answer_alike_on_the_diagonal() -> None:
    before, after = (matching.likeness(pair(), way) for way in (None, ByActivations()))
    assert list(before) == ["fc1", "fc2"]
    for layer in before:
        assert np.diagonal(before[layer]).mean() < 0.25
        assert np.diagonal(after[layer]).mean() > 0.4
        assert np.allclose(np.sort(before[layer], axis=1), np.sort(after[layer], axis=1), atol=1e-4)


def test_matching_takes_the_barrier_away() -> None:
    naive, aligned = (pair().line(way) for way in (None, ByWeights()))
    assert aligned.barrier < 0.5 * naive.barrier
    assert aligned.accuracy[[0, -1]].tolist() == pytest.approx(naive.accuracy[[0, -1]].tolist(), abs=0.006)


def test_both_pictures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "first_scene", scene)
    monkeypatch.setattr(matching, "scenes", lambda: [scene(), replace(scene(), restate=True)])
    monkeypatch.setattr(matching, "trained", lambda shown: replace(pair(), scene=shown))
    monkeypatch.setattr(matching, "POINTS", 3)
    for name in ("matching-units", "matching-barrier"):
        (path,) = all_figures()[name].draw(tmp_path)
        assert path.name == f"{name}.png"
        assert path.stat().st_size > 20_000


def test_without_data_sets_the_bundled_digits_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "find", lambda _: None)
    assert [s.data.name for s in matching.scenes()] == ["digits"]


SPEC = Spec("vgg11", {"widths": 0.05, "hidden": [], "norm": True, "classes": 3})
ROWS = Rows(torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3)


def test_ends_are_the_networks_and_copies_are_apart_until_they_are_moved_back() -> None:
    torch.manual_seed(1)
    one = {
        n: t + 0.1 * torch.rand_like(t) if t.is_floating_point() else t for n, t in SPEC.build().state_dict().items()
    }
    draw = torch.Generator().manual_seed(2)
    groups = channel_groups(SPEC, (3, 32, 32))
    copy = move_units(one, {g: torch.randperm(g.size, generator=draw) for g in groups})
    line = matching.straight_line(SPEC, one, copy, ROWS, points=5)
    loss = float(F.cross_entropy(SPEC.forward(one, ROWS.x), ROWS.y))
    assert line.loss[[0, -1]].tolist() == pytest.approx([loss, loss], rel=1e-4)
    assert abs(float(line.loss[2]) - loss) > 1e-4
    assert matching.straight_line(SPEC, one, one, ROWS, points=3).barrier == pytest.approx(0, abs=1e-6)
    assert matching.straight_line(SPEC, one, copy, ROWS, 3, norms=ROWS).loss.isfinite().all()


def test_the_barrier_is_measured_from_the_chord() -> None:
    places = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    assert matching.Line(places, torch.tensor([1.0, 2.5, 2.0], dtype=torch.float64), places).barrier == pytest.approx(
        1.0
    )
    with pytest.raises(ConfigError, match="a line of 1 points"):
        matching.straight_line(SPEC, {}, {}, ROWS, points=1)
