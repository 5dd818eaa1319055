from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from fake_grid import FakeGrid, TestSite, grid_of, spoilt
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict

from builders import as_bytes, rows
from fedfuse.client.objectives import Proximal
from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.seams import Work
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.engines.local import InProcess, Population
from fedfuse.errors import ConfigError, QuorumLost
from fedfuse.flower import engine as flower
from fedfuse.flower.engine import SITE, Federation, FlowerEngine, Member
from fedfuse.flower.records import PARAMS, REPLY
from fedfuse.flower.site import client_app
from fedfuse.server.admission.admit import Admission, admit_all

LOCAL = LocalSettings(batch_size=8, optimizer={"lr": 0.1})
SPEC = Spec("mlp", {"inputs": 6, "hidden": [4], "classes": 3})
PEOPLE = Population.of({f"client-{i}": rows(n, 6, seed=i) for i, n in enumerate((14, 9, 22))})
PLAIN = find_method("fedavg").recipe()
Spoil = Callable[[RecordDict], None]


class FakeClock:
    """Time that passes only when somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._events = 0.0, list[tuple[float, Callable[[], object]]]()
        monkeypatch.setattr(flower, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for event in [event for event in self._events if event[0] <= self.now]:
            self._events.remove(event)
            event[1]()

    def at(self, when: float, what: Callable[[], object]) -> None:
        self._events.append((when, what))


def a_brief(round_: int = 0) -> Brief:
    torch.manual_seed(0)
    return Brief(round_, SPEC, SPEC.build().state_dict(), classes=3)


def a_federation(recipe: Recipe = PLAIN, deadline: float = 20.0) -> tuple[FakeGrid, FlowerEngine]:
    grid = grid_of(client_app(TestSite(PEOPLE, recipe, LOCAL)), len(PEOPLE.clients))
    federation = Federation(grid, len(PEOPLE.clients), deadline=deadline, names=PEOPLE.clients)
    federation.gather()
    return grid, FlowerEngine(federation, recipe.label, recipe, LOCAL)


def node_of(engine: FlowerEngine, client: str) -> int:
    return engine.federation.members[client].node


def settled(engine: FlowerEngine) -> FlowerEngine:
    """Give nodes that just joined the time to say who they are."""
    for _ in range(4):
        engine.federation.poll_nodes()
    return engine


def exchanged(engine: FlowerEngine, recipe: Recipe = PLAIN, brief: Brief | None = None) -> dict[str, Envelope]:
    said = engine.exchange(brief or a_brief(), recipe.work(LOCAL), engine.clients)
    return {envelope.client: envelope for envelope in said}


def admitted(engine: FlowerEngine) -> Admission:
    asked = engine.clients
    return admit_all(engine.exchange(a_brief(), PLAIN.work(LOCAL), asked), a_brief(), (), asked, None, PEOPLE.sizes())


def in_process() -> Iterator[Envelope]:
    return InProcess(PEOPLE).exchange(a_brief(), PLAIN.work(LOCAL), PEOPLE.clients)


def test_replies_are_the_bytes_a_client_in_process_sends() -> None:
    _, engine = a_federation()
    ours = {e.client: as_bytes(e.payload) for e in in_process()}
    got = exchanged(engine)
    assert {c: e.payload for c, e in got.items()} == ours
    assert all(e.seconds > 0 for e in got.values())


def test_nodes_are_clients_by_their_partition_and_enrol_with_their_rows() -> None:
    _, engine = a_federation()
    assert engine.clients == PEOPLE.clients
    assert {c: m.rows for c, m in engine.federation.members.items()} == PEOPLE.sizes()
    assert engine.federation.is_simulated


def test_what_a_client_remembers_stays_in_its_own_state() -> None:
    recipe = find_method("scaffold").recipe()
    grid, engine = a_federation(recipe)
    brief = replace(a_brief(), memory={f"control/{n}": torch.zeros_like(t) for n, t in a_brief().params.items()})
    exchanged(engine, recipe, brief)
    assert engine.memories == {}
    states = [node.context.state for node in grid.nodes.values()]
    assert all(any(t.numpy().any() for t in state.array_records["memory"].values()) for state in states)
    first = states[0].array_records["memory"]
    engine.seed = 1  # another course: it begins without a memory
    exchanged(engine, recipe, brief)
    second = states[0].array_records["memory"]
    assert first is not second
    assert states[0].config_records["course"]["seed"] == 1


def test_the_deadline_ends_a_round_without_the_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, engine = a_federation()
    engine.federation.deadline = 0.3
    grid.nodes[node_of(engine, "client-1")].silent = True
    got = exchanged(engine)
    assert got["client-1"].payload is None
    assert "0.3 s" in got["client-1"].dropped
    assert got["client-0"].payload
    assert got["client-2"].payload


def a_deployment(quorum: float = 0.5, **settings: float) -> tuple[FakeGrid, FlowerEngine]:
    """The same nodes, none of them a part of a simulation."""
    grid, engine = a_federation()
    members = {name: Member(member.node, member.rows) for name, member in engine.federation.members.items()}
    engine.federation = Federation(grid, 3, quorum, members=members, **settings)
    return grid, engine


def test_a_round_closes_some_time_after_its_quorum_and_not_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """One silent node cost every round the whole deadline, an hour by default."""
    clock = FakeClock(monkeypatch)
    grid, engine = a_deployment(patience=30.0)
    grid.nodes[node_of(engine, "client-1")].silent = True
    got = exchanged(engine)
    assert got["client-1"].payload is None
    assert "quorum, 30" in got["client-1"].dropped
    assert 30 <= clock.now < 40


def test_a_late_answer_is_refused_by_name_in_the_round_in_which_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeClock(monkeypatch)
    grid, engine = a_deployment(patience=5.0)
    slow = grid.nodes[node_of(engine, "client-1")]
    slow.silent = True
    assert [d["client"] for d in admitted(engine).dropped] == ["client-1"]
    slow.silent = False
    second = admitted(engine)
    assert second.cohort.clients == PEOPLE.clients  # its answer to this round is as good as anybody's
    assert [(r["client"], r["field"], r["got"]) for r in second.refused] == [
        ("client-1", "reply", "an answer to round 1")
    ]
    assert admitted(engine).refused == []


def test_whoever_answers_with_rubbish_closes_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three are a quorum; one of them lies at once, and the slow one is waited for."""
    clock = FakeClock(monkeypatch)
    grid, engine = a_deployment(quorum=0.6, patience=1.0, deadline=500.0)
    spoilt(grid, node_of(engine, "client-0"), lambda content: content.config_records["reply.words"].update(round=77))
    slow = grid.nodes[node_of(engine, "client-2")]
    slow.silent = True
    clock.at(100.0, lambda: setattr(slow, "silent", False))
    seen = admitted(engine)
    assert seen.cohort.clients == ("client-1", "client-2")
    assert [r["client"] for r in seen.refused] == ["client-0"]


