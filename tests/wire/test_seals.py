"""Files for others carry a checksum: whichever bit is another one, they are refused by name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import safetensors
import torch
from tests.conftest import Fedfuse

import fedfuse as ff
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.wire.codec import Altered, read, write, write_sealed

SPEC = Spec("mlp", {"inputs": 3, "hidden": [2], "classes": 2})


def flip(path: Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def site(folder: Path, name: str, method: str = "fedavg") -> Path:
    torch.manual_seed(0)
    start = SPEC.build().state_dict()
    draw = torch.Generator().manual_seed(sum(name.encode()))
    rows = torch.randn(20, 3, generator=draw), torch.arange(20) % 2
    return ff.local_update(SPEC, rows, method, client=name, start=start).save(folder / f"{name}.safetensors")


def test_whichever_bit_is_flipped_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w"
    write_sealed(path, {"w": torch.arange(6.0), "n": torch.tensor(3)}, {"kind": "reply"}, {"format": "pt"})
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole)
        flip(path, place, place % 8)
        with pytest.raises(ff.FuseError):
            read(path)


def test_other_readers_read_it_and_a_few_lines_check_it(tmp_path: Path) -> None:
    path = tmp_path / "w"
    write_sealed(path, {"w": torch.ones(2)}, {"kind": "reply"}, {"format": "pt"})
    with safetensors.safe_open(path, "pt") as file:
        told = file.metadata()
        assert file.get_tensor("w").equal(torch.ones(2))
    assert told["format"] == "pt"
    zeroed = path.read_bytes().replace(told["fedfuse.sha256"].encode(), b"0" * 64)
    assert hashlib.sha256(zeroed).hexdigest() == told["fedfuse.sha256"]
    assert read(path).sealed
    assert read(path).header == {"kind": "reply"}


def test_a_file_that_promises_a_checksum_and_has_none_is_refused_and_an_older_one_is_read(tmp_path: Path) -> None:
    write(tmp_path / "old", {"w": torch.ones(2)}, {"kind": "reply"})
    assert not read(tmp_path / "old").sealed
    write(tmp_path / "bare", {"w": torch.ones(2)}, {"kind": "reply", "format": 2})
    with pytest.raises(Altered, match="bare is damaged or altered: it has no checksum"):
        read(tmp_path / "bare")
    write(tmp_path / "later", {"w": torch.ones(2)}, {"kind": "reply", "format": 3})
    with pytest.raises(ff.FuseError, match="its format is 3"):
        read(tmp_path / "later")


def test_a_flipped_bit_costs_its_own_update_and_no_other(fedfuse: Fedfuse, tmp_path: Path) -> None:
    paths = [site(tmp_path, name) for name in ("north", "east", "south", "west")]
    flip(paths[0], -5)
    said = fedfuse("fuse", *paths, "-o", "all.safetensors")
    assert said.code == 0
    assert "refused north: file is damaged or altered" in said.err
    assert "3 of 4 updates fused" in said.out


@pytest.mark.parametrize(
    "words", [["show"], ["evaluate", "--data", "digits"], ["export", "--to", "state-dict", "-o", "x"]]
)
def test_a_flipped_bit_of_a_fused_model_is_seen_by_all_that_read_it(
    words: list[str], fedfuse: Fedfuse, tmp_path: Path
) -> None:
    ff.fuse([site(tmp_path, name) for name in ("north", "east")]).save("all.safetensors")
    assert "as it was written" in fedfuse("show", "all.safetensors").out
    flip(Path("all.safetensors"), -5)
    said = fedfuse(words[0], "all.safetensors", *words[1:])
    assert said.code == 2
    assert "all.safetensors is damaged or altered" in said.err
    assert "fetch it again" in said.err


def test_a_flipped_bit_is_seen_in_sums_in_the_start_and_in_evidence(fedfuse: Fedfuse, tmp_path: Path) -> None:
    ridge = [site(tmp_path, name, "ridge") for name in ("north", "east")]
    fused = ff.fuse(ridge, "ridge")
    fused.save("all.safetensors")
    fused.partial().save("region.safetensors")
    flip(Path("region.safetensors"), -3)
    [refused] = ff.fuse(["region.safetensors", *ridge], "ridge").refused
    assert (refused["client"], refused["field"], refused["got"][:18]) == ("region", "file", "damaged or altered")
    flip(Path("all.safetensors"), -3)
    with pytest.raises(ConfigError, match="all.safetensors is damaged or altered"):
        ff.fuse(ridge, "ridge", start="all.safetensors")
    with pytest.raises(ConfigError, match="all.safetensors is damaged or altered"):
        ff.fuse(ridge, "ridge", into="all.safetensors")
    assert fedfuse("init", "fed", "--model", "mlp", "--classes", "a,b", "--shape", "3").code == 0
    flip(Path("fed/w0.safetensors"), -3)
    said = fedfuse("fuse", *ridge, "--federation", "fed", "-o", "none.safetensors")
    assert (said.code, "w0.safetensors is damaged or altered" in said.err) == (2, True)


def test_moments_carry_a_checksum_too(fedfuse: Fedfuse) -> None:
    Path("a.csv").write_text("age,ill\n" + "".join(f"{k},{k % 2}\n" for k in range(20)))
    assert fedfuse("moments", "--data", "a.csv", "--target", "ill", "--task", "binary", "-o", "a.moments").code == 0
    text = Path("a.moments").read_text()
    take = ("init", "fed", "--task", "binary", "--moments", "a.moments", "--classes", "0,1")
    Path("a.moments").write_text(text.replace('"total": 190', '"total": 191'))
    said = fedfuse(*take)
    assert (said.code, "a.moments is damaged or altered" in said.err) == (2, True)
    plain = json.loads(text)
    del plain["sha256"]
    Path("a.moments").write_text(json.dumps(plain))
    assert "it has no checksum" in fedfuse(*take).err
    Path("a.moments").write_text(json.dumps(plain | {"format": 1}))
    assert fedfuse(*take).code == 0, "older files have none"
