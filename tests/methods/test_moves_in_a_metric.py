"""Rules around a base whose mean of moves is taken in the metric of the clients' factors, against closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedfuse
from fedfuse.errors import ConfigError

ROWS = 40
EXACT = {"alpha": 1.0, "min_rows": 1}  # RegMean's normal equations as they stand


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3, bias=False)).double()


def inputs(client: int) -> Tensor:
    draw = torch.Generator().manual_seed(client)
    return torch.randn(ROWS, 4, generator=draw).double() * torch.linspace(0.2, 1 + client, 4)


def trained(recipe: Any, same_rows: bool = False) -> list[Any]:
    made = []
    for client in range(3):
        draw = torch.Generator().manual_seed(10 + client)
        rows = inputs(0 if same_rows else client), torch.randint(3, (ROWS,), generator=draw)
        made.append(fedfuse.local_update(network(), rows, recipe, client=f"c{client}", epochs=3, lr=0.5))
    return made


def fuse(updates: list[Any], recipe: Any) -> Tensor:
    return fedfuse.fuse(updates, recipe, start=network().state_dict(), model=network()).state_dict()["0.weight"]


def weights(updates: list[Any]) -> list[Tensor]:
    return [fuse([update], "fedavg") for update in updates]


def regression(layers: list[Tensor]) -> Tensor:
    """(Σ M_k A_k)(Σ A_k)⁻¹."""
    moments = [inputs(client).T @ inputs(client) / ROWS for client in range(3)]
    total = torch.stack(moments).sum(0)
    return torch.linalg.solve(total, sum(M @ A for M, A in zip(layers, moments, strict=True)).T).T  # type: ignore[union-attr]


def elected(moves: list[Tensor], density: float) -> tuple[list[Tensor], Tensor]:
    """What TIES keeps of each move, filled up with its mean where a client has no say; and that mean."""
    kept = []
    for move in moves:
        limit = move.abs().flatten().sort(descending=True).values[round(density * move.numel()) - 1]
        kept.append(torch.where(move.abs() >= limit, move, torch.zeros_like(move)))
    sign = torch.stack(kept).sum(0).sign()
    agree = [(k.sign() == sign) & (k != 0) for k in kept]
    voters = torch.stack(agree).sum(0).clamp(min=1)
    mean = torch.stack([k * a for k, a in zip(kept, agree, strict=True)]).sum(0) / voters
    return [torch.where(a, k, mean) for k, a in zip(kept, agree, strict=True)], mean


def test_a_sum_of_moves_in_the_metric_of_the_inputs() -> None:
    recipe = fedfuse.recipe("task_arithmetic", metric="regmean", options=EXACT, scale=0.4)
    updates, base = trained(recipe), network().state_dict()["0.weight"]
    expected = base + 0.4 * 3 * (regression(weights(updates)) - base)
    torch.testing.assert_close(fuse(updates, recipe), expected)


@pytest.mark.parametrize(("metric", "options"), [("regmean", EXACT), ("fisher", {}), ("fedlpa", {"min_rows": 1})])
def test_the_mean_of_moves_in_a_metric_is_the_mean_in_that_metric(metric: str, options: dict[str, Any]) -> None:
    """Whatever the metric: a base that all share drops out of the equation."""
    recipe = fedfuse.recipe("task_arithmetic", metric=metric, options=options, scale=1.0, average=True)
    updates = trained(recipe)
    torch.testing.assert_close(fuse(updates, recipe), fuse(updates, fedfuse.recipe(metric, **options)))


def test_ties_in_the_metric_of_the_inputs_is_its_three_steps() -> None:
    recipe = fedfuse.recipe("ties", metric="regmean", options=EXACT, density=0.5, scale=0.7)
    updates, base = trained(recipe), network().state_dict()["0.weight"]
    moves, _ = elected([w - base for w in weights(updates)], 0.5)
    expected = base + 0.7 * (regression([base + move for move in moves]) - base)
    torch.testing.assert_close(fuse(updates, recipe), expected)


def test_ties_of_clients_that_know_alike_is_plain_ties() -> None:
    recipe = fedfuse.recipe("ties", metric="regmean", options=EXACT, density=0.4)
    updates = trained(recipe, same_rows=True)
    torch.testing.assert_close(fuse(updates, recipe), fuse(updates, fedfuse.recipe("ties", density=0.4)))


def test_dare_hands_over_to_a_rule_that_reads_evidence() -> None:
    recipe = fedfuse.recipe("dare", drop=0.0, then="regmean", options=EXACT)
    updates = trained(recipe)
    torch.testing.assert_close(fuse(updates, recipe), regression(weights(updates)))
    through = fedfuse.recipe("dare", drop=0.0, then="ties", options={"metric": "regmean", "options": EXACT})
    plain = fedfuse.recipe("ties", metric="regmean", options=EXACT)
    torch.testing.assert_close(fuse(updates, through), fuse(updates, plain))


def test_what_has_no_metric_is_refused() -> None:
    for name in ("ties", "task_arithmetic"):
        with pytest.raises(ConfigError, match=f"'{name}': metric is 'fedavg', which reads no evidence"):
            fedfuse.recipe(name, metric="fedavg")
    with pytest.raises(ConfigError, match="'ties': metric is 'fedprox', which is more than a rule that fuses"):
        fedfuse.recipe("ties", metric="fedprox")
    with pytest.raises(ConfigError, match="'dare': then is 'ensemble'"):
        fedfuse.recipe("dare", then="ensemble")
    with pytest.raises(ConfigError, match="'regmean' has no option 'alfa'"):
        fedfuse.recipe("ties", metric="regmean", options={"alfa": 1})
