"""A fuzzer at the door: thousands of mutants of valid replies, each refused by name or harmless.

Two honest clients and one mutant answer every time. Whatever the mutant sends, nothing but a refusal comes of it: no
exception, no honest client lost, no callable called. A mutant that is let in looks like an honest update, and then the
fused model is finite and lies between the admitted ones.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedfuse.client.class_sums import LabelCounts
from fedfuse.core import spec as spec_module
from fedfuse.core.messages import Brief, Cohort, Envelope
from fedfuse.core.model import Single
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.methods.scaffold import ControlDelta, ControlStep
from fedfuse.server.admission.admit import Admission, admit_all
from fedfuse.server.aggregate.mean import Mean
from fedfuse.training.round import client_round
from fedfuse.wire.codec import DTYPES, decode, encode

EVIDENCE = (ControlDelta(), LabelCounts())
CLIENTS = ("a", "m", "z")
TIMES = 50


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


@cache
def state(round_: int = 3) -> ServerState:
    torch.manual_seed(0)
    net = network()
    return ServerState(round_, Single.of(net, Spec.of(net)))


@cache
def replies(round_: int = 3) -> dict[str, bytes]:
    """What honest clients answer."""
    draw = torch.Generator().manual_seed(1)
    work = Work(LocalSettings(batch_size=4, optimizer={"lr": 0.1}), evidence=EVIDENCE)
    data = {
        c: Rows(torch.randn(n, 4, generator=draw), torch.arange(n) % 3)
        for c, n in zip(CLIENTS, (8, 10, 12), strict=True)
    }
    return {c: client_round(work, brief(round_), c, rows).payload for c, rows in data.items()}


@cache
def brief(round_: int = 3) -> Brief:
    return state(round_).brief((), classes=3)


@dataclass(slots=True)
class Draft:
    """A valid reply taken apart, to be spoilt."""

    chance: random.Random
    payload: bytes
    tensors: dict[str, Tensor]
    header: dict[str, Any]

    @classmethod
    def of(cls, seed: int) -> Draft:
        packet = decode(replies()["m"])
        return cls(
            random.Random(seed), replies()["m"], {n: t.clone() for n, t in packet.tensors.items()}, dict(packet.header)
        )

    def name(self, floating: bool | None = None) -> str:
        """A random tensor's name."""
        names = [n for n, t in self.tensors.items() if floating is None or t.is_floating_point() == floating]
        return self.chance.choice(names)

    def table(self) -> tuple[dict[str, Any], bytes]:
        """The table of contents and the data behind it."""
        length = int.from_bytes(self.payload[:8], "little")
        return json.loads(self.payload[8 : 8 + length]), self.payload[8 + length :]

    def saying(self, **header: Any) -> bytes:
        """The reply with other words in its header, even such as JSON does not know."""
        return self.forged_header(json.dumps(self.header | header))

    def forged_header(self, text: str) -> bytes:
        table, body = self.table()
        return forge(table | {"__metadata__": {"fedfuse": text}}, body)

    def with_tensor(self, name: str, tensor: Tensor) -> bytes:
        return encode({**self.tensors, name: tensor}, self.header)


def forge(table: Any, body: bytes) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


Mutator = Callable[[Draft], bytes]
MUTATORS: dict[str, Mutator] = {}


def mutator(make: Mutator) -> Mutator:
    MUTATORS[make.__name__.replace("_", " ")] = make
    return make


def poke(d: Draft, value: float) -> bytes:
    name = d.name(floating=True)
    tensor = d.tensors[name]
    tensor.view(-1)[d.chance.randrange(tensor.numel())] = value
    return d.with_tensor(name, tensor)


@mutator
def not_a_number(d: Draft) -> bytes:
    return poke(d, math.nan)


@mutator
def infinity(d: Draft) -> bytes:
    return poke(d, d.chance.choice([math.inf, -math.inf]))


@mutator
def huge_values(d: Draft) -> bytes:
    return poke(d, d.chance.choice([3.4e38, -3.4e38, 1e30, 1e-45]))


