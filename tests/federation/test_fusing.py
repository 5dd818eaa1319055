"""Fusing files: the header says whose an update is, the folder says what it must be, the card says what counted."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.conftest import Fedfuse

import fedfuse as ff
from fedfuse.core.spec import Spec
from fedfuse.data import load
from fedfuse.errors import ConfigError
from fedfuse.federation.agreement import read_federation
from fedfuse.federation.fusion import charge
from fedfuse.linalg.privacy import Release, gaussian_epsilon, gaussian_sigma, release_of
from fedfuse.wire.codec import read

SPEC = Spec("mlp", {"inputs": 3, "hidden": [2], "classes": 2})


Made = Callable[..., Path]


def update(name: str, count: int = 20, seed: int | None = None) -> ff.Update:
    torch.manual_seed(0)
    start = SPEC.build().state_dict()
    draw = torch.Generator().manual_seed(sum(name.encode()) if seed is None else seed)
    rows = torch.randn(count, 3, generator=draw), torch.arange(count) % 2
    return ff.local_update(SPEC, rows, client=name, start=start, classes=("ill", "well"))


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """An update of a site in a file of any name."""

    def make(name: str, count: int = 20, at: str = "", seed: int | None = None) -> Path:
        return update(name, count, seed).save(tmp_path / f"{at or name}.safetensors")

    return make


def test_a_header_says_whose_an_update_is_and_a_file_only_where_it_lies(made: Made, fedfuse: Fedfuse) -> None:
    paths = made("north", 20, at="south"), made("south", 40, at="north"), made("east", 30)
    said = fedfuse("fuse", *paths, "-o", "all.safetensors")
    assert said.code == 0, said.err
    assert "files are called otherwise than their sites" in said.err
    assert "south.safetensors is of north" in said.err
    told = json.loads(fedfuse("show", "all.safetensors", "--json").out)["sites"]
    assert {s["client"]: (s["num_examples"], s.get("file")) for s in told} == {
        "north": (20, "south.safetensors"),
        "south": (40, "north.safetensors"),
        "east": (30, None),
    }
    fedfuse("show", "all.safetensors", "--card", "card.md")
    assert "- north: 20 examples, from south.safetensors" in Path("card.md").read_text()


def test_one_update_under_two_names_counts_once(made: Made, tmp_path: Path) -> None:
    honest = [made("north", 20), made("south", 40), made("east", 30)]
    alone = ff.fuse(honest).state_dict()
    copied = shutil.copy(honest[0], tmp_path / "west.safetensors")
    relabelled = update("north", 20).telling(client="elsewhere").save(tmp_path / "elsewhere.safetensors")
    for twin in (honest[0], copied, relabelled):
        fused = ff.fuse([*honest, twin])
        [refused] = fused.refused
        assert refused["field"] == "update"
        assert Path(twin).name in refused["got"]
        assert "north.safetensors" in refused["expected"]
        assert all(torch.equal(fused.state_dict()[n], t) for n, t in alone.items())


def test_two_updates_of_one_site_are_both_refused_and_both_files_named(made: Made, fedfuse: Fedfuse) -> None:
    paths = made("north"), made("north", at="newer", seed=9), made("south"), made("east")
    said = fedfuse("fuse", *paths, "-o", "all.safetensors")
    assert said.code == 0, said.err
    assert said.err.count("refused north: file is") == 2
    assert "newer.safetensors is of north too" in said.err
    assert "north.safetensors is of north too" in said.err
    assert [s.client for s in ff.fuse(paths).about.sites] == ["east", "south"]


def test_updates_in_memory_are_judged_alike_and_those_without_a_name_are_told_apart() -> None:
    one, other = update("north"), update("north", seed=9)
    assert [r["client"] for r in ff.fuse([one, other, update("south"), update("east")]).refused] == ["north", "north"]
    assert [r["field"] for r in ff.fuse([one, update("south"), one]).refused] == ["update"]
    unnamed = ff.fuse([update("", seed=1), update("", seed=2)])
    assert [s.client for s in unnamed.about.sites] == ["site-1", "site-2"]


def test_plain_weights_keep_their_files_name_and_may_come_twice(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    fused = ff.fuse([tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "a.safetensors"])
    assert (len(fused.about.sites), fused.refused, fused.remarks) == (3, (), ())


def test_two_regions_are_two_though_neither_has_a_name(made: Made, tmp_path: Path) -> None:
    for region, names in (("r1", ("north", "south")), ("r2", ("east", "west"))):
        ff.fuse([made(n) for n in names]).partial().save(tmp_path / f"{region}.safetensors")
    fused = ff.fuse([tmp_path / "r1.safetensors", tmp_path / "r2.safetensors"])
    assert [s.client for s in fused.about.sites] == ["r1", "r2"]


def test_what_a_site_sent_and_what_it_counted_for_are_both_told(made: Made, fedfuse: Fedfuse) -> None:
    paths = made("large", 400), made("north", 40), made("south", 50), made("east", 60)
    said = fedfuse("fuse", *paths, "-o", "all.safetensors")
    assert "weakened large: num_examples is 400" in said.err
    large = next(s for s in read(Path("all.safetensors")).header["sites"] if s["client"] == "large")
    assert (large["num_examples"], large["counted"]) == (400, 150)
    assert "large (400 examples, counted as 150)" in fedfuse("show", "all.safetensors").out
    fedfuse("show", "all.safetensors", "--card", "card.md")
    assert "- large: 400 examples, counted as 150\n" in Path("card.md").read_text()
    vouched = ff.fuse(paths, num_examples=[400, 40, 50, 600]).about.sites
    assert {s.client: (s.num_examples, s.counted) for s in vouched}["east"] == (60, 600)


COLUMNS = ("--columns", "age[years],chol[mg/dl]")


@pytest.fixture
def tables(fedfuse: Fedfuse) -> None:
    """Four sites, of which three train by a folder of another scale than the one that will be fused by."""
    draw = np.random.default_rng(0)
    for site in "abcd":
        lines = [f"{draw.normal(60, 9):.1f},{draw.normal(200, 30):.1f},{'ill' if k % 3 else 'well'}" for k in range(30)]
        Path(f"{site}.csv").write_text("\n".join(["age,chol,state", *lines]))
    words = ("--target", "state", "--classes", "ill,well", "--set", "model.hidden=[3]", "--set", "local.epochs=1")
    for name, first in (("fed", "a.csv"), ("other", "b.csv")):
        said = fedfuse("init", name, "--task", "binary", *COLUMNS, *words, "--data", first, "--normalize")
        assert said.code == 0, said.err


def trained(fedfuse: Fedfuse, folder: str, sites: str, kind: str = "csv") -> list[str]:
    for site in sites:
        said = fedfuse("update", "--federation", folder, "--data", f"{site}.{kind}", "-o", f"{site}.safetensors")
        assert said.code == 0, said.err
    return [f"{site}.safetensors" for site in sites]


@pytest.mark.usefixtures("tables")
def test_the_folder_decides_on_the_scale_and_not_the_majority(fedfuse: Fedfuse) -> None:
    files = trained(fedfuse, "fed", "a") + trained(fedfuse, "other", "bcd")
    words = ("fuse", *files, "--federation", "fed", "-o", "all.safetensors")
    said = fedfuse(*words)
    assert said.code == 3, "one of four is no quorum"
    assert "1 of 4 updates can be fused" in said.err
    for site in "bcd":
        assert f"{site}: the form of inputs is a table whose" in said.err
    assert "as the federation folder says" in said.err
    said = fedfuse(*words, "--quorum", "0.25")
    assert said.code == 0, said.err
    header = read(Path("all.safetensors")).header
    assert [s["client"] for s in header["sites"]] == ["a"]
    assert header["inputs"] == read(Path("fed/w0.safetensors")).header["inputs"]


OTHERWISE = {
    "classes": ("--classes", "ill,dead"),
    "the order of classes": ("--classes", "well,ill"),
    "the form of inputs": ("--shape", "1,3"),
    "spec": ("--set", "model.hidden=[4]"),
    "start": ("--seed", "3"),
}


@pytest.mark.parametrize("field", OTHERWISE)
def test_the_folder_decides_on_everything_it_fixes(field: str, fedfuse: Fedfuse) -> None:
    usual = ("--model", "mlp", "--set", "model.hidden=[3]", "--set", "local.epochs=1", "--classes", "ill,well")
    for name, words in (("fed", ()), ("other", OTHERWISE[field])):
        assert fedfuse("init", name, *usual, "--shape", "3", "--method", "fedavg", *words).code == 0
    draw, files = np.random.default_rng(0), []
    for folder, sites in (("fed", "a"), ("other", "bcd")):
        agreed = read_federation(Path(folder)).agreement
        for site in sites:
            x, y = draw.normal(size=(20, *agreed.inputs.shape)), draw.integers(0, 2, 20)
            np.savez(f"{site}.npz", x=x.astype(np.float32), y=y, classes=np.array(agreed.classes))
        files += trained(fedfuse, folder, sites, "npz")
    said = fedfuse("fuse", *files, "--federation", "fed", "--quorum", "0.2", "-o", "all.safetensors")
    assert said.code == 0, said.err
    assert said.err.count(f": {field} is ") == 3, said.err
    assert said.err.count("as the federation folder says") == 3
    assert [s["client"] for s in read(Path("all.safetensors")).header["sites"]] == ["a"]


# --- What all exchanges tell of one row: signals add in squares, in a run and in a site's own ledger ---------------


SIGNAL = 1 / gaussian_sigma(1.0, 1e-5)


def test_releases_add_in_squares() -> None:
    one = Release(SIGNAL, 1e-5)
    assert math.isclose(one.after([one, one, one]).epsilon, gaussian_epsilon(2 * SIGNAL, 1e-5))
    assert Release.from_json(one.to_json()) == one
    assert Release.from_json(None).epsilon == math.inf
    with pytest.raises(ConfigError, match="is no release"):
        Release.from_json({"signal": -1})


def test_a_method_says_what_one_exchange_is() -> None:
    ridge = ff.recipe("ridge", epsilon=2.0, delta=1e-6)
    release = release_of(ridge.evidence, ridge.trains)
    assert release is not None
    assert math.isclose(release.epsilon, 2.0, rel_tol=1e-9)
    for name in ("ridge", "fedavg", "fedlpa"):
        plain = ff.recipe(name)
        assert release_of(plain.evidence, plain.trains) is None


def test_a_budget_ends_a_ledger(tmp_path: Path) -> None:
    path, one = tmp_path / "site.json", Release(SIGNAL, 1e-5)
    assert math.isclose(charge(one, path, "a", budget=1.6).epsilon, 1.0)
    second = charge(one, path, "b", budget=1.6).epsilon
    assert math.isclose(second, gaussian_epsilon(math.sqrt(2) * SIGNAL, 1e-5))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"budget of .* is ε = 1.6 and with c it would be 1.8.* 2 releases before"):
        charge(one, path, "c", budget=1.6)
    assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="without bound, since something has no noise"):
        charge(Release.from_json(None), path, "weights", budget=100.0)
    assert charge(Release.from_json(None), path, "weights").epsilon == math.inf
    assert charge(one, path, "d").epsilon == math.inf
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is no privacy ledger"):
        charge(one, path, "e")


def test_a_run_tells_the_total_of_every_client(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(2, (60,), generator=draw)
    x = torch.randn(60, 3, generator=draw) + 2 * y[:, None]
    how = {"name": "ridge", "features": 8, "epsilon": 1.0, "reproducible": True}
    ff.run(
        {"rounds": 3, "data": {"clients": 2}, "model": {"name": "mlp", "inputs": 3, "hidden": []}, "methods": [how]},
        data=(x, y, x, y),
        workers=0,
        out=tmp_path / "run",
        progress=False,
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    told = [line["facts"]["privacy"] for line in lines]
    wanted = [gaussian_epsilon(math.sqrt(k) * SIGNAL, 1e-5) for k in (1, 2, 3)]
    assert [fact["epsilon"] for fact in told] == pytest.approx(wanted)
    assert len(told[2]["by_client"]) == 2


def test_files_carry_their_release_and_the_command_refuses_beyond_the_budget(fedfuse: Fedfuse, tmp_path: Path) -> None:
    digits = load("digits")
    rows = digits.train.take(range(80))
    arrays = {"x_train": rows.x, "y_train": rows.y, "x_test": rows.x, "y_test": rows.y}
    names = np.array(digits.classes)
    np.savez(tmp_path / "site.npz", classes=names, **{k: v.numpy() for k, v in arrays.items()})
    ridge = ("--data", "site.npz", "--model", "mlp", "--method", "ridge", "--set", "method.epsilon=1.0")
    account = ("--privacy-ledger", "mine.json", "--budget", "1.2")
    code, _, err = fedfuse("update", *ridge, *account, "-o", "one.safetensors")
    assert (code, "ε = 1 at δ = 1e-05 (mine.json)" in err) == (0, True), err
    code, _, err = fedfuse("update", *ridge, *account, "-o", "two.safetensors")
    assert (code, "the budget of mine.json is ε = 1.2 and with two.safetensors by ridge" in err) == (2, True), err
    assert not Path("two.safetensors").exists()
    code, _, err = fedfuse("update", *ridge, "--budget", "1", "-o", "two.safetensors")
    assert (code, "name the ledger" in err) == (2, True)
