"""Networks of few digits: what is widened, and what stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedfuse.core.torch_utils import answer_in_full, as_floats_of, full_dtype, in_full


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
