from __future__ import annotations

import gzip
import io
import sys

import pytest

from fedfuse.data import stores
from fedfuse.data.stores import Folder, Tar, Zip, bar, open_store
from fedfuse.errors import ConfigError

FILES = {"a.txt": b"first", "deep/b.bin": b"second", "deep/er/c.bin": b"third"}


@pytest.fixture(params=["folder", "zip", "tar"])
def store(request, tiny, tmp_path):
    if request.param == "folder":
        return open_store(tiny.write(tmp_path / "set", FILES))
    make, name = (tiny.zip_bytes, "set.zip") if request.param == "zip" else (tiny.tar_bytes, "set.tar.gz")
    (tmp_path / name).write_bytes(make(FILES, "top"))
    return open_store(tmp_path / name)


def test_every_store_answers_alike(store):
    assert {name: store.read(name) for name in FILES} == FILES
    assert all(store.has(name) for name in FILES)
    assert not store.has("absent")
    assert store.listing("deep/er") == ["c.bin"]


def test_folders_and_zips_list_folders_too(tiny, tmp_path):
    (tmp_path / "set.zip").write_bytes(tiny.zip_bytes(FILES, "top"))
    for store in (Folder(tiny.write(tmp_path / "set", FILES)), Zip(tmp_path / "set.zip")):
        assert store.listing("") == ["a.txt", "deep"]
        assert store.listing("deep") == ["b.bin", "er"]
        assert store.has("deep/er")


def test_archives_without_a_common_top_keep_their_names(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "flat.zip", "w") as archive:
        archive.writestr("a.txt", b"1")
        archive.writestr("b/c.txt", b"2")
    assert Zip(tmp_path / "flat.zip").read("b/c.txt") == b"2"


def test_a_folder_unzips_on_the_way(tmp_path):
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"content"))
    assert Folder(tmp_path).has("x")
    assert Folder(tmp_path).read("x") == b"content"
    (tmp_path / "x").write_bytes(b"plain")
    assert Folder(tmp_path).read("x") == b"plain"


def test_cut_and_scrambled_archives_are_named(tiny, tmp_path):
    whole = {
        "x.gz": gzip.compress(bytes(range(256)) * 50),
        "set.zip": tiny.zip_bytes(FILES, "top"),
        "set.tar.gz": tiny.tar_bytes({"a": bytes(range(256)) * 50}, "top"),
    }
    for name, content in whole.items():
        for broken in (content[: len(content) // 2], b"no archive at all", b""):
            (tmp_path / name).write_bytes(broken)
            store, inside = (Folder(tmp_path), "x") if name == "x.gz" else (open_store(tmp_path / name), "a.txt")
            with pytest.raises(ConfigError, match=f"{name} is damaged"):
                store.read(inside)


def test_a_scrambled_zip_member_is_named(tiny, tmp_path):
    content = bytearray(tiny.zip_bytes({"a.txt": b"first" * 100}, "top"))
    at = content.index(b"firstfirst")
    content[at : at + 5] = b"FIRST"
    (tmp_path / "set.zip").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.txt in .*set\.zip is damaged.*CRC"):
        Zip(tmp_path / "set.zip").read("a.txt")


def test_absent_files_are_named(tmp_path, tiny):
    with pytest.raises(ConfigError, match="cannot be read"):
        Folder(tmp_path).read("absent")
    with pytest.raises(ConfigError, match="cannot be listed"):
        Folder(tmp_path).listing("absent")
    (tmp_path / "set.tar.gz").write_bytes(tiny.tar_bytes(FILES, "top"))
    with pytest.raises(ConfigError, match="holds no absent"):
        Tar(tmp_path / "set.tar.gz").read("absent")


def test_no_more_is_unzipped_than_the_reader_allows(tiny, tmp_path):
    """A file of 389 kB took 381 MB before anybody looked at what it was."""
    bomb = gzip.compress(bytes(10**7))
    (tmp_path / "x.gz").write_bytes(bomb)
    (tmp_path / "set.zip").write_bytes(tiny.zip_bytes({"x": bytes(10**7)}, "top"))
    for store in (Folder(tmp_path), Zip(tmp_path / "set.zip")):
        with pytest.raises(ConfigError, match="x.* is damaged: it unzips to more than 1,000,000 bytes"):
            store.read("x", limit=10**6)
        assert len(store.read("x")) == 10**7


def test_a_tar_of_more_than_the_limit_is_not_read(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "MOST_BYTES", 1000)
    (tmp_path / "set.tar.gz").write_bytes(tiny.tar_bytes({"a": bytes(600), "b": bytes(600)}, "top"))
    with pytest.raises(ConfigError, match="unzips to more than 1,000 bytes"):
        Tar(tmp_path / "set.tar.gz").read("a")


def test_several_gzipped_pieces_in_a_row_are_one_file(tmp_path):
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"one ") + gzip.compress(b"two") + bytes(8))
    assert Folder(tmp_path).read("x") == b"one two"


@pytest.mark.parametrize("name", ["../secret", "a/../../secret", "/etc/hostname", "a\0b"])
def test_no_name_leads_out_of_a_folder(tmp_path, name):
    (tmp_path / "secret").write_text("s")
    (tmp_path / "set").mkdir()
    for ask in (Folder(tmp_path / "set").has, Folder(tmp_path / "set").read, Folder(tmp_path / "set").listing):
        with pytest.raises(ConfigError, match="which is not inside it"):
            ask(name)


# --- progress ------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("in_bytes", [False, True])
def test_a_terminal_sees_a_bar(monkeypatch, in_bytes):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with bar("reading tiny", 10, done=2, in_bytes=in_bytes) as advance:
        advance(8)
    assert "reading tiny" in terminal.getvalue()


def test_elsewhere_there_is_silence(capsys):
    with bar("reading", None) as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")
