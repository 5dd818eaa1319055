"""SWA: the equations, what follows which layer, layers without scores, and the method's options and tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedfuse
from fedfuse.core.messages import ClientUpdate, Cohort, Envelope
from fedfuse.core.model import Single
from fedfuse.core.params import Params
from fedfuse.core.posterior import Posterior
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.data import Dataset
from fedfuse.engines.local import InProcess, Population
from fedfuse.errors import ConfigError
from fedfuse.experiment.config import NameWithOptions, load_experiments
from fedfuse.experiment.prepare import prepare
from fedfuse.kernels import why_not
from fedfuse.linalg.divergence import renyi_to_gaussian
from fedfuse.methods import swa
from fedfuse.methods.swa import HigherOrder, Negentropy, NonGaussianMean, Renyi, Wasserstein
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.aggregate.mean import ALL_LAWS, Mean, mean_of
from fedfuse.server.guards import NormClip
from fedfuse.server.loop import RunPlan, one_round, run
from fedfuse.server.round import fuse_round
from fedfuse.training.round import client_round
from fedfuse.wire.codec import LazyParams, decode, encode, read

LENET = Spec("lenet", {"channels": 1, "size": 28})
RESNET = Spec("resnet18", {"widths": [4, 4, 8, 8], "classes": 3})


def states(spec: Spec, clients: int = 3, seed: int = 0) -> list[dict[str, Tensor]]:
    """Skewed weights of different scales, so that every layer has a clear score."""
    draw = torch.Generator().manual_seed(seed)
    built = spec.skeleton().state_dict()
    return [
        {
            n: (1 + place) * 0.05 * torch.randn(t.shape, generator=draw).exp() if t.is_floating_point() else t + place
            for n, t in built.items()
        }
        for place in range(clients)
    ]


def cohort_of(members: list[Params], spec: Spec, num_examples: list[float] | None = None) -> Cohort:
    num_examples = num_examples or [1.0] * len(members)
    pairs = enumerate(zip(members, num_examples, strict=True))
    return Cohort(tuple(ClientUpdate(f"c{i}", Posterior(p), m, 1, spec) for i, (p, m) in pairs))


def messages(members: list[dict[str, Tensor]]) -> list[Params]:
    return [decode(encode(m, {})).tensors for m in members]


def fuse(aggregate: NonGaussianMean, cohort: Cohort, seed: int = 0) -> ServerState:
    update = cohort.updates[0]
    return aggregate(cohort, ServerState(0, Single(update.spec, update.posterior)), Bench(seed=seed))


def fused(aggregate: NonGaussianMean, cohort: Cohort) -> dict[str, Tensor]:
    return dict(fuse(aggregate, cohort).single.posterior.mean)


def hos(x: Tensor) -> float:
    flat = x.double().numpy().ravel()
    return abs(float(scipy.stats.kstat(flat, 3) * scipy.stats.kstat(flat, 4)))


def blend(members: list[dict[str, Tensor]], name: str, weights: list[float]) -> Tensor:
    return sum(w * m[name].double() for w, m in zip(weights, members, strict=True))  # type: ignore[return-value]


def shares(scores: list[float]) -> list[float]:
    return [s / sum(scores) for s in scores]


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("as_messages", [False, True], ids=["dicts", "messages"])
def test_every_layer_is_the_equation_with_scipys_statistics(as_messages: bool) -> None:
    members = states(LENET)
    out = fused(NonGaussianMean(), cohort_of(messages(members) if as_messages else members, LENET, [1.0, 9.0, 5.0]))
    assert list(out) == list(members[0])
    for layer in LENET.layout.layers:
        weights = shares([hos(m[layer.weight]) for m in members])
        for name in (layer.weight, layer.bias):
            assert name is not None
            assert close(out[name], blend(members, name, weights))


@pytest.mark.parametrize(
    ("distance", "score"),
    [
        (Renyi(1.0), lambda x: renyi_to_gaussian(x, 1.0)),
        (Renyi(2.0, "grid"), lambda x: renyi_to_gaussian(x, 2.0, density="grid")),
        (Renyi(0.5, standardized=True), lambda x: renyi_to_gaussian(x, 0.5, reference="fitted")),
        (HigherOrder(standardized=True), lambda x: hos(x) / float(x.double().var()) ** 3.5),
    ],
    ids=["renyi-1", "renyi-2-grid", "renyi-half-fitted", "hos-standardized"],
)
def test_other_distances_enter_the_same_equation(distance: swa.Distance, score: object) -> None:
    assert callable(score)
    members = states(LENET)
    out = fused(NonGaussianMean(distance), cohort_of(messages(members), LENET))
    for layer in LENET.layout.layers:
        assert close(out[layer.weight], blend(members, layer.weight, shares([score(m[layer.weight]) for m in members])))


def test_samples_hold_every_client_against_the_same_draws() -> None:
    same = states(LENET, 1) * 3
    state = fuse(NonGaussianMean(Renyi(1.0, "samples")), cohort_of(same, LENET))
    for scores in state.facts["gaussianity"].values():
        assert len(set(scores.values())) == 1
    other = fuse(NonGaussianMean(Renyi(1.0, "samples")), cohort_of(same, LENET), seed=1)
    assert other.facts["gaussianity"] != state.facts["gaussianity"]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    scores=st.lists(
        st.one_of(st.floats(0, 1e300), st.sampled_from([0.0, float("nan"), float("inf")])), min_size=1, max_size=6
    ),
    mix=st.floats(0, 1),
    level=st.sampled_from(["layer", "filter"]),
)
def test_weights_are_shares_whatever_the_scores(scores: list[float], mix: float, level: swa.Level) -> None:
    counts = torch.rand(len(scores), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    column = torch.tensor(scores, dtype=torch.float64)[:, None].expand(-1, 3)
    weights, lost = NonGaussianMean(mix=mix, level=level)._shares(column, counts / counts.sum())
    assert torch.allclose(weights.sum(0), torch.ones(3, dtype=torch.float64))
    assert (weights >= 0).all()
    assert bool(lost.all()) == (not any(0 < s < float("inf") for s in scores))


def test_equation_eight_taken_literally_is_no_average() -> None:
    alike = states(LENET, 1) * 3
    out = fused(NonGaussianMean(normalize="max"), cohort_of(alike, LENET))
    for layer in LENET.layout.layers:
        assert close(out[layer.weight], 3 * alike[0][layer.weight])
    assert NonGaussianMean(normalize="max").laws == ALL_LAWS - {"agree"}
    members = states(LENET)
    scores = [hos(m["fc1.weight"]) for m in members]
    literal = fused(NonGaussianMean(normalize="max"), cohort_of(members, LENET))
    assert close(literal["fc1.weight"], blend(members, "fc1.weight", [s / max(scores) for s in scores]))


def test_a_grown_layer_takes_over_unless_scores_are_standardized() -> None:
    one = states(LENET, 1)[0]
    grown = {n: 1.1 * t for n, t in one.items()}
    cohort = cohort_of([one, grown], LENET)
    raw = fuse(NonGaussianMean(), cohort).facts["layer_weights"]
    free = fuse(NonGaussianMean(HigherOrder(standardized=True)), cohort).facts["layer_weights"]
    for layer in raw:
        assert raw[layer]["c1"] / raw[layer]["c0"] == pytest.approx(1.1**7, rel=1e-3)
        assert free[layer]["c1"] == pytest.approx(0.5, abs=1e-4)


def test_identical_clients_change_nothing() -> None:
    one = states(RESNET, 1)[0]
    for level in ("layer", "filter"):
        out = fused(NonGaussianMean(level=level), cohort_of(messages([one] * 4), RESNET))
        assert all(out[n].equal(one[n]) for n in one)


def test_mixing_reaches_from_scores_to_example_counts() -> None:
    members, num_examples = states(LENET), [1.0, 2.0, 7.0]
    cohort = cohort_of(messages(members), LENET, num_examples)
    own, counted = fused(NonGaussianMean(), cohort), mean_of(cohort)
    half = fused(NonGaussianMean(mix=0.5), cohort)
    assert all(close(half[n], (own[n].double() + counted[n].double()) / 2) for n in own)
    assert all(close(t, counted[n]) for n, t in fused(NonGaussianMean(mix=1.0), cohort).items())


def shuffled(params: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    names = list(params)
    return {names[i]: params[names[i]] for i in np.random.default_rng(seed).permutation(len(names))}


@pytest.mark.parametrize("form", ["dicts", "messages", "messages that differ"])
def test_norms_follow_their_convolution_in_any_order_of_the_state_dict(form: str) -> None:
    members = states(RESNET)
    mixed = [shuffled(m, place if form == "messages that differ" else 0) for place, m in enumerate(members)]
    out = fused(NonGaussianMean(), cohort_of(mixed if form == "dicts" else messages(mixed), RESNET))
    followers = 0
    for layer in RESNET.layout.layers:
        weights = shares([hos(m[layer.weight]) for m in members])
        for name in layer.followers:
            if RESNET.layout.roles[name] == "counter":
                assert out[name].equal(members[-1][name])
            else:
                followers += 1
                assert close(out[name], blend(members, name, weights))
    assert followers == 4 * sum(isinstance(m, nn.BatchNorm2d) for m in RESNET.skeleton().modules())


def test_every_filter_has_its_own_weights() -> None:
    members = states(RESNET)
    out = fused(NonGaussianMean(level="filter"), cohort_of(messages(members), RESNET))
    layer = next(x for x in RESNET.layout.layers if x.kind == "conv" and x.followers)
    for row in range(len(members[0][layer.weight])):
        weights = shares([hos(m[layer.weight][row]) for m in members])
        for name in (layer.weight, *layer.followers):
            if RESNET.layout.roles[name] != "counter":
                assert close(out[name][row], blend([{name: m[name][row]} for m in members], name, weights))


class Odd(nn.Module):
    """Weights that are no layer's, norms that normalize nothing known, and too little of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(7))
        self.table = nn.Embedding(3, 5)
        self.tiny = nn.Linear(1, 3)
        self.constant = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.constant(self.table(x)[..., :4]) + self.tiny(self.token[:1]).sum()


