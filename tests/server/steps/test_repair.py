"""After a merge units have the parents' means and deviations, and running statistics those of the rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedfuse.api import recipe
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.model import Single
from fedfuse.core.posterior import Posterior
from fedfuse.core.rows import Rows
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import RecipeError
from fedfuse.models import lenet, mlp
from fedfuse.nets.units import repairable_layers
from fedfuse.server.align.alignment import AlignUnits
from fedfuse.server.filters import find_alignment, with_filters
from fedfuse.server.round import fuse_round
from fedfuse.server.steps.repair import Repair, RestateNorms

SPECS = {
    "mlp": (Spec.of(mlp(inputs=6, hidden=[8, 7], classes=3).double()), (6,)),
    "lenet": (Spec.of(lenet(channels=1, size=16).double()), (1, 16, 16)),
}


def drawn(spec: Spec) -> dict[str, Tensor]:
    """Weights of a network drawn anew."""
    return {n: t + 0.3 * torch.randn_like(t) for n, t in spec.build().state_dict().items()}


def parents(spec: Spec, shapes: tuple[int, ...], count: int = 3) -> tuple[Cohort, Bench]:
    """Networks drawn apart with different numbers of rows, and the server's inputs."""
    torch.manual_seed(4)
    updates = [ClientUpdate(f"c{k}", Posterior(drawn(spec)), 10.0 * (k + 1), 1, spec) for k in range(count)]
    return Cohort.of(updates), Bench(Rows(torch.randn(50, *shapes).double(), torch.zeros(50, dtype=torch.long)))


def statistics(spec: Spec, params: object, layer: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of a layer's units, by a hook on a network of one's own."""
    net, seen = spec.build().double(), list[Tensor]()
    net.load_state_dict(dict(params))  # type: ignore[call-overload]
    net.get_submodule(layer).register_forward_hook(lambda _, __, out: seen.append(out.detach()))
    net(x)
    units = seen[0].transpose(0, 1).flatten(1)
    return units.mean(1), units.std(1, correction=0)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_hidden_units_have_the_interpolated_parents_statistics(name: str, uniform: bool) -> None:
    spec, shape = SPECS[name]
    cohort, bench = parents(spec, shape)
    assert bench.rows is not None
    shares = torch.full((3,), 1 / 3, dtype=torch.float64) if uniform else torch.tensor([1.0, 2.0, 3.0]).double() / 6
    merged = {n: sum(s * u.posterior.mean[n] for s, u in zip(shares, cohort, strict=True)) for n in cohort.names}
    before = ServerState(0, Single(spec, Posterior(merged)))  # type: ignore[arg-type]
    after = Repair(uniform)(before, cohort, bench)
    layers = repairable_layers(spec, shape)[0]
    assert after.facts["repair"] == {"repaired": [layer.name for layer in layers], "not_repaired": []}
    for layer in layers:
        mine = statistics(spec, after.single.posterior.mean, layer.name, bench.rows.x)
        theirs = [statistics(spec, u.posterior.mean, layer.name, bench.rows.x) for u in cohort]
        for now, goal in zip(mine, zip(*theirs, strict=True), strict=True):
            assert torch.allclose(now, shares @ torch.stack(goal), rtol=1e-9, atol=1e-10)
    for tensor in ("classifier.weight", "classifier.bias"):
        assert after.single.posterior.mean[tensor].equal(merged[tensor])  # type: ignore[arg-type]


def test_one_network_is_left_as_it_is_and_a_constant_unit_only_shifted() -> None:
    spec, shape = SPECS["mlp"]
    cohort, bench = parents(spec, shape, 1)
    alone = Repair()(ServerState(0, Single(spec, cohort.updates[0].posterior)), cohort, bench).single
    for name, tensor in cohort.updates[0].posterior.mean.items():
        assert torch.allclose(alone.posterior.mean[name], tensor, atol=1e-12)
    dead = {n: t.clone() for n, t in cohort.updates[0].posterior.mean.items()}
    dead["fc1.weight"][2] = 0.0
    after = Repair()(ServerState(0, Single(spec, Posterior(dead))), cohort, bench).single.posterior.mean
    assert after["fc1.weight"][2].equal(dead["fc1.weight"][2])
    assert all(t.isfinite().all() for t in after.values())


def test_layers_behind_norms_are_left_alone_and_layers_without_bias_named() -> None:
    class Mixed(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(
                nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)
            )

    assert repairable_layers(Spec.of(Mixed()), (6,)) == ([], ["0"])


def test_every_door_to_it() -> None:
    name, alignment, steps = find_alignment({"name": "weights", "repair": True})
    assert (name, type(alignment), steps) == ("weights", AlignUnits, (Repair(),))
    assert recipe("otfusion", repair=True).steps == (Repair(uniform=True),)
    spec, shape = SPECS["mlp"]
    cohort, bench = parents(spec, shape)
    how = with_filters(recipe("fedavg"), align={"name": "weights", "repair": True})
    start = ServerState(0, Single(spec, cohort.updates[0].posterior))
    assert fuse_round(how, cohort, start, bench).facts["repair"]["repaired"] == ["fc1", "fc2"]
    with pytest.raises(RecipeError, match="activation statistics"):
        fuse_round(how, cohort, start, Bench())


ROWS = Rows(torch.randn(60, 4, generator=torch.Generator().manual_seed(0)) * 3 + 1, torch.zeros(60, dtype=torch.long))


def restated(net: nn.Module, batch: int = 256) -> tuple[Single, Single]:
    spec = Spec.of(net)
    before = Single.of(net, spec)
    return before, RestateNorms(batch)(ServerState(0, before), Cohort(()), Bench(ROWS)).single


def test_running_statistics_become_those_of_the_rows_layer_by_layer() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    before, after = restated(net)
    assert torch.allclose(after.posterior.mean["0.running_mean"], ROWS.x.mean(0), atol=1e-5)
    assert torch.allclose(after.posterior.mean["0.running_var"], ROWS.x.var(0), rtol=1e-5)
    normed = (ROWS.x - ROWS.x.mean(0)) / (ROWS.x.var(0, unbiased=False) + 1e-5).sqrt()
    middle = net[2](normed).detach()
    assert torch.allclose(after.posterior.mean["3.running_mean"], middle.mean(0), atol=1e-5)
    for name in ("2.weight", "3.weight", "0.num_batches_tracked"):
        assert after.posterior.mean[name].equal(before.posterior.mean[name])


def test_batches_are_averaged_and_inputs_left_alone() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    _, after = restated(net, batch=20)
    variance = torch.stack([part.var(0) for part in ROWS.x.split(20)]).mean(0)
    assert torch.allclose(after.posterior.mean["0.running_var"], variance, rtol=1e-5)
    assert net[0].running_mean.equal(torch.zeros(4))


def test_without_norms_nothing_happens() -> None:
    before, after = restated(nn.Linear(4, 2))
    assert after is before
