"""Fusing without a server: `update` at each site, `fuse` anywhere, `evaluate` the result; all by files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from tests.conftest import Fedfuse

from fedfuse import cli
from fedfuse.data import load
from fedfuse.wire.codec import read, write

NETWORK = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width=6, classes=10):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x):
        return self.body(x)
"""


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites with digits of their own, as arrays in files."""
    folder, digits = tmp_path_factory.mktemp("sites"), load("digits")
    for site, labels in enumerate(((0, 1, 2, 3), (3, 4, 5, 6), (6, 7, 8, 9))):
        mine = torch.isin(digits.train.y, torch.tensor(labels)).nonzero()[:, 0][:120]
        rows, test = digits.train.take(mine), digits.test.take(range(40))
        arrays = {"x_train": rows.x, "y_train": rows.y, "x_test": test.x, "y_test": test.y}
        names = np.array(digits.classes)
        np.savez(folder / f"site-{site}.npz", classes=names, **{k: v.numpy() for k, v in arrays.items()})
    return folder


@pytest.fixture
def fedfuse(fedfuse: Fedfuse, tmp_path: Path) -> Fedfuse:
    """Types one command in a fresh folder that holds a network."""
    (tmp_path / "mine.py").write_text(NETWORK)
    return fedfuse


def update(fedfuse: Fedfuse, sites: Path, site: int, *words: str, name: str = "") -> Path:
    path = Path(f"{name or f'update-{site}'}.safetensors")
    said = fedfuse(
        *("update", "--data", sites / f"site-{site}.npz", "--method", "fedlpa", "-o", path, "--set", "local.epochs=3"),
        *("--set", "local.optimizer.lr=0.1", "--set", "model.hidden=[8]", "--set", "method.min_rows=100", *words),
    )
    assert said.code == 0, said.err
    return path


@pytest.fixture
def files(fedfuse: Fedfuse, sites: Path) -> list[Path]:
    """An update of each site."""
    return [update(fedfuse, sites, site) for site in range(3)]


def tampered(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    packet = read(path)
    tensors = {n: t.clone() for n, t in packet.tensors.items()}
    change(tensors)
    write(path, tensors, packet.header)


def test_three_sites_one_file_each_one_model(fedfuse: Fedfuse, sites: Path, files: list[Path]) -> None:
    said = fedfuse("fuse", *files, "--method", "fedlpa", "-o", "global.safetensors")
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines()[-1] == "global.safetensors: 3 of 3 updates fused by fedlpa"
    plain = fedfuse("fuse", *files, "-o", "mean.safetensors")
    assert plain.code == 0  # updates made for one method can be fused by another
    scores = json.loads(fedfuse("evaluate", "global.safetensors", "mean.safetensors", "--data", "digits", "--json").out)
    assert scores["global.safetensors"]["accuracy"] > scores["mean.safetensors"]["accuracy"] + 0.05
    loaded = safetensors.torch.load_file("global.safetensors")
    assert set(loaded) == {"fc1.weight", "fc1.bias", "classifier.weight", "classifier.bias"}


def test_update_says_what_leaves_the_site(fedfuse: Fedfuse, sites: Path) -> None:
    said = fedfuse("update", "--data", sites / "site-0.npz", "--method", "fedlpa", "-o", "a.safetensors")
    assert "120 examples behind it" in said.out
    assert "it reveals: second moments of every layer's inputs and gradients" in said.out
    told = json.loads(fedfuse("update", "--data", sites / "site-0.npz", "-o", "b.safetensors", "--json").out)
    assert told["file"] == "b.safetensors"
    assert told["reveals"] == []
    assert told["bytes"] == Path("b.safetensors").stat().st_size
    assert read(Path("a.safetensors")).header["client"] == "a"


def test_sites_begin_alike_by_seed_or_by_file(fedfuse: Fedfuse, sites: Path, files: list[Path]) -> None:
    starts = {read(path).header["start"] for path in files}
    assert len(starts) == 1
    fedfuse("fuse", *files, "-o", "global.safetensors")
    second = [update(fedfuse, sites, site, "--start", "global.safetensors") for site in range(2)]
    assert {read(path).header["start"] for path in second}.isdisjoint(starts)
    said = fedfuse("fuse", *second, "--start", "global.safetensors", "--method", "fednova", "-o", "next.safetensors")
    assert said.code == 0, said.err
    wrong = fedfuse("fuse", *second, "--start", "next.safetensors", "--method", "fednova", "-o", "no.safetensors")
    assert wrong.code == 2
    assert "trained from other weights" in wrong.err


def test_a_network_of_the_users_own(fedfuse: Fedfuse, sites: Path) -> None:
    for site in range(2):
        words = ("--data", sites / f"site-{site}.npz", "--model", "mine:Net", "--set", "model.width=5")
        assert fedfuse("update", *words, "--method", "fedlpa", "-o", f"{site}.safetensors").code == 0
    unnamed = fedfuse("fuse", "0.safetensors", "1.safetensors", "--method", "ensemble", "-o", "g.safetensors")
    assert unnamed.code == 3
    assert (
        "0: network is 'mine:Net', whose code was not named here, expected one that 'ensemble' can run" in unnamed.err
    )
    named = ("--model", "mine:Net")
    fused = ("fuse", "0.safetensors", "1.safetensors", "--method", "fedlpa", "-o", "g.safetensors")
    assert fedfuse(*fused).code == 0
    without = Path("g.safetensors").read_bytes()
    assert fedfuse(*fused, *named).code == 0
    assert Path("g.safetensors").read_bytes() == without, "fusing needs no code"
    scored = fedfuse("evaluate", "g.safetensors", "--data", "digits", *named, "--json")
    assert 0 <= json.loads(scored.out)["g.safetensors"]["accuracy"] <= 1
    assert safetensors.torch.load_file("g.safetensors")["body.1.weight"].shape == (5, 64)


ODD = """
import torch
from torch import nn

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 10)

    def forward(self, x):
        return self.out(self.lstm(x[:, 0])[0][:, -1])

