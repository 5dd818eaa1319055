"""Alignment: a network and its permuted copies are one network, by every way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedfuse.client.kfac import KroneckerFactors, kronecker_factors
from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.params import Params, squared_distance
from fedfuse.core.posterior import Diag, Flat, Geometry, Kron, Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Aggregator
from fedfuse.core.spec import Spec, tie
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.nets.channels import channel_groups, move_posterior_units, move_units
from fedfuse.nets.kronecker import blocks_of
from fedfuse.server.aggregate.mean import Mean, mean_of
from fedfuse.server.aggregate.natural import NaturalKron
from fedfuse.server.align.activations import ByActivations
from fedfuse.server.align.alignment import ALIGNMENTS, AlignUnits, Reference
from fedfuse.server.align.nets import Net
from fedfuse.server.align.transport import ByTransport
from fedfuse.server.align.weights import ByWeights
from fedfuse.server.filters import find_alignment, with_filters
from fedfuse.server.guards import NormClip
from fedfuse.server.round import fuse_round
from fedfuse.server.steps.repair import RestateNorms
from fedfuse.wire.codec import decode, encode
from odd_networks import ODD, Cumulative, Odd

NETWORKS: dict[str, tuple[Spec, tuple[int, ...]]] = {
    "mlp": (Spec("mlp", {"inputs": 20, "hidden": [12, 9], "classes": 4}), (20,)),
    "lenet": (Spec("lenet", {"size": 12, "channels": 2, "hidden": [14, 10]}), (2, 12, 12)),
    "vgg-bn": (Spec("vgg11", {"widths": 0.08, "hidden": [12], "norm": True, "dropout": 0.0}), (3, 32, 32)),
    "resnet": (Spec("resnet18", {"widths": 0.08, "size": 12}), (3, 12, 12)),
}


def drawn(spec: Spec, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    values = {}
    for name, t in spec.build().state_dict().items():
        if not t.is_floating_point():
            values[name] = t
            continue
        noise = torch.rand(t.shape, generator=draw)
        positive = name.endswith("running_var") or (t.ndim == 1 and name.endswith("weight"))
        scale = (6 / max(1, t[0].numel())) ** 0.5 if t.ndim > 1 else 1.0
        values[name] = noise + 0.5 if positive else (2 * noise - 1) * scale
    return values


def inputs(shape: tuple[int, ...], rows: int = 16, seed: int = 1) -> Tensor:
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(seed))


def shuffled(spec: Spec, shape: tuple[int, ...], params: Params, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return move_units(params, {g: torch.randperm(g.size, generator=draw) for g in channel_groups(spec, shape)})


def cohort(spec: Spec, every: list[Any], geometry: Geometry | None = None) -> Cohort:
    return Cohort(
        tuple(
            ClientUpdate(f"c{k}", Posterior(params, geometry or Flat()), 1.0 + k, 1, spec)
            for k, params in enumerate(every)
        )
    )


def start(spec: Spec) -> ServerState:
    return ServerState(0, Single(spec, Posterior(spec.build().state_dict())))


def bench(shape: tuple[int, ...], rows: int = 32) -> Bench:
    return Bench(rows=Rows(inputs(shape, rows), torch.zeros(rows, dtype=torch.long)))


def fuse_aligned(
    group: Cohort, spec: Spec, bench_: Bench, align: Any = "weights", aggregate: Aggregator | None = None
) -> ServerState:
    evidence = (KroneckerFactors(min_rows=1),) if isinstance(aggregate, NaturalKron) else ()
    recipe = with_filters(Recipe(aggregate=aggregate or Mean(), evidence=evidence), align=align)
    return fuse_round(recipe, group, start(spec), bench_)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("way", ALIGNMENTS)
def test_permuted_copies_fuse_to_the_same_function(way: str, network: str) -> None:
    spec, shape = NETWORKS[network]
    one = drawn(spec, 0)
    group = cohort(spec, [one, shuffled(spec, shape, one, 1), shuffled(spec, shape, one, 2)])
    fused = fuse_aligned(group, spec, bench(shape), way).single
    x = inputs(shape, seed=7)
    want = spec.forward(one, x)
    assert float((fused.logits(x) - want).abs().max()) <= 1e-5 * max(1.0, float(want.abs().max()))
    naive = Mean()(group, start(spec), bench(shape)).single.logits(x)
    assert float((naive - want).abs().max()) > 1e-2


def factors(spec: Spec, params: Params, rows: Rows) -> Kron:
    net = spec.build().eval()
    net.load_state_dict(dict(params))
    found = kronecker_factors(net, blocks_of(spec), rows)
    return Kron({layer: (A[0], B[0]) for layer, (A, B) in found.items()})


def test_factors_travel_so_that_aligned_natural_fusion_of_copies_is_the_network() -> None:
    """Aligned FedLPA: with factors left behind, the solve would mix units that do not belong together."""
    spec, shape = NETWORKS["lenet"]
    one, rows = drawn(spec, 0), Rows(inputs(shape, 40), torch.arange(40) % 4)
    groups = channel_groups(spec, shape)
    belief = Posterior(one, factors(spec, one, rows))
    draw = torch.Generator().manual_seed(3)
    moved = move_posterior_units(belief, {g: torch.randperm(g.size, generator=draw) for g in groups}, spec.layout)
    other = Posterior(drawn(spec, 5), factors(spec, drawn(spec, 5), rows))

    def fused(second: Posterior) -> Params:
        updates = [ClientUpdate(f"c{k}", p, 1.0, 1, spec) for k, p in enumerate((belief, second, other))]
        solve = NaturalKron(damping=1e-2)
        return fuse_aligned(Cohort(tuple(updates)), spec, bench(shape), aggregate=solve).single.posterior.mean

    plain, behind = fused(belief), fused(moved)
    assert all(torch.allclose(plain[n], behind[n], atol=1e-5) for n in plain)


def test_variances_travel_with_their_means() -> None:
    spec, shape = NETWORKS["mlp"]
    one = drawn(spec, 0)
    variance = {n: torch.rand(t.shape, generator=torch.Generator().manual_seed(2)) + 0.1 for n, t in one.items()}
    draw = torch.Generator().manual_seed(3)
    orders = {g: torch.randperm(g.size, generator=draw) for g in channel_groups(spec, shape)}
    moved = move_posterior_units(Posterior(one, Diag(variance)), orders, spec.layout)
    updates = [ClientUpdate(c, p, 1.0, 1, spec) for c, p in (("a", Posterior(one, Diag(variance))), ("b", moved))]
    for update in AlignUnits(ByWeights())(Cohort(tuple(updates)), bench(shape))[0]:
        assert isinstance(update.posterior.geometry, Diag)
        assert all(update.posterior.geometry.variance[n].equal(variance[n]) for n in variance)
        assert all(update.posterior.mean[n].equal(one[n]) for n in one)


def test_evidence_about_single_weights_travels_too() -> None:
    """SCAFFOLD's control variates have the order of the weights they belong to."""
    spec, shape = NETWORKS["mlp"]
    one = drawn(spec, 0)
    told = {f"control/{n}": torch.randn(t.shape, generator=torch.Generator().manual_seed(4)) for n, t in one.items()}
    orders = {
        g: torch.randperm(g.size, generator=torch.Generator().manual_seed(3)) for g in channel_groups(spec, shape)
    }
    moved = {f"control/{n}": t for n, t in move_units({n: told[f"control/{n}"] for n in one}, orders).items()}
    group = cohort(spec, [one, move_units(one, orders)])
    group = Cohort(tuple(replace(u, notes=notes) for u, notes in zip(group, (told, moved), strict=True)))
    for update in AlignUnits(ByWeights())(group, bench(shape))[0]:
        assert all(update.notes[n].equal(told[n]) for n in told)


