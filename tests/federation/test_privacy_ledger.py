"""What all exchanges tell of one row: signals add in squares, in a run and in a site's own ledger."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.conftest import Fedfuse

import fedfuse as ff
from fedfuse.data import load
from fedfuse.errors import ConfigError
from fedfuse.federation.fusion import charge
from fedfuse.linalg.privacy import Release, gaussian_epsilon, gaussian_sigma, release_of

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
