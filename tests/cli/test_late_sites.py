"""The command line adds to fused files, takes sites out of them, and brings evidence at finished models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.builders import ok
from tests.conftest import Fedfuse

from fedfuse.data import load
from fedfuse.wire.codec import read
from fedfuse.wire.messages import NOTE

SITES = ("north", "east", "south")


@pytest.fixture
def fedfuse(fedfuse: Fedfuse, tmp_path: Path) -> Fedfuse:
    """Types one command in a folder with the rows of three sites."""
    digits = load("digits")
    for place, site in enumerate(SITES):
        rows = digits.train.take(range(100 * place, 100 * place + 80))
        arrays = {"x_train": rows.x, "y_train": rows.y, "x_test": digits.test.x, "y_test": digits.test.y}
        names = np.array(digits.classes)
        np.savez(tmp_path / f"{site}.npz", classes=names, **{k: v.numpy() for k, v in arrays.items()})
    return fedfuse


def bring_sums(fedfuse: Fedfuse) -> None:
    how = ("--model", "mlp", "--set", "model.hidden=[12]", "--method", "ridge")
    for site in SITES:
        ok(fedfuse("update", "--data", f"{site}.npz", *how, "-o", f"{site}.safetensors"))


def assert_same(a: str, b: str) -> None:
    ours, theirs = (
        {n: t for n, t in read(Path(f"{name}.safetensors")).tensors.items() if not n.startswith(NOTE)}
        for name in (a, b)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(t, theirs[n], rtol=1e-4, atol=1e-5) for n, t in ours.items())


def test_sites_come_late_leave_and_form_regions(fedfuse: Fedfuse) -> None:
    bring_sums(fedfuse)
    ridge = ("--method", "ridge", "-o")
    north, east, south = (f"{site}.safetensors" for site in SITES)
    ok(fedfuse("fuse", north, east, south, *ridge, "all.safetensors"))
    ok(fedfuse("fuse", north, east, "--keep-sites", *ridge, "two.safetensors"))
    out = ok(fedfuse("fuse", south, "--into", "two.safetensors", "--keep-sites", *ridge, "three.safetensors")).out
    assert out.splitlines()[-1] == ("three.safetensors: 1 of 1 updates fused into the sums of two.safetensors by ridge")
    assert_same("three", "all")
    ok(fedfuse("fuse", "--into", "three.safetensors", "--remove", "south", *ridge, "left.safetensors"))
    assert_same("left", "two")
    assert read(Path("left.safetensors")).header["class_names"] == [str(k) for k in range(10)]
    ok(fedfuse("fuse", "--into", "all.safetensors", "--remove", south, *ridge, "minus.safetensors"))
    assert_same("minus", "two")
    out = ok(fedfuse("fuse", north, east, "--partial", *ridge, "region.safetensors")).out
    assert out.splitlines()[-1] == "region.safetensors: 2 of 2 updates added up by ridge"
    ok(fedfuse("fuse", "region.safetensors", south, *ridge, "whole.safetensors"))
    assert_same("whole", "all")


def test_regions_of_trained_weights_are_fused_as_their_sites(fedfuse: Fedfuse) -> None:
    train = ("--model", "mlp", "--set", "model.hidden=[6]", "--set", "local.epochs=1")
    for site in SITES:
        ok(fedfuse("update", "--data", f"{site}.npz", *train, "-o", f"{site}.safetensors"))
    north, east, south = (f"{site}.safetensors" for site in SITES)
    ok(fedfuse("fuse", north, east, "--partial", "-o", "region.safetensors"))
    ok(fedfuse("fuse", "region.safetensors", south, "-o", "tree.safetensors"))
    ok(fedfuse("fuse", north, east, south, "-o", "all.safetensors"))
    tree, whole = (read(Path(name)).tensors for name in ("tree.safetensors", "all.safetensors"))
    assert all(tree[n].equal(tensor) for n, tensor in whole.items())
    code, _, err = fedfuse("fuse", north, east, "--method", "ensemble", "--partial", "-o", "no.safetensors")
    assert (code, "for 'ensemble' reads more of its clients than one sum" in err) == (2, True)


def test_what_cannot_be_added_is_told(fedfuse: Fedfuse) -> None:
    bring_sums(fedfuse)
    ridge = ("--method", "ridge", "-o", "out.safetensors")
    code, _, err = fedfuse("fuse", "north.safetensors", "--into", "nowhere.safetensors", *ridge)
    assert (code, "there is no file or folder nowhere.safetensors" in err) == (2, True)
    code, _, err = fedfuse("fuse", *ridge)
    assert (code, "there is nothing to fuse" in err) == (2, True)
    assert not Path("out.safetensors").exists()


def test_evidence_at_a_common_model_refits_its_last_layer(fedfuse: Fedfuse) -> None:
    train = ("--model", "mlp", "--set", "model.hidden=[16]", "--set", "local.epochs=5")
    for site in SITES:
        ok(fedfuse("update", "--data", f"{site}.npz", *train, "-o", f"{site}.safetensors"))
    ok(fedfuse("fuse", *(f"{site}.safetensors" for site in SITES), "-o", "mean.safetensors"))
    for site in SITES:
        how = ("--method", "refit", "--json", "-o", f"sums-{site}.safetensors")
        told = json.loads(ok(fedfuse("evidence", "mean.safetensors", "--data", f"{site}.npz", *how)).out)
        assert told["examples"] == 80
        assert all(n.startswith(NOTE) for n in read(Path(f"sums-{site}.safetensors")).tensors)
    sums = [f"sums-{site}.safetensors" for site in SITES]
    ok(fedfuse("fuse", *sums, "--method", "refit", "--start", "mean.safetensors", "-o", "fit.safetensors"))
    files = ("mean.safetensors", "fit.safetensors")
    scores = json.loads(ok(fedfuse("evaluate", *files, "--data", "digits", "--json")).out)
    assert scores["fit.safetensors"]["accuracy"] > scores["mean.safetensors"]["accuracy"]


def test_every_layer_is_refitted_by_files(fedfuse: Fedfuse) -> None:
    train = ("--model", "mlp", "--set", "model.hidden=[12]", "--set", "local.epochs=5")
    for site in SITES:
        ok(fedfuse("update", "--data", f"{site}.npz", *train, "-o", f"{site}.safetensors"))
    ok(fedfuse("fuse", *(f"{site}.safetensors" for site in SITES), "-o", "model-0.safetensors"))
    layers = ("--method", "refit", "--set", "layers=true")
    for turn in range(2):
        now, sums = f"model-{turn}.safetensors", [f"sums-{site}.safetensors" for site in SITES]
        for site, out in zip(SITES, sums, strict=True):
            own = ("--own", f"{site}.safetensors", "-o", out)
            ok(fedfuse("evidence", now, "--data", f"{site}.npz", *layers, *own))
        ok(fedfuse("fuse", *sums, *layers, "--start", now, "-o", f"model-{turn + 1}.safetensors"))
    assert read(Path("model-1.safetensors")).header["facts"]["published"] == {"turn/done": 1}
    code, _, err = fedfuse("evidence", "model-0.safetensors", "--data", "north.npz", *layers, "-o", "x.safetensors")
    assert (code, "pass this site's own update (--own)" in err) == (2, True)


def test_networks_trained_elsewhere_bring_evidence_for_a_method_that_trains(fedfuse: Fedfuse) -> None:
    train = ("--model", "mlp", "--set", "model.hidden=[8]", "--set", "local.epochs=5")
    for seed, site in enumerate(SITES):
        told = ("--seed", str(seed), "-o", f"{site}.safetensors")
        ok(fedfuse("update", "--data", f"{site}.npz", *train, *told))
        how = ("--method", "fedlpa", "--set", "min_rows=80", "-o", f"seen-{site}.safetensors")
        ok(fedfuse("evidence", f"{site}.safetensors", "--data", f"{site}.npz", *how))
        own, seen = (read(Path(f"{name}.safetensors")) for name in (site, f"seen-{site}"))
        assert all(torch.equal(tensor, seen.tensors[name]) for name, tensor in own.tensors.items())
        assert seen.header["steps"] == 0
    seen = [f"seen-{site}.safetensors" for site in SITES]
    out = ok(fedfuse("fuse", *seen, "--method", "fedlpa", "-o", "fused.safetensors")).out
    assert out.splitlines()[-1] == "fused.safetensors: 3 of 3 updates fused by fedlpa"


def test_evidence_needs_one_network(fedfuse: Fedfuse) -> None:
    train = ("--model", "mlp", "--set", "model.hidden=[4]")
    for site in SITES:
        ok(fedfuse("update", "--data", f"{site}.npz", *train, "-o", f"{site}.safetensors"))
    files = [f"{site}.safetensors" for site in SITES]
    ok(fedfuse("fuse", *files, "--method", "ensemble", "-o", "many.safetensors"))
    code, _, err = fedfuse("evidence", "many.safetensors", "--data", "north.npz", "-o", "x.safetensors")
    assert (code, "many.safetensors holds several networks; use a file that holds one" in err) == (2, True)
