"""The one way in: what is chosen, and what a user who insists is told."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_training import rows, seeded
from torch import nn

from fedfuse import kernels
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.errors import ConfigError
from fedfuse.kernels import chain_for, code_cache
from fedfuse.kernels.chain.description import Conv, Linear, is_faster


def net() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))


def asked(kernel: str, data: Rows | None = None, module: nn.Module | None = None, **settings: Any) -> object:
    module = module or net()
    live = {name for name, _ in module.named_parameters()}
    return chain_for(module, data or rows((4,), 10), LocalSettings(kernel=kernel, **settings), live)  # type: ignore[arg-type]


def test_torch_is_torch_and_auto_takes_the_faster() -> None:
    assert asked("torch") is None
    assert asked("auto") is not None
    assert asked("compiled") is asked("auto")  # the same buffers serve the next client
    assert asked("auto", module=nn.Sequential(nn.Linear(4, 3), nn.GELU()).train()) is None


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"data": Rows(torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.int64))}, "torch.float64"),
        ({"data": Rows(torch.zeros(3, 4), torch.tensor([0, 1, 3]))}, "labels outside 0 to 2"),
        ({"data": Rows(torch.zeros(3, 4), torch.tensor([0, 1, -100]))}, "labels outside 0 to 2"),
        (
            {"data": rows((4, 5, 5), 3), "module": nn.Sequential(nn.Conv2d(4, 3, 5)).train()},
            "scores of shape (3, 1, 1)",
        ),
        ({"module": net().double()}, "the parameter '0.weight' of torch.float64"),
        ({"module": nn.Sequential(nn.Linear(4, 3), nn.GELU()).train()}, "GELU '1'"),
    ],
)
def test_who_insists_is_told_what_is_missing(settings: dict[str, Any], word: str) -> None:
    assert asked("auto", **settings) is None
    with pytest.raises(
        ConfigError, match=r'kernel = "compiled" cannot train this: .*; use kernel = "auto" or "torch"'
    ) as why:
        asked("compiled", **settings)
    assert word in str(why.value)


def test_parameters_that_are_held_or_not_in_the_chain_are_torchs() -> None:
    module, data = net(), rows((4,), 10)
    live = {name for name, _ in module.named_parameters()}
    assert chain_for(module, data, LocalSettings(), live - {"0.bias"}) is None
    module.register_parameter("spare", nn.Parameter(torch.zeros(2)))
    assert chain_for(module, data, LocalSettings(), live | {"spare"}) is None


def test_without_numba_torch_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_not", lambda: "not installed: pip install 'fedfuse[fast]'")
    assert asked("auto") is None
    with pytest.raises(ConfigError, match=r"needs numba, which is not installed: pip install 'fedfuse\[fast\]'"):
        asked("compiled")


def test_the_rule_prefers_kernels_for_narrow_networks_and_small_batches() -> None:
    wide = [Conv("a", 64, 3, 1, 1, True), Conv("b", 128, 3, 1, 1, True)]
    lenet = [Conv("a", 6, 5, 1, 0, True), Conv("b", 16, 5, 1, 0, True)]
    middle = [Conv("a", 20, 5, 1, 0, True), Conv("b", 50, 5, 1, 0, True)]
    assert not is_faster(wide, (3, 32, 32), 64)
    assert all(is_faster(lenet, (1, 28, 28), batch) for batch in (1, 8, 64, 256))
    assert is_faster(middle, (1, 28, 28), 64)
    assert not is_faster(middle, (1, 28, 28), 4)  # most lanes would be empty
    assert is_faster([Linear("a", 100, True)], (784,), 64)
    assert not is_faster([Linear("a", 100, True)], (784,), 512)


def test_the_first_use_says_that_it_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        asked("auto")
        assert "compiling" not in caplog.text
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
        asked("auto")
    assert "compiling the kernels for this machine" in caplog.text


def test_code_is_kept_per_source_below_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code_cache.code_folder.cache_clear()
    try:
        assert code_cache.is_cold()
        folder = code_cache.code_folder()
        assert folder.parent == tmp_path / "fedfuse" / "kernels"
        assert not code_cache.is_cold()
        (tmp_path / "file").touch()
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
        code_cache.code_folder.cache_clear()
        assert code_cache.code_folder().is_dir()  # it cannot be there: this process has one of its own
    finally:
        code_cache.code_folder.cache_clear()


def test_the_signature_changes_with_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernels.signature()
    monkeypatch.setattr(kernels, "version", lambda name: "0.0")
    assert kernels.signature() != before


def test_a_network_that_was_seen_in_evaluation_is_trained_with_its_dropout() -> None:
    """What a network is traced to depends on the mode it is in, and it is remembered by that."""
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    data, live = rows((4,), 10), {name for name, _ in module.named_parameters()}
    assert kernels.inputs_of_head(module.eval(), data, "auto", "2") is not None
    chain = chain_for(module.train(), data, LocalSettings(), live)
    assert chain is not None
    first, second = (
        chain.batches(chain.begin(module, LocalSettings(), 0.0, {}, {}), data.x, data.y, torch.arange(10), 1e-9, draw)
        for draw in map(torch.Generator().manual_seed, (1, 2))
    )
    assert first != second
