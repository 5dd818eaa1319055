from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedfuse.engines.flower_records import BRIEF, read_brief, to_arrays, to_tensors
from fedfuse.wire.codec import DTYPES, Malformed


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3), (2, 3, 1, 2)], ids=str)
def test_every_tensor_comes_back_as_it_was(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(100)[: int(np.prod(shape))].reshape(shape).to(dtype)
    (back,) = to_tensors(to_arrays({"t": tensor})).values()
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert back.equal(tensor)


def test_what_other_apps_send_is_read_whatever_its_order() -> None:
    columns = np.asfortranarray(np.arange(24.0).reshape(2, 3, 4))
    record = ArrayRecord({"columns": Array(columns), "strided": Array(np.arange(10)[::2])})
    got = to_tensors(record)
    assert got["columns"].equal(torch.arange(24.0, dtype=torch.float64).reshape(2, 3, 4))
    assert got["strided"].tolist() == [0, 2, 4, 6, 8]


def test_a_strided_tensor_is_sent_as_its_values() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    assert to_tensors(to_arrays({"t": tensor}))["t"].equal(tensor)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({}, "no usable 'version'"),
        ({"version": True}, "no usable 'version'"),
        ({"version": 1, "round": 0.0}, "no usable 'round'"),
        (
            {"version": 99, "round": 0, "classes": 2, "spec": "{}", "label": "", "seed": 0, "client": "", "work": ""},
            "speaks version 99 and this site version 1",
        ),
    ],
)
def test_what_is_no_brief_is_said(words: dict[str, object], why: str) -> None:
    with pytest.raises(Malformed, match=why):
        read_brief(RecordDict({BRIEF: ConfigRecord(words)}))  # type: ignore[arg-type]
