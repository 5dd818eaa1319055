from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from fedfuse.data import download
from fedfuse.data.download import fetch, fetch_all
from fedfuse.data.official import OFFICIAL, Remote
from fedfuse.errors import ConfigError

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def remote(server) -> Remote:
    return server.serve({"set.bin": CONTENT})[0]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_arrives_whole_and_alone(server, remote, tmp_path):
    path = fetch(remote, tmp_path / "deep" / "folder")
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == ["set.bin"]
    assert server.asked == [("set.bin", None)]


def test_a_file_that_is_there_is_not_fetched_again(server, remote, tmp_path):
    fetch(remote, tmp_path)
    fetch(remote, tmp_path)
    assert len(server.asked) == 1


def test_a_cut_connection_is_taken_up_where_it_broke(server, remote, tmp_path):
    server.cuts = [3000, 1000]
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert [asked for _, asked in server.asked] == [None, "bytes=3000-", "bytes=4000-"]


def test_what_an_earlier_process_fetched_is_kept(server, remote, tmp_path):
    (tmp_path / "set.bin.part").write_bytes(CONTENT[:5000])
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert server.asked == [("set.bin", "bytes=5000-")]
    assert "set.bin.part" not in names(tmp_path)


def test_a_download_killed_before_its_rename_is_finished(server, remote, tmp_path):
    (tmp_path / "set.bin.part").write_bytes(CONTENT)
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert server.asked == [("set.bin", f"bytes={len(CONTENT)}-")]


def test_a_foreign_part_is_thrown_away_and_everything_fetched_again(server, remote, tmp_path):
    (tmp_path / "set.bin.part").write_bytes(b"something else")
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    assert [asked for _, asked in server.asked] == ["bytes=14-", None]


def test_a_server_that_cannot_resume_sends_everything(server, remote, tmp_path):
    server.ranges = False
    (tmp_path / "set.bin.part").write_bytes(CONTENT[:5000])
    assert fetch(remote, tmp_path).read_bytes() == CONTENT


def test_a_connection_that_breaks_for_ever_is_given_up_and_its_bytes_kept(server, remote, tmp_path):
    server.cuts = [700] + [0] * 20
    with pytest.raises(ConfigError, match=r"set\.bin .*127\.0\.0\.1.*cut.*700 bytes are kept") as caught:
        fetch(remote, tmp_path)
    assert "fetch it by hand" in str(caught.value)
    assert (tmp_path / "set.bin.part").read_bytes() == CONTENT[:700]
    server.cuts = []
    assert fetch(remote, tmp_path).read_bytes() == CONTENT


def test_a_server_that_starts_over_and_breaks_anywhere_is_given_up(server, remote, tmp_path):
    server.ranges = False
    server.cuts = [3000, 1000, 2000] * 20
    with pytest.raises(ConfigError, match="cut"):
        fetch(remote, tmp_path)
    assert len(server.asked) == 1 + download.ATTEMPTS


def test_a_wrong_sum_names_file_address_and_both_sums(server, tmp_path):
    server.files["set.bin"] = CONTENT
    remote = server.remote("set.bin", md5="0" * 32)
    with pytest.raises(ConfigError, match=rf"set\.bin from {remote.url} has the MD5 sum \w+, expected 0000"):
        fetch(remote, tmp_path)
    assert names(tmp_path) == []


def test_a_missing_file_is_an_error_at_once(server, tmp_path):
    remote = server.remote("gone.bin")
    with pytest.raises(ConfigError, match=rf"gone\.bin .* {remote.url}: .*404.*by hand"):
        fetch(remote, tmp_path)
    assert len(server.asked) == 1


def test_a_troubled_server_is_asked_again(server, remote, tmp_path):
    server.errors = [503, 500]
    assert fetch(remote, tmp_path).read_bytes() == CONTENT
    server.errors = [503] * 20
    with pytest.raises(ConfigError, match="503"):
        fetch(remote, tmp_path / "other")


def test_no_server_at_all_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"set\.bin could not be fetched .*refused"):
        fetch(Remote("set.bin", "http://127.0.0.1:9/set.bin", "0" * 32), tmp_path)


def test_a_folder_that_cannot_be_written_is_named(remote, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"set\.bin cannot be written to .*file.*XDG_CACHE_HOME"):
        fetch(remote, tmp_path / "file")


def test_a_full_disk_is_no_network_error(remote, tmp_path, monkeypatch):
    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download, "_copy", full)
    with pytest.raises(ConfigError, match="No space left"):
        fetch(remote, tmp_path)


def test_two_at_once_fetch_once(server, remote, tmp_path):
    threads = [threading.Thread(target=fetch, args=(remote, tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "set.bin").read_bytes() == CONTENT
    assert len(server.asked) == 1


@pytest.mark.parametrize(("value", "forbidden"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_offline_is_a_word_the_user_can_say(value, forbidden, monkeypatch):
    monkeypatch.setenv("FEDFUSE_OFFLINE", value)
    assert download.offline() is forbidden


def test_offline_forbids_and_says_what_to_do(server, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDFUSE_OFFLINE", "1")
    with pytest.raises(
        ConfigError, match=r"FEDFUSE_OFFLINE forbids.*train-images-idx3-ubyte\.gz.*MNIST/raw.*FEDFUSE_DATA"
    ):
        fetch_all(OFFICIAL["mnist"], tmp_path)
    assert server.asked == []


# --- locations -----------------------------------------------------------------------------------------------------


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
