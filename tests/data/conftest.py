"""Tiny sets in the official formats, and a server on loopback that misbehaves on request."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from fedfuse.data import download
from fedfuse.data.official import OFFICIAL, Official, Remote


@pytest.fixture(autouse=True)
def home(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, no proxy, no waiting between attempts, and no data of the machine unless asked for."""
    real = request.getfixturevalue("real_data") if "real_data" in request.fixturenames else None
    for name in ("FEDFUSE_DATA", "FEDFUSE_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    if real:
        monkeypatch.setenv("FEDFUSE_DATA", str(real))
        monkeypatch.setenv("FEDFUSE_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "SHARED", tmp_path / "shared")
    monkeypatch.setattr(download, "PAUSE", 0.0)
    return tmp_path


# --- formats ---------------------------------------------------------------------------------------------


def idx_bytes(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


def mnist_files(train: int = 30, test: int = 20, seed: int = 0) -> dict[str, bytes]:
    rng = np.random.default_rng(seed)
    files = {}
    for name, rows in (("train", train), ("t10k", test)):
        pixels = rng.integers(0, 256, (rows, 28, 28))
        files[f"{name}-images-idx3-ubyte.gz"] = gzip.compress(idx_bytes(pixels))
        files[f"{name}-labels-idx1-ubyte.gz"] = gzip.compress(idx_bytes(np.arange(rows) % 10))
    return files


def cifar_records(rows: int, labels: int, seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 256, (rows, labels + 3072), dtype=np.uint8)
    table[:, labels - 1] = np.arange(rows) % (10 if labels == 1 else 100)
    if labels == 2:
        table[:, 0] = np.arange(rows) % 20
    return table.tobytes()


def cifar10_files(batches: int = 5, rows: int = 10) -> dict[str, bytes]:
    files = {f"data_batch_{i}.bin": cifar_records(rows, 1, i) for i in range(1, batches + 1)}
    return files | {"test_batch.bin": cifar_records(rows, 1, 0), "batches.meta.txt": b"airplane\n"}


def cifar100_files() -> dict[str, bytes]:
    return {
        "train.bin": cifar_records(200, 2, 0),
        "test.bin": cifar_records(100, 2, 1),
        "fine_label_names.txt": "\n".join(f"fine-{i}" for i in range(100)).encode(),
        "coarse_label_names.txt": "\n".join(f"coarse-{i}" for i in range(20)).encode(),
    }


def svhn_bytes(rows: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32, 3, rows), dtype=np.uint8)
    labels = (np.arange(rows) % 10 + 1).astype(np.uint8)[:, None]
    stream = io.BytesIO()
    savemat(stream, {"X": pixels, "y": labels}, do_compression=True)
    return stream.getvalue()


def picture_bytes(colour: tuple[int, int, int] | int, size: tuple[int, int] = (64, 64), kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(stream, kind)
    return stream.getvalue()


def tiny_imagenet_files(per_class: int = 3) -> dict[str, bytes]:
    ids = ("n02000002", "n01000001")
    files = {"wnids.txt": "\n".join(ids).encode(), "words.txt": b"n01000001\tgoldfish, carp\nn02000002\tnewt\n"}
    for number, one in enumerate(ids):
        for i in range(per_class):
            colour = 40 * (i + 1) if number else (200, 100 * number, 10 * i)
            files[f"train/{one}/images/{one}_{i}.JPEG"] = picture_bytes(colour, kind="JPEG")
        files[f"train/{one}/{one}_boxes.txt"] = b"ignored"
        files[f"val/images/val_{number}.JPEG"] = picture_bytes((0, 0, 250 * number), kind="JPEG")
    lines = [f"val_{number}.JPEG\t{one}\t0\t32\t44\t62" for number, one in enumerate(ids)]
    return files | {"val/val_annotations.txt": "\n".join(lines).encode()}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def tar_bytes(files: dict[str, bytes], top: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def zip_bytes(files: dict[str, bytes], top: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"{top}/{name}", content)
    return stream.getvalue()


class Tiny:
    """Makers of tiny official files, as one fixture."""

    idx_bytes = staticmethod(idx_bytes)
    mnist_files = staticmethod(mnist_files)
    cifar_records = staticmethod(cifar_records)
    cifar10_files = staticmethod(cifar10_files)
    cifar100_files = staticmethod(cifar100_files)
    svhn_bytes = staticmethod(svhn_bytes)
    picture_bytes = staticmethod(picture_bytes)
    tiny_imagenet_files = staticmethod(tiny_imagenet_files)
    write = staticmethod(write)
    tar_bytes = staticmethod(tar_bytes)
    zip_bytes = staticmethod(zip_bytes)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def official(self, name: str, rows: tuple[int, int], remotes: tuple[Remote, ...] = ()) -> Official:
        """Let the set of this name have so many rows, and come from these addresses."""
        changed = replace(OFFICIAL[name], rows=rows, remotes=remotes or OFFICIAL[name].remotes)
        self._monkeypatch.setitem(OFFICIAL, name, changed)
        return changed


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Tiny:
    return Tiny(monkeypatch)


# --- a server --------------------------------------------------------------------------------------------


@dataclass
class Loopback:
    """What the server serves, how it misbehaves, and what it was asked."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)  # for each coming answer, after how many bytes it breaks off
    errors: list[int] = field(default_factory=list)  # for each coming answer, a status instead of the file
    ranges: bool = True
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def remote(self, name: str, md5: str | None = None) -> Remote:
        content = self.files.get(name, b"")
        return Remote(name, f"{self.url}/{name}", md5 or hashlib.md5(content).hexdigest())

    def serve(self, files: dict[str, bytes]) -> tuple[Remote, ...]:
        self.files.update(files)
        return tuple(self.remote(name) for name in files)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        server: Loopback = self.server.book  # type: ignore[attr-defined]
        name, wanted = self.path.lstrip("/"), self.headers.get("Range")
        server.asked.append((name, wanted))
        if server.errors and (status := server.errors.pop(0)):
            return self._refuse(status)
        if name not in server.files:
            return self._refuse(404)
        content = server.files[name]
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and server.ranges else 0
        if start and start >= len(content):
            return self._refuse(416)
        return self._send(content, start, server.cuts.pop(0) if server.cuts else None)

    def _send(self, content: bytes, start: int, cut: int | None) -> None:
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:][:cut])
        self.close_connection = cut is not None

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up early is part of the tests."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            raise


@pytest.fixture
def server() -> Iterator[Loopback]:
    http = _Server(("127.0.0.1", 0), _Handler)
    book = Loopback(f"http://127.0.0.1:{http.server_address[1]}")
    http.book = book  # type: ignore[attr-defined]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield book
    http.shutdown()
    http.server_close()
    thread.join()
