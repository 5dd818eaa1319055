"""Regions of weights: the mean of regions' sums is the mean of all their sites, to the bit where sums are exact."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedfuse
from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.recipe import Recipe
from fedfuse.core.rows import Rows
from fedfuse.errors import QuorumLost, RecipeError
from fedfuse.server.admission.admit import admit_all
from fedfuse.wire.codec import Packet, decode
from fedfuse.wire.sums import Summed

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
START = {name: tensor.clone() for name, tensor in NET.state_dict().items()}
SITES = tuple(f"site-{k}" for k in range(7))


def trained(net: nn.Module, start: dict[str, Tensor], recipe: Recipe | str = "fedavg") -> list[fedfuse.Update]:
    """An update of each of seven sites, of other numbers of rows."""
    found = []
    for place, site in enumerate(SITES):
        draw = torch.Generator().manual_seed(place)
        y = torch.randint(3, (20 + 9 * place,), generator=draw)
        x = (torch.randn(len(y), 4, generator=draw) + y[:, None]).to(start["0.weight"].dtype)
        net.load_state_dict(start)
        how: dict[str, Any] = {"client": site, "start": start, "classes": 3, "seed": place, "epochs": 1}
        found.append(fedfuse.local_update(net, Rows(x, y), recipe, **how))
    return found


UPDATES = trained(NET, START)


def fused(updates: list[Any], recipe: Recipe | str = "fedavg", **how: Any) -> fedfuse.Fused:
    """Without bounds: a client that is weakened is no term of a sum."""
    return fedfuse.fuse(updates, recipe, start=START, **{"bounds": {"over": "off"}, **how})


def regions(updates: list[Any], cuts: tuple[int, ...], recipe: Recipe | str = "fedavg") -> list[fedfuse.Update]:
    """Sums of neighbours, cut at some places, called by their first site."""
    edges = [0, *cuts, len(updates)]
    parts = [updates[a:b] for a, b in pairwise(edges)]
    return [replace(fused(part, recipe).partial(), client=f"region-{k}") for k, part in enumerate(parts)]


def assert_bits(a: fedfuse.Fused, b: fedfuse.Fused) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(tensor.equal(theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("seed", range(6))
def test_any_regions_of_any_sites_give_the_mean_of_all_to_the_last_bit(seed: int) -> None:
    draw = random.Random(seed)
    order = draw.sample(UPDATES, len(UPDATES))
    cuts = tuple(sorted(draw.sample(range(1, 7), draw.randint(1, 4))))
    assert_bits(fused(regions(order, cuts)), fused(UPDATES))


def test_a_tree_of_three_levels_and_a_site_beside_it() -> None:
    inner = regions(UPDATES[:6], (2, 4))
    country = replace(fused(inner).partial(), client="country")
    told = decode(country.payload).header
    assert (told["sums"]["sites"], told["num_examples"]) == (6, sum(u.num_examples for u in UPDATES[:6]))
    assert_bits(fused([country, UPDATES[6]]), fused(UPDATES))
    assert_bits(fused([country]), fused(UPDATES[:6]))


@pytest.mark.parametrize("method", ["task_arithmetic", "fedadam", "fedavgm"])
def test_other_means_of_weights_go_the_same_way(method: str) -> None:
    whole, tree = fused(UPDATES, method).state_dict(), fused(regions(UPDATES, (3,), method), method).state_dict()
    assert all(torch.allclose(tensor.double(), tree[n].double(), rtol=1e-6, atol=1e-7) for n, tensor in whole.items())


def test_clients_that_weigh_alike_are_counted() -> None:
    alike = fedfuse.recipe("fedavg", uniform=True)
    tree = regions(UPDATES, (2,), alike)
    assert_bits(fused(tree, alike), fused(UPDATES, alike))
    with pytest.raises(QuorumLost, match="by clients, expected .* by examples"):
        fused(tree)


def test_a_float64_network_agrees_to_twelve_digits() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    start = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    sites = trained(net, start)
    parts = [replace(fedfuse.fuse(sites[a:b]).partial(), client=f"r{a}") for a, b in ((0, 3), (3, 7))]
    whole, tree = fedfuse.fuse(sites).state_dict(), fedfuse.fuse(parts).state_dict()
    assert all(torch.allclose(tensor, tree[n], rtol=1e-12, atol=1e-14) for n, tensor in whole.items())


def test_plain_weights_make_regions_too() -> None:
    plain = [u.state_dict() for u in UPDATES[:4]]
    examples = [10.0, 30.0, 7.0, 9.0]
    halves = [fedfuse.fuse(plain[k : k + 2], num_examples=examples[k : k + 2]).partial() for k in (0, 2)]
    assert_bits(fedfuse.fuse(halves), fedfuse.fuse(plain, num_examples=examples))


def test_a_region_is_a_network_that_anybody_reads(tmp_path: Path) -> None:
    path = regions(UPDATES, ())[0].save(tmp_path / "region.safetensors")
    state = {n: t for n, t in decode(path.read_bytes()).tensors.items() if not n.startswith("~")}
    NET.load_state_dict(state)
    assert all(tensor.equal(fused(UPDATES).state_dict()[name]) for name, tensor in state.items())


def test_methods_that_read_each_client_refuse_sums() -> None:
    tree = regions(UPDATES, (3,))
    with pytest.raises(QuorumLost, match="3 sites by examples"):
        fused(tree, guard="median")
    with pytest.raises(QuorumLost, match="sum of"):
        fused(tree, "ensemble")
    with pytest.raises(RecipeError, match="'fednova'"):
        fused(UPDATES, "fednova").partial()
    with pytest.raises(RecipeError, match="'ensemble'"):
        fused(UPDATES, "ensemble").partial()


def altered(update: fedfuse.Update, **entries: Any) -> fedfuse.Update:
    packet = decode(update.payload)
    return replace(update, packet=Packet.of(packet.tensors, {**packet.header, **entries}))


def test_a_mean_that_is_not_its_sum_is_refused() -> None:
    north, south = regions(UPDATES, (3,))
    packet = decode(north.payload)
    moved = {n: t + 1.0 if n == "0.bias" else t for n, t in packet.tensors.items()}
    lying = replace(north, packet=Packet.of(moved, packet.header))
    refused = fused([lying, south], quorum=0.5).refused
    assert refused[0]["got"] == "not its sum divided by the weight"
    for sums in ({"sites": 0, "by": "examples", "weight": 1.0}, {"sites": True}, 7, {"sites": 3, "by": "x"}):
        refused = fused([altered(north, sums=sums), south], quorum=0.5).refused
        assert "impossible sum of sites" in refused[0]["got"]


def test_examples_are_bounded_per_site() -> None:
    four = regions(UPDATES, (2, 4, 6))
    assert not fused(four, bounds={"few": 3.0}).clipped, "compared as wholes, the last would be the largest"
    lying = altered(four[0], num_examples=1000.0)
    told = fused([lying, *four[1:]], bounds={"few": 3.0}, quorum=0.5)
    assert [(r["client"], r["field"]) for r in told.refused] == [("region-0", "num_examples")]


def claimed(sites: int, client: str = "site-6") -> fedfuse.Update:
    """One site's own weights as a sum of so many, each with as many examples as it has."""
    packet = decode(UPDATES[6].payload)
    count = packet.header["num_examples"] * sites
    weights = {n: t for n, t in packet.tensors.items() if not n.startswith("~")}
    sums = {f"~sum/{n}": t.double() * count for n, t in weights.items() if t.is_floating_point()}
    told = {"client": client, "num_examples": count, "sums": {"sites": sites, "by": "examples", "weight": count}}
    return replace(UPDATES[6], packet=Packet.of({**weights, **sums}, {**packet.header, **told}))


