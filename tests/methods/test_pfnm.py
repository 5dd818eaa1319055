"""What the options of PFNM stand for."""

from __future__ import annotations

import pytest

from fedfuse.api import recipe as method
from fedfuse.client.class_sums import LabelCounts
from fedfuse.core.settings import LocalSettings
from fedfuse.errors import ConfigError
from fedfuse.methods.pfnm import MatchedUnits
from fedfuse.server.aggregate.chain import Matcher


def test_the_defaults_are_the_published_grid() -> None:
    assert method("pfnm").aggregate == MatchedUnits((1.0, 1e-3, 50.0), (1.0, 0.1, 0.5), (1.0, 10.0), Matcher())
    chosen = method("pfnm", gamma=[2], variance=[0.5], odds="released", shrink=False, sweeps=3, scale="layer")
    rest = Matcher(odds="released", shrink=False, sweeps=3, scale="layer")
    assert chosen.aggregate == MatchedUnits((2.0,), (0.5,), (1.0, 10.0), rest)


def test_clients_train_as_ever_and_send_their_label_counts() -> None:
    work = method("pfnm").work(LocalSettings())
    assert work.evidence == (LabelCounts(),)
    assert work == method("pfnm", gamma=[3.0]).work(LocalSettings()), "all choices are the server's"
    assert method("pfnm").reveals == ("how many rows of each class the client has",)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gamma": []}, "gamma is"),
        ({"gamma": [0.0]}, "greater than 0"),
        ({"variance": [-1.0]}, "greater than 0"),
        ({"sweeps": 0}, "sweeps is 0"),
        ({"odds": "even"}, "odds is 'even'"),
        ({"scale": "net"}, "scale is 'net'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        method("pfnm", **options)
