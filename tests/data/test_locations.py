from __future__ import annotations

from pathlib import Path

import pytest

from fedfuse.data import download
from fedfuse.data.official import OFFICIAL
from fedfuse.errors import ConfigError


def test_the_cache_follows_xdg_and_else_home(monkeypatch, tmp_path):
    assert download.cache_folder() == tmp_path / "cache" / "fedfuse"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert download.cache_folder() == Path("/somewhere/.cache/fedfuse")


def test_own_folder_before_cache_before_shared(tiny, home, monkeypatch):
    order = [home / "own", home / "cache" / "fedfuse", home / "shared"]
    for folder in order:
        tiny.write(folder / "MNIST" / "raw", tiny.mnist_files())
    monkeypatch.setenv("FEDFUSE_DATA", str(order[0]))
    assert list(download.roots()) == order
    for folder in order:
        assert download.locate(OFFICIAL["mnist"]).store.location == folder / "MNIST" / "raw"
        for file in (folder / "MNIST" / "raw").iterdir():
            file.unlink()
    assert download.locate(OFFICIAL["mnist"]) is None


def test_a_whole_set_further_down_beats_a_partial_one(tiny, home, monkeypatch):
    monkeypatch.setenv("FEDFUSE_DATA", str(home / "own"))
    tiny.write(home / "own" / "cifar10", tiny.cifar10_files(batches=2))
    found = download.locate(OFFICIAL["cifar10"])
    assert found.missing == ("data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin")
    assert found.train == (("data_batch_1.bin",), ("data_batch_2.bin",))
    tiny.write(home / "shared" / "cifar-10-batches-bin", tiny.cifar10_files())
    assert download.locate(OFFICIAL["cifar10"]).store.location == home / "shared" / "cifar-10-batches-bin"


@pytest.mark.parametrize("folder", ["MNIST/raw", "MNIST", "mnist", "mnist/raw"])
def test_torchvision_layout_and_flat_folders_are_known(tiny, home, folder):
    tiny.write(home / "shared" / folder, tiny.mnist_files())
    assert download.locate(OFFICIAL["mnist"]).store.location == home / "shared" / folder
    assert download.locate(OFFICIAL["fashion-mnist"]) is None


def test_half_a_set_is_not_a_set(tiny, home):
    files = tiny.mnist_files()
    del files["t10k-labels-idx1-ubyte.gz"]
    tiny.write(home / "shared" / "mnist", files)
    assert download.locate(OFFICIAL["mnist"]) is None


@pytest.mark.parametrize("folder", ["", "cifar10"])
def test_archives_are_found_beside_and_inside(tiny, home, folder):
    archive = tiny.tar_bytes(tiny.cifar10_files(), "cifar-10-batches-bin")
    tiny.write(home / "shared" / folder, {"cifar-10-binary.tar.gz": archive})
    assert download.locate(OFFICIAL["cifar10"]).store.location.name == "cifar-10-binary.tar.gz"


def test_a_data_folder_that_is_none_is_named(monkeypatch, home):
    monkeypatch.setenv("FEDFUSE_DATA", str(home / "absent"))
    with pytest.raises(ConfigError, match=r"FEDFUSE_DATA is .*absent.* no folder"):
        download.locate(OFFICIAL["mnist"])
    (home / "here").mkdir()
    assert download.find_local(str(home / "here")) == home / "here"


def test_local_folders_and_npz_files_are_found_from_here_and_from_the_roots(home, monkeypatch):
    (home / "shared" / "pets").mkdir(parents=True)
    (home / "cache" / "fedfuse").mkdir(parents=True)
    (home / "cache" / "fedfuse" / "x.npz").write_bytes(b"")
    (home / "cache" / "fedfuse" / "x.doc").write_bytes(b"")
    assert download.find_local("pets") == home / "shared" / "pets"
    assert download.find_local("x.npz") == home / "cache" / "fedfuse" / "x.npz"
    assert download.find_local("x.doc") is None
    monkeypatch.setenv("HOME", str(home))
    assert download.find_local("~/shared/pets") == home / "shared" / "pets"
