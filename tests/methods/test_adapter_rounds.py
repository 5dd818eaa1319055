"""Rounds over adapters: the base rests with everybody, adapters alone travel, and their products are what is fused."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedfuse
from fedfuse.core.model import Single
from fedfuse.core.rng import seeded
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines.local import InProcess, Population
from fedfuse.errors import ConfigError
from fedfuse.models.adapted import AdaptedLayer, adapt, adapted_spec, fill_base
from fedfuse.server.loop import Record, RunPlan, run
from fedfuse.wire.files import load_answering
from fedfuse.wire.messages import brief_size

SETTINGS: dict[str, Any] = {"epochs": 1, "batch_size": 8, "lr": 0.2}
LOCAL = LocalSettings(epochs=1, batch_size=8, optimizer={"lr": 0.2})
BASE = Spec("mlp", {"inputs": 6, "hidden": [16], "classes": 3})
SPEC = adapted_spec(BASE, {"rank": 2, "alpha": 4.0})
SIZES = {"a": 24, "b": 16, "c": 8}


def rows(seed: int, n: int) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=draw)
    return Rows(torch.randn(n, 6, generator=draw) + y[:, None], y)


DATA = {client: rows(k, n) for k, (client, n) in enumerate(SIZES.items())}


def begin(spec: Spec) -> Single:
    with seeded(0, "start"):
        return Single.of(spec.build(), spec)


def records(name: str, rounds: int, spec: Spec = SPEC, **options: Any) -> list[Record]:
    bench = Bench(None, None, len(SIZES), 3, LOCAL, 0)
    engine = InProcess(Population.of(DATA), 0)
    recipe = fedfuse.recipe(name, **options)
    return list(run(recipe, engine, bench, None, ServerState(0, begin(spec)), RunPlan(rounds)))


def moved(single: Single, layer: str) -> Tensor:
    """What stands beside a layer's resting weight: s (B A + B₀ A₀)."""
    w = {n.removeprefix(f"{layer}."): t.double() for n, t in single.posterior.mean.items() if n.startswith(f"{layer}.")}
    merged = w["merged_B"] @ w["merged_A"] if "merged_A" in w else 0.0
    return 2.0 * (w["lora_B.weight"] @ w["lora_A.weight"] + merged)


def sites(spec: Spec, name: str, **options: Any) -> list[fedfuse.Update]:
    recipe, start = fedfuse.recipe(name, **options), dict(begin(spec).posterior.mean)
    return [
        fedfuse.local_update(spec, data, recipe, client=client, start=start, classes=3, **SETTINGS)
        for client, data in DATA.items()
    ]


def test_a_network_with_adapters_begins_as_its_base() -> None:
    with seeded(SPEC.options["seed"], "base"):
        plain = BASE.build()
    x = torch.randn(5, 6)
    torch.testing.assert_close(SPEC.build()(x), plain(x))
    assert set(SPEC.layout.roles) == {f"{layer}.lora_{side}.weight" for layer in ("fc1", "classifier") for side in "AB"}
    one, two = (SPEC.build() for _ in range(2))
    assert all(a.equal(b) for a, b in zip(one.fc1.base_layer.buffers(), two.fc1.base_layer.buffers(), strict=True))


@pytest.mark.parametrize("name", ["flora", "flexlora", "fedit"])
def test_only_adapters_travel(name: str) -> None:
    done = records(name, 1)
    numbers = sum(2 * (6 + 16) + 2 * (16 + 3) for _ in SIZES)
    whole = sum(p.numel() for p in BASE.build().parameters())
    for side in ("bytes_up", "bytes_down"):
        assert 4 * numbers <= done[0].facts[side] < 4 * numbers + 4096 * len(SIZES), "and headers"
    assert not any("base_layer" in n or n.endswith("fc1.weight") for n in done[0].state.single.posterior.mean)
    assert whole > 0