@pytest.mark.parametrize("sites", [9, 1000, 10**9])
def test_among_single_sites_nobody_is_many_by_its_own_word(sites: int) -> None:
    """One header entry, a billion sites, took the whole mean."""
    alone = fused(UPDATES[:6], bounds=None).state_dict()["0.weight"]
    told = fused([*UPDATES[:6], claimed(sites)], bounds=None)
    assert {entry["client"] for entry in (*told.refused, *told.clipped)} >= {"site-6"}
    honest = fused(UPDATES, bounds=None).state_dict()["0.weight"]
    assert (told.state_dict()["0.weight"] - alone).norm() <= 2 * (honest - alone).norm()
    for method in (fedfuse.recipe("fedavg", uniform=True), fedfuse.recipe("task_arithmetic", average=False)):
        moved = fused([*UPDATES[:6], claimed(sites)], method, bounds=None).state_dict()["0.weight"]
        assert float(moved.abs().max()) < 10


def test_who_is_vouched_for_may_be_many() -> None:
    given = [u.num_examples for u in UPDATES[:6]] + [9 * UPDATES[6].num_examples]
    vouched = fused([*UPDATES[:6], claimed(9)], bounds={"ratio": 100.0}, num_examples=given)
    assert not vouched.refused
    assert "sites" not in {entry["field"] for entry in vouched.clipped}


def test_among_regions_nobody_claims_far_more_sites_than_others() -> None:
    tree = [replace(r, client=f"r{k}") for k, r in enumerate(regions(UPDATES[:6], (2, 4)))]
    told = fused([*tree, claimed(10**6, "r3")], bounds={"few": 100.0})
    assert [(r["client"], r["field"]) for r in told.refused] == [("r3", "sites")]


def test_what_was_weakened_is_no_sum() -> None:
    loud = altered(UPDATES[0], num_examples=100_000)
    with pytest.raises(RecipeError, match="site-0"):
        fused([loud, *UPDATES[1:3]], bounds={"over": "clip", "few": 1e9}).partial()


def test_a_live_round_admits_no_sums() -> None:
    spec = UPDATES[0].spec
    assert spec is not None
    loud = altered(UPDATES[0], sums={"sites": 1000, "by": "examples", "weight": 20.0})
    found = admit_all([Envelope("a", loud.payload)], Brief(0, spec, START, classes=3), (), ["a"])
    assert found.refused[0]["expected"] == "one client's own reply"


def test_what_a_header_says_of_a_sum_comes_back() -> None:
    told = Summed(3, "examples", 90.0)
    assert Summed.of({"sums": told.to_json()}) == told
    assert Summed.of({}) is None
