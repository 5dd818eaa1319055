"""No evidence, no method: what a method needs and an update does not bring is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import fedfuse
from fedfuse.core.registry import all_methods
from fedfuse.core.seams import NOT_EVIDENCE
from fedfuse.errors import ConfigError, FuseError, QuorumLost
from fedfuse.server.aggregate.mean import Mean

ROWS = (torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def plain(count: int = 5) -> list[dict[str, Tensor]]:
    return [{n: t + k for n, t in net().state_dict().items()} for k in range(count)]


def sites(method: str, count: int = 3) -> list[fedfuse.Update]:
    return [fedfuse.local_update(net(), ROWS, method, client=f"site-{k}", seed=k, classes=3) for k in range(count)]


@pytest.mark.parametrize("name", sorted(all_methods()))
def test_plain_tensors_are_fused_only_by_methods_that_need_nothing_else(name: str) -> None:
    recipe = fedfuse.recipe(name)
    lacking = recipe.needs - {"start", "server_rows"}
    dressed = recipe.prepare_model.missing(fedfuse.Spec.of_tensors(plain()[0]).layout, _forms(plain()[0]), 0)
    given: dict[str, Any] = {"start": plain()[0], "server_rows": ROWS}
    if lacking or dressed or name in ("hybrid_fl", "data_sharing"):
        with pytest.raises(FuseError) as said:
            fedfuse.fuse(plain(), recipe, **given)
        assert name in str(said.value)
    else:
        assert fedfuse.fuse(plain(), recipe, **given).refused == ()


def _forms(state: dict[str, Tensor]) -> Any:
    from fedfuse.wire.codec import forms_of

    return forms_of(state)


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("laplace", "evidence 'fisher' is missing"),
        ("fedlpa", "evidence 'kron' is missing"),
        ("rklb", "network is .*log-variances"),
        ("scaffold", "evidence 'control' is missing"),
        ("fednova", "training is missing"),
    ],
)
def test_five_plain_files_are_refused_with_the_command_that_brings_what_is_missing(
    method: str, what: str, tmp_path: Path
) -> None:
    paths = [tmp_path / f"{k}.safetensors" for k in range(5)]
    for path, state in zip(paths, plain(), strict=True):
        safetensors.torch.save_file(state, path)
    with pytest.raises(QuorumLost, match=f"0: {what}.*`fedfuse update --method {method}`"):
        fedfuse.fuse(paths, method, start=paths[0])


def test_updates_for_another_method_do_not_pass_for_this_one() -> None:
    with pytest.raises(QuorumLost, match="site-0: network is .*log-variances"):
        fedfuse.fuse(sites("fedlpa"), "rklb")
    with pytest.raises(QuorumLost, match='site-0: network is .*"none of the classes"'):
        fedfuse.fuse(sites("fedavg"), "fedov")
    assert fedfuse.fuse(sites("rklb"), "rklb").refused == ()
    assert fedfuse.fuse(sites("fedov"), "fedov").refused == ()


@pytest.mark.parametrize("method", ["fedavg", "ensemble", "local"])
def test_adapters_are_refused_by_every_method(method: str) -> None:
    adapters = [{"q.lora_A.weight": torch.randn(2, 8), "q.lora_B.weight": torch.randn(8, 2)} for _ in range(3)]
    with pytest.raises((ConfigError, QuorumLost), match=r"low-rank adapter|plain tensors do not say"):
        fedfuse.fuse(adapters, method)


def test_the_words_for_what_is_no_evidence_are_not_names_of_evidence() -> None:
    names = {e.name for m in all_methods().values() for e in m.recipe().evidence}
    assert not names & NOT_EVIDENCE


def test_the_mean_does_not_depend_on_the_order_of_state_dicts() -> None:
    """Summing rounded shares lets the last bit fall by order; whole numbers of examples are summed exactly."""
    generator = torch.Generator().manual_seed(0)
    states = [{"w": torch.randn(64, 128, generator=generator)} for _ in range(7)]
    counts = [100, 300, 7, 55, 1, 999, 12]
    orders = [list(range(7)), list(reversed(range(7))), [3, 0, 6, 2, 5, 1, 4]]
    fused = [
        fedfuse.fuse([states[i] for i in order], "fedavg", num_examples=[counts[i] for i in order]).state_dict()["w"]
        for order in orders
    ]
    assert fused[0].equal(fused[1])
    assert fused[0].equal(fused[2])
    uniform = [
        fedfuse.fuse([states[i] for i in order], fedfuse.Recipe(aggregate=Mean(uniform=True))).state_dict()["w"]
        for order in orders
    ]
    assert uniform[0].equal(uniform[1])
