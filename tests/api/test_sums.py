"""Sums of sums: regions, late sites and sites that leave give what fusing their updates at once gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedfuse
from builders import rows
from fedfuse.core.rows import Rows
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.wire.codec import decode, encode

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
START = {name: tensor.clone() for name, tensor in NET.state_dict().items()}
REFIT = fedfuse.recipe("refit", penalty=1e-3, precision="float64")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One update file of each of four sites."""
    folder, found = tmp_path_factory.mktemp("sites"), {}
    for place, site in enumerate(("north", "east", "south", "west")):
        own = rows(20 + 9 * place, 4, seed=place, shift=1.0)
        update = fedfuse.local_update(NET, own, REFIT, client=site, start=START, classes=3)
        found[site] = update.save(folder / f"{site}.safetensors")
    return found


def fused(updates: list[Any], **how: Any) -> fedfuse.Fused:
    return fedfuse.fuse(updates, REFIT, start=START, model=NET, **how)


def assert_equal(a: fedfuse.Fused, b: fedfuse.Fused, tolerance: float) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert all(torch.allclose(t, theirs[n], rtol=tolerance, atol=tolerance) for n, t in ours.items())


def test_fusing_regions_is_fusing_all_sites(files: dict[str, Path], tmp_path: Path) -> None:
    regions = [
        fused([files[site] for site in region]).partial().save(tmp_path / f"{'-'.join(region)}.safetensors")
        for region in (("north", "east"), ("south", "west"))
    ]
    assert_equal(fused(list(regions)), fused(list(files.values())), 1e-12)
    twice = fused([fused(list(regions)).partial()])
    assert twice.facts["rows"] == fused(list(files.values())).facts["rows"]


def test_a_late_site_is_added(files: dict[str, Path], tmp_path: Path) -> None:
    *early, late = files.values()
    before = fused(early).save(tmp_path / "before.safetensors")
    assert_equal(fused([late], into=before), fused(list(files.values())), 1e-12)


def test_a_site_is_taken_out_by_name_or_by_its_file(files: dict[str, Path], tmp_path: Path) -> None:
    without = fused([path for site, path in files.items() if site != "east"])
    apart = fused(list(files.values()), keep_sites=True).save(tmp_path / "apart.safetensors")
    assert_equal(fused([], into=apart, remove=["east"]), without, 1e-12)
    total = fused(list(files.values())).save(tmp_path / "total.safetensors")
    assert_equal(fused([], into=total, remove=[files["east"]]), without, 1e-10)
    with pytest.raises(ConfigError, match="'east'"):
        fused([], into=total, remove=["east"])


def test_what_was_never_in_cannot_be_taken_out(files: dict[str, Path], tmp_path: Path) -> None:
    small = fused([files["north"]]).save(tmp_path / "small.safetensors")
    with pytest.raises(ConfigError, match="no part"):
        fused([], into=small, remove=[files["west"]])
    total = fused(list(files.values())).save(tmp_path / "total.safetensors")
    torch.nn.init.zeros_(NET[0].bias)
    moved = fedfuse.local_update(NET, Rows(torch.zeros(5, 4), torch.arange(5) % 3), REFIT, classes=3)
    NET.load_state_dict(START)
    path = moved.save(tmp_path / "moved.safetensors")
    with pytest.raises(ConfigError, match="start"):
        fused([], into=total, remove=[path])


def test_what_a_file_keeps_is_never_lost_unasked(files: dict[str, Path], tmp_path: Path) -> None:
    total = fused(list(files.values())).save(tmp_path / "total.safetensors")
    start = {**START, "0.bias": START["0.bias"] + 1.0}
    owns = {f"late-{k}": rows(30, 4, seed=k, shift=1.0) for k in range(3)}
    late = [fedfuse.local_update(NET, r, REFIT, client=site, start=start, classes=3) for site, r in owns.items()]
    with pytest.raises(ConfigError, match="start"):
        fedfuse.fuse(late, REFIT, start=start, model=NET, into=total)


def test_small_sites_are_added_to_the_sum_of_many(files: dict[str, Path], tmp_path: Path) -> None:
    many = rows(6000, 4, seed=7, shift=1.0)
    large = fedfuse.local_update(NET, many, REFIT, client="large", start=START, classes=3)
    before = fused([large]).save(tmp_path / "before.safetensors")
    after = fused(list(files.values()), into=before)
    assert not after.refused
    counts = [6000.0, *(decode(path.read_bytes()).header["num_examples"] for path in files.values())]
    assert_equal(after, fused([large, *files.values()], num_examples=counts), 1e-12)
    assert after.partial().num_examples == after.facts["rows"]


def test_methods_that_read_more_than_sums_say_so(files: dict[str, Path], tmp_path: Path) -> None:
    plain: dict[str, Tensor] = dict(START)
    model = fedfuse.fuse([plain, plain]).save(tmp_path / "mean.safetensors")
    with pytest.raises(RecipeError, match="no one sum"):
        fedfuse.fuse([plain, plain], "ensemble", model=NET).partial()
    with pytest.raises(RecipeError, match="adding"):
        fedfuse.fuse([plain], into=model)
    with pytest.raises(ConfigError, match="keep"):
        fused([files["north"]], into=model)
    with pytest.raises(ConfigError, match="--into"):
        fused([files["north"]], remove=["east"])


def test_only_sums_is_what_secure_aggregation_needs() -> None:
    found = {name: fedfuse.recipe(name).only_sums for name in ("fedavg", "fednova", "ridge", "fedlpa", "ensemble")}
    assert found == {"fedavg": True, "fednova": True, "ridge": True, "fedlpa": False, "ensemble": False}


def test_sums_of_far_more_rows_than_others_have_need_somebody_to_vouch(files: dict[str, Path], tmp_path: Path) -> None:
    """Sums of a million times the rows, each as it should be beside the others, were the whole solution."""
    paths = [*files.values(), tmp_path / "fifth.safetensors"]
    packet = decode(paths[0].read_bytes())
    for factor, refused in ((2.0, []), (1e6, ["fifth"])):
        count = packet.header["num_examples"] * factor
        paths[-1].write_bytes(
            encode(
                {n: t * factor for n, t in packet.tensors.items()},
                {**packet.header, "client": "fifth", "num_examples": count},
            )
        )
        assert [r["client"] for r in fused(list(paths)).refused] == refused
        assert not fused(list(paths)).clipped, "what is let in is the sum of rows and nothing else"
        numbers = [decode(path.read_bytes()).header["num_examples"] for path in paths]
        assert not fused(list(paths), num_examples=numbers).refused
