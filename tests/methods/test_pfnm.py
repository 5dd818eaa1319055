"""PFNM: permuted copies are one network, class shares, growth, choices, rounds and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedfuse.api import recipe as method
from fedfuse.core.messages import ClientUpdate, Cohort, Start
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines.local import InProcess, Population
from fedfuse.errors import ConfigError
from fedfuse.methods.pfnm import MatchedUnits, pfnm
from fedfuse.nets.channels import permute_group
from fedfuse.server.aggregate.chain import Matcher, hidden_layers
from fedfuse.server.loop import RunPlan, run
from fedfuse.wire.files import load_model, save_model

FEATURES, CLASSES = 6, 3
DEEP = Spec("mlp", {"inputs": FEATURES, "hidden": [8, 7, 5], "classes": CLASSES})
ONE = Spec("mlp", {"inputs": FEATURES, "hidden": [8], "classes": CLASSES})
EVEN = [1, 1, 1]


def weights(spec: Spec, seed: int = 0, scale: float = 2.0) -> dict[str, Tensor]:
    """Weights large enough that units are told apart."""
    draw = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(t.shape, generator=draw) for n, t in spec.skeleton().state_dict().items()}


def shuffled(spec: Spec, params: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    for hidden in hidden_layers("test", spec, Bench()):
        params = permute_group(params, hidden.group, torch.randperm(hidden.group.size, generator=draw))
    return params


def cohort(
    spec: Spec, params: Sequence[dict[str, Tensor]], counts: Sequence[list[int]] | None = None
) -> tuple[Cohort, ServerState]:
    labels = counts or [EVEN] * len(params)
    updates = [
        ClientUpdate(f"c{k}", Posterior(p), 3.0, 1, spec.with_shapes_of(p), {"counts/labels": torch.tensor(c)})
        for k, (p, c) in enumerate(zip(params, labels, strict=True))
    ]
    return Cohort.of(updates), ServerState(0, Single.of(spec.build(), spec))


def single(gamma: float = 1.0, variance: float = 1.0, prior_variance: float = 1.0, **more: float) -> MatchedUnits:
    return MatchedUnits((gamma,), (variance,), (prior_variance,), Matcher(**more))  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [ONE, DEEP], ids=["one layer", "three layers"])
@pytest.mark.parametrize("copies", [1, 4])
def test_permuted_copies_of_a_network_are_that_network(spec: Spec, copies: int) -> None:
    original = weights(spec)
    clients, state = cohort(spec, [shuffled(spec, original, k) for k in range(copies)])
    fused = single(shrink=False)(clients, state, Bench()).single
    x = torch.randn(20, FEATURES, generator=torch.Generator().manual_seed(1))
    assert fused.spec == spec, "no wider than it was"
    assert torch.allclose(fused.logits(x), spec.forward(original, x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("copies", [1, 3])
def test_the_prior_shrinks_by_how_many_share_a_unit(copies: int) -> None:
    """To m/(m + σ²/σ₀²); of a class's weights all copies together are one share, so to 1/(1 + σ²/σ₀²)."""
    original, ratio = weights(ONE), 0.5 / 2.0
    clients, state = cohort(ONE, [shuffled(ONE, original, k) for k in range(copies)])
    mean = single(variance=0.5, prior_variance=2.0, bias_mean=0.1)(clients, state, Bench()).single.posterior.mean
    first = clients.updates[0].posterior.mean  # common units are numbered as the first client has them
    kept, whole = copies / (copies + ratio), 1 / (1 + ratio)
    assert torch.allclose(mean["fc1.weight"], kept * first["fc1.weight"], atol=1e-5)
    assert torch.allclose(mean["fc1.bias"], 0.1 + kept * (first["fc1.bias"] - 0.1), atol=1e-5)
    assert torch.allclose(mean["classifier.weight"], whole * first["classifier.weight"], atol=1e-5)
    assert torch.allclose(mean["classifier.bias"], 0.1 + whole * (first["classifier.bias"] - 0.1), atol=1e-5)


def test_what_a_client_says_of_a_class_counts_by_its_share() -> None:
    """Two networks that differ in what they say of the classes alone."""
    a = weights(ONE, scale=5.0)
    b = a | {n: a[n] + 1.0 for n in ("classifier.weight", "classifier.bias")}
    clients, state = cohort(ONE, [a, b], [[4, 0, 3], [0, 4, 1]])
    mean = single(shrink=False)(clients, state, Bench()).single.posterior.mean
    theirs = torch.tensor([0.0, 1.0, 0.25])  # the second client's share of each class
    assert torch.allclose(mean["classifier.weight"], a["classifier.weight"] + theirs[:, None])
    assert torch.allclose(mean["classifier.bias"], a["classifier.bias"] + theirs)


