from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedfuse.flower.records import BRIEF, REPLY, read_brief, read_reply, reply_content, to_arrays, to_tensors
from fedfuse.wire.codec import DTYPES, Malformed, Packet, decode, encode


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
        ({}, "'version'"),
        ({"version": True}, "'version'"),
        ({"version": 1, "round": 0.0}, "'round'"),
        (
            {"version": 99, "round": 0, "classes": 2, "spec": "{}", "label": "", "seed": 0, "client": "", "work": ""},
            "version 99 .*version 1",
        ),
    ],
)
def test_what_is_no_brief_is_said(words: dict[str, object], why: str) -> None:
    with pytest.raises(Malformed, match=why):
        read_brief(RecordDict({BRIEF: ConfigRecord(words)}))  # type: ignore[arg-type]


def test_whatever_a_header_holds_travels_whole() -> None:
    header = {
        "kind": "reply",
        "version": 1,
        "round": 3,
        "spec": {"factory": "mlp", "options": {"hidden": [3, 4]}},
        "num_examples": 7.0,
        "steps": 4,
        "facts": {"loss": 0.5},
        "share": 0.25,
        "nothing": None,
        "names": ["a", "b"],
        "training": {"optimizer": "sgd", "lr": 0.1, "decay": None, "nested": {"betas": [0.9, 0.99]}},
    }
    payload = encode({"w": torch.ones(2), "~note/w": torch.zeros(1)}, header)
    assert read_reply(reply_content(decode(payload), 1.0), encode) == payload


def test_a_header_that_is_no_json_is_malformed() -> None:
    content = reply_content(Packet.of({}, {"num_examples": 1.0, "steps": 1, "facts": {}, "spec": {}}), 0.0)
    content.config_records[f"{REPLY}.tables"]["spec"] = "[" * 100_000
    with pytest.raises(Malformed, match="reply"):
        read_reply(content, encode)
