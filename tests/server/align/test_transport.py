"""Transport: the assignment between equal widths, merging and splitting between others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from builders import net_of
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Diag, Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import ConfigError
from fedfuse.nets.channels import channel_groups, move_units
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.align.alignment import AlignUnits
from fedfuse.server.align.nets import Coupling, Net, blend_units
from fedfuse.server.align.transport import ByTransport, exact_plan
from fedfuse.server.round import fuse_round

MLP = Spec("mlp", {"inputs": 6, "hidden": [8, 7], "classes": 3})
LENET = Spec("lenet", {"size": 8, "maps": [3, 4], "hidden": [6]})
SHAPES = {MLP: (6,), LENET: (1, 8, 8)}


def net(spec: Spec, seed: int) -> Net:
    return net_of(spec, SHAPES[spec], seed)


@pytest.mark.parametrize("spec", [MLP, LENET], ids=["mlp", "lenet"])
def test_between_equal_widths_it_is_the_hungarian_solution(spec: Spec) -> None:
    """Layer by layer: what a layer reads is moved by the order before, its cost solved by scipy and by POT."""
    target, one = net(spec, 0), net(spec, 1)
    found = ByTransport().transport(target, one)
    before: Tensor | None = None
    for group, layer in zip(one.groups, [g.name for g in one.groups], strict=True):
        ours, theirs = (n.params[f"{layer}.weight"].double() for n in (one, target))
        if before is not None:
            per = ours.shape[1] // len(before)
            ours = ours[:, (before[:, None] * per + torch.arange(per)).flatten()]
        a, b = (
            torch.cat([w.flatten(1), n.params[f"{layer}.bias"][:, None].double()], 1)
            for w, n in ((theirs, target), (ours, one))
        )
        cost = torch.cdist(a, b)
        _, columns = linear_sum_assignment(cost.numpy())
        order = found[group.name]
        assert isinstance(order, Tensor)
        assert order.tolist() == columns.tolist()
        plan = exact_plan(cost) * group.size
        assert torch.allclose(plan, torch.eye(group.size, dtype=torch.float64)[order], atol=1e-12)
        before = order


def doubled(one: Net) -> Net:
    """The same function with every hidden unit there twice, each read half as much, in a random order."""
    params = dict(one.params)
    for group in one.groups:
        for place in group.locations:
            t = params[place.tensor]
            n = t.shape[place.axis]
            units = torch.arange(n).view(-1, place.per).repeat(2, 1).flatten()
            params[place.tensor] = t.index_select(place.axis, units) / (2 if place.reads else 1)
    wide = one.spec.with_shapes_of(params)
    groups = channel_groups(wide, SHAPES[one.spec])
    draw = torch.Generator().manual_seed(9)
    params = move_units(params, {g: torch.randperm(g.size, generator=draw) for g in groups})
    return Net("wide", wide, groups, params)


@pytest.mark.parametrize("ground", ["weights", "activations"])
@pytest.mark.parametrize("spec", [MLP, LENET], ids=["mlp", "lenet"])
def test_twins_merge_into_the_network_they_came_from(spec: Spec, ground: str) -> None:
    one = net(spec, 0)
    wide = doubled(one)
    x = torch.randn(40, *SHAPES[spec], generator=torch.Generator().manual_seed(2))
    assert torch.allclose(wide.spec.forward(wide.params, x), spec.forward(one.params, x), rtol=1e-4, atol=1e-3)
    way = ByTransport(ground=ground)  # type: ignore[arg-type]
    (moves,) = way([wide], one, Bench(Rows(x, torch.zeros(40, dtype=torch.long))))
    back = blend_units(wide.params, wide.groups, moves)
    assert {n: t.shape for n, t in back.items()} == {n: t.shape for n, t in one.params.items()}
    assert all(torch.allclose(back[n], one.params[n], atol=1e-4) for n in back)


def test_the_papers_reading_halves_what_twins_say() -> None:
    one = net(MLP, 0)
    moves = ByTransport(reading="average").transport(one, doubled(one))
    back = blend_units(doubled(one).params, doubled(one).groups, moves)
    assert torch.allclose(back["classifier.weight"], one.params["classifier.weight"] / 2, atol=1e-4)


def test_a_narrow_network_is_split_over_a_wide_one_without_a_change() -> None:
    one = net(MLP, 0)
    wide = doubled(one)
    moves = ByTransport().transport(wide, one)
    for move in moves.values():
        assert isinstance(move, Coupling)
        assert torch.allclose(move.make.sum(1), torch.ones(len(move.make), dtype=torch.float64))
        assert torch.allclose(move.read.sum(0), torch.ones(move.read.shape[1], dtype=torch.float64))
    split = blend_units(one.params, one.groups, moves)
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(wide.spec.forward(split, x), MLP.forward(one.params, x), rtol=1e-4, atol=1e-3)


def test_a_cold_entropic_plan_is_the_exact_one() -> None:
    cost = torch.rand(7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    soft = ByTransport(reg=0.005).plan(cost)
    assert torch.allclose(soft, exact_plan(cost), atol=0.02)
    unequal = torch.rand(4, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact, warm = exact_plan(unequal), ByTransport(reg=0.05).plan(unequal)
    assert torch.allclose(warm.sum(1), torch.full((4,), 0.25, dtype=torch.float64), atol=1e-6)
    assert float((exact * unequal).sum()) <= float((warm * unequal).sum())


def test_clients_of_different_widths_fuse_into_the_largest() -> None:
    one = net(MLP, 0)
    wide = doubled(one)
    updates = [ClientUpdate(n.client, Posterior(n.params), 1.0, 1, n.spec) for n in (one, wide)]
    state = ServerState(0, Single(MLP, Posterior(one.params)))
    fused = fuse_round(
        Recipe(align=AlignUnits(ByTransport(), reference="largest"), aggregate=Mean()),
        Cohort(tuple(updates)),
        state,
        Bench(),
    ).single
    assert fused.spec == wide.spec
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(fused.logits(x), MLP.forward(one.params, x), rtol=1e-3, atol=1e-2)


def test_variances_of_blends_are_those_of_independent_weights() -> None:
    """Log-variances: Var Σ m_j w_j = Σ m_j² Var w_j."""
    spec = Spec("bayesian", {"of": Spec("mlp", {"inputs": 2, "hidden": [4], "classes": 2}).to_json(), "last": 2})
    (group,) = channel_groups(spec, (2,))
    draw = torch.Generator().manual_seed(0)
    params = {n: torch.randn(t.shape, generator=draw) for n, t in spec.build().state_dict().items()}
    make, read = torch.rand(3, 4, generator=draw), torch.rand(3, 4, generator=draw)
    log_variances = frozenset(spec.layout.with_role("log_variance"))
    mixed = blend_units(params, [group], {group.name: Coupling(make, read)}, log_variances)
    assert torch.allclose(mixed["net.fc1.weight"], make @ params["net.fc1.weight"], atol=1e-6)
    variance = make.square() @ params["net.fc1.log_variance"].exp()
    assert torch.allclose(mixed["net.fc1.log_variance"].exp(), variance, rtol=1e-5)
    behind = params["net.classifier.log_variance"].exp() @ read.square().T
    assert torch.allclose(mixed["net.classifier.log_variance"].exp(), behind, rtol=1e-5)


def test_blends_carry_no_geometry() -> None:
    one = net(MLP, 0)
    updates = [ClientUpdate(n.client, Posterior(n.params, Diag({})), 1.0, 1, MLP) for n in (one, net(MLP, 1))]
    with pytest.raises(ConfigError, match="c1: units that are blended carry no Diag geometry"):
        AlignUnits(ByTransport(reg=0.1))(Cohort(tuple(updates)), Bench())


def test_what_makes_no_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="reg is -1"):
        ByTransport(reg=-1)
    with pytest.raises(ConfigError, match="reg is nan"):
        ByTransport(reg=float("nan"))
    with pytest.raises(ConfigError, match="rows is 0"):
        ByTransport(rows=0)
    monkeypatch.setitem(__import__("sys").modules, "ot", None)
    with pytest.raises(ConfigError, match=r"install fedfuse\[match\]"):
        exact_plan(torch.rand(2, 3))


def test_laws_and_needs_depend_on_the_options() -> None:
    assert "agree" in ByTransport().laws
    assert "agree" not in ByTransport(reg=0.1).laws
    assert ByTransport(inputs="server").needs == frozenset()
    assert replace(ByTransport(inputs="server"), ground="activations").needs == {"server_rows"}
    assert np.isclose(float(exact_plan(torch.zeros(2, 3)).sum()), 1.0)