def test_strangers_are_kept_side_by_side_and_every_client_finds_itself_again() -> None:
    """Far apart units are not merged: the common network holds each client's own, and hands it back."""
    sizes = {"c0": [8, 7], "c1": [3, 4], "c2": [5, 2]}
    specs = [Spec("mlp", {"inputs": FEATURES, "hidden": h, "classes": CLASSES}) for h in sizes.values()]
    clients, state = cohort(specs[0], [weights(s, k, scale=50.0) for k, s in enumerate(specs)])
    after = single(prior_variance=1e4, shrink=False)(clients, state, Bench())
    assert after.facts["widths"] == {"fc1": 16, "fc2": 13}
    assert after.single.spec.build().fc2.weight.shape == (13, 16)
    for update in clients:
        spec, params = after.starts[update.client]
        assert spec == update.spec
        own = update.posterior.mean
        assert torch.allclose(params["fc1.weight"], own["fc1.weight"])
        assert torch.allclose(params["fc2.weight"], own["fc2.weight"], atol=1e-4)


def test_the_best_choice_on_the_servers_rows_is_taken_else_the_first() -> None:
    clients, state = cohort(ONE, [weights(ONE, k, scale=0.7) for k in range(4)])
    grid = MatchedUnits((1e-3, 50.0), (1.0,), (1.0, 10.0))
    blind = grid(clients, state, Bench())
    assert (blind.facts["gamma"], blind.facts["prior_variance"]) == (1e-3, 1.0)
    x = torch.randn(200, FEATURES, generator=torch.Generator().manual_seed(3))
    each = {(g, p): single(g, 1.0, p)(clients, state, Bench()).single for g in (1e-3, 50.0) for p in (1.0, 10.0)}
    for (gamma, prior), wanted in each.items():
        rows = Rows(x, wanted.logits(x).argmax(1))
        facts = grid(clients, state, Bench(rows=rows)).facts
        assert (facts["gamma"], facts["prior_variance"]) == (gamma, prior)


def test_a_grown_network_is_saved_loaded_and_trained_on(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    rows = {f"c{k}": Rows(torch.randn(30, FEATURES, generator=draw), torch.arange(30) % 3) for k in range(3)}
    local = LocalSettings(epochs=4, batch_size=8, optimizer={"lr": 0.3})
    starts = {c: Start(ONE, weights(ONE, k)) for k, c in enumerate(rows)}
    state = ServerState(0, Single.of(ONE.build(), ONE), starts=starts)
    bench = Bench(population=3, classes=CLASSES, local=local)
    engine = InProcess(Population.of(rows))
    records = list(run(replace(pfnm(gamma=(1e6,)), name="pfnm"), engine, bench, None, state, RunPlan(2)))
    first, second = (r.state.single for r in records)
    assert first.spec.build().fc1.out_features == 24
    assert {s.spec for s in records[0].state.starts.values()} == {ONE}, "every client goes on with its own units"
    assert second.spec.build().fc1.out_features >= 8
    save_model(first, tmp_path / "grown.safetensors")
    loaded, _ = load_model(tmp_path / "grown.safetensors")
    assert isinstance(loaded, Single)
    assert loaded.spec == first.spec
    x = torch.randn(4, FEATURES, generator=draw)
    assert loaded.logits(x).equal(first.logits(x))


def test_other_networks_are_refused_before_training() -> None:
    recipe = pfnm()
    for spec, says in [
        (Spec("lenet"), "pfnm matches the units of fully connected networks and model 'lenet' has 'conv1.weight'"),
        (Spec.of(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))), "has '1.weight'; use an mlp"),
        (Spec("mlp", {"hidden": []}), "has none; give it a hidden layer"),
    ]:
        with pytest.raises(ConfigError, match=says):
            recipe.check(1, Bench(), ServerState(0, Single.of(spec.build(), spec)))
    deep = {"c1": Start(DEEP, weights(DEEP))}
    with pytest.raises(ConfigError, match="c1 has 3 hidden layers"):
        recipe.check(1, Bench(), ServerState(0, Single.of(ONE.build(), ONE), starts=deep))


def test_clients_train_as_ever_and_send_their_label_counts() -> None:
    work = method("pfnm").work(LocalSettings())
    assert work == method("pfnm", gamma=[3.0]).work(LocalSettings()), "all choices are the server's"
    assert method("pfnm").reveals == ("how many rows of each class the client has",)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gamma": []}, "gamma is"),
        ({"gamma": [0.0]}, "greater than 0"),
        ({"variance": [-1.0]}, "greater than 0"),
        ({"sweeps": 0}, "sweeps is 0"),
        ({"odds": "even"}, "odds is 'even'"),
        ({"scale": "net"}, "scale is 'net'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        method("pfnm", **options)