ODD = Spec.of(Odd())


def test_without_scores_all_weigh_alike_and_the_record_says_so() -> None:
    members = states(ODD)
    for member in members:
        member["constant.weight"].fill_(0.1)
    state = fuse(NonGaussianMean(), cohort_of(messages(members), ODD, [1.0, 2.0, 3.0]))
    out = state.single.posterior.mean
    for name in ("token", "tiny.weight", "tiny.bias", "constant.weight", "constant.bias"):
        assert close(out[name], blend(members, name, [1 / 3] * 3))
    scores = [hos(m["table.weight"]) for m in members]
    assert close(out["table.weight"], blend(members, "table.weight", shares(scores)))
    assert state.facts["uniform_layers"] == ["tiny", "constant"]
    assert state.facts["gaussianity"]["tiny"] == {"c0": None, "c1": None, "c2": None}
    assert "uniform_layers" not in fuse(NonGaussianMean(), cohort_of(states(LENET), LENET)).facts


def test_a_client_without_a_score_counts_nothing_where_others_have_one() -> None:
    members = states(LENET)
    members[0]["conv1.weight"].zero_()
    state = fuse(NonGaussianMean(), cohort_of(messages(members), LENET))
    assert state.facts["layer_weights"]["conv1"]["c0"] == 0
    assert close(
        state.single.posterior.mean["conv1.weight"],
        blend(members, "conv1.weight", [0, *shares([hos(m["conv1.weight"]) for m in members[1:]])]),
    )


