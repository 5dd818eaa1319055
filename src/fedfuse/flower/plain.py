"""What Flower clients that are not ours send: one record of arrays and some numbers, read for the door."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedfuse.core.messages import Brief, Envelope
from fedfuse.engines.flower import printable
from fedfuse.engines.flower_records import to_tensors
from fedfuse.wire.codec import Malformed, encode
from fedfuse.wire.messages import reply_header

from flwr.app import MetricRecord, RecordDict  # isort: skip - after flower_records has checked that it is there


def numbers_in(content: RecordDict) -> dict[str, float]:
    """The plain numbers of a reply's metric records."""
    found: Mapping[str, Any] = {k: v for record in content.metric_records.values() for k, v in record.items()}
    return {key: value for key, value in found.items() if isinstance(value, int | float)}


def plain_envelope(client: str, content: RecordDict, said: Mapping[str, float], brief: Brief) -> Envelope:
    """The reply of a client that is not ours, as the door wants it."""
    facts = {key: value for key, value in said.items() if key not in ("num-examples", "num-steps")}
    mass, steps = said.get("num-examples", math.nan), said.get("num-steps", 1)
    try:
        header = reply_header(brief, mass=mass, steps=int(steps), facts=facts)
        if not math.isfinite(mass):
            header["mass"] = str(mass)  # the door refuses it by name
        (arrays,) = content.array_records.values()
        return Envelope(client, encode(to_tensors(arrays), header))
    except (Malformed, ValueError, OverflowError) as why:
        return Envelope(client, None, dropped=f"malformed: {printable(why)}")


def averaged(numbers: Mapping[str, Mapping[str, float]], shares: Mapping[str, float], left_out: int) -> MetricRecord:
    """Everybody's common finite numbers, weighted by examples; and how many were left out."""
    common = set.intersection(*({k for k, v in numbers[name].items() if math.isfinite(v)} for name in shares))
    means = {key: sum(share * numbers[name][key] for name, share in shares.items()) for key in sorted(common)}
    return MetricRecord({**means, "left-out": left_out})
