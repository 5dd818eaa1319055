"""Rules around a base, each against its paper's formula on small matrices in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import fedfuse
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.server.aggregate.angles import sphere_weights

BASE = {"a.weight": torch.randn(5, 4, generator=torch.Generator().manual_seed(9)).double(), "a.bias": torch.ones(5)}


def models(count: int, size: float = 0.3) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(count)
    return [
        {n: t + size * torch.randn(t.shape, generator=draw).to(t.dtype) for n, t in BASE.items()} for _ in range(count)
    ]


def fused(
    name: str, given: list[dict[str, Tensor]], num_examples: list[float] | None = None, **options: object
) -> Tensor:
    recipe = fedfuse.recipe(name, **options)
    return fedfuse.fuse(given, recipe, num_examples=num_examples, start=BASE).state_dict()["a.weight"]


def moves(given: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([m["a.weight"] - BASE["a.weight"] for m in given])


def test_task_arithmetic_adds_the_moves() -> None:
    given = models(3)
    torch.testing.assert_close(fused("task_arithmetic", given, scale=0.4), BASE["a.weight"] + 0.4 * moves(given).sum(0))
    mean = (moves(given) * torch.tensor([1.0, 2.0, 1.0]).double()[:, None, None]).sum(0) / 4
    found = fused("task_arithmetic", given, [10, 20, 10], scale=0.5, average=True)
    torch.testing.assert_close(found, BASE["a.weight"] + 0.5 * mean)
    torch.testing.assert_close(fused("task_arithmetic", given, scale=1.0, average=True), fused("fedavg", given))


def test_ties_is_the_papers_three_steps() -> None:
    """Written as in the paper: one coordinate at a time."""
    given = models(4)
    delta, keep = moves(given).flatten(1), 6  # 0.3 of 20
    expected = BASE["a.weight"].flatten().clone()
    limits = [row.abs().sort(descending=True).values[keep - 1] for row in delta]
    for p in range(20):
        kept = [float(d[p]) if abs(d[p]) >= limit else 0.0 for d, limit in zip(delta, limits, strict=True)]
        sign = np.sign(sum(kept))
        agree = [d for d in kept if d and np.sign(d) == sign]
        expected[p] += 0.7 * sum(agree) / len(agree) if agree else 0.0
    torch.testing.assert_close(fused("ties", given, density=0.3, scale=0.7).flatten(), expected)


def test_ties_weighs_votes_and_means_by_examples() -> None:
    start = {"a.weight": torch.zeros(1, 2).double()}
    given = [{"a.weight": torch.tensor([[1.0, 1.0]]).double()}, {"a.weight": torch.tensor([[-2.0, 4.0]]).double()}]
    recipe = fedfuse.recipe("ties", density=1.0)
    found = fedfuse.fuse(given, recipe, start=start, num_examples=[3, 1]).state_dict()["a.weight"]
    assert found.tolist() == [[1.0, (3 * 1 + 4) / 4]]  # 3·1 outvotes 1·(−2)


def test_ties_of_moves_in_blocks_is_ties_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    given = models(3)
    whole = fused("ties", given)
    monkeypatch.setattr("fedfuse.server.aggregate.sparse._TILE", 7)
    assert fused("ties", given).equal(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("examples", [[1, 1, 1], [5, 1, 2]])
def test_ties_of_a_long_tensor_is_the_formula(dtype: torch.dtype, examples: list[int]) -> None:
    """So long that limits are found by a sample, in every precision: to a rounding of the result."""
    draw = torch.Generator().manual_seed(1)
    base = torch.randn(70_001, generator=draw).to(dtype)
    given = [base + 0.1 * torch.randn(70_001, generator=draw).to(dtype) for _ in range(3)]
    found = fedfuse.fuse([{"w": t} for t in given], "ties", start={"w": base}, num_examples=examples).state_dict()["w"]
    moves = torch.stack([t.double() - base.double() for t in given])
    sizes = moves.to(torch.promote_types(dtype, torch.float32)).abs()
    limits = sizes.sort(dim=1, descending=True).values[:, round(0.2 * 70_001) - 1 :][:, :1]
    shares = torch.tensor(examples).double()[:, None]
    kept = shares * moves * (sizes >= limits)
    agree = (kept.sign() == kept.sum(0).sign()) & (kept != 0)
    merged = (kept * agree).sum(0) / (agree * shares).sum(0).clamp(min=1e-300)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), base.double() + merged, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


def test_dare_drops_by_lot_and_keeps_the_expected_move() -> None:
    start = {"a.weight": torch.zeros(200, 200).double()}
    given = [{"a.weight": torch.full((200, 200), 0.5).double()}] * 2
    recipe = fedfuse.recipe("dare", drop=0.75, then="fedavg")
    found = fedfuse.fuse(given, recipe, start=start, seed=3).state_dict()["a.weight"]
    assert sorted(set(found.flatten().tolist())) == [0.0, 1.0, 2.0]  # dropped by both, by one, by nobody
    assert float((found > 0).double().mean()) == pytest.approx(1 - 0.75**2, abs=0.01)
    assert float(found.mean()) == pytest.approx(0.5, abs=0.01)
    again, other = (fedfuse.fuse(given, recipe, start=start, seed=s).state_dict()["a.weight"] for s in (3, 4))
    assert again.equal(found)
    assert not other.equal(found)


def test_dare_without_dropping_is_the_rule_it_hands_over_to() -> None:
    given = models(3)
    ties = fused("dare", given, drop=0.0, then="ties", options={"density": 0.4})
    torch.testing.assert_close(ties, fused("ties", given, density=0.4))


def test_dare_rounds_half_precision_once() -> None:
    base = {"w": torch.full((400,), 1.0, dtype=torch.bfloat16)}
    given = [{"w": torch.full((400,), 1.0078125, dtype=torch.bfloat16)}] * 4  # the next number after 1
    found = fedfuse.fuse(given, fedfuse.recipe("dare", drop=0.5, then="fedavg"), start=base).state_dict()["w"]
    assert found.dtype == torch.bfloat16
    assert float(found.float().mean()) == pytest.approx(1.0078125, abs=1e-3)


def test_dare_hands_over_to_rules_that_fuse() -> None:
    with pytest.raises(ConfigError, match="'dare': then is 'fedprox', which is more than a rule that fuses"):
        fedfuse.recipe("dare", then="fedprox")
    with pytest.raises(ConfigError, match="did you mean 'ties'"):
        fedfuse.recipe("dare", then="tiess")


def slerp(a: Tensor, b: Tensor, t: float) -> Tensor:
    u, v = a / a.norm(), b / b.norm()
    angle = torch.acos((u * v).sum())
    return (torch.sin((1 - t) * angle) * u + torch.sin(t * angle) * v) / torch.sin(angle)


def test_slerp_of_two_is_on_their_great_circle() -> None:
    a, b = (m["a.weight"] for m in models(2, size=2.0))
    length = 0.75 * a.norm() + 0.25 * b.norm()
    found = fused("slerp", models(2, size=2.0), [30, 10])
    torch.testing.assert_close(found, length * slerp(a, b, 0.25))


def test_slerp_of_several_is_their_karcher_mean() -> None:
    """The mean of the logarithms at it is zero, and no shorter way round is found by searching."""
    given, shares = models(4, size=1.5), torch.tensor([1.0, 2.0, 3.0, 4.0]).double() / 10
    found = fused("slerp", given, [1, 2, 3, 4]).flatten()
    mean, units = found / found.norm(), torch.stack([(w := m["a.weight"].flatten()) / w.norm() for m in given])
    angles = torch.acos(units @ mean)
    logs = (angles / angles.sin())[:, None] * (units - (units @ mean)[:, None] * mean)
    assert float((shares[:, None] * logs).sum(0).norm()) < 1e-10
    lengths = torch.stack([m["a.weight"].norm() for m in given])
    assert float(found.norm()) == pytest.approx(float(shares @ lengths))


def test_slerp_without_a_direction_is_the_plain_mean_and_says_so() -> None:
    opposite = [{"w": torch.tensor([[1.0, 0.0]])}, {"w": torch.tensor([[-1.0, 0.0]])}]
    done = fedfuse.fuse(opposite, "slerp")
    assert done.state_dict()["w"].tolist() == [[0.0, 0.0]]
    assert done.facts["straight_means"] == ["w"]
    assert sphere_weights(torch.zeros(2, 2).double(), torch.full((2,), 0.5).double()) is None


def test_model_stock_stands_at_the_foot_of_the_perpendicular() -> None:
    """By the mean cosine of any three moves, and of three with the same length and angle."""
    given = models(3)
    delta = moves(given).flatten(1)
    units = delta / delta.norm(dim=1, keepdim=True)
    cosine = float((units @ units.T).sum() - 3) / 6
    ratio = 3 * cosine / (1 + 2 * cosine) if cosine > 0 else 0.0
    torch.testing.assert_close(fused("model_stock", given), BASE["a.weight"] + ratio * moves(given).mean(0))
    equal = torch.eye(3).double() + 1.0  # three moves with the same length and angle
    start = {"a.weight": torch.zeros(1, 3).double()}
    alike = [{"a.weight": row[None]} for row in equal]
    found = fedfuse.fuse(alike, "model_stock", start=start)
    cosine = 5 / 6
    assert found.facts["ratio"]["a.weight"] == pytest.approx(3 * cosine / (1 + 2 * cosine))


def test_model_stock_stays_at_the_base_where_moves_are_orthogonal() -> None:
    start = {"a.weight": torch.ones(2, 2).double()}
    given = [
        {"a.weight": start["a.weight"] + torch.tensor(m).double()} for m in ([[1.0, 0], [0, 0]], [[0, 0], [0, 1.0]])
    ]
    assert fedfuse.fuse(given, "model_stock", start=start).state_dict()["a.weight"].equal(start["a.weight"])


def test_iso_makes_the_spectrum_of_the_sum_flat() -> None:
    given = models(3)
    left, values, right = np.linalg.svd(moves(given).sum(0).numpy(), full_matrices=False)
    expected = BASE["a.weight"] + 0.8 * torch.from_numpy(values.mean() * left @ right)
    torch.testing.assert_close(fused("iso", given, scale=0.8), expected)
    bias = fedfuse.fuse(given, fedfuse.recipe("iso"), start=BASE).state_dict()["a.bias"]
    torch.testing.assert_close(bias, torch.stack([m["a.bias"] for m in given]).mean(0))


def test_iso_leaves_directions_in_which_nobody_moved() -> None:
    start = {"a.weight": torch.zeros(3, 3).double()}
    given = [{"a.weight": torch.diag(torch.tensor([4.0, 2.0, 0.0]).double())}] * 2
    found = fedfuse.fuse(given, "iso", start=start).state_dict()["a.weight"]
    torch.testing.assert_close(found, torch.diag(torch.tensor([6.0, 6.0, 0.0]).double()))


@pytest.mark.parametrize("name", ["task_arithmetic", "ties", "dare", "model_stock", "iso"])
def test_without_a_base_each_says_that_it_needs_one(name: str) -> None:
    with pytest.raises(RecipeError, match=f"{name!r} needs the weights the sites started from; pass `start`"):
        fedfuse.fuse(models(2), name)


@pytest.mark.parametrize("name", ["task_arithmetic", "ties", "dare", "slerp", "model_stock", "iso"])
@pytest.mark.parametrize("guard", ["median", {"name": "krum", "byzantine": 1}, "clip"])
def test_each_stands_behind_a_guard(name: str, guard: object) -> None:
    done = fedfuse.fuse(models(5), name, start=BASE, guard=guard)
    assert all(t.isfinite().all() for t in done.state_dict().values())


def test_each_stands_behind_an_alignment() -> None:
    """Clients whose hidden units were swapped come back to the base's order first."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    base = {n: t.detach().clone() for n, t in net.state_dict().items()}
    swap = torch.tensor([1, 0, 2, 3, 4, 5])
    moved = {
        **base,
        "0.weight": base["0.weight"][swap],
        "0.bias": base["0.bias"][swap],
        "2.weight": base["2.weight"][:, swap],
    }
    done = fedfuse.fuse([base, moved], fedfuse.recipe("ties"), start=base, model=net, align="weights")
    assert all(done.state_dict()[n].equal(t) for n, t in base.items())


def test_options_outside_their_range_are_refused() -> None:
    for name, options in (("ties", {"density": 0.0}), ("dare", {"drop": 1.0})):
        with pytest.raises(ConfigError, match=next(iter(options))):
            fedfuse.recipe(name, **options)