def test_some_filters_without_scores() -> None:
    members = states(ODD)
    for member in members:
        member["constant.weight"][:2] = 0.1
    state = fuse(NonGaussianMean(level="filter"), cohort_of(members, ODD))
    assert state.facts["uniform_layers"] == ["tiny (3 of 3 filters)", "constant (2 of 4 filters)"]
    out = state.single.posterior.mean
    assert close(out["constant.bias"][:2], blend(members, "constant.bias", [1 / 3] * 3)[:2])
    rows = shares([hos(m["constant.weight"][3]) for m in members])
    assert close(out["constant.bias"][3], blend(members, "constant.bias", rows)[3])
    whole = shares([hos(m["table.weight"]) for m in members])  # an embedding's rows are no filters
    assert close(out["table.weight"], blend(members, "table.weight", whole))


def test_the_record_is_small_and_true() -> None:
    members = states(RESNET)
    facts = fuse(NonGaussianMean(), cohort_of(messages(members), RESNET)).facts
    layers = [layer.name for layer in RESNET.layout.layers]
    assert list(facts["layer_weights"]) == list(facts["gaussianity"]) == layers
    for layer in RESNET.layout.layers:
        scores = [hos(m[layer.weight]) for m in members]
        assert list(facts["gaussianity"][layer.name].values()) == pytest.approx(scores, rel=1e-4)
        assert list(facts["layer_weights"][layer.name].values()) == pytest.approx(shares(scores), rel=1e-4)
    assert all(len(repr(w)) < 12 for line in facts["layer_weights"].values() for w in line.values())