def test_a_round_of_flora_is_the_exact_mean_of_what_clients_learned() -> None:
    sent = sites(SPEC, "flora")
    (record,) = records("flora", 1)
    for layer in ("fc1", "classifier"):
        wanted = sum(
            SIZES[u.client]
            / 48
            * u.state_dict()[f"{layer}.lora_B.weight"].double()
            @ u.state_dict()[f"{layer}.lora_A.weight"].double()
            for u in sent
        )
        torch.testing.assert_close(moved(record.state.single, layer), 2.0 * wanted, rtol=1e-5, atol=1e-6)
    again = record.state.single.posterior.mean
    assert not any(bool(t.any()) for n, t in again.items() if "lora_B" in n), "new adapters begin at zero"
    x = torch.randn(4, 6)
    module = record.state.single.spec.build()
    module.load_state_dict(dict(again))
    torch.testing.assert_close(module(x), record.state.single.logits(x))
    with torch.no_grad():
        w = module.fc1.base_layer.weight + moved(record.state.single, "fc1").float()
        torch.testing.assert_close(module.fc1(x), x @ w.mT + module.fc1.base_layer.bias)


def test_merged_rounds_grow_until_the_product_is_smaller() -> None:
    done = records("flora", 3)
    ranks = [record.state.facts["merged_ranks"] for record in done]
    assert ranks[0] == {"fc1": 6, "classifier": 3}
    assert ranks[2] == {"fc1": 6, "classifier": 3}, "as many as the smaller side has"
    assert done[2].state.single.spec.surgery
    steps = [moved(r.state.single, "fc1") for r in done]
    assert float((steps[1] - steps[0]).norm()) > 0


def test_flexlora_keeps_the_rank_and_says_what_is_lost_and_training_helps() -> None:
    done = records("flexlora", 8)
    mean = done[-1].state.single
    assert mean.posterior.mean["fc1.lora_A.weight"].shape == (2, 6)
    assert 0 <= done[0].state.facts["adapter_error"] < 1
    test = rows(99, 200)

    def accuracy(single: Single) -> float:
        return float((single.logits(test.x).argmax(1) == test.y).double().mean())

    assert accuracy(mean) > accuracy(begin(SPEC)) + 0.2


def test_moments_travel_in_rounds_too() -> None:
    (record,) = records("flexlora", 1, moments=True, min_rows=1)
    assert record.state.facts["adapter_metric"] == "inputs"
    assert not record.state.facts["unseen_modules"]


