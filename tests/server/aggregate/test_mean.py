"""The weighted mean: exact, by role, independent of order, and small in memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedfuse.core.messages import Brief, ClientUpdate, Cohort, Envelope, Form
from fedfuse.core.model import Single
from fedfuse.core.params import Params
from fedfuse.core.posterior import Posterior
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.server.admission.admit import Admission, Rules, admit_all
from fedfuse.server.aggregate import mean as means
from fedfuse.server.aggregate.mean import Mean, largest, mean_of, weighted_mean
from fedfuse.wire.codec import LazyParams, decode, encode, read, write
from fedfuse.wire.messages import encode_reply

LENET = Spec("lenet", {"channels": 3, "size": 32})


def exact(tensors: list[Tensor], shares: list[float]) -> Tensor:
    """Σ w x in float64, in the given order, rounded once."""
    total = torch.zeros(tensors[0].shape, dtype=torch.float64)
    for tensor, share in zip(tensors, shares, strict=True):
        total += tensor.double() * share
    return total.to(tensors[0].dtype)


def cohort_of(states: list[Params], num_examples: list[float], spec: Spec, steps: list[int] | None = None) -> Cohort:
    steps = steps or [1] * len(states)
    rows = zip(states, num_examples, steps, strict=True)
    return Cohort(tuple(ClientUpdate(f"c{i}", Posterior(s), m, t, spec) for i, (s, m, t) in enumerate(rows)))


def random_state(spec: Spec, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(t.shape, generator=draw, dtype=t.dtype) if t.is_floating_point() else t + seed
        for n, t in spec.skeleton().state_dict().items()
    }


@pytest.mark.parametrize("many", [0, 1 << 60])  # by compiled code where there is any, and by torch
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    clients=st.integers(1, 10),
    count=st.integers(0, 20_000),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 10**6),
)
def test_it_is_the_float64_sum_in_client_order_rounded_once(
    many: int, clients: int, count: int, dtype: torch.dtype, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(count, generator=draw).to(dtype) for _ in range(clients)]
    weights = torch.rand(clients, generator=draw, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(means, "MIN_COMPILED", many)
        out = weighted_mean([{"w": t} for t in tensors], weights, "w")
    assert out.dtype == dtype
    assert out.equal(exact(tensors, weights.tolist()))


def test_blocks_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [random_state(LENET, s) for s in range(3)]
    cohort = cohort_of([decode(encode(s, {})).tensors for s in states], [1.0, 2.0, 5.0], LENET)
    whole = mean_of(cohort)
    monkeypatch.setattr(means, "BLOCK", 64)
    pieces = mean_of(cohort)
    assert all(whole[n].equal(pieces[n]) for n in whole)
    for n in whole:
        assert whole[n].equal(exact([s[n] for s in states], [0.125, 0.25, 0.625]))


@pytest.mark.parametrize("many", [0, 1 << 60])
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_share_the_blocks_and_change_no_bit(threads: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(means, "MIN_COMPILED", many)
    monkeypatch.setattr(means, "_MIN_THREADED", 0)
    cohort = cohort_of([in_bytes(random_state(LENET, s)) for s in range(3)], [1.0, 2.0, 5.0], LENET)
    monkeypatch.setattr(means, "BLOCK", 1 << 10)
    alone = mean_of(cohort)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    together = mean_of(cohort)
    assert all(alone[n].equal(together[n]) for n in alone)


@pytest.mark.parametrize("compiled", [False, True])
def test_every_way_a_client_can_be_stored_gives_the_same_bytes(
    tmp_path: object, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a message, in a file, in separate tensors, in another order, with evidence between: same mean."""
    monkeypatch.setattr(means, "MIN_COMPILED", 0 if compiled else 1 << 60)
    spec = Spec.of(nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2)))
    states = [random_state(spec, s) for s in range(3)]
    num_examples, expected = [1.0, 2.0, 5.0], None
    for store in (dict, in_bytes, in_file(tmp_path), reordered, with_notes, channels_last):
        got = mean_of(cohort_of([store(s) for s in states], num_examples, spec))
        expected = expected or got
        assert set(got) == set(expected)
        assert all(got[n].equal(expected[n]) and got[n].dtype == expected[n].dtype for n in got)
        assert len({t.untyped_storage().data_ptr() for t in got.values()}) == len(got), "each tensor has its own memory"
    mixed = cohort_of([in_bytes(states[0]), dict(states[1]), reordered(states[2])], num_examples, spec)
    assert all(mean_of(mixed)[n].equal(expected[n]) for n in expected or {})


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("clients", [3, 12, 14])
@pytest.mark.parametrize("odd", ["none", "in memory", "in half precision", "under other names"])
def test_files_are_read_into_few_rooms_and_summed_as_ever(
    tmp_path: object, clients: int, odd: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With so many that all pieces lie side by side or not, and with one that has no use for a room."""
    monkeypatch.setattr(means, "BLOCK", 1 << 10)
    monkeypatch.setattr(means, "MIN_COMPILED", 0 if compiled else 1 << 60)
    monkeypatch.setattr(means, "MIN_COMPILED_FILES", 0)
    store, draw = in_file(tmp_path), torch.Generator().manual_seed(0)
    values = [torch.randn(3 << 12, generator=draw) for _ in range(clients)]
    if odd == "in half precision":
        values[1] = values[1].half()
    states = [{"x" if odd == "under other names" else "w": v} for v in values]
    sources = [store(state) for state in states]
    if odd == "in memory":
        sources[1] = states[1]
    elif odd == "under other names":
        sources = [source.part(lambda _: True, lambda _: "w") for source in sources]  # type: ignore[attr-defined]
    weights = [float(k + 1) for k in range(clients)]
    assert weighted_mean(sources, weights, "w").equal(exact(values, weights))


@pytest.mark.parametrize("odd", ["wide", "strided", "fetched wide", "fetched strided"])
def test_what_lies_otherwise_is_summed_all_the_same(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code reads addresses: what is not float32 side by side must not reach it."""
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(300, generator=draw) for _ in range(5)]
    strange = values[2].double() if odd.endswith("wide") else torch.stack([values[2], -values[2]], 1)[:, 0]
    source: Params = {"w": strange}
    if odd.startswith("fetched"):
        source = LazyParams({"w": Form(strange.shape, strange.dtype)}, lambda _, begin, end: strange[begin:end])
    expected = exact(values, [1.0, 2.0, 3.0, 4.0, 5.0])
    monkeypatch.setattr(means, "MIN_COMPILED", 0)
    sources: list[Params] = [{"w": v} for v in values[:2]] + [source] + [{"w": v} for v in values[3:]]
    assert weighted_mean(sources, [1.0, 2.0, 3.0, 4.0, 5.0], "w").equal(expected)


