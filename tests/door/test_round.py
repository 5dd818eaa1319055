"""A hostile client in a running federation: rounds go on, memory stays small, files are no way in."""

from __future__ import annotations

import json
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.model import Single
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Terms, Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.engines.local import InProcess, Population
from fedfuse.server.admission.admit import Contract, admit_all
from fedfuse.server.loop import RunPlan, run
from fedfuse.wire.codec import decode, encode
from fedfuse.wire.messages import encode_reply

SPEC = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 3})
BRIEF = Brief(1, SPEC, SPEC.skeleton().state_dict(), classes=3)


def forge(table: bytes, body: bytes = b"") -> bytes:
    table += b" " * (-len(table) % 8)
    return len(table).to_bytes(8, "little") + table + body


def honest(num_examples: float = 10.0, brief: Brief = BRIEF) -> bytes:
    return encode_reply(brief, brief.params, {}, num_examples=num_examples, steps=2, facts={})


def million_tensors() -> bytes:
    names = (f'"{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(10**6))
    return forge(("{" + ",".join(names) + "}").encode(), b"\0" * 10**6)


def claims_400_gigabytes() -> bytes:
    table = {n: {"dtype": "F32", "shape": list(t.shape), "data_offsets": [0, 0]} for n, t in BRIEF.params.items()}
    at = 0
    for entry in table.values():
        entry |= {"shape": [2 * 10**10], "data_offsets": [at, at + 8 * 10**10]}
        at += 8 * 10**10
    return forge(json.dumps(table).encode(), b"\0" * 100)


LARGE: dict[str, Callable[[], bytes]] = {
    "a million tiny tensors": million_tensors,
    "400 GB in the table": claims_400_gigabytes,
    "fifty megabytes of nothing": lambda: b"\0" * 50_000_000,
    "fifty megabytes behind a good reply": lambda: honest() + b"\0" * 50_000_000,
    "fifty megabytes of header": lambda: forge(b'{"x":"' + b"x" * 50_000_000 + b'"}'),
    "a pit of brackets": lambda: forge(b"[" * 10_000_000),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("where", ["bytes", "file"])
def test_what_is_too_large_is_refused_without_taking_memory(name: str, where: str, tmp_path: Path) -> None:
    payload: bytes | Path = LARGE[name]()
    if where == "file":
        (tmp_path / "reply").write_bytes(payload)  # type: ignore[arg-type]
        payload = tmp_path / "reply"
    tracemalloc.start()
    try:
        admission = admit_all([Envelope("m", payload), Envelope("a", honest())], BRIEF, (), ("a", "m"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert admission.cohort.clients == ("a",)
    assert [r["client"] for r in admission.refused] == ["m"]
    assert peak < 2_000_000
    assert admission.spool._bytes_in_memory < 100_000, "what is too long is not kept either"


def test_a_file_of_terabytes_is_refused_by_its_size(tmp_path: Path) -> None:
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 2**42)
    admission = admit_all([Envelope("m", tmp_path / "sparse")], BRIEF, (), ("m",))
    assert "that fit here" in admission.refused[0]["got"]


def test_a_duplicate_a_stranger_and_a_latecomer() -> None:
    late = honest(brief=Brief(0, SPEC, BRIEF.params, classes=3))
    other = Spec("mlp", {"inputs": 4, "hidden": [6], "classes": 3})
    elsewhere = honest(brief=Brief(1, other, other.skeleton().state_dict(), classes=3))
    replies = [("a", honest()), ("a", honest(20.0)), ("zoe", honest()), ("b", late), ("c", elsewhere), ("d", honest())]
    admission = admit_all([Envelope(c, p) for c, p in replies], BRIEF, (), ("a", "b", "c", "d"))
    assert [(u.client, u.num_examples) for u in admission.cohort] == [("a", 10.0), ("d", 10.0)]
    told = {r["client"]: (r["field"], r["got"]) for r in admission.refused}
    assert told["a"] == ("reply", "a second one")
    assert told["zoe"] == ("client", "a stranger")
    assert told["b"] == ("round", "0")
    assert told["c"][0] == "spec"
    assert "hidden=[6]" in told["c"][1]


def test_a_sender_cannot_choose_who_it_is() -> None:
    packet = decode(honest())
    payload = encode(packet.tensors, {**packet.header, "client": "a"})
    admission = admit_all([Envelope("m", payload), Envelope("a", honest())], BRIEF, (), ("a", "m"))
    assert admission.cohort.clients == ("a", "m")


@pytest.mark.parametrize("num_examples", [1001.0, 1e6, 1e12])
def test_without_an_enrolled_count_a_huge_mass_is_refused_by_the_median(num_examples: float) -> None:
    envelopes = [Envelope(c, honest()) for c in "abc"] + [Envelope("m", honest(num_examples))]
    admission = admit_all(envelopes, BRIEF, (), "abcm")
    assert admission.cohort.clients == ("a", "b", "c")
    assert admission.refused[0]["expected"] == "at most 1000, 100 times the median"


def test_a_tiny_mass_cannot_make_honest_ones_look_huge() -> None:
    envelopes = [Envelope(c, honest()) for c in "ab"] + [Envelope("m", honest(1e-300))]
    admission = admit_all(envelopes, BRIEF, (), "abm")
    assert {"a", "b"} <= set(admission.cohort.clients)


def test_mutants_in_files_fare_no_better(tmp_path: Path) -> None:
    chance, good, contract = random.Random(0), honest(), Contract.of(BRIEF, ())
    for place in range(150):
        data = bytearray(good[: chance.randrange(len(good))] if place % 3 == 0 else good)
        for _ in range(chance.randint(1, 4) if data else 0):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        (tmp_path / "m").write_bytes(bytes(data))
        admission = admit_all([Envelope("m", tmp_path / "m"), Envelope("a", good)], BRIEF, (), ("a", "m"))
        assert "a" in admission.cohort.clients
        assert len(admission.cohort) + len(admission.refused) == 2
    assert contract.limits.bytes > len(good)


@dataclass(slots=True)
class Hostile:
    """A federation whose client m answers with something else every round."""

    inner: InProcess
    terms: ClassVar[Terms] = Terms()

    @property
    def clients(self) -> tuple[str, ...]:
        return self.inner.clients

    def exchange(self, brief: Brief, work: Work, asked: tuple[str, ...]) -> Iterator[Envelope]:
        chance = random.Random(brief.round)
        for envelope in self.inner.exchange(brief, work, asked):
            yield envelope
            if envelope.client == "m":
                yield Envelope("m", chance.randbytes(500))
                yield Envelope("n", chance.randbytes(500))

    @property
    def memories(self) -> object:
        return self.inner.memories


def test_a_run_goes_on_round_after_round() -> None:
    draw = torch.Generator().manual_seed(0)
    people = {c: Rows(torch.randn(9, 4, generator=draw), torch.arange(9) % 3) for c in "abm"}
    bench = Bench(population=3, classes=3, local=LocalSettings(batch_size=4))
    state = ServerState(0, Single.of(SPEC.build(), SPEC))
    engine = Hostile(InProcess(Population.of(people)))
    records = list(run(find_method("scaffold").recipe(), engine, bench, None, state, RunPlan(rounds=4)))
    assert [len(r.facts["refused"]) for r in records] == [2, 2, 2, 2]
    assert all(list(r.facts["clients"]) == ["a", "b", "m"] for r in records)