def test_a_simulation_waits_for_everybody_and_each_round_has_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(monkeypatch)
    grid, engine = a_federation()
    engine.federation.deadline = (300.0, 200.0)
    grid.nodes[node_of(engine, "client-1")].silent = True
    for round_, seconds in ((0, 300.0), (1, 200.0), (5, 200.0)):
        clock.now = 0.0
        assert f"{seconds:g} s" in exchanged(engine, brief=a_brief(round_))["client-1"].dropped
        assert clock.now == pytest.approx(seconds)


def test_a_node_that_went_is_told_and_may_come_back() -> None:
    grid, engine = a_federation()
    gone = node_of(engine, "client-2")
    grid.nodes[gone].online = False
    assert "not connected" in exchanged(engine)["client-2"].dropped
    again = grid.add(grid.nodes[gone].app, **{"partition-id": 2})  # the same site as another node
    assert exchanged(settled(engine))["client-2"].payload
    assert node_of(engine, "client-2") == again
    grid.nodes[gone].online = True  # two nodes of one name: the first to hold it keeps it
    assert exchanged(engine)["client-2"].payload
    assert node_of(engine, "client-2") == again


def test_errors_of_nodes_and_links_are_told_and_end_nothing() -> None:
    grid, engine = a_federation()
    grid.refuses.add(node_of(engine, "client-0"))

    def fails(message: Message, context: Context) -> Message:
        grid.nodes[node_of(engine, "client-1")].online = False
        return Message(RecordDict(), reply_to=message)

    grid.nodes[node_of(engine, "client-2")].app = fails
    got = exchanged(engine)
    assert "SuperLink" in got["client-0"].dropped
    assert "malformed" in got["client-2"].dropped


def test_a_node_that_dies_while_it_is_asked_is_told_with_flowers_own_reason() -> None:
    grid, engine = a_federation()
    node = grid.nodes[node_of(engine, "client-1")]
    pushed = grid.push_messages

    def push(messages: list[Message]) -> object:
        taken = pushed(messages)
        node.online = False
        return taken

    grid.push_messages = push  # type: ignore[method-assign, assignment]
    assert "error 5: node unavailable" in exchanged(engine)["client-1"].dropped