@mutator
def another_shape(d: Draft) -> bytes:
    name = d.name()
    t = d.tensors[name]
    flat = t.reshape(-1)
    shapes = [t[None], t[..., None], flat, flat.repeat(2), flat[:0], flat[:-1], t.unsqueeze(0).repeat(2, *[1] * t.ndim)]
    return d.with_tensor(name, d.chance.choice([s for s in shapes if s.shape != t.shape]).contiguous())


@mutator
def a_shape_that_would_broadcast(d: Draft) -> bytes:
    name = d.chance.choice([n for n, t in d.tensors.items() if t.numel() > 1])
    t = d.tensors[name]
    axis = d.chance.randrange(t.ndim)
    return d.with_tensor(name, d.chance.choice([t.narrow(axis, 0, 1), t.reshape(-1)[0]]).contiguous())


@mutator
def transposed(d: Draft) -> bytes:
    """A square matrix turned round has the right form: only its values lie."""
    name = d.chance.choice([n for n, t in d.tensors.items() if t.ndim == 2])
    return d.with_tensor(name, d.tensors[name].T.contiguous())


@mutator
def another_dtype(d: Draft) -> bytes:
    name = d.name()
    kinds = [k for k in DTYPES.values() if k != d.tensors[name].dtype]
    return d.with_tensor(name, d.tensors[name].to(d.chance.choice(kinds)))


@mutator
def a_dtype_of_the_same_width(d: Draft) -> bytes:
    """The bytes stay, the table calls them something else."""
    table, body = d.table()
    name = d.name()
    table[name]["dtype"] = {"F32": "I32", "I64": "F64"}[table[name]["dtype"]]
    return forge(table, body)


@mutator
def a_missing_tensor(d: Draft) -> bytes:
    for _ in range(d.chance.randint(1, len(d.tensors))):
        del d.tensors[d.name()]
    return encode(d.tensors, d.header)


@mutator
def an_extra_tensor(d: Draft) -> bytes:
    odd = ["extra", "~extra", "0.weights", "~control/none", "", "~", "0.weight ", "\u202e0.weight", "a\nb", "x" * 3000]
    return d.with_tensor(d.chance.choice(odd), torch.ones(d.chance.randint(0, 3)))


@mutator
def a_renamed_tensor(d: Draft) -> bytes:
    name = d.name()
    d.tensors[d.chance.choice([name.upper(), f"{name}.", name[:-1], f"~{name}"])] = d.tensors.pop(name)
    return encode(d.tensors, d.header)


@mutator
def tensors_that_changed_places(d: Draft) -> bytes:
    first = d.name()
    second = d.chance.choice([n for n, t in d.tensors.items() if t.shape == d.tensors[first].shape])
    d.tensors[first], d.tensors[second] = d.tensors[second], d.tensors[first]
    return encode(d.tensors, d.header)


NUMBERS: list[Any] = [
    *[
        0,
        -1,
        -9.5,
        0.0,
        -0.0,
        1e-320,
        0.5,
        1e12,
        1e13,
        1e300,
        1e308,
        10**18,
        10**400,
        -(10**400),
        2**63,
        math.nan,
        math.inf,
    ],
    *[-math.inf, True, False, None, "8", "", "eight", [], [8], {}, {"num_examples": 8}, "NaN", 10.0, 10],
]


@mutator
def another_mass(d: Draft) -> bytes:
    return d.saying(num_examples=d.chance.choice(NUMBERS))


@mutator
def another_number_of_steps(d: Draft) -> bytes:
    return d.saying(steps=d.chance.choice([*NUMBERS, 10**9, 10**9 + 1, 299, 301]))


@mutator
def another_round(d: Draft) -> bytes:
    return d.saying(round=d.chance.choice([*NUMBERS, 2, 4, "3", 3.5, [3]]))