def test_needs_and_laws_are_those_of_every_part() -> None:
    plain = Recipe(aggregate=Mean())
    both = with_filters(plain, align={"name": "activations", "inputs": "server", "renorm": True}, guard="clip")
    assert both.needs == {"server_rows", "start", "network"}
    assert both.laws == Mean.laws & ByActivations().laws & NormClip.laws
    assert with_filters(plain, align="weights").laws == Mean.laws & ByWeights().laws
    assert (both.result, both.mixes_networks) == ("single", False)
    assert with_filters(plain, align=ByTransport()).mixes_networks


def far_apart(cohort_: Cohort) -> float:
    """Σ over pairs of the squared distance between clients."""
    means = [u.posterior.mean for u in cohort_]
    return sum(squared_distance(a, b) for i, a in enumerate(means) for b in means[:i])


@pytest.mark.parametrize("reference", ["first", "largest", "mean"])
def test_clients_come_closer_whoever_is_the_reference(reference: Reference) -> None:
    spec, shape = NETWORKS["mlp"]
    group = cohort(spec, [drawn(spec, k) for k in range(4)])
    moved, _ = AlignUnits(ByWeights(), reference)(group, bench(shape))
    assert far_apart(moved) < 0.98 * far_apart(group)
    stays = [a.posterior.mean is b.posterior.mean for a, b in zip(moved, group, strict=True)]
    assert stays == {"first": [True, *3 * [False]], "largest": [*3 * [False], True]}.get(reference, stays)


