"""What the options of FedMA stand for."""

from __future__ import annotations

import pytest

from fedfuse.api import recipe as method
from fedfuse.core.settings import LocalSettings
from fedfuse.errors import ConfigError
from fedfuse.methods.fedma import MatchedLayers
from fedfuse.server.aggregate.chain import Matcher


def test_the_defaults_are_the_released_ones() -> None:
    recipe = method("fedma")
    assert recipe.aggregate == MatchedLayers() == MatchedLayers(Matcher(gamma=7.0))
    assert recipe.publishes == ("held",), "clients hear which layers are settled"
    assert method("fedma", gamma=1, shrink=False).aggregate == MatchedLayers(Matcher(1.0, shrink=False))


def test_clients_train_alike_whatever_the_server_does() -> None:
    assert method("fedma").work(LocalSettings()) == method("pfnm").work(LocalSettings())


@pytest.mark.parametrize("option", ["gamma", "variance", "prior_variance", "sweeps"])
def test_bad_options_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is 0"):
        method("fedma", **{option: 0})