class Counting(dict[str, int]):
    """Counts how many elements of each tensor are fetched."""

    def of(self, path: Path) -> LazyParams:
        whole = read(path).tensors

        def fetch(name: str, begin: int, end: int) -> Tensor:
            self[path.name] = self.get(path.name, 0) + end - begin
            return whole.piece(name, begin, end)

        return LazyParams(whole.forms, fetch, whole.offsets)


@pytest.mark.parametrize("level", ["layer", "filter"])
def test_each_clients_file_is_read_once_unless_a_layer_is_too_large_to_keep(
    level: swa.Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = states(RESNET)
    paths = [tmp_path / f"{place}.safetensors" for place in range(3)]
    for path, member in zip(paths, members, strict=True):
        path.write_bytes(encode(member, {}))
    size = sum(t.numel() for t in members[0].values())
    aggregate, counts = NonGaussianMean(level=level), Counting()
    once = fused(aggregate, cohort_of([counts.of(p) for p in paths], RESNET))
    assert counts == {path.name: size for path in paths}
    monkeypatch.setattr(swa, "_MAX_CACHED_BYTES", 0)
    counts.clear()
    twice = fused(aggregate, cohort_of([counts.of(p) for p in paths], RESNET))
    assert all(size < count < 2 * size for count in counts.values())
    assert all(once[n].equal(twice[n]) for n in once)


@pytest.mark.skipif(bool(why_not()), reason="numba is not installed")
def test_short_layers_are_the_same_bits_whoever_sums_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cohort, found = cohort_of(messages(states(LENET, clients=13)), LENET), []
    for loaded in (True, False):  # compiled sums serve short layers only where they are in the process already
        monkeypatch.setattr(swa, "is_loaded", lambda loaded=loaded: loaded)
        found.append(fused(NonGaussianMean(), cohort))
    assert all(found[0][n].equal(found[1][n]) for n in found[0])


def test_blocks_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swa, "is_loaded", lambda: False)
    cohort = cohort_of(messages(states(LENET)), LENET)
    whole = fused(NonGaussianMean(), cohort)
    monkeypatch.setattr(swa, "BLOCK", 100)
    pieces = fused(NonGaussianMean(), cohort)
    assert all(whole[n].equal(pieces[n]) for n in whole)


def test_results_share_no_memory() -> None:
    out = fused(NonGaussianMean(), cohort_of(messages(states(RESNET)), RESNET))
    assert len({t.untyped_storage().data_ptr() for t in out.values()}) == len(out)