@mutator
def another_kind_of_message(d: Draft) -> bytes:
    word = d.chance.choice(["brief", "model", "", "REPLY", None, 3, [], {}])
    return d.saying(**d.chance.choice([{"kind": word}, {"version": d.chance.choice([0, 2, "1", None, 1e9])}]))


@mutator
def a_missing_word(d: Draft) -> bytes:
    del d.header[d.chance.choice(list(d.header))]
    return encode(d.tensors, d.header)


@mutator
def words_nobody_asked_for(d: Draft) -> bytes:
    return d.saying(**{d.chance.choice(["client", "__class__", "x" * 500, "\u0000"]): d.chance.choice(NUMBERS)})


@mutator
def strange_facts(d: Draft) -> bytes:
    facts = [None, [], "x", 3, {"loss": "low"}, {"loss": math.nan}, {"loss": [1]}, {"": {}}, {"a" * 9999: 1}]
    return d.saying(facts=d.chance.choice([*facts, {str(i): i for i in range(500)}, {"loss": 10**400}]))


@mutator
def a_spec_that_names_a_callable(d: Draft) -> bytes:
    calls = [
        "os:system",
        "builtins:exec",
        "builtins:eval",
        "subprocess:run",
        "canary:boom",
        "canary.sub:boom",
        ":",
        "os:",
    ]
    options = d.chance.choice([{}, {"command": "true"}, {"source": "raise SystemExit"}, {"args": ["true"]}])
    return d.saying(spec={"factory": d.chance.choice(calls), "options": options})


@mutator
def another_spec(d: Draft) -> bytes:
    own = d.header["spec"]
    changes: list[Any] = [
        *[None, [], "mlp", 3, {}, {"factory": None}, {"factory": "mlp"}, own | {"options": {"inputs": 4}}],
        *[
            own | {"surgery": {"0.weight": [1, 4]}},
            own | {"surgery": {"0.weight": [2**40]}},
            own | {"kept": {"0": [-1]}},
        ],
        *[own | {"prototype": "x"}, own | {"options": []}, own | {"options": {"a": math.nan}}, own | {"surgery": 3}],
        own | {"options": {"x" * 2000: list(range(500))}},
    ]
    return d.saying(spec=d.chance.choice(changes))


@mutator
def a_deep_header(d: Draft) -> bytes:
    depth, (left, right) = d.chance.choice([30, 200, 900, 990, 5000]), d.chance.choice([("[", "]"), ('{"a":', "}")])
    pit = left * depth + "1" + right * depth
    where = d.chance.choice(["spec", "num_examples", "facts", "round", "more"])
    text = json.dumps(d.header | {where: "PIT"}).replace('"PIT"', pit)
    if d.chance.random() < 0.3:
        text = json.dumps(d.header | {"spec": {"factory": "mlp", "options": "PIT"}}).replace('"PIT"', pit)
    return d.forged_header(text)


@mutator
def a_deep_table(d: Draft) -> bytes:
    table, body = d.table()
    depth = d.chance.choice([10, 500, 980, 20_000])
    pit = "[" * depth + "]" * depth
    name = d.name()
    field = d.chance.choice(["dtype", "shape", "data_offsets", None])
    table[name] = "PIT" if field is None else table[name] | {field: "PIT"}
    return forge(json.dumps(table).replace('"PIT"', pit).encode(), body)


@mutator
def a_key_that_stands_twice(d: Draft) -> bytes:
    if d.chance.random() < 0.5:
        return d.forged_header(json.dumps(d.header)[:-1] + ', "num_examples": 1}')
    table, body = d.table()
    name = d.name()
    return forge((json.dumps(table)[:-1] + f", {json.dumps(name)}: {json.dumps(table[name])}}}").encode(), body)


@mutator
def a_header_that_is_no_header(d: Draft) -> bytes:
    return d.forged_header(d.chance.choice(["", "null", "[]", "3", '"x"', "{", "\ud800", "NaN", "{]", "\x00", "true"]))


