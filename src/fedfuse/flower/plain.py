"""What Flower clients that are not ours send: one record of arrays and some numbers, read for the door."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.settings import LocalSettings
from fedfuse.flower.engine import printable
from fedfuse.flower.records import to_tensors
from fedfuse.wire.codec import Malformed, encode
from fedfuse.wire.messages import reply_header

from flwr.app import RecordDict  # isort: skip - after records has checked that it is there

NUM_EXAMPLES, STEPS = "num-examples", "num-steps"
_MANY = 10**9


def numbers_in(content: RecordDict) -> dict[str, float]:
    """The plain numbers of a reply's metric records."""
    found: Mapping[str, Any] = {k: v for record in content.metric_records.values() for k, v in record.items()}
    return {key: value for key, value in found.items() if isinstance(value, int | float)}


def plain_envelope(
    client: str, content: RecordDict, numbers: Mapping[str, float], brief: Brief, default_steps: int
) -> Envelope:
    """The reply of a client that is not ours, as the door wants it.

    Args:
        client: who sent it.
        content: what it sent.
        numbers: the numbers in it.
        brief: what it was asked.
        default_steps: how many steps it took, where it does not say so.
    """
    facts = {key: value for key, value in numbers.items() if key not in (NUM_EXAMPLES, STEPS)}
    num_examples = numbers.get(NUM_EXAMPLES, math.nan)
    try:
        header = reply_header(
            brief, num_examples=num_examples, steps=int(numbers.get(STEPS, default_steps)), facts=facts
        )
        if not math.isfinite(num_examples):
            header["num_examples"] = str(num_examples)  # the door refuses it by name
        (arrays,) = content.array_records.values()
        return Envelope(client, encode(to_tensors(arrays), header))
    except (Malformed, ValueError, OverflowError) as why:
        return Envelope(client, None, dropped=f"malformed: {printable(why)}")


def steps_by(local: LocalSettings, num_examples: float) -> int:
    """How many steps a client takes that trains so on so many examples; 0, which no door lets in, for an odd number.

    Example:
        >>> steps_by(LocalSettings(epochs=3, batch_size=32), 100)
        12
    """
    return local.steps_for(num_examples) if 0 < num_examples < _MANY else 0


def average_numbers(numbers: Mapping[str, Mapping[str, float]], shares: Mapping[str, float]) -> dict[str, float]:
    """The mean of each number that at least half of the clients report, over those whose own is finite, by examples.

    Example:
        >>> reported = {"a": {"loss": 1.0}, "b": {"loss": 3.0}, "c": {"loss": math.nan, "odd": 1.0}}
        >>> average_numbers(reported, {"a": 0.125, "b": 0.375, "c": 0.5})
        {'loss': 2.5}
    """
    means = {}
    for key in sorted({key for name in shares for key in numbers[name]} - {NUM_EXAMPLES}):  # which is the weight
        told = [(share, numbers[name][key]) for name, share in shares.items() if key in numbers[name]]
        finite = [(share, value) for share, value in told if math.isfinite(value)]
        if finite and 2 * len(told) >= len(shares):
            means[key] = sum(share * value for share, value in finite) / sum(share for share, _ in finite)
    return means
