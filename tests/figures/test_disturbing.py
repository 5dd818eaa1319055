"""Neuron disturbing: the toy's geometry, its networks, and pictures that appear."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedfuse.core.rows import Rows
from fedfuse.data import load
from fedfuse.experiment.reproduce import all_figures, experiments_folder, load_claims, load_figures
from fedfuse.nets.mixture import TopLogit
from fedfuse.report.claims import judge_claim, read_result

FIGURES = experiments_folder() / "figures"
disturbing: Any = load_figures(FIGURES / "disturbing.py")
accuracy = disturbing.accuracy
band = disturbing.band
toy = disturbing.toy

SIDES = (band(300, -2.0, 0.5, 1), band(300, -0.5, 2.0, 2))
TEST = band(200, -2.0, 2.0, 3)


def test_points_lie_in_the_papers_band() -> None:
    rows = band(2000, -2.0, 0.5, seed=5)
    away = rows.x[:, 1] - rows.x[:, 0].abs()
    assert rows.x[:, 0].min() >= -2
    assert rows.x[:, 0].max() <= 0.5
    assert away.abs().max() <= 1
    assert ((away > 0) == (rows.y == 0)).all(), "the upper class has the first output"
    assert abs(float((rows.y == 0).double().mean()) - 0.5) < 0.04


@pytest.fixture(scope="module")
def pair() -> disturbing.Pair:
    return toy(1, TEST, SIDES)


def test_adding_logits_is_concatenating_neurons(pair: disturbing.Pair) -> None:
    """The paper's global model: both neurons side by side, output weights side by side, no output bias."""
    left, right = (m.posterior.mean for m in pair.members)
    hidden = (TEST.x @ torch.cat([left["fc1.weight"], right["fc1.weight"]]).T).add(
        torch.cat([left["fc1.bias"], right["fc1.bias"]])
    )
    top = torch.cat([left["classifier.weight"], right["classifier.weight"]], 1)
    assert "classifier.bias" not in left
    expected = torch.nn.functional.leaky_relu(hidden) @ top.T
    assert torch.allclose(pair.together(TopLogit("all")).logits(TEST.x), expected, atol=1e-4)
    assert pair.added == accuracy(pair.together(TopLogit("all")), TEST)
    assert pair.chosen == accuracy(pair.together(TopLogit(1)), TEST)


def test_one_side_alone_is_right_on_its_own_side(pair: disturbing.Pair) -> None:
    for member, rows in zip(pair.members, SIDES, strict=True):
        assert accuracy(member, rows) > 0.9
    assert all(0.7 < a < 0.9 for a in pair.alone), "one neuron knows nothing of the other side"


def test_success_and_failure_are_alike_alone(pair: disturbing.Pair) -> None:
    served, hurt = (
        replace(pair, seed=1, alone=(0.8, 0.79), added=0.98),
        replace(pair, seed=2, alone=(0.8, 0.8), added=0.7),
    )
    unlike = replace(pair, seed=3, alone=(0.5, 0.8), added=0.4)
    assert disturbing.success_and_failure([unlike, served, hurt]) == (served, hurt)


def test_luck_is_the_best_and_the_worst_of_each_group(pair: disturbing.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disturbing, "GROUP", 2)
    pairs = [replace(pair, added=added) for added in (0.9, 0.7, 0.6, 0.8)]
    lucky, unlucky = disturbing.luck(pairs).values()
    assert lucky == {"accuracy": {0: 0.9, 1: 0.8}}
    assert unlucky == {"accuracy": {0: 0.7, 1: 0.6}}


def test_both_pictures_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disturbing, "GROUP", 2)
    monkeypatch.setattr(disturbing, "GROUPS", 1)
    monkeypatch.setattr(disturbing, "ADAM", disturbing.ADAM.model_copy(update={"epochs": 60}))
    digits = load("digits", train_limit=400)
    wide = replace(digits, train=Rows(digits.train.x, digits.train.y), test=Rows(digits.test.x, digits.test.y))
    monkeypatch.setattr(disturbing, "load", lambda _: wide)
    claims = load_claims()
    for name in ("ams-toy", "ams-confidence"):
        picture = all_figures()[name]
        assert picture.summary.endswith(".")
        path, numbers = picture.draw(tmp_path / "figures")
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert path.stat().st_size > 10_000
        assert any(
            claim.picture == name and judge_claim(claim, {name: read_result(numbers)}).effect for claim in claims
        )