def test_a_mean_as_reference_is_a_fixed_point() -> None:
    """Nobody would move if matched to the mean of the aligned clients once more."""
    spec, shape = NETWORKS["mlp"]
    moved, _ = AlignUnits(ByWeights(), "mean")(cohort(spec, [drawn(spec, k) for k in range(4)]), bench(shape))
    nets = [Net.of(u, shape) for u in moved]
    middle = replace(nets[0], params=mean_of(moved))
    for moves in ByWeights()(nets, middle, bench(shape)):
        assert all(isinstance(o, Tensor) and o.equal(torch.arange(len(o))) for o in moves.values())


def test_the_record_says_who_moved() -> None:
    spec, shape = NETWORKS["mlp"]
    one = drawn(spec, 0)
    first, _ = channel_groups(spec, shape)
    swapped = move_units(one, {first: [1, 0, *range(2, 12)]})
    facts = fuse_aligned(cohort(spec, [one, swapped]), spec, bench(shape)).facts
    assert facts["moved"] == {"fc1": {"c0": 0.0, "c1": pytest.approx(2 / 12)}, "fc2": {"c0": 0.0, "c1": 0.0}}
    assert facts["aligned"] == "ByWeights(sweeps=50)"


def test_updates_on_disk_are_moved_as_they_are_read() -> None:
    spec, shape = NETWORKS["lenet"]
    one = drawn(spec, 0)
    every = [one, shuffled(spec, shape, one, 1)]
    lazy = cohort(spec, [decode(encode(params, {})).tensors for params in every])
    there = fuse_aligned(lazy, spec, bench(shape)).single.posterior.mean
    here = fuse_aligned(cohort(spec, every), spec, bench(shape)).single.posterior.mean
    assert all(there[n].equal(here[n]) for n in here)
    assert all(torch.allclose(here[n], one[n], atol=1e-6) for n in here)


def test_networks_of_other_depths_and_widths_are_refused_by_name() -> None:
    deep, wide = (Spec("mlp", {"inputs": 20, "hidden": h, "classes": 4}) for h in ([12, 9, 5], [13, 9]))
    spec, shape = NETWORKS["mlp"]
    first = cohort(spec, [drawn(spec, 0)]).updates[0]

    def fuse(way: str, other: Spec) -> None:
        second = ClientUpdate("hospital", Posterior(drawn(other, 1)), 1.0, 1, other)
        fuse_aligned(Cohort((first, second)), spec, bench(shape), way)

    with pytest.raises(ConfigError, match=r"hospital has 3 kinds of hidden units \(fc1, fc2, fc3\) and c0 has 2"):
        fuse("transport", deep)
    with pytest.raises(ConfigError, match=r"hospital has 13 units in 'fc1' and c0 has 12; align .* by transport"):
        fuse("weights", wide)
    fuse("transport", wide)


