from __future__ import annotations

from dataclasses import replace

import odd_parts
import pytest
import torch

from builders import as_bytes, ask, payloads
from fedfuse.client.class_sums import LabelCounts
from fedfuse.client.objectives import Proximal
from fedfuse.core.messages import Brief, Start
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.spec import Spec
from fedfuse.engines.local import InProcess, OncePerBrief, Population, one_thread
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.methods.scaffold import ControlDelta, KeepControl
from fedfuse.training.round import client_round
from fedfuse.wire.codec import Packet, decode, encode
from fedfuse.wire.messages import encode_brief, hand_over, receive_brief


def test_an_engine_gives_what_a_client_round_gives(population: Population, brief: Brief, work: Work) -> None:
    got = payloads(InProcess(population, seed=4), brief, work)
    for client in population.clients:
        assert got[client] == client_round(work, brief, client, population.rows_of(client), seed=4).payload


def test_a_population_keeps_client_order_and_sizes(population: Population) -> None:
    assert population.clients == ("site-1", "site-2", "site-3", "site-10", "site-11")
    assert population.sizes()["site-3"] == 24
    with pytest.raises(ConfigError, match="client"):
        Population.of({})


def test_a_fingerprint_tells_rows_apart_wherever_they_lie() -> None:
    x, y = torch.rand(6, 2), torch.arange(6)
    one = Population(Rows(x, y), {"a": torch.tensor([4, 1])})
    other = Population(Rows(x.flip(0), y.flip(0)), {"b": torch.tensor([1, 4]), "c": torch.tensor([4, 1])})
    assert one.fingerprint("a") == other.fingerprint("b")
    assert one.fingerprint("a") != other.fingerprint("c")  # the same rows in another order train differently
    changed = x.clone()
    changed[4, 0] += 1e-7 + changed[4, 0] * 1e-6
    assert Population(Rows(changed, y), one.index).fingerprint("a") != one.fingerprint("a")
    assert Population(Rows(x, y + 1), one.index).fingerprint("a") != one.fingerprint("a")


def test_one_clients_failure_drops_it_and_no_other(population: Population, brief: Brief, work: Work) -> None:
    spoiled = replace(work, objective=odd_parts.Spoiled("site-2", KeyError))
    envelopes = ask(InProcess(population), brief, spoiled)
    assert envelopes["site-2"].payload is None
    assert envelopes["site-2"].dropped == "KeyError: 'site-2 will not'"
    assert [c for c, e in envelopes.items() if e.payload is None] == ["site-2"]


@pytest.mark.parametrize("error", [ConfigError, RecipeError])
def test_what_the_user_asked_wrongly_is_not_swallowed(
    population: Population, brief: Brief, work: Work, error: type[Exception]
) -> None:
    with pytest.raises(error, match="site-2 will not"):
        payloads(InProcess(population), brief, replace(work, objective=odd_parts.Spoiled("site-2", error)))


def test_threads_of_the_process_do_not_reach_the_bits(population: Population, brief: Brief, work: Work) -> None:
    alone = payloads(InProcess(population), brief, work)
    torch.set_num_threads(2)
    try:
        assert payloads(InProcess(population), brief, work) == alone
        assert torch.get_num_threads() == 2
        with pytest.raises(RuntimeError), one_thread():
            raise RuntimeError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_strides_of_the_server_do_not_reach_the_bits(population: Population, brief: Brief, work: Work) -> None:
    proximal = replace(work, objective=Proximal(0.5))
    last = torch.channels_last
    odd = {n: t.contiguous(memory_format=last) if t.ndim == 4 else t for n, t in brief.params.items()}
    assert any(not t.is_contiguous() for t in odd.values())
    strided = Population(
        Rows(population.rows.x.transpose(2, 3).contiguous().transpose(2, 3), population.rows.y), population.index
    )
    plain = payloads(InProcess(population), brief, proximal)
    assert payloads(InProcess(strided), replace(brief, params=odd), proximal) == plain


def test_memories_stay_from_round_to_round_and_can_be_put_back(
    population: Population, brief: Brief, work: Work
) -> None:
    controlled = replace(work, evidence=(ControlDelta(),), memory=(KeepControl(),))
    engine = InProcess(population)
    payloads(engine, brief, controlled)
    saved = dict(engine.memories)
    second = payloads(engine, replace(brief, round=1), controlled)
    assert engine.memories["site-1"]["control/fc1.weight"].ne(saved["site-1"]["control/fc1.weight"]).any()
    assert payloads(InProcess(population, memories=saved), replace(brief, round=1), controlled) == second


def test_a_known_training_is_not_done_again(population: Population, brief: Brief, work: Work) -> None:
    plain = payloads(InProcess(population), brief, work)
    asked = replace(work, objective=odd_parts.Spoiled("site-2", KeyError), evidence=(LabelCounts(), ControlDelta()))
    direct = payloads(InProcess(population), brief, replace(asked, objective=work.objective))
    seen: list[tuple[str, bool]] = []
    engine = InProcess(population, on_client=lambda client, _, remembered: seen.append((client, remembered)))
    trained = {c: p for c, p in plain.items() if isinstance(p, bytes)}
    got = {e.client: e for e in engine.exchange(brief, asked, engine.clients, trained.get)}
    assert {c: as_bytes(e.payload) for c, e in got.items()} == direct  # site-2's objective was never called
    assert all(e.remembered for e in got.values())
    assert seen == [(c, True) for c in engine.clients]


def test_a_brief_is_made_into_something_once_for_all_who_hear_the_same(brief: Brief) -> None:
    start = Start(brief.spec, brief.params)
    made: list[Brief] = []
    per_brief = OncePerBrief(replace(brief, own={"b": start}), lambda told: made.append(told) or len(made))
    assert [per_brief.for_client(c) for c in ("a", "b", "c", "a")] == [1, 2, 1, 1]


def test_a_heard_brief_has_the_bytes_and_the_prototype(brief: Brief) -> None:
    own = Spec.of(odd_parts.Net(5))
    said = replace(brief, spec=own, params=own.build().state_dict(), memory={"mask/w": torch.ones(2)})
    got = receive_brief(encode_brief(said), own)
    assert got.spec.prototype is own.prototype
    assert got.memory["mask/w"].tolist() == [1, 1]
    assert all(torch.equal(t, said.params[n]) for n, t in got.params.items())


def test_what_never_was_in_a_message_lies_as_what_was(population: Population, brief: Brief, work: Work) -> None:
    """Strides decide the order of sums: a value must be laid out as its bytes are read."""
    odd = {n: t.mT.contiguous().mT if t.ndim == 2 else t for n, t in brief.params.items()}
    odd |= {"half": torch.arange(6).to(torch.bfloat16)[::2], "count": torch.tensor(3), "empty": torch.empty(0, 2)}
    value, read = Packet.of(odd, {"b": (1, 2), "a": 0.5}), decode(encode(odd, {"b": (1, 2), "a": 0.5}))
    assert (value.header, value.size, list(value.tensors)) == (read.header, read.size, list(read.tensors))
    assert value.tensors.offsets == read.tensors.offsets
    for name, tensor in value.tensors.items():
        assert tensor.stride() == read.tensors[name].stride()
        assert tensor.equal(read.tensors[name])
    heard, told = hand_over(brief), receive_brief(encode_brief(brief), brief.spec)
    rows = population.rows_of("site-2")
    here, there = (client_round(work, b, "site-2", rows, seed=2).payload for b in (heard, told))
    assert here == there