def test_a_guard_may_stand_before_it() -> None:
    cohort = cohort_of(messages(states(LENET)), LENET)
    start = Single(LENET, Posterior({n: torch.zeros_like(t) for n, t in states(LENET, 1)[0].items()}))
    recipe = Recipe(aggregate=NonGaussianMean(), guard=NormClip())
    state = fuse_round(recipe, cohort, ServerState(0, start), Bench())
    assert state.facts["layer_weights"].keys() == {layer.name for layer in LENET.layout.layers}


def test_it_travels_and_has_one_repr() -> None:
    aggregate = NonGaussianMean(Renyi(0.5, "samples"), mix=0.25)
    assert ForkingPickler.loads(ForkingPickler.dumps(aggregate)) == aggregate
    assert repr(aggregate) == (
        "NonGaussianMean(distance=Renyi(order=0.5, density='samples', standardized=False), "
        "normalize='sum', level='layer', mix=0.25, signed=False)"
    )


def test_scores_free_of_scale_against_scipy() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.stack(
        [torch.randn(500, generator=draw), torch.rand(500, generator=draw), torch.randn(500, generator=draw) ** 3]
    )
    found = Negentropy()(rows, torch.Generator)
    for row, score in zip(rows.double().numpy(), found.tolist(), strict=True):
        k2, k3, k4 = (scipy.stats.kstat(row, r) for r in (2, 3, 4))
        assert score == pytest.approx((k3 / k2**1.5) ** 2 / 12 + (k4 / k2**2) ** 2 / 48, rel=1e-8)
    for score in (Negentropy(), Wasserstein()):
        assert torch.allclose(score(3 * rows + 1, torch.Generator), score(rows, torch.Generator), rtol=1e-4)


def test_the_distance_to_the_fitted_gaussian_is_the_known_one() -> None:
    """A fair coin of ±1 is sqrt(2 − 2 sqrt(2/π)) from N(0, 1); equal weights have no distance."""
    coin = torch.tensor([[-1.0, 1.0]]).repeat(1, 5000)
    assert float(Wasserstein()(coin, torch.Generator)) == pytest.approx((2 - 2 * (2 / math.pi) ** 0.5) ** 0.5, rel=1e-6)
    many = torch.rand(1, 100_000, generator=torch.Generator().manual_seed(1))
    between = (2 - 2 * math.sqrt(12) / (2 * math.sqrt(math.pi))) ** 0.5  # E[U Φ⁻¹(U)] = 1 / (2 √π)
    assert float(Wasserstein()(many, torch.Generator)) == pytest.approx(between, rel=2e-2)
    assert bool(Wasserstein()(torch.ones(1, 9), torch.Generator).isnan())


def test_the_signed_product_is_the_literal_equation() -> None:
    draw = torch.Generator().manual_seed(2)
    rows = torch.randn(6, 400, generator=draw)
    want = [scipy.stats.kstat(r, 3) * scipy.stats.kstat(r, 4) for r in rows.double().numpy()]
    assert HigherOrder(signed=True)(rows, torch.Generator).tolist() == pytest.approx(want, rel=1e-6)
    assert any(w < 0 for w in want)
    shares, unscored = NonGaussianMean(HigherOrder(signed=True), signed=True)._shares(
        torch.tensor([[2.0], [-1.0]]), torch.ones(2) / 2
    )
    assert shares[:, 0].tolist() == [2.0, -1.0]
    assert not unscored.any()


ONE_STEP = LocalSettings(max_steps=1, batch_size=4, optimizer={"lr": 0.01, "momentum": 0.9})


def rows(channels: int = 3, size: int = 32, count: int = 8, seed: int = 0) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    return Rows(torch.rand(count, channels, size, size, generator=draw), torch.arange(count) % 4)