@mutator
def metadata_that_are_no_metadata(d: Draft) -> bytes:
    table, body = d.table()
    odd: list[Any] = [None, [], "x", 3, {}, {"fedfuse": None}, {"fedfuse": {}}, {"other": "x"}]
    return forge(table | {"__metadata__": d.chance.choice(odd)}, body)


@mutator
def a_lying_header_length(d: Draft) -> bytes:
    honest = int.from_bytes(d.payload[:8], "little")
    lies = [0, 1, 7, honest - 8, honest + 8, honest + 1, len(d.payload), 2**31, 2**40, 2**63, 2**64 - 1]
    return d.chance.choice(lies).to_bytes(8, "little") + d.payload[8:]


@mutator
def lying_offsets(d: Draft) -> bytes:
    table, body = d.table()
    name = d.name()
    begin, end = table[name]["data_offsets"]
    size = end - begin
    lies: list[Any] = [
        *[
            [begin + 8, end + 8],
            [begin, end + 8],
            [end, begin],
            [0, size],
            [begin - 8, end - 8],
            [len(body), len(body) + size],
        ],
        *[[begin, 400 * 10**9], [-8, size - 8], [begin], [], [begin, end, end], [str(begin), end], [float(begin), end]],
        *[[True, end], None, "all", [10**30, 10**30 + size], {"begin": 0}],
    ]
    table[name]["data_offsets"] = d.chance.choice(lies)
    return forge(table, body)


@mutator
def lying_shapes(d: Draft) -> bytes:
    table, body = d.table()
    name = d.name()
    lies: list[Any] = [[10**11], [2**32, 2**32], [-1], [0], [1.5], ["4"], [True], None, 4, [1] * 9, [10**30], {}, [[4]]]
    table[name]["shape"] = d.chance.choice(lies)
    if d.chance.random() < 0.3:  # and offsets that agree with 400 GB
        table[name] |= {"shape": [10**11], "data_offsets": [0, 4 * 10**11]}
    return forge(table, body)


@mutator
def truncated(d: Draft) -> bytes:
    return d.payload[: d.chance.randrange(len(d.payload))]


@mutator
def longer(d: Draft) -> bytes:
    return d.payload + d.chance.randbytes(d.chance.choice([1, 4, 8, 64, 4096, 200_000]))


@mutator
def flipped_bits(d: Draft) -> bytes:
    data = bytearray(d.payload)
    for _ in range(d.chance.choice([1, 1, 2, 8, 100])):
        data[d.chance.randrange(len(data))] ^= 1 << d.chance.randrange(8)
    return bytes(data)


@mutator
def flipped_header_bits(d: Draft) -> bytes:
    data, length = bytearray(d.payload), int.from_bytes(d.payload[:8], "little")
    for _ in range(d.chance.choice([1, 1, 2, 5])):
        data[d.chance.randrange(8 + length)] ^= 1 << d.chance.randrange(8)
    return bytes(data)


@mutator
def bytes_lost_or_found(d: Draft) -> bytes:
    at = d.chance.randrange(len(d.payload))
    if d.chance.random() < 0.5:
        return d.payload[:at] + d.payload[at + d.chance.randint(1, 9) :]
    return d.payload[:at] + d.chance.randbytes(d.chance.randint(1, 9)) + d.payload[at:]


@mutator
def random_bytes(d: Draft) -> bytes:
    return d.chance.randbytes(d.chance.choice([0, 1, 7, 8, 9, 100, 5000]))


@mutator
def random_bytes_behind_an_honest_length(d: Draft) -> bytes:
    return d.payload[:8] + d.chance.randbytes(len(d.payload) - 8)


@mutator
def another_format(d: Draft) -> bytes:
    """A pickle that would call os.system, torch.save's zip, a plain zip, numpy's archive, text."""
    call = b"cos\nsystem\n(S'touch pickled'\ntR."
    saved, packed, numbers = io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save(d.tensors, saved)
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("data.pkl", call)
    np.savez(numbers, **{n.replace("/", "."): t.numpy() for n, t in d.tensors.items()})
    kinds = [call, saved.getvalue(), packed.getvalue(), numbers.getvalue(), b"<html>", json.dumps(d.header).encode()]
    return d.chance.choice(kinds)


