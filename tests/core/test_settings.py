"""Local settings: defaults, refusals, and the rate in force."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from fedfuse.core.settings import Decay, LocalSettings, Optimizer, validate_settings
from fedfuse.errors import ConfigError


@pytest.mark.parametrize(
    "bad",
    [
        {"epochs": -1},
        {"epochs": 1.5},
        {"batch_size": -1},
        {"clip": 0},
        {"l1": -1e-9},
        {"l1": math.inf},
        {"round_decay": 1.1},
        {"optimizer": {"lr": 0}},
        {"optimizer": {"lr": math.inf}},
        {"optimizer": {"lr": math.nan}},
        {"optimizer": {"momentum": 1.0}},
        {"optimizer": {"betas": [0.9, 1.0]}},
        {"optimizer": {"name": "sdg"}},
        {"decay": {"gamma": 0.0}},
        {"decay": {"gamma": 0.5, "milestones": [0]}},
        {"epoch": 3},
    ],
)
def test_impossible_settings_are_refused_in_one_sentence(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LocalSettings.model_validate(bad)
    with pytest.raises(ConfigError) as why:
        validate_settings(LocalSettings, bad)
    assert "\n" not in str(why.value)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        LocalSettings().epochs = 3  # type: ignore[misc]


def test_the_rate_falls_every_few_local_epochs_and_from_round_to_round() -> None:
    settings = LocalSettings(epochs=4, optimizer=Optimizer(lr=1.0), decay=Decay(gamma=0.5, every=2), round_decay=0.1)
    assert [settings.rate(0, e) for e in range(4)] == [1.0, 1.0, 0.5, 0.5]
    assert [settings.rate(2, e) for e in (0, 3)] == pytest.approx([0.01, 0.005])


def test_milestones_count_local_epochs_over_all_rounds() -> None:
    """SWA's schedule: the rate falls tenfold at half and at three quarters of all epochs, even inside a round."""
    settings = LocalSettings(epochs=3, optimizer=Optimizer(lr=1.0), decay=Decay(gamma=0.1, milestones=(4, 6)))
    rates = [settings.rate(r, e) for r in range(3) for e in range(3)]
    assert rates == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.01])


def test_the_text_of_settings_is_stable() -> None:
    assert repr(LocalSettings()) == repr(LocalSettings.model_validate({}))
