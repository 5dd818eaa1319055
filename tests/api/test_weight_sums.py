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
from fedfuse.server.door.admit import admit_all
from fedfuse.wire.codec import decode, encode
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
    """Without bounds, for whoever is weakened is no term of a sum."""
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
    with pytest.raises(QuorumLost, match="a sum of 2 sites by clients, expected a sum by examples"):
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
    with pytest.raises(QuorumLost, match="a sum of 3 sites by examples, expected one client's own reply"):
        fused(tree, guard="median")
    with pytest.raises(QuorumLost, match="sum of"):
        fused(tree, "ensemble")
    with pytest.raises(RecipeError, match="for 'fednova' reads more of its clients than one sum"):
        fused(UPDATES, "fednova").partial()
    with pytest.raises(RecipeError, match="for 'ensemble' reads more"):
        fused(UPDATES, "ensemble").partial()


def altered(update: fedfuse.Update, **entries: Any) -> fedfuse.Update:
    packet = decode(update.payload)
    return replace(update, payload=encode(packet.tensors, {**packet.header, **entries}))


def test_a_mean_that_is_not_its_sum_is_refused() -> None:
    north, south = regions(UPDATES, (3,))
    packet = decode(north.payload)
    moved = {n: t + 1.0 if n == "0.bias" else t for n, t in packet.tensors.items()}
    lying = replace(north, payload=encode(moved, packet.header))
    refused = fused([lying, south], quorum=0.5).refused
    assert refused[0]["got"] == "not its sum divided by the weight"
    for sums in ({"sites": 0, "by": "examples", "weight": 1.0}, {"sites": True}, 7, {"sites": 3, "by": "x"}):
        refused = fused([altered(north, sums=sums), south], quorum=0.5).refused
        assert "impossible sum of sites" in refused[0]["got"]


def test_examples_are_bounded_per_site() -> None:
    (whole,) = regions(UPDATES, ())
    small = [replace(u, client=f"late-{k}") for k, u in enumerate(UPDATES[:5])]
    assert not fused([whole, *small], bounds=None).refused
    one = altered(whole, sums={**decode(whole.payload).header["sums"], "sites": 1})
    told = fused([one, *small], bounds=None)
    assert told.clipped or told.refused


def test_what_was_weakened_is_no_sum() -> None:
    loud = altered(UPDATES[0], num_examples=100_000)
    with pytest.raises(RecipeError, match="the say of site-0 was weakened at the door"):
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