@mutator
def counts_that_lie(d: Draft) -> bytes:
    lies = [[-1, 11, 0], [4, 4, 4], [0, 0, 0], [2**62, 2**62, 10], [2**63 - 1, 2**63 - 1, 12], [10, 0, 0]]
    return d.with_tensor("~counts/labels", torch.tensor(d.chance.choice(lies)))


@mutator
def buffers_that_lie(d: Draft) -> bytes:
    lies = [
        ("1.running_var", torch.tensor([1.0, -1e-3, 1.0, 1.0])),
        ("1.running_var", torch.full((4,), -1.0)),
        ("1.num_batches_tracked", torch.tensor(-5)),
        ("1.num_batches_tracked", torch.tensor(2**63 - 1)),
    ]
    return d.with_tensor(*d.chance.choice(lies))


@mutator
def a_reply_to_another_round(d: Draft) -> bytes:
    return replies(d.chance.choice([0, 2, 4]))["m"]


@mutator
def the_same_reply_in_another_order(d: Draft) -> bytes:
    names = d.chance.sample(list(d.tensors), len(d.tensors))
    return encode({n: d.tensors[n] for n in names}, d.header)


def judged(mutant: bytes | Path, chance: random.Random, **how: Any) -> Admission:
    envelopes = [Envelope("a", replies()["a"]), Envelope("z", replies()["z"])]
    envelopes.insert(chance.randint(0, 2), Envelope("m", mutant))
    return admit_all(envelopes, brief(), EVIDENCE, CLIENTS, **how)


def check_harmless(cohort: Cohort) -> None:
    """Finite, and for the plain mean between the admitted updates; control variates are finite too."""
    bench = Bench(population=3)
    fused = Mean()(cohort, state(), bench)
    for name, tensor in fused.single.posterior.mean.items():
        stack = cohort.stack(name)
        assert tensor.isfinite().all()
        low, high = stack.amin(0), stack.amax(0)
        slack = 1e-6 * torch.maximum(low.abs(), high.abs()) if tensor.is_floating_point() else 0
        assert ((low - slack <= tensor) & (tensor <= high + slack)).all()
    assert all(t.isfinite().all() for t in ControlStep()(fused, cohort, bench).memory.values())


def check_told(admission: Admission) -> None:
    """One refusal that says who, what came and what was expected, fit for a log."""
    (refusal,) = admission.refused
    assert refusal["client"] == "m"
    for words in refusal.values():
        assert words
        assert words.isprintable()
        assert len(words) <= 300


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing a client names may be called or imported."""

    def never(*args: object, **_: object) -> None:
        raise AssertionError(f"something a client named was called: {args}")

    assert brief().spec.layout.roles
    assert all(replies(r) for r in (0, 2, 3, 4)), "honest work is done before anything is forbidden"
    (tmp_path / "canary.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for owner, name in ((os, "system"), (subprocess, "run"), (spec_module, "factory_of"), (Spec, "build")):
        monkeypatch.setattr(owner, name, never)


@pytest.mark.parametrize("name", MUTATORS)
def test_every_mutant_is_refused_by_name_or_harmless(name: str, untouched: None) -> None:
    for seed in range(TIMES):
        draft = Draft.of(seed)
        admission = judged(MUTATORS[name](draft), draft.chance)
        assert {"a", "z"} <= set(admission.cohort.clients), f"{name}, {seed}: an honest client was lost"
        if "m" in admission.cohort.clients:
            assert not admission.refused
            check_harmless(admission.cohort)
        else:
            check_told(admission)
    assert "canary" not in sys.modules
    assert not Path("pickled").exists()


def test_there_are_thousands_of_mutants() -> None:
    assert len(MUTATORS) * TIMES >= 2000
