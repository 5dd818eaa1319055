"""What the doctor finds."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fedfuse.experiment import doctor
from fedfuse.experiment.doctor import examine


def test_missing_data_come_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDFUSE_DATA", str(tmp_path))
    assert examine()["data"]["mnist"].startswith("not found: set FEDFUSE_DATA")


def test_part_of_a_data_set_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for name in ("data_batch_1.bin", "test_batch.bin"):
        (tmp_path / "cifar-10-batches-bin" / name).write_bytes(b"")
    monkeypatch.setenv("FEDFUSE_DATA", str(tmp_path))
    told = examine()["data"]["cifar10"]
    assert "without" in told
    assert "set train_limit to use what is there" in told


def test_whole_data_are_named_by_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        path = tmp_path / "MNIST" / "raw" / f"{part}-ubyte.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(b""))
    monkeypatch.setenv("FEDFUSE_DATA", str(tmp_path))
    assert examine()["data"]["mnist"].startswith(str(tmp_path))


def test_who_waits_for_a_compiler_is_told_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_cold", lambda: True)
    monkeypatch.setattr(doctor, "why_not", lambda: "")
    assert doctor.compile_notice("torch") == ""
    assert "once on this machine" in doctor.compile_notice("auto")
    monkeypatch.setattr(doctor, "is_cold", lambda: False)
    assert doctor.compile_notice("auto") == ""


def test_the_doctor_says_whether_kernels_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine()["machine"]["kernels"].startswith("compiled where they are faster")
    monkeypatch.setattr(doctor, "why_not", lambda: "not installed: pip install 'fedfuse[fast]'")
    assert examine()["machine"]["kernels"] == "not installed: pip install 'fedfuse[fast]'"
    monkeypatch.setattr(doctor, "is_cold", lambda: True)
    assert doctor.compile_notice("auto") == ""


def test_a_missing_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "versions", lambda: {"torch": "2"})
    assert examine()["software"]["flwr"] == "not installed: pip install 'fedfuse[flower]'"