@pytest.mark.parametrize("many", [0, 1 << 60])
def test_a_shorter_tensor_is_an_error_not_a_look_beyond_its_end(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(means, "MIN_COMPILED", many)
    with pytest.raises(RuntimeError, match="size"):
        weighted_mean([{"w": torch.zeros(300)}, {"w": torch.zeros(200)}], [1.0, 1.0], "w")


def in_bytes(state: Params) -> Params:
    return decode(encode(state, {})).tensors


def in_file(folder: object) -> Callable[[Params], Params]:
    def store(state: Params) -> Params:
        path = folder / str(id(state))  # type: ignore[operator]
        write(path, state, {})
        return read(path).tensors

    return store


def reordered(state: Params) -> Params:
    return in_bytes({n: state[n] for n in sorted(state, reverse=True)})


def with_notes(state: Params) -> Params:
    mixed = {k: v for n, t in state.items() for k, v in ((n, t), (f"~note/{n}", t.double()))}
    return decode(encode(mixed, {})).tensors.part(lambda n: not n.startswith("~"))


def channels_last(state: Params) -> Params:
    return {n: t.to(memory_format=torch.channels_last) if t.ndim == 4 else t for n, t in state.items()}


def test_runs_join_what_lies_together_in_every_client() -> None:
    spec = Spec.of(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    states = [random_state(spec, s) for s in range(2)]
    together = means._runs([in_bytes(s) for s in states])
    assert [len(run) for run in together] == [1, 6]  # the counter (eight bytes wide) stands first
    assert [len(run) for run in means._runs([in_bytes(states[0]), reordered(states[1])])] == [1] * 7
    assert [len(run) for run in means._runs(states)] == [1] * 7


def test_buffers_are_averaged_with_the_clients_weights_and_counters_take_the_largest() -> None:
    spec = Spec.of(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    states = [random_state(spec, s) for s in (3, 1, 2)]
    state = ServerState(0, Single(spec, Posterior(random_state(spec, 9))))
    fused = Mean()(cohort_of(states, [1.0, 1.0, 2.0], spec), state, Bench()).single.posterior.mean
    for leaf in ("weight", "bias", "running_mean", "running_var"):
        assert fused[f"1.{leaf}"].equal(exact([s[f"1.{leaf}"] for s in states], [0.25, 0.25, 0.5]))
    assert fused["1.num_batches_tracked"].equal(torch.tensor(3))
    assert fused["1.num_batches_tracked"].dtype == torch.int64


def test_uniform_means_forget_the_masses() -> None:
    spec = Spec.of(nn.Linear(2, 1))
    states = [random_state(spec, s) for s in range(4)]
    state = ServerState(0, Single(spec, Posterior(states[0])))
    fused = Mean(uniform=True)(cohort_of(states, [1.0, 50.0, 2.0, 9.0], spec), state, Bench()).single.posterior.mean
    assert fused["weight"].equal(exact([s["weight"] for s in states], [0.25] * 4))


def test_largest_is_elementwise_and_leaves_its_inputs_alone() -> None:
    sources = [{"n": torch.tensor([1, 9])}, {"n": torch.tensor([4, 2])}]
    assert largest(sources, "n").tolist() == [4, 9]
    assert sources[0]["n"].tolist() == [1, 9]


def arrivals(brief: Brief, clients: int) -> Iterator[Envelope]:
    states = [random_state(LENET, seed) for seed in range(10)]
    replies = [encode_reply(brief, s, {}, num_examples=1.0 + i, steps=1, facts={}) for i, s in enumerate(states)]
    return (Envelope(f"c{i}", replies[i % 10]) for i in range(clients))


def admitted(clients: int, memory: int) -> Admission:
    brief = Brief(0, LENET, LENET.skeleton().state_dict(), classes=10)
    return admit_all(arrivals(brief, clients), brief, (), [f"c{i}" for i in range(clients)], Rules(memory=memory))


def python_peak(work: Callable[[], object]) -> int:
    """The most bytes Python's own objects took at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def tensor_peak(work: Callable[[], object]) -> int:
    """The most bytes tensors took at once, the scratch of kernels included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(change for _, change in changes))


def test_a_thousand_updates_wait_in_files_and_need_two_models_of_memory() -> None:
    model = 4 * 62_006
    files, held = admitted(1000, memory=2 * model), admitted(1000, memory=2**40)
    assert len(list(files.spool._folder.iterdir())) >= 997  # type: ignore[union-attr]
    assert held.spool._folder is None
    for cohort in (files.cohort, held.cohort):
        mean_of(cohort)  # what is loaded once is nobody's
        few, more = (tensor_peak(partial(mean_of, Cohort(cohort.updates[-n:]))) for n in (5, 15))
        assert more - few <= 10 * 16, "beyond a number or two per client, no client adds to it"
        assert more + python_peak(partial(mean_of, cohort)) <= 2 * model
    a, b = mean_of(files.cohort), mean_of(held.cohort)
    assert all(a[n].equal(b[n]) for n in a)


def test_large_tensors_that_lie_transposed_are_summed_as_they_are() -> None:
    """Laid flat they are copies that nobody holds: their addresses must not be kept."""
    draw = torch.Generator().manual_seed(0)
    sources = [{"w": torch.randn(900, 1000, generator=draw).t()} for _ in range(4)]
    assert means.MIN_COMPILED < 4 * 900 * 1000
    weights = [0.1, 0.2, 0.3, 0.4]
    expected = weighted_mean([{"w": s["w"].contiguous()} for s in sources], weights, "w")
    assert weighted_mean(sources, weights, "w").equal(expected)
