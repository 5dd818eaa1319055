from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError

import pytest

from fedfuse.errors import ConfigError
from fedfuse.flower import version as flower_version
from fedfuse.flower.version import QUIET, need_flower


def test_without_flower_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(flower_version, "version", missing)
    with pytest.raises(ConfigError, match=r"'fedfuse\[flower\]'"):
        need_flower()


@pytest.mark.parametrize("found", ["1.40.9", "1.42.0", "2.0"])
def test_another_flower_is_not_used_by_luck(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_version, "version", lambda _: found)
    with pytest.raises(ConfigError, match=rf"{found} .*1\.41"):
        need_flower()


def test_flower_is_told_to_be_quiet_unless_the_user_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in QUIET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setattr(flower_version, "version", lambda _: "1.41.3")
    need_flower()
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "1"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
