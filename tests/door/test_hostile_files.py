"""One hostile file among honest ones: it is refused by name, and the others are fused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedfuse
from fedfuse.core.spec import Spec
from fedfuse.data.sources import load
from fedfuse.errors import FuseError
from fedfuse.wire.codec import decode, encode

SPEC = Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 3})
Header = dict[str, Any]


def honest(folder: Path, method: str, count: int = 4) -> list[Path]:
    torch.manual_seed(0)
    start = SPEC.build().state_dict()
    paths = []
    for k in range(count):
        draw = torch.Generator().manual_seed(k)
        rows = torch.randn(12, 4, generator=draw), torch.arange(12) % 3
        update = fedfuse.local_update(SPEC, rows, method, client=f"site-{k}", start=start, classes=3, lr=0.05)
        paths.append(update.save(folder / f"site-{k}.safetensors"))
    return paths


def spec(header: Header, **changes: Any) -> Header:
    return header | {"spec": header["spec"] | changes}


HEADERS: dict[str, Callable[[Header], Header]] = {
    "a factory nobody knows": lambda h: spec(h, factory="no-such-network"),
    "a factory of somebody's": lambda h: spec(h, factory="os:system"),
    "options that do not fit": lambda h: spec(h, options={"inputs": 5, "hidden": [3], "classes": 3}),
    "options that are none": lambda h: spec(h, options=7),
    "a spec that is none": lambda h: h | {"spec": 7},
    "no spec": lambda h: {k: v for k, v in h.items() if k != "spec"},
    "a hundred thousand layers": lambda h: spec(h, options={"inputs": 4, "hidden": [1] * 100_000, "classes": 3}),
    "a round below zero": lambda h: h | {"round": -1},
    "a round of words": lambda h: h | {"round": "first"},
    "a huge round": lambda h: h | {"round": 10**30},
    "minus one class": lambda h: h | {"classes": -1},
    "a billion classes": lambda h: h | {"classes": 10**9},
    "four classes": lambda h: h | {"classes": 4},
    "classes in words": lambda h: h | {"classes": "three"},
    "a layout that is none": lambda h: h | {"layout": 7},
    "a client that is none": lambda h: h | {"client": 7},
    "a client of a megabyte": lambda h: h | {"client": "x" * 10**6},
    "a client that steers a terminal": lambda h: h | {"client": "site-0\x1b[2J"},
    "nothing": lambda _: {},
}


@pytest.mark.parametrize("method", ["fedavg", "ensemble", "fedov", "pfnm", "ridge", "pvi"])
@pytest.mark.parametrize("place", [0])
def test_whatever_one_header_says_the_others_are_fused(method: str, place: int, tmp_path: Path) -> None:
    """Before `ridge` and `pvi` too, whose start follows from what updates say: from what most say."""
    paths = honest(tmp_path, method)
    torch.manual_seed(0)
    begun = {"start": SPEC.build().state_dict()} if method == "pvi" else {}
    good = paths[place].read_bytes()
    packet = decode(good)
    for name, change in HEADERS.items():
        paths[place].write_bytes(encode(dict(packet.tensors), change(dict(packet.header))))
        try:
            fused = fedfuse.fuse(paths, method, **begun)
        except FuseError as why:
            pytest.fail(f"{name}: {why}")
        assert [r["client"] for r in fused.refused] in ([f"site-{place}"], []), name
        if fused.refused == ():
            assert name in ("nothing", "no spec", "a layout that is none", "a client that steers a terminal"), name


def test_tensors_of_other_names_in_the_first_file_do_not_say_what_all_began_with(tmp_path: Path) -> None:
    paths = honest(tmp_path, "pvi")
    torch.manual_seed(0)
    start, packet = SPEC.build().state_dict(), decode(paths[0].read_bytes())
    for tensors in (
        {},
        {f"a.{n}": t for n, t in packet.tensors.items()},
        {n: t.long() for n, t in packet.tensors.items()},
    ):
        paths[0].write_bytes(encode(tensors, packet.header))
        assert [r["client"] for r in fedfuse.fuse(paths, "pvi", start=start).refused] == ["site-0"]


@pytest.mark.parametrize("method", ["fedavg", "ensemble"])
def test_an_extra_tensor_costs_only_its_own_file(method: str, tmp_path: Path) -> None:
    paths = honest(tmp_path, method)
    packet = decode(paths[0].read_bytes())
    paths[0].write_bytes(encode({**packet.tensors, "extra": torch.zeros(2)}, packet.header))
    assert [r["client"] for r in fedfuse.fuse(paths, method).refused] == ["site-0"]


def test_a_module_beside_received_files_is_not_imported(tmp_path: Path) -> None:
    """A `PIL.py` among the updates ran when they were fused: their folder stood first on the import path."""
    paths = honest(tmp_path, "fedavg", 2)
    for name in ("PIL", "numba", "safetensors", "scipy"):
        (tmp_path / f"{name}.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    command = [sys.executable, "-P", "-m", "fedfuse", "fuse", *(p.name for p in paths), "-o", "out.safetensors"]
    home = os.environ | {"PYTHONPATH": str(Path(fedfuse.__file__).parents[1])}  # -P: as the installed command starts
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=home)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


RUN = """
name = "beside"
rounds = 1
[data]
source = "digits"
clients = 2
[model]
name = "mlp"
hidden = [4]
[local]
epochs = 1
batch_size = 64
[[methods]]
name = "fedavg"
"""


def test_nothing_beside_an_experiment_stands_before_what_is_installed(tmp_path: Path) -> None:
    """Workers are forked off a server that Python starts with the current folder in front: its `json.py` was run."""
    (place := tmp_path / "place").mkdir()
    (command := tmp_path / "fedfuse").write_text(
        "from fedfuse.cli import main\nif __name__ == '__main__':\n    main()\n"
    )
    (place / "run.toml").write_text(RUN)
    for name in ("json", "torch", "numpy", "PIL", "sitecustomize"):
        (place / f"{name}.py").write_text("from pathlib import Path\nPath('ran').touch()\nraise ImportError\n")
    home = os.environ | {"PYTHONPATH": str(Path(fedfuse.__file__).parents[1])}
    shell = [sys.executable, str(command), "run", "run.toml", "--check"]
    done = subprocess.run(shell, cwd=place, capture_output=True, text=True, check=False, env=home)
    assert done.returncode == 0, done.stderr
    done = subprocess.run(shell[:-1], cwd=place, capture_output=True, text=True, check=False, env=home)
    assert done.returncode == 0, done.stderr
    assert not (place / "ran").exists()


def test_a_data_source_of_pythons_own_is_refused_unrun(tmp_path: Path) -> None:
    with pytest.raises(FuseError, match="a part of Python itself"):
        load("os:system", options={"command": f"touch {tmp_path / 'ran'}"})
    assert not (tmp_path / "ran").exists()
