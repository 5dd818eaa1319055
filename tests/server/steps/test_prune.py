"""Channels that go: rates from spectra, ranks of feature maps against numpy, and networks that get smaller."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import Cohort, Envelope
from fedfuse.core.model import Single
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines.local import InProcess, Population
from fedfuse.errors import ConfigError, RecipeError, Refused
from fedfuse.linalg.lanczos import Spectrum
from fedfuse.nets.channels import Group
from fedfuse.nets.curvature import Curvature
from fedfuse.server.admission.admit import Contract, admit
from fedfuse.server.loop import Record, RunPlan, run
from fedfuse.server.steps.prune import (
    FixedRate,
    Prune,
    SpectralRate,
    combined_rate,
    feature_ranks,
    filters_of,
    gap_rate,
    layer_rates,
    magnitude_threshold,
    map_ranks,
    plateau_rate,
    share_below,
    share_of_small,
    shrink_state,
    units_to_keep,
)
from fedfuse.wire.files import load_model, save_model
from fedfuse.wire.messages import encode_reply
from odd_networks import ODD

NETWORKS = {
    "lenet": (Spec("lenet"), (1, 28, 28)),
    "vgg11": (Spec("vgg11", {"widths": 0.1, "hidden": [16]}), (3, 32, 32)),
    "resnet18": (Spec("resnet18", {"widths": 0.125}), (3, 32, 32)),
}


def lively(spec: Spec) -> nn.Module:
    """A network whose norms have something to say."""
    torch.manual_seed(7)
    net = spec.build()
    with torch.no_grad():
        for part in net.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.weight.uniform_(0.5, 1.5)
                part.bias.normal_(0, 0.3)
                part.running_mean.normal_(0, 0.3)
                part.running_var.uniform_(0.5, 1.5)
    return net


def zeroed(net: nn.Module, keep: dict[Group, Tensor]) -> nn.Module:
    """The network with everything that makes a removed channel set to zero."""
    state = net.state_dict()
    for group, units in keep.items():
        gone = [u for u in range(group.size) if u not in units.tolist()]
        for place in group.makers:
            if not place.tensor.endswith(("running_mean", "running_var")):
                state[place.tensor][gone] = 0.0
    return net


@pytest.mark.parametrize("name", NETWORKS)
def test_without_its_channels_it_is_the_network_with_zeros(name: str) -> None:
    spec, shape = NETWORKS[name]
    net = lively(spec)
    filters = filters_of(spec, shape)
    draw = torch.Generator().manual_seed(1)
    keep = {f.group: units_to_keep(torch.rand(f.group.size, generator=draw), 0.5) for f in filters}
    smaller = shrink_state(ServerState(0, Single.of(net, spec)), keep).single
    x = torch.rand(5, *shape, generator=draw)
    with torch.no_grad():
        want = zeroed(net, keep).eval()(x)
        assert torch.allclose(smaller.logits(x), want, atol=1e-5)
    before, after = (sum(t.numel() for t in m.values()) for m in (net.state_dict(), smaller.posterior.mean))
    assert after < 0.7 * before


REMOVABLE = (
    *("6+5", "6+4+4", "64+32", "6+5, norm", "6+5, flat", "6+4+4, flat"),
    *("GroupNorm(C, C)", "multiplied", "squeezed"),
)


@pytest.mark.parametrize("name", REMOVABLE)
def test_odd_networks_lose_channels_as_if_these_had_been_zero(name: str) -> None:
    module, shape, _ = ODD[name]
    spec, bench = Spec.of(module.float()), Bench(inputs=InputForm(shape), rows=some_rows(shape))
    step = Prune(0, FixedRate(0.5), "uniform", renorm=False)
    step.check_network({"": spec}, bench, 1)
    net = lively(spec)
    pruned = step(ServerState(0, Single.of(net, spec)), Cohort(()), bench)
    filters = filters_of(spec, shape)
    assert {n: k for n, (k, _) in pruned.facts["pruned"]["kept"].items()} == {
        f.group.name: f.group.size - f.group.size // 2 for f in filters
    }
    keep = {}
    for f in filters:  # which units stayed is told by the channels the spec remembers
        place, channels = f.places[0], pruned.single.spec.kept[f.layers[0]]
        keep[f.group] = torch.tensor([u for u in range(f.group.size) if place.offset + u * place.per in channels])
    x = torch.rand(5, *shape, generator=torch.Generator().manual_seed(1))
    silent = dict(net.state_dict())
    for group, units in keep.items():
        gone = [u for u in range(group.size) if u not in units.tolist()]
        for place in group.readers:
            at = torch.tensor([place.offset + u * place.per + k for u in gone for k in range(place.per)])
            silent[place.tensor] = silent[place.tensor].index_fill(place.axis, at, 0)
    assert torch.allclose(pruned.single.logits(x), spec.forward(silent, x), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "group"), [("written out", "second"), ("squeezed, written", "conv"), ("padded", r"wide\[0\]")]
)
def test_sizes_that_are_written_out_are_refused_before_anybody_trains(name: str, group: str) -> None:
    module, shape, _ = ODD[name]
    with pytest.raises(ConfigError, match=rf"channels of '{group}' cannot be removed: .*flatten\(1\)"):
        Prune(0, FixedRate(0.5)).check_network({"": Spec.of(module.float())}, Bench(inputs=InputForm(shape)), 1)


def some_rows(shape: tuple[int, ...]) -> Rows:
    x = torch.rand(20, *shape, generator=torch.Generator().manual_seed(3))
    return Rows(x, torch.arange(20) % 2)


def test_convolutions_that_are_added_go_together() -> None:
    spec, shape = NETWORKS["resnet18"]
    by_name = {f.group.name: f.layers for f in filters_of(spec, shape)}
    assert by_name["stage2.0.body.conv2"] == (
        "stage2.0.body.conv2",
        "stage2.0.shortcut.conv",
        "stage2.1.body.conv2",
    )


@pytest.mark.parametrize(("rate", "stay"), [(0.0, 8), (0.5, 4), (0.51, 4), (0.99, 1)])
def test_the_lowest_scores_go_and_one_stays(rate: float, stay: int) -> None:
    scores = torch.tensor([5.0, 1.0, 7.0, 3.0, 3.0, 8.0, 0.0, 2.0])
    units = units_to_keep(scores, rate)
    assert len(units) == stay
    assert units.tolist() == sorted(scores.sort(descending=True, stable=True).indices[:stay].tolist())


def test_every_room_keeps_as_many() -> None:
    assert units_to_keep(torch.tensor([9.0, 8.0, 1.0, 2.0]), 0.5, rooms=2).tolist() == [0, 3]


def test_rates_per_layer_follow_the_weights_magnitudes() -> None:
    spec, shape = NETWORKS["lenet"]
    net = spec.build()
    with torch.no_grad():
        for name, weight in net.named_parameters():
            weight.fill_(1.0)
            if name == "conv1.weight":
                weight.view(-1)[:30] = 0.1
            if name == "conv2.weight":
                weight.view(-1)[:1800] = -0.2
    model, filters = Single.of(net, spec), filters_of(spec, shape)
    total = sum(p.numel() for p in net.parameters())
    assert layer_rates(model, filters, 1831 / total, "magnitude") == {"conv1": 30 / 150, "conv2": 1800 / 2400}
    assert layer_rates(model, filters, 0.3, "uniform") == {"conv1": 0.3, "conv2": 0.3}


def test_memories_of_the_models_shape_shrink_with_it() -> None:
    spec, shape = NETWORKS["lenet"]
    net = spec.build()
    memory = {f"control/{n}": p.detach().clone() for n, p in net.named_parameters()}
    masks = {f"mask/{n}": p.detach() > 0 for n, p in net.named_parameters() if p.ndim > 1}
    state = ServerState(0, Single.of(net, spec), {**memory, **masks, "labels/client-0": torch.ones(10)})
    filters = filters_of(spec, shape)
    smaller = shrink_state(state, {filters[1].group: torch.tensor([0, 3, 7])})
    for name, tensor in smaller.single.posterior.mean.items():
        assert smaller.memory[f"control/{name}"].equal(tensor), name
        if f"mask/{name}" in masks:
            assert smaller.memory[f"mask/{name}"].equal(tensor > 0), name
    assert smaller.memory["labels/client-0"].shape == (10,)


SMALL = Spec("lenet", {"size": 8, "classes": 3, "maps": [6, 8], "hidden": [10]})


def rows(n: int, seed: int, only: int | None = None) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=draw) if only is None else torch.full((n,), only)
    return Rows(torch.rand(n, 1, 8, 8, generator=draw) + y[:, None, None, None], y)


def federate(
    name: str, rounds: int = 3, spec: Spec = SMALL, server: Rows | None = None, **options: Any
) -> list[Record]:
    population = Population.of({f"c{i}": rows(12, i, only=i) for i in range(3)})
    local = LocalSettings(batch_size=6, optimizer={"lr": 0.05})
    bench = Bench(rows(30, 9) if server is None else server, None, 3, 3, local, seed=1)
    torch.manual_seed(0)
    state = ServerState(0, Single.of(spec.build(), spec))
    recipe = find_method(name).recipe(**options)
    return list(run(recipe, InProcess(population), bench, None, state, RunPlan(rounds, enrolled=population.sizes())))


def sizes(records: list[Record]) -> list[int]:
    return [sum(t.numel() for t in r.state.single.posterior.mean.values()) for r in records]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hrank", {"rate": 0.5}),
        ("fedap", {"rule": "fixed", "rate": 0.7}),
        ("fedap", {"lanczos": 12, "sample": 10}),
        ("fedduap", {"lanczos": 12, "sample": 10, "rule": "gap"}),
        ("fedduap", {"rule": "fixed", "rate": 0.7, "epochs": 1}),
    ],
)
def test_the_network_narrows_once_and_clients_train_the_smaller_one(name: str, options: dict[str, Any]) -> None:
    records = federate(name, at=2, **options)
    told = records[1].facts["facts"]["pruned"]
    assert "pruned" not in records[0].facts["facts"]
    assert not any(r.facts["refused"] or r.facts["dropped"] for r in records)
    kept = {layer: len(units) for layer, units in records[1].state.single.spec.kept.items()}
    assert {g: n for g, (n, _) in told["kept"].items()} == kept
    for group, (stay, size) in told["kept"].items():
        assert stay == max(1, size - int(told["layer_rates"][group] * size + 1e-9))
    if told["rate"] > 0.3:
        assert sizes(records)[0] > sizes(records)[1] == sizes(records)[2]
        assert records[2].facts["bytes_up"] < records[0].facts["bytes_up"]
        assert records[2].facts["bytes_down"] < records[1].facts["bytes_down"]


def test_everybodys_rate_is_told() -> None:
    told = federate("fedap", at=2, lanczos=12, sample=10)[1].facts["facts"]["pruned"]
    assert set(told["rates"]) == {"c0", "c1", "c2", "server"}
    assert sum(told["rate_weights"].values()) == pytest.approx(1)
    assert told["rate"] == pytest.approx(sum(told["rates"][w] * told["rate_weights"][w] for w in told["rates"]))


def test_labels_heard_before_count_too() -> None:
    records = federate("fedap", at=2, lanczos=12, sample=10)
    known = {name for name in records[0].state.memory if name.startswith("labels/")}
    assert known == {f"labels/c{i}" for i in range(3)}


def test_a_reply_of_the_old_shape_is_refused_by_name() -> None:
    records = federate("hrank", at=1, rate=0.5)
    old, new = (replace(r.state, round=1).brief((), 3) for r in (federate("fedavg", rounds=1)[0], records[0]))
    late = encode_reply(old, old.params, {}, num_examples=12.0, steps=2, facts={})
    words = r"c1: spec is lenet.*, expected the network briefed, lenet.*with 5 resized tensors"
    with pytest.raises(Refused, match=words):
        admit(Envelope("c1", late), Contract.of(new, ()))


def test_a_pruned_model_is_one_file(tmp_path: Path) -> None:
    model = federate("hrank", at=1, rate=0.5, rounds=1)[0].state.single
    save_model(model, tmp_path / "small.safetensors", {})
    loaded, _ = load_model(tmp_path / "small.safetensors")
    x = rows(4, 0).x
    assert isinstance(loaded, Single)
    assert loaded.logits(x).equal(model.logits(x))
    module = loaded.spec.build()
    module.load_state_dict(dict(loaded.posterior.mean))
    torch.testing.assert_close(module.eval()(x), model.logits(x))


def test_what_cannot_be_is_said_before_training() -> None:
    with pytest.raises(ConfigError, match="pruned after round 9 and the run ends after 3; lower `at` or add rounds"):
        federate("fedap", at=9)
    with pytest.raises(ConfigError, match="'mlp' has no convolution whose channels could be removed"):
        federate("hrank", at=1, spec=Spec("mlp", {"inputs": 64, "classes": 3}))
    with pytest.raises(RecipeError, match="server's own rows and there are none"):
        federate("hrank", at=1, server=rows(0, 0))
    with pytest.raises(ConfigError, match="rate is 1.0, expected less than 1"):
        federate("hrank", at=1, rate=1.0)


def test_in_other_rounds_nothing_happens() -> None:
    state = ServerState(4, Single.of(SMALL.build(), SMALL))
    assert Prune(3, FixedRate(0.5))(state, Cohort(()), Bench()) is state


def pruned_widths(step: Prune, spec: Spec, shape: tuple[int, ...], rows: Rows | None = None) -> ServerState:
    return step(
        ServerState(0, Single.of(lively(spec), spec)), Cohort(()), Bench(inputs=InputForm(shape), rows=rows, seed=3)
    )


def test_the_smallest_filters_go_by_magnitude_and_no_rows_are_needed() -> None:
    spec, shape = NETWORKS["lenet"]
    step = Prune(0, FixedRate(0.5), "uniform", by="magnitude")
    assert "server_rows" not in step.needs
    weight = lively(spec).state_dict()["conv1.weight"]
    want = sorted(weight.abs().mean((1, 2, 3)).topk(3).indices.tolist())
    assert list(pruned_widths(step, spec, shape).single.spec.kept["conv1"]) == want


def test_random_filters_go_by_the_seed() -> None:
    spec, shape = NETWORKS["lenet"]
    step = Prune(0, FixedRate(0.5), "uniform", by="random")
    first, again = (pruned_widths(step, spec, shape).single.spec.kept for _ in range(2))
    assert first == again
    assert len(first["conv1"]) == 3


def test_inner_leaves_the_residual_stream_alone() -> None:
    spec, shape = NETWORKS["resnet18"]
    kept = pruned_widths(Prune(0, FixedRate(0.5), "uniform", by="magnitude", inner=True), spec, shape).single.spec.kept
    inner = {f"stage{s}.{b}.body.conv1" for s in (1, 2, 3, 4) for b in (0, 1)}
    assert set(kept) == inner
    plain, shape = NETWORKS["lenet"]
    everything = pruned_widths(Prune(0, FixedRate(0.5), "uniform", by="magnitude", inner=True), plain, shape)
    assert set(everything.single.spec.kept) == {"conv1", "conv2"}
    multiplied = Spec.of(ODD["multiplied"].module.float())
    assert not any(f.joined for f in filters_of(multiplied, (2, 4, 4))), "a depthwise convolution adds nothing"


def test_norms_are_estimated_anew_on_the_servers_rows() -> None:
    """The running statistics of the pruned network are those of its own activations over the rows."""
    spec, shape = NETWORKS["vgg11"]
    rows = some_rows(shape)
    after = pruned_widths(Prune(0, FixedRate(0.5), "uniform", by="magnitude"), spec, shape, rows).single
    net = after.spec.build().eval()
    net.load_state_dict(dict(after.posterior.mean))
    convs = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    norm = next(m for m in net.modules() if isinstance(m, nn.BatchNorm2d))
    with torch.no_grad():
        made = convs[0](rows.x)
    assert torch.allclose(norm.running_mean, made.mean((0, 2, 3)), atol=1e-5)
    untouched = pruned_widths(
        Prune(0, FixedRate(0.5), "uniform", by="magnitude", renorm=False), spec, shape, rows
    ).single
    assert any(not untouched.posterior.mean[n].equal(after.posterior.mean[n]) for n in after.posterior.mean)


def exact(*values: float) -> Spectrum:
    return Spectrum(torch.tensor([values]).double(), torch.full((1, len(values)), 1 / len(values)).double())


def test_the_first_gap_of_four_lipschitz_constants_is_the_rate() -> None:
    """Gaps 0.1, 0.3, 2, 5: with 𝓛 = 0.1 the third is the first above 0.4, so three of five may go."""
    spectrum = exact(-0.1, 0.0, 0.3, 2.3, 7.3)
    assert gap_rate(spectrum, 0.1) == pytest.approx(3 / 5)
    assert gap_rate(spectrum, 0.6) == pytest.approx(4 / 5)
    assert gap_rate(spectrum, 2.0) == 0.0


def test_several_probes_count_together() -> None:
    two = Spectrum(torch.tensor([[0.0, 9.0], [0.5, 9.5]]), torch.tensor([[0.8, 0.2], [0.6, 0.4]]))
    assert gap_rate(two, 1.0) == pytest.approx((0.8 + 0.6) / 2)


def test_the_plateau_lies_where_hardly_an_eigenvalue_is() -> None:
    """A flat bulk up to 0.01 and three outliers far away: what lies below the plateau is at least what is not positive
    and at most the bulk, and of four shares at equal steps none moves."""
    bulk = torch.linspace(-0.01, 0.01, 97)
    spectrum = exact(*bulk.tolist(), 5.0, 8.0, 10.0)
    rate = plateau_rate(spectrum)
    assert 0.48 <= rate <= 0.75
    assert rate <= 1 - (1 - share_below(spectrum, 0.0, 0.01)) / 2


def test_a_spectrum_without_positive_values_is_flat_all_over() -> None:
    assert plateau_rate(exact(-3.0, -2.0, -1.0)) == pytest.approx(1.0, abs=1e-6)
    assert plateau_rate(exact(0.0, 0.0)) == 1.0


def test_everybody_counts_by_rows_and_by_nearness_to_all_labels() -> None:
    """Eq. 6 by hand."""
    num_examples, apart, rates, eps = [400.0, 400.0, 800.0], [0.61, 0.31, 0.0], [0.7, 0.5, 0.2], 1e-2
    raw = [400 / 0.62, 400 / 0.32, 800 / 0.01]
    rate, weights = combined_rate(rates, num_examples, apart, eps)
    assert weights == pytest.approx([w / sum(raw) for w in raw])
    assert rate == pytest.approx(sum(w * p for w, p in zip(raw, rates, strict=True)) / sum(raw))


def test_threshold_and_layer_rates_by_hand() -> None:
    """Ten weights, p* = 0.45: the ⌊4.5⌋ = 4th smallest magnitude is 0.4; below it are 2 of 4 and 1 of 6."""
    first, second = torch.tensor([0.1, -0.2, 0.8, -0.9]), torch.tensor([0.3, -0.4, 0.5, -0.6, 0.7, 1.0])
    threshold = magnitude_threshold([first, second], 0.45)
    assert threshold == pytest.approx(0.4)
    assert share_of_small([first], threshold) == 0.5
    assert share_of_small([second], threshold) == pytest.approx(1 / 6)
    assert share_of_small([first, second], threshold) == pytest.approx(3 / 10)
    assert magnitude_threshold([first, second], 0.05) == 0.0


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_threshold_leaves_about_the_rate_below(rate: float) -> None:
    weights: list[Tensor] = [torch.randn(70, 30, generator=torch.Generator().manual_seed(0))]
    assert share_of_small(weights, magnitude_threshold(weights, rate)) == pytest.approx(rate, abs=1.01 / 2100)


def test_the_rule_is_the_users_choice() -> None:
    seen = Curvature(exact(-1.0, 0.0, 0.1, 30.0), 0.5)
    assert SpectralRate("gap").rate_of(seen) == pytest.approx(0.75)
    assert SpectralRate("plateau").rate_of(seen) == plateau_rate(seen.spectrum)
    assert math.isfinite(plateau_rate(seen.spectrum))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranks_are_numpys(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    low = torch.randn(6, 5, 9, 2, generator=draw).to(dtype) @ torch.randn(6, 5, 2, 7, generator=draw).to(dtype)
    maps = torch.cat(
        [low, torch.randn(6, 5, 9, 7, generator=draw).to(dtype).relu(), torch.zeros(6, 1, 9, 7).to(dtype)], 1
    )
    assert map_ranks(maps).tolist() == np.linalg.matrix_rank(maps.numpy()).tolist()


def test_a_coarser_tolerance_sees_less() -> None:
    almost = torch.diag(torch.tensor([1.0, 0.5, 1e-4]))
    assert int(map_ranks(almost)) == 3
    assert int(map_ranks(almost, tolerance=1e-3)) == 2


def test_maps_are_taken_after_the_relu_and_before_pooling() -> None:
    torch.manual_seed(0)
    spec, x = Spec("lenet"), torch.rand(130, 1, 28, 28)
    model = Single.of(spec.build(), spec)
    found = feature_ranks(model, x, ["conv1"])["conv1"]
    w = model.posterior.mean
    maps = F.conv2d(x, w["conv1.weight"], w["conv1.bias"]).relu()
    want = np.linalg.matrix_rank(maps.numpy()).mean(0) / 24
    assert np.allclose(found.numpy(), want)


def test_a_norm_belongs_to_its_layer() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 36, 2))
    with torch.no_grad():
        net[1].bias.copy_(torch.tensor([-100.0, 100.0, 0.0]))  # dead, all lit, half lit
    spec = Spec.of(net)
    model, x = Single.of(net, spec), torch.rand(9, 1, 8, 8)
    found = feature_ranks(model, x, ["0"])["0"]
    maps = net.eval()[1](net[0](x)).relu().detach().numpy()
    assert np.allclose(found.numpy(), np.linalg.matrix_rank(maps).mean(0) / 6)
    assert found[0] == 0


def test_a_units_rank_is_how_often_it_is_lit() -> None:
    torch.manual_seed(0)
    spec = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 2})
    model, x = Single.of(spec.build(), spec), torch.randn(50, 4)
    lit = (x @ model.posterior.mean["fc1.weight"].T + model.posterior.mean["fc1.bias"] > 0).double().mean(0)
    assert torch.allclose(feature_ranks(model, x, ["fc1"])["fc1"], lit)