class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.out = nn.Linear(64, 6), nn.Linear(6, 10)

    def forward(self, x):
        return self.out(self.enter(x.flatten(1)).relu().cumsum(1))
"""


@pytest.mark.parametrize(("network", "told"), [("Recurrent", ""), ("Running", "not aligned: enter.weight (cumsum)")])
def test_units_that_could_not_be_aligned_are_named(
    fedfuse: Fedfuse, sites: Path, tmp_path: Path, network: str, told: str
) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    for site in (0, 1):
        words = ("--data", sites / f"site-{site}.npz", "--model", f"odd:{network}", "-o", f"{site}.safetensors")
        assert fedfuse("update", *words).code == 0
    said = fedfuse(
        *("fuse", "0.safetensors", "1.safetensors", "--model", f"odd:{network}", "--align", "weights"),
        *("-o", "all.safetensors"),
    )
    assert said.code == 0, said.err
    assert told in said.err
    assert ("not aligned" in said.err) == bool(told)


@pytest.mark.parametrize("quorum", [0.5, 0.9])
def test_a_bad_file_is_told_and_the_quorum_decides(fedfuse: Fedfuse, files: list[Path], quorum: float) -> None:
    tampered(files[1], lambda tensors: tensors["~kron/fc1/out"].fill_(float("nan")))
    said = fedfuse("fuse", *files, "--method", "fedlpa", "--quorum", quorum, "-o", "global.safetensors")
    assert "update-1: kron/fc1/out is not finite, expected finite numbers" in said.err
    if quorum == 0.9:
        assert said.code == 3
        assert not Path("global.safetensors").exists()
    else:
        assert said.code == 0
        assert "2 of 3 updates fused by fedlpa" in said.out


def test_a_truncated_file_another_network_and_another_start_are_told(
    fedfuse: Fedfuse, sites: Path, files: list[Path]
) -> None:
    update(fedfuse, sites, 0, "--set", "model.hidden=[9]", name="wide")
    update(fedfuse, sites, 0, "--seed", "7", name="late")
    Path("short.safetensors").write_bytes(files[0].read_bytes()[:1000])
    odd = ["wide.safetensors", "late.safetensors", "short.safetensors"]
    said = fedfuse("fuse", *files, *odd, "--method", "fedlpa", "-o", "global.safetensors", "--json")
    assert said.code == 0, said.err
    told = {r["client"]: r["field"] for r in json.loads(said.out)["refused"]}
    assert told == {"wide": "classifier.weight", "late": "start", "short": "file"}
    assert fedfuse("fuse", files[0], *odd, "--method", "fedlpa", "-o", "none.safetensors").code == 3


def test_what_cannot_be_is_one_sentence(fedfuse: Fedfuse, sites: Path, files: list[Path]) -> None:
    cases = {
        ("fuse", "absent.safetensors", "-o", "x"): "there is no file or folder absent.safetensors",
        ("fuse", files[0], "--method", "fedlpaa", "-o", "x"): "did you mean 'fedlpa'?",
        ("fuse", files[0], "--set", "dampin=3", "--method", "fedlpa", "-o", "x"): "did you mean 'damping'?",
        ("fuse", files[0], "--method", "fednova", "-o", "x"): "needs the weights the sites started from",
        ("fuse", *files, "--num-examples", "3", "-o", "x"): "1 numbers of examples were given for 3 updates",
        ("update", "--data", "digits", "--set", "epochs=3", "-o", "x"): "must begin with model., local. or method.",
        ("update", "--data", "digits", "--set", "local.epoch=3", "-o", "x"): "did you mean 'epochs'?",
        ("update", "--data", "digits", "--start", "mine.py", "-o", "x"): "mine.py is no file of weights to start from",
        ("update", "--data", "nowhere.npz", "-o", "x"): "nowhere.npz",
        ("evaluate", "mine.py", "--data", "digits"): "mine.py is neither a model nor an update of fedfuse",
    }
    for words, sentence in cases.items():
        said = fedfuse(*words)
        assert said.code == 2, (words, said)
        assert sentence in said.err
        assert said.err.startswith("error: ")
        assert said.err.count("\n") == 1


def test_masses_can_be_given(fedfuse: Fedfuse, files: list[Path]) -> None:
    said = fedfuse(
        "fuse", *files, "--num-examples", "1", "--num-examples", "1", "--num-examples", "2", "-o", "global.safetensors"
    )
    assert said.code == 0, said.err
    each = [read(path).tensors["fc1.bias"] for path in files]
    found = safetensors.torch.load_file("global.safetensors")["fc1.bias"]
    assert torch.allclose(found, (each[0] + each[1] + 2 * each[2]) / 4)


def peak_of(*words: str | Path) -> int:
    """The most memory, in bytes, that one `fedfuse` command held."""
    command = [sys.executable, "-c", "from fedfuse.cli import main; main()", *map(str, words)]
    child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return int(usage.ru_maxrss) * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_examples", [(), ("--num-examples", "1", "--num-examples", "2", "--num-examples", "3", "--num-examples", "4")]
)
def test_memory_is_that_of_the_result_however_many_files(tmp_path: Path, num_examples: tuple[str, ...]) -> None:
    """Four files of 100 MB: beyond what the command needs anyway, only the fused model is held."""
    size = 100 * 2**20
    for k in range(4):
        write(tmp_path / f"{k}.safetensors", {"w": torch.full((size // 4,), float(k))}, {})
        write(tmp_path / f"small-{k}.safetensors", {"w": torch.zeros(1)}, {})
    plain = peak_of("fuse", *tmp_path.glob("small-*"), "-o", tmp_path / "small", *num_examples)
    large = peak_of("fuse", *tmp_path.glob("?.safetensors"), "-o", tmp_path / "large", *num_examples)
    assert large - plain < 1.5 * size


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_a_merge_that_is_stopped_says_so_and_leaves_nothing(
    number: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    for seed in range(2):
        (tmp_path / f"m{seed}").mkdir()
        safetensors.torch.save_file({"w": torch.full((4,), float(seed))}, tmp_path / f"m{seed}" / "model.safetensors")

    def stop(*_: object, **__: object) -> None:
        assert [path for path in tmp_path.iterdir() if path.name.startswith(".out.")]  # in the middle of it
        os.kill(os.getpid(), number)

    monkeypatch.setattr("fedfuse.wire.folders.write_sealed", stop)
    monkeypatch.setattr(sys, "argv", ["fedfuse", "fuse", "m0", "m1", "-o", "out"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == code
    assert "stopped" in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m0", "m1"]
