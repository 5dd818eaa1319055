"""Threads that come back, narrow floats that are widened, large pages that change no number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from fedfuse.core import torch_utils
from fedfuse.core.torch_utils import answer_in_full, as_floats_of, full_dtype, in_full, one_thread, use_large_pages


def test_the_number_of_threads_comes_back_even_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: now.__setitem__(0, n))
    with one_thread():
        assert now == [1]
    with pytest.raises(KeyError), one_thread():
        raise KeyError
    assert now == [4]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32])
def test_only_narrow_floats_are_widened(dtype: torch.dtype) -> None:
    t = torch.ones(2, dtype=dtype)
    wide = in_full(t)
    assert wide.dtype == full_dtype(dtype)
    assert (wide is t) == (dtype not in (torch.float16, torch.bfloat16))


def test_inputs_take_the_first_floating_dtype_and_tokens_stay() -> None:
    params = [torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.float16), torch.ones(1)]
    assert as_floats_of(params, torch.ones(1)).dtype == torch.float16
    assert as_floats_of(params, torch.ones(1, dtype=torch.uint8)).dtype == torch.uint8
    x = torch.ones(1)
    assert as_floats_of([], x) is x
    assert as_floats_of([torch.ones(1)], x) is x


def test_an_answer_in_full_is_the_modules_own() -> None:
    net, x = nn.Linear(3, 2).bfloat16(), torch.randn(4, 3)
    assert answer_in_full(net, x).equal(net(x.bfloat16()).float())


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