@pytest.mark.parametrize(("name", "options"), [("flora", {}), ("flexlora", {}), ("flexlora", {"moments": True})])
def test_files_give_the_bytes_of_a_run(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    (record,) = records(name, 1, **options)
    sent = sites(SPEC, name, **options)
    files = [u.save(tmp_path / f"{u.client}.safetensors") for u in sent]
    for updates in (sent, files):
        found = fedfuse.fuse(updates, fedfuse.recipe(name, **options))
        assert not found.refused
        wanted = record.state.single.posterior.mean
        assert found.state_dict().keys() == wanted.keys()
        assert all(t.equal(wanted[n]) for n, t in found.state_dict().items())
    found.save(tmp_path / "fused.safetensors")
    x = torch.randn(3, 6)
    loaded = load_answering(tmp_path / "fused.safetensors")[0]
    for model in (found, loaded):
        assert model.logits(x).equal(record.state.single.logits(x))


class Own(nn.Module):
    """A user's network: a convolution, a norm with statistics, a tied pair, an attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.inner = nn.Linear(24, 24)
        self.outer = nn.Linear(24, 24)
        self.outer.weight = self.inner.weight
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.conv(x[:, None])).mT
        z = self.attend(z, z, z, need_weights=False)[0].flatten(1)
        answer: Tensor = self.head(self.outer(self.inner(z).relu()).relu())
        return answer


def test_a_users_network_rests_whatever_it_is_made_of() -> None:
    plain = Own()
    with torch.no_grad():
        plain.norm.running_mean.fill_(0.3)
    x = torch.randn(5, 6)
    expected = plain.eval()(x)
    net = adapt(Own(), rank=2, targets=["conv", "inner", "head"])
    net.norm.running_mean.fill_(0.3)
    torch.testing.assert_close(net.eval()(x), expected)
    assert isinstance(net.conv, AdaptedLayer)
    spec = Spec.of(net)
    assert set(spec.layout.trainable) == set(net.state_dict())
    for name in ("flora", "flexlora"):
        found = records(name, 2, spec)[-1].state.single
        assert bool(found.logits(x).isfinite().all())
        module = found.spec.build()
        assert float(module.norm.running_mean.mean()) == pytest.approx(0.3), "what rests does not move"
    assert net.train().norm.training is False


def test_adapters_in_an_experiments_file(tmp_path: Path) -> None:
    train, test = rows(0, 90), rows(1, 60)
    told = {
        "rounds": 2,
        "seeds": [0],
        "data": {"source": "given", "clients": 3, "partition": {"kind": "iid"}},
        "model": {"name": "mlp", "hidden": [8], "adapters": {"rank": 2, "alpha": 4.0, "targets": ["fc1"]}},
        "local": {"epochs": 1, "batch_size": 16},
        "methods": [{"name": "flora"}, {"name": "flexlora"}],
    }
    results = fedfuse.run(told, data=(train.x, train.y, test.x, test.y), out=tmp_path / "out", progress=False)
    ledger = [
        json.loads(line) for path in (tmp_path / "out").rglob("*.jsonl") for line in path.read_text().splitlines()
    ]
    rounds = [line for line in ledger if "bytes_up" in line]
    assert len(rounds) == 4
    assert all(line["bytes_up"] < 3 * (4 * 2 * (6 + 8) * 5 + 4096) for line in rounds)
    assert results is not None


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"rank": 0}, "rank"),
        ({"ranks": 2}, "rank"),
        ({"targets": ["nowhere"]}, "'nowhere' is no linear layer or plain convolution of Sequential; it has fc1"),
        ("all", "expected a table"),
    ],
)
def test_adapters_that_cannot_be_are_named(table: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        adapted_spec(BASE, table).build()


def test_other_methods_say_that_they_would_fuse_factors_apart() -> None:
    with pytest.raises(ConfigError, match="belongs to a low-rank adapter"):
        records("fedavg", 1)
    assert brief_size(ServerState(0, begin(SPEC)).brief(())) < 4096
    assert math.isfinite(records("fedit", 1)[0].state.facts["adapter_error"])


def run_file(out: Path, adapters: dict[str, Any], **more: Any) -> dict[str, Tensor]:
    """The last weights of a run of an experiment's file over adapters."""
    train, test = rows(0, 90), rows(1, 60)
    told = {
        "rounds": 2,
        "seeds": [0],
        "data": {"source": "given", "clients": 3, "partition": {"kind": "iid"}},
        "model": {"name": "mlp", "hidden": [8], "adapters": adapters},
        "local": {"epochs": 1, "batch_size": 16},
        "methods": [{"name": "flora"}],
    }
    fedfuse.run(told, data=(train.x, train.y, test.x, test.y), out=out, progress=False, **more)
    return dict(load_file(out / "models" / "flora-0.safetensors"))


def base_file(path: Path, seed: int = 3) -> Path:
    with seeded(seed, "elsewhere"):
        save_file(Spec("mlp", {"inputs": 6, "hidden": [8], "classes": 3}).build().state_dict(), path)
    return path


def test_adapters_begin_at_a_file_that_never_travels(tmp_path: Path) -> None:
    base = base_file(tmp_path / "base.safetensors")
    of = Spec("mlp", {"inputs": 6, "hidden": [8], "classes": 3})
    plain, spec = of.build(), adapted_spec(of, {"rank": 2, "base": str(base)})
    plain.load_state_dict(load_file(base))
    x = rows(5, 7).x
    torch.testing.assert_close(spec.build()(x), plain(x))
    assert all("lora" in name for name in spec.shapes())
    drawn, loaded = run_file(tmp_path / "a", {"rank": 2}), run_file(tmp_path / "b", {"rank": 2, "base": str(base)})
    assert drawn.keys() == loaded.keys()
    assert not any("base_layer" in name for name in loaded)
    assert any(not drawn[name].equal(loaded[name]) for name in drawn)


def test_a_folder_is_a_base_too_and_its_tied_tensors_may_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    base_file(tmp_path / "base" / "model.safetensors")
    network = Spec("mlp", {"inputs": 6, "hidden": [8], "classes": 3}).build()
    fill_base(network, tmp_path / "base")
    assert all(network.state_dict()[n].equal(t) for n, t in load_file(tmp_path / "base" / "model.safetensors").items())

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    save_file({"embed.weight": torch.ones(5, 3)}, tmp_path / "tied.safetensors")
    tied = Tied()
    fill_base(tied, tmp_path / "tied.safetensors")
    assert tied.head.weight.equal(torch.ones(5, 3))


@pytest.mark.slow
def test_workers_read_the_same_base(tmp_path: Path) -> None:
    told = {"rank": 2, "base": str(base_file(tmp_path / "base.safetensors"))}
    alone, shared = run_file(tmp_path / "a", told), run_file(tmp_path / "b", told, workers=2)
    assert alone.keys() == shared.keys()
    assert all(alone[name].equal(shared[name]) for name in alone)


def test_a_base_that_does_not_fit_is_refused_by_its_tensor(tmp_path: Path) -> None:
    of = Spec("mlp", {"inputs": 6, "hidden": [9], "classes": 3})
    base = base_file(tmp_path / "base.safetensors")
    with pytest.raises(ConfigError, match=r"'classifier\.weight' is 3×8 and in the network 3×9; name the checkpoint"):
        adapted_spec(of, {"base": str(base)}).build()
    with pytest.raises(ConfigError, match="has no 'fc2"):
        adapted_spec(Spec("mlp", {"inputs": 6, "hidden": [8, 4], "classes": 3}), {"base": str(base)}).build()
    with pytest.raises(ConfigError, match="has a tensor that the network has not, 'fc1"):
        adapted_spec(Spec("mlp", {"inputs": 6, "hidden": [], "classes": 3}), {"base": str(base)}).build()
    with pytest.raises(ConfigError, match="there is no file or folder"):
        adapted_spec(of, {"base": str(tmp_path / "nowhere")})
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"torn.safetensors cannot be read: .*name a safetensors file or folder"):
        adapted_spec(of, {"base": str(tmp_path / "torn.safetensors")})


def test_a_base_that_was_changed_since_is_refused(tmp_path: Path) -> None:
    of = Spec("mlp", {"inputs": 6, "hidden": [8], "classes": 3})
    spec = adapted_spec(of, {"base": str(base_file(tmp_path / "base.safetensors"))})
    os.utime(base_file(tmp_path / "base.safetensors", seed=4), ns=(1, 1))  # clocks of files are coarse
    with pytest.raises(ConfigError, match=r"are other ones .* than the experiment began with"):
        Spec.from_json(spec.to_json()).build()


def test_a_base_that_is_not_here_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    """A spec may come from somebody else, and name a pipe that would be waited for."""
    of = Spec("mlp", {"inputs": 6, "hidden": [4], "classes": 3})
    spec = adapted_spec(of, {"base": str(base_file(tmp_path / "base.safetensors"))})
    (tmp_path / "base.safetensors").unlink()
    with pytest.raises(ConfigError, match="are not here; put the same file or folder"):
        spec.build()
    os.mkfifo(tmp_path / "base.safetensors")
    with pytest.raises(ConfigError, match="are not here"):
        spec.build()