def test_a_stranger_is_told_in_every_round_and_never_asked() -> None:
    grid, engine = a_federation()
    stranger = grid.add(client_app(TestSite(PEOPLE, PLAIN, LOCAL)), **{"partition-id": 9})
    got = exchanged(settled(engine))
    assert "IndexError" in got[f"node {stranger}"].dropped
    assert stranger not in {m.node for m in engine.federation.members.values()}
    twin = grid.add(client_app(TestSite(PEOPLE, PLAIN, LOCAL)), **{"partition-id": 0})
    assert "'client-0'" in exchanged(settled(engine))[f"node {twin}"].dropped
    grid.nodes[twin].online = False
    assert f"node {twin}" not in exchanged(engine)  # gone, and asked anew should it come back


def test_a_registered_name_beats_what_a_node_calls_itself() -> None:
    def liar(message: Message, context: Context) -> Message:
        said = ConfigRecord({"name": "north", "rows": 3, "partition": -1})
        return Message(RecordDict({SITE: said}), reply_to=message)

    grid = FakeGrid()
    grid.add(liar, name="south")
    grid.add(liar)
    federation = Federation(grid, 2, deadline=5)
    federation.gather()
    assert federation.members.keys() == {"south", "north"}
    assert not federation.is_simulated


def test_a_registered_node_cannot_make_a_deployment_look_like_a_simulation() -> None:
    def claims(message: Message, context: Context) -> Message:
        said = ConfigRecord({"name": "", "rows": 3, "partition": 0})
        return Message(RecordDict({SITE: said}), reply_to=message)

    grid = FakeGrid()
    grid.add(claims, name="north")
    federation = Federation(grid, 1, wait=5, names=PEOPLE.clients)
    federation.gather()
    assert federation.members.keys() == {"north"}
    assert not federation.is_simulated


def test_a_node_that_cannot_load_the_app_is_told_and_one_that_went_is_asked_again() -> None:
    codes = iter([5, 1])

    def fails(message: Message, context: Context) -> Message:
        return Message(Error(code=next(codes), reason="no module named fedfuse"), reply_to=message)

    grid = FakeGrid()
    node = grid.add(fails)
    federation = Federation(grid, 1, wait=0.5)
    with pytest.raises(QuorumLost, match=f"node {node}: .*error 1: no module named fedfuse"):
        federation.gather()
    assert next(codes, None) is None  # asked twice: the first time it had gone away


def test_too_few_nodes_are_one_sentence() -> None:
    grid = FakeGrid()
    grid.add(client_app(TestSite(PEOPLE, PLAIN, LOCAL)), **{"partition-id": 7})
    with pytest.raises(QuorumLost, match="0 of 4 clients .*50%; node 1000: Ind"):
        Federation(grid, 4, wait=0.2, names=PEOPLE.clients).gather()


def test_a_federation_begins_with_a_quorum() -> None:
    grid = grid_of(client_app(TestSite(PEOPLE, PLAIN, LOCAL)), 3)
    federation = Federation(grid, 5, wait=0.5, names=PEOPLE.clients)
    federation.gather()
    assert len(federation.members) == 3


def put(values: dict[str, torch.Tensor]) -> Spoil:
    def spoil(content: RecordDict) -> None:
        for name, tensor in ArrayRecord(values).items():
            content.array_records[PARAMS][name] = tensor

    return spoil


def numbers(**values: float) -> Spoil:
    def spoil(content: RecordDict) -> None:
        content[f"{REPLY}.numbers"] = MetricRecord({**content.metric_records[f"{REPLY}.numbers"], **values})

    return spoil


@pytest.mark.parametrize(
    ("spoil", "field", "got"),
    [
        (put({"fc1.bias": torch.tensor([0.0, float("nan"), 0.0, 0.0])}), "fc1.bias", "not finite"),
        (put({"fc1.bias": torch.zeros(5)}), "fc1.bias", "5 float32"),
        (put({"fc1.bias": torch.zeros(4, dtype=torch.float64)}), "fc1.bias", "4 float64"),
        (put({"more": torch.zeros(1)}), "more", "sent unasked"),
        (numbers(num_examples=1e11), "num_examples", "100000000000.0"),
        (numbers(num_examples=float("nan")), "num_examples", "'nan'"),
        (numbers(num_examples=-3.0), "num_examples", "-3.0"),
        (numbers(steps=0), "steps", "0"),
    ],
)
def test_the_door_refuses_what_it_refuses_in_process(spoil: Spoil, field: str, got: str) -> None:
    grid, engine = a_federation()
    spoilt(grid, node_of(engine, "client-1"), spoil)
    admission = admitted(engine)
    assert admission.cohort.clients == ("client-0", "client-2")
    (refusal,) = admission.refused
    assert (refusal["client"], refusal["field"], refusal["got"]) == ("client-1", field, got)


