"""Bounds where files are fused: an argument of `fuse`; `--bounds` and `--set bounds.…` of the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import fedfuse
from fedfuse.cli.app import app
from fedfuse.core.settings import Bounds
from fedfuse.errors import ConfigError
from fedfuse.federation.fusion import fuse_files
from fedfuse.wire.codec import write

START = {"w": torch.ones(4)}


def sites(last: float) -> list[dict[str, Tensor]]:
    """Five sites that moved by about one, and one that moved further."""
    return [{"w": START["w"] + step} for step in (0.9, 1.0, 1.1, 1.0, 1.0, last)]


def test_a_client_above_the_bound_is_weakened_and_named() -> None:
    fused = fedfuse.fuse(sites(7.0), start=START)
    assert [c["client"] for c in fused.clipped] == ["model-6"]
    assert fused.refused == ()
    assert float(fused.state_dict()["w"][0]) == pytest.approx(1 + (5 + 2.0) / 6)


@pytest.mark.parametrize("bounds", [{"ratio": 10.0}, Bounds(ratio=10.0)])
def test_the_bound_is_the_callers_to_set(bounds: Bounds | dict[str, float]) -> None:
    fused = fedfuse.fuse(sites(7.0), start=START, bounds=bounds)
    assert (fused.clipped, fused.refused) == ((), ())
    assert float(fused.state_dict()["w"][0]) == pytest.approx(1 + 12 / 6)


def test_far_above_it_is_refused_unless_the_caller_clips() -> None:
    assert [r["client"] for r in fedfuse.fuse(sites(7.0), start=START, bounds={"margin": 1.0}).refused] == ["model-6"]
    assert fedfuse.fuse(sites(1e6), start=START, bounds={"over": "clip"}).refused == ()


@pytest.mark.parametrize("bounds", [{"ratios": 2}, {"ratio": 0.5}, {"over": "shout"}])
def test_bounds_that_are_none_are_one_sentence(bounds: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="bounds"):
        fedfuse.fuse(sites(1.0), start=START, bounds=bounds)


def written(folder: Path, last: float) -> tuple[list[Path], Path]:
    """The sites' files, and the start's."""
    files, start = [folder / f"site-{k}.safetensors" for k in range(6)], folder / "w0.safetensors"
    for path, params in zip([*files, start], [*sites(last), START], strict=True):
        write(path, params, {})
    return files, start


def test_the_command_takes_them_by_set(tmp_path: Path) -> None:
    files, start = written(tmp_path, 7.0)
    assert [c["client"] for c in fuse_files(files, start=start).clipped] == ["site-5"]
    assert fuse_files(files, sets=["bounds.ratio=10"], start=start).clipped == ()
    assert fuse_files(files, bounds="off", start=start).clipped == ()


def test_the_command_has_a_word_for_what_happens_above_the_bound(tmp_path: Path) -> None:
    files, start = written(tmp_path, 1e6)
    command = ["fuse", *map(str, files), "-o", str(tmp_path / "out.safetensors"), "--start", str(start)]
    told = {}
    for word in ("refuse", "clip", "off"):
        done = CliRunner().invoke(app, [*command, "--bounds", word, "--json"])
        assert done.exit_code == 0, done.output
        told[word] = json.loads(done.stdout)
    assert [entry["client"] for entry in told["refuse"]["refused"]] == ["site-5"]
    assert {entry["client"] for entry in told["clip"]["clipped"]} == {"site-5"}
    assert not told["off"].get("refused")
    assert not told["off"].get("clipped")
    wrong = CliRunner().invoke(app, [*command, "--bounds", "shout"])
    assert wrong.exit_code != 0


def test_without_bounds_no_client_is_compared() -> None:
    fused = fedfuse.fuse(sites(1e6), start=START, bounds={"over": "off"})
    assert (fused.clipped, fused.refused) == ((), ())


@pytest.mark.parametrize("method", ["flora", "flexlora"])
@pytest.mark.parametrize("factors", [(2.0, 2.0), (10.0, 10.0), (1.9, 1.9), (30.0, 1.0)])
def test_the_product_of_an_adapters_factors_is_bounded_and_not_only_each(
    factors: tuple[float, float], method: str
) -> None:
    """Twice the median of each factor was four times the median of what is fused."""

    def adapter(seed: int, a: float = 1.0, b: float = 1.0) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        A, B = torch.randn(4, 16, generator=draw), torch.randn(12, 4, generator=draw)
        return {"fc.lora_A.weight": a * A, "fc.lora_B.weight": b * B}

    def product(params: dict[str, Tensor]) -> Tensor:
        return params["fc.lora_B.weight"] @ params["fc.lora_A.weight"]

    honest = [adapter(seed) for seed in range(9)]
    alone = fedfuse.fuse(honest, "flora")
    assert (alone.refused, alone.clipped) == ((), ())
    fused = fedfuse.fuse([*honest, adapter(9, *factors)], "flora")
    assert "product of fc" in {entry["field"] for entry in fused.clipped}
    mine = 10 * (product(fused.state_dict()) - 0.9 * product(alone.state_dict()))
    usual = torch.tensor([float(product(each).norm()) for each in honest]).median()
    assert float(mine.norm()) <= 2.1 * float(usual)
    assert fedfuse.fuse([*honest, adapter(9, *factors)], method).refused == ()