def test_an_alignment_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no alignment 'weigths'; did you mean 'weights'\?"):
        find_alignment("weigths")
    with pytest.raises(ConfigError, match=r"no option 'refrence'; did you mean 'reference'\?"):
        find_alignment({"name": "weights", "refrence": "mean"})
    for way in ALIGNMENTS:
        assert find_alignment({"name": way, "reference": "mean", "renorm": True})[1:] == (
            AlignUnits(ALIGNMENTS[way](), "mean"),
            (RestateNorms(),),
        )


def test_new_statistics_need_rows_and_fit_the_mean() -> None:
    spec, shape = NETWORKS["vgg-bn"]
    group = cohort(spec, [drawn(spec, k) for k in range(2)])
    rows = bench(shape, 64)
    plain, anew = (fuse_aligned(group, spec, rows, {"name": "weights", "renorm": r}).single for r in (False, True))
    name = "conv1_norm.running_mean"
    assert rows.rows is not None
    weight, bias = (plain.posterior.mean[f"conv1.{what}"] for what in ("weight", "bias"))
    conv = torch.nn.functional.conv2d(rows.rows.x, weight, bias, padding=1)
    assert torch.allclose(anew.posterior.mean[name], conv.mean((0, 2, 3)), atol=1e-5)
    assert not torch.allclose(anew.posterior.mean[name], plain.posterior.mean[name], atol=1e-3)
    with pytest.raises(RecipeError, match="BatchNorm's statistics learns on the server's own rows"):
        fuse_aligned(group, spec, Bench(), {"name": "weights", "renorm": True})


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_permuted_copies_of_odd_networks_come_back_exactly(odd: Odd) -> None:
    """Attention heads as blocks, MLP units, gates of recurrent layers, unequal branches: the mean is the network."""
    spec = Spec.of(odd.module.float())
    groups, weights = channel_groups(spec, odd.shape), tie(spec, drawn(spec, 5))
    draw = torch.Generator().manual_seed(6)
    moves = {}
    for group in groups:
        room = group.size // group.sections
        moves[group] = torch.cat([torch.randperm(room, generator=draw) + s * room for s in range(group.sections)])
    shuffled = [weights, move_units(weights, moves)]
    cohort = Cohort.of([ClientUpdate(c, Posterior(w), 1.0, 1, spec) for c, w in zip("ab", shuffled, strict=True)])
    aligned, facts = AlignUnits(ByWeights())(cohort, Bench(inputs=InputForm(odd.shape)))
    assert all(aligned.updates[1].posterior.mean[n].equal(t) for n, t in weights.items())
    assert "not_aligned" not in facts


def test_what_could_not_be_aligned_is_named_in_the_result() -> None:
    bench = Bench(inputs=InputForm((4,)))
    spec = Spec.of(Cumulative())
    cohort = Cohort.of([ClientUpdate(c, Posterior(drawn(spec, i)), 1.0, 1, spec) for i, c in enumerate("ab")])
    _, facts = AlignUnits(ByWeights())(cohort, bench)
    assert facts["not_aligned"] == ["enter.weight (cumsum)"]
    spec, bench = Spec.of(ODD["lstm"].module.float()), Bench(inputs=InputForm(ODD["lstm"].shape))
    cohort = Cohort.of([ClientUpdate(c, Posterior(drawn(spec, i)), 1.0, 1, spec) for i, c in enumerate("ab")])
    _, facts = AlignUnits(ByActivations())(cohort, bench)
    assert facts["not_aligned"] == ["cell (nothing to compare)"]
    with pytest.raises(ConfigError, match=r"units of 'cell'.*ground = \"weights\""):
        AlignUnits(ByTransport(ground="activations"))(cohort, bench)
