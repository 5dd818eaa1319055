"""Large pages are advice: a tensor is what it was, with them or without."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fedfuse.core import torch_utils
from fedfuse.core.torch_utils import use_large_pages


def test_numbers_stay_what_they_are() -> None:
    tensor = torch.arange(3_000_001, dtype=torch.float32)
    assert use_large_pages(tensor) is tensor
    assert tensor.equal(torch.arange(3_000_001, dtype=torch.float32))


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.ones(3), torch.ones(1 << 20, dtype=torch.int8)])
def test_small_tensors_are_left_alone(tensor: torch.Tensor) -> None:
    assert use_large_pages(tensor) is tensor


def test_a_system_without_them_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_utils, "_ADVICE", None)
    assert use_large_pages(torch.ones(1 << 21)).sum() == 1 << 21


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").is_file()
    or "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(),
    reason="this system has no large pages to give",
)
def test_the_system_hears_the_advice() -> None:
    tensor = use_large_pages(torch.empty(1 << 23))
    assert "hg" in flags_at(tensor.data_ptr() + tensor.nbytes // 2)


def flags_at(address: int) -> list[str]:
    """What the system notes of the map that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("the address is in no map")