def a_round(recipe: Recipe, spec: Spec, state: ServerState | None = None) -> ServerState:
    """Two clients, one step each, through the door and the aggregator."""
    torch.manual_seed(0)
    state = state or ServerState(0, Single.of(spec.build(), spec))
    brief = state.brief(recipe.publishes, classes=4)
    made = [(c, client_round(recipe.work(ONE_STEP), brief, c, rows(seed=i)).payload) for i, c in enumerate("ab")]
    admission = admit_all([Envelope(c, p) for c, p in made], brief, recipe.evidence, ("a", "b"))
    assert not admission.refused
    return recipe.aggregate(admission.cohort, state, Bench(classes=4))


def test_server_options_leave_the_clients_work_alone() -> None:
    """Comparing distances trains once: the memo's key is the client half."""
    settings = LocalSettings()
    keys = {
        fedfuse.recipe("swa", **options).work(settings).key
        for options in ({}, {"distance": "renyi", "order": 2}, {"level": "filter"}, {"mix": 0.5, "normalize": "max"})
    }
    assert keys == {fedfuse.recipe("fedavg").work(settings).key}


def test_contrastive_is_moons_term() -> None:
    swa, moon = fedfuse.recipe("swa", contrastive=8), fedfuse.recipe("moon", mu=8.0)
    assert swa.work(LocalSettings()) == moon.work(LocalSettings())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"distance": "hos", "order": 2}, "order 2 and density 'histogram' came with distance 'hos'"),
        ({"distance": "kl"}, "option distance is 'kl', expected 'hos', 'renyi', 'negentropy' or 'wasserstein'"),
        ({"mix": 2}, "option mix is 2, expected less than or equal to 1"),
        ({"order": -1, "distance": "renyi"}, "option order is -1"),
        ({"contrastiv": 8}, "did you mean 'contrastive'"),
    ],
)
def test_wrong_options_are_explained(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        fedfuse.recipe("swa", **options)


def test_every_option_is_documented() -> None:
    assert all(option.text for option in find_method("swa").options)


SMALL = [
    Spec("vgg16", {"widths": 0.03125, "hidden": [16, 16], "classes": 4}),
    Spec("vgg11", {"widths": 0.03125, "hidden": [], "head": 16, "classes": 4}),
    Spec("vgg11", {"widths": 0.03125, "hidden": [], "norm": False, "bias": "none", "classes": 4}),
    Spec("resnet50", {"widths": [4, 4, 8, 8], "head": 16, "classes": 4}),
]


@pytest.mark.parametrize("spec", SMALL, ids=["vgg16", "vgg11", "gamf-vgg11", "resnet50"])
@pytest.mark.parametrize("options", [{}, {"contrastive": 5.0, "level": "filter"}], ids=["plain", "contrastive"])
def test_the_papers_networks_take_a_step(spec: Spec, options: dict[str, object]) -> None:
    state = a_round(fedfuse.recipe("swa", **options), spec)
    assert all(t.isfinite().all() for t in state.single.posterior.mean.values())
    assert state.facts["layer_weights"].keys() == {layer.name for layer in spec.layout.layers}


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        Spec("vgg16", {"classes": 10}),
        Spec("vgg11", {"hidden": [], "head": 256, "classes": 10}),
        Spec("resnet50", {"head": 256, "classes": 100}),
    ],
    ids=["vgg16", "vgg11", "resnet50"],
)
def test_the_papers_networks_take_a_step_at_full_size(spec: Spec) -> None:
    state = a_round(fedfuse.recipe("swa", contrastive=5.0), spec)
    weights = state.facts["layer_weights"]
    assert all(sum(line.values()) == pytest.approx(1, abs=1e-4) for line in weights.values())


