from __future__ import annotations

import re

import pytest

from fedfuse.data.official import OFFICIAL


@pytest.mark.parametrize("name", OFFICIAL)
def test_the_table_is_whole(name):
    official = OFFICIAL[name]
    assert official.name == name
    for remote in official.remotes:
        assert remote.url.startswith(("https://", "http://"))
        assert remote.url.endswith(f"/{remote.name}")
        assert re.fullmatch(r"[0-9a-f]{32}", remote.md5)
    # What is downloaded must be what is looked for afterwards.
    files = {file for part in (*official.train, *official.test) for file in part}
    got = {remote.name for remote in official.remotes}
    assert got == set(official.archives) or {name.removesuffix(".gz") for name in got} == files


def test_the_published_sizes():
    rows = {name: official.rows for name, official in OFFICIAL.items()}
    assert rows["mnist"] == rows["fashion-mnist"] == (60_000, 10_000)
    assert rows["cifar10"] == rows["cifar100"] == rows["cifar100-coarse"] == (50_000, 10_000)
    assert rows["svhn"] == (73_257, 26_032)
    assert rows["tiny-imagenet"] == (100_000, 10_000)