def test_a_reply_for_another_round_is_refused() -> None:
    grid, engine = a_federation()

    def late(content: RecordDict) -> None:
        content.config_records[f"{REPLY}.words"]["round"] = 7

    spoilt(grid, node_of(engine, "client-0"), late)
    assert [r["field"] for r in admitted(engine).refused] == ["round"]


def raw(data: bytes, stype: str = "numpy.ndarray") -> Spoil:
    def spoil(content: RecordDict) -> None:
        content.array_records[PARAMS]["fc1.bias"].data = data
        content.array_records[PARAMS]["fc1.bias"].stype = stype

    return spoil


def npy(shape: str, dtype: str = "'<f4'", body: bytes = b"\0" * 16) -> bytes:
    head = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}}}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + body


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (npy("(100000000000,)"), "400,000,000,000 bytes"),
        (npy("(4,)", "'|O'"), "'|O'"),
        (npy("(4,)", "'>f4'"), "'>f4'"),
        (npy("(-4,)"), "'<f4'"),
        (npy("(4,"), ".npy"),
        (b"\x80\x04\x95 a pickle", ".npy"),
        (b"", ".npy"),
    ],
)
def test_a_lying_array_is_dropped_before_anything_is_allocated(data: bytes, why: str) -> None:
    grid, engine = a_federation()
    spoilt(grid, node_of(engine, "client-1"), raw(data))
    admission = admitted(engine)
    assert admission.cohort.clients == ("client-0", "client-2")
    (drop,) = admission.dropped
    assert drop["client"] == "client-1"
    assert drop["reason"].startswith("malformed: tensor 'fc1.bias'")
    assert why in drop["reason"]


def test_arrays_of_another_kind_are_dropped() -> None:
    grid, engine = a_federation()
    spoilt(grid, node_of(engine, "client-1"), raw(b"", "pickle"))
    assert "'pickle'" in admitted(engine).dropped[0]["reason"]


def test_what_a_node_says_cannot_reach_a_terminal() -> None:
    grid, engine = a_federation()

    def shout(content: RecordDict) -> None:
        content["failed"] = ConfigRecord({"why": "\x1b[31mred\n" + "x" * 900})

    spoilt(grid, node_of(engine, "client-1"), shout)
    reason = admitted(engine).dropped[0]["reason"]
    assert reason.isprintable()
    assert len(reason) <= 300


def test_large_replies_wait_in_files_that_go_with_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(flower, "INBOX_BYTES", 200)
    _, engine = a_federation()
    got = exchanged(engine)
    paths = [e.payload for e in got.values() if isinstance(e.payload, Path)]
    assert len(paths) == 2
    plain = {e.client: as_bytes(e.payload) for e in in_process()}
    assert all(e.payload.read_bytes() == plain[c] for c, e in got.items() if isinstance(e.payload, Path))
    exchanged(engine)
    assert not any(path.exists() for path in paths)  # those of the round before
    del engine
    assert not list(tmp_path.iterdir())


def test_another_experiment_at_a_site_is_told() -> None:
    _, engine = a_federation()
    engine.local = LocalSettings(epochs=3)
    said = list(engine.exchange(a_brief(), PLAIN.work(engine.local), engine.clients))
    assert all("ConfigError" in e.dropped and "this site's" in e.dropped for e in said)


def test_a_network_a_site_was_not_told_of_is_not_built() -> None:
    _, engine = a_federation()
    foreign = replace(a_brief(), spec=Spec("os:getcwd"))
    said = list(engine.exchange(foreign, PLAIN.work(LOCAL), engine.clients))
    assert all("os:getcwd" in e.dropped for e in said)


def test_what_cannot_travel_is_said_before_anything_is_sent() -> None:
    grid, engine = a_federation()
    grid.pulls.clear()
    with pytest.raises(ConfigError, match="server changes"):
        list(engine.exchange(a_brief(), Work(LOCAL, objective=Proximal(0.5)), engine.clients))
    nameless = replace(PLAIN, objective=lambda *_: None)
    engine.recipe = nameless
    with pytest.raises(ConfigError, match="has no name"):
        list(engine.exchange(a_brief(), nameless.work(LOCAL), engine.clients))
    engine.recipe = PLAIN
    with pytest.raises(ConfigError, match="cannot travel"):
        list(engine.exchange(replace(a_brief(), spec=Spec.of(SPEC.build())), PLAIN.work(LOCAL), engine.clients))
    assert not grid.pulls