def test_two_rounds_remember_the_last_model() -> None:
    """In the second round the contrastive term moves the clients; in the first it is zero."""
    spec, train = Spec("lenet", {"channels": 3, "size": 32, "classes": 4, "head": 8}), rows(count=16)
    population = Population(train, {"a": torch.arange(8), "b": torch.arange(8, 16)})
    bench = Bench(population=2, classes=4, local=ONE_STEP)
    torch.manual_seed(0)
    start = ServerState(0, Single.of(spec.build(), spec))
    outcomes = []
    for options in ({}, {"contrastive": 5.0}):
        records = run(fedfuse.recipe("swa", **options), InProcess(population, 0), bench, None, start, RunPlan(2))
        outcomes.append([r.state.single.posterior.mean["conv1.weight"] for r in records])
    (plain, plain2), (pulled, pulled2) = outcomes
    assert plain.equal(pulled)
    assert not plain2.equal(pulled2)


def test_fusing_state_dicts_that_only_have_names() -> None:
    """Without a network the layers are read off the names, and norms follow the weight before them."""
    draw = torch.Generator().manual_seed(0)
    nets = [
        {"conv.weight": s * torch.randn(4, 3, generator=draw).exp(), "norm.weight": torch.full((4,), s)}
        for s in (0.1, 0.2)
    ]
    fused = fedfuse.fuse(nets, "swa")
    weights = fused.facts["layer_weights"]["conv"]
    expected = 0.1 * weights["model-1"] + 0.2 * weights["model-2"]
    assert float(fused.state_dict()["norm.weight"][0]) == pytest.approx(expected, rel=1e-4)


FILES = sorted((Path(__file__).parents[2] / "experiments" / "swa").glob("*.toml"))
SHAPES = {"fashion-mnist": (1, 28, 10), "cifar10": (3, 32, 10), "cifar100": (3, 32, 100), "tiny-imagenet": (3, 64, 200)}
NARROW = {
    "lenet": {},
    "vgg11": {"widths": 0.03125},
    "vgg16": {"widths": 0.03125, "hidden": [8, 8]},
    "resnet50": {"widths": [4, 4, 8, 8]},
}


def stand_in(source: str, **_: object) -> Dataset:
    """Rows of a data set's shape, for checking files whose data are not at hand."""
    channels, size, classes = SHAPES[source]
    draw = torch.Generator().manual_seed(0)
    count = max(400, 4 * classes)
    x, y = torch.rand(count, channels, size, size, generator=draw), torch.arange(count) % classes
    return Dataset(source, Rows(x, y), Rows(x[:8], y[:8]), tuple(map(str, range(classes))), {})


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_experiment_files_compare_swa_with_means_on_one_network(path: Path) -> None:
    assert path.read_text().startswith("# SWA, ")
    for cell in load_experiments(path):
        aggregates = [recipe.aggregate for recipe in cell.recipes().values()]
        assert NonGaussianMean() in aggregates
        assert Mean() in aggregates
        assert len(cell.seeds) >= 3


def test_every_table_and_figure_has_a_file() -> None:
    names = {path.name.split(".")[0].split("-")[0] for path in FILES}
    assert names - {"cifar10", "scale", "splits"} == {
        "table1",
        "table2",
        "table3",
        "table4",
        "table5",
        "table6",
        "table7",
        "table8",
        "figure2",
        "figure3",
    }


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_experiment_files_run_a_step(path: Path) -> None:
    """With narrow networks and rows of the right shape: the file's every method, one step of every client."""
    for cell in load_experiments(path):
        narrow = NameWithOptions(**{**cell.model.model_dump(), **NARROW[cell.model.name]})
        local = cell.local.model_copy(update={"max_steps": 1, "batch_size": 4})
        data = cell.data.model_copy(update={"train_limit": None, "test_limit": None})
        short = cell.model_copy(update={"model": narrow, "local": local, "data": data, "seeds": (0,), "rounds": 1})
        prepared = prepare(short, stand_in)
        prepared.check()
        setting = prepared.setting(0)
        for recipe in prepared.recipes.values():
            engine = InProcess(setting.population)
            record = one_round(recipe, engine, setting.bench, None, setting.start, setting.plan)
            assert len(record.facts["clients"]) == cell.data.clients
