"""SWA as a method: its options, its client half, and the networks of its tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedfuse
from fedfuse.client.objectives import Contrastive, KeepModel
from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.model import Single
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import find_method
from fedfuse.core.rows import Rows
from fedfuse.core.seams import TaskLoss
from fedfuse.core.settings import LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench, ServerState
from fedfuse.data import Dataset
from fedfuse.engines.local import InProcess, Population
from fedfuse.errors import ConfigError
from fedfuse.experiment.config import NameWithOptions, load_experiments
from fedfuse.experiment.prepare import prepare
from fedfuse.methods.swa import HigherOrder, NonGaussianMean, Renyi
from fedfuse.server.admission.admit import admit_all
from fedfuse.server.aggregate.mean import Mean
from fedfuse.server.loop import RunPlan, one_round, run
from fedfuse.training.round import client_round

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


def test_defaults_are_the_papers_choice() -> None:
    recipe = fedfuse.recipe("swa")
    assert recipe.aggregate == NonGaussianMean(HigherOrder())
    assert recipe.evidence == ()
    assert recipe.objective == TaskLoss()
    assert recipe.reveals == ()


def test_server_options_leave_the_clients_work_alone() -> None:
    """Comparing distances trains once: the memo's key is the client half."""
    settings = LocalSettings()
    keys = {
        fedfuse.recipe("swa", **options).work(settings).key
        for options in ({}, {"distance": "renyi", "order": 2}, {"level": "filter"}, {"mix": 0.5, "normalize": "max"})
    }
    assert keys == {fedfuse.recipe("fedavg").work(settings).key}


def test_options_reach_the_aggregator() -> None:
    made = fedfuse.recipe("swa", distance="renyi", order=0, density="grid", scale="standardized", mix=0.1)
    assert made.aggregate == NonGaussianMean(Renyi(0.0, "grid", standardized=True), mix=0.1)
    assert made.label == "swa(distance=renyi, order=0, density=grid, scale=standardized, mix=0.1)"


def test_contrastive_is_moons_term() -> None:
    recipe = fedfuse.recipe("swa", contrastive=8)
    assert recipe.objective == Contrastive(8, 0.5)
    assert recipe.memory == (KeepModel(),)
    moon = fedfuse.recipe("moon", mu=8.0)
    assert recipe.work(LocalSettings()) == moon.work(LocalSettings())


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


def test_a_brief_needs_nothing_from_swa() -> None:
    recipe = fedfuse.recipe("swa", contrastive=8)
    brief = Brief(0, SMALL[1], SMALL[1].skeleton().state_dict(), classes=4)
    assert all(not dict(e.expects(brief)) for e in recipe.evidence)
    assert recipe.needs == frozenset()


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
