"""An experiment file: read, changed, swept, and one sentence for each mistake."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfuse.core.recipe import Recipe
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.experiment.config import Experiment, assign, file_name, load_experiment, load_experiments, to_toml
from fedfuse.experiment.prepare import prepare
from fedfuse.experiment.run import execute
from fedfuse.methods.swa import NonGaussianMean
from fedfuse.server.aggregate.natural import NaturalKron
from fedfuse.server.align.activations import ByActivations
from fedfuse.server.align.alignment import ALIGNMENTS, AlignUnits
from fedfuse.server.align.transport import ByTransport
from fedfuse.server.align.weights import ByWeights
from fedfuse.server.guards import Krum
from fedfuse.server.steps.repair import RestateNorms

FILE = """
rounds = 3
seeds = [4, 5]
[data]
source = "digits"
clients = 7
partition = { kind = "dirichlet", alpha = 0.3 }
[model]
name = "mlp"
hidden = [8]
[local]
epochs = 2
optimizer = { name = "sgd", lr = 0.2 }
[[methods]]
name = "fedavg"
[[methods]]
name = "fedprox"
mu = 0.5
"""


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "study.toml").write_text(text)
        return tmp_path / "study.toml"

    return write


@pytest.fixture
def file(written: Callable[[str], Path]) -> Path:
    return written(FILE)


def complaint(path: Path, *sets: str) -> str:
    """The one sentence a bad experiment gets."""
    with pytest.raises(ConfigError) as caught:
        load_experiments(path, sets)
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_the_file_beats_the_default_and_set_beats_the_file(file: Path) -> None:
    plain = load_experiment(file)
    assert (plain.rounds, plain.local.epochs, plain.local.optimizer.momentum) == (3, 2, 0.0)
    said = load_experiment(file, ["rounds=9", "local.optimizer.momentum=0.5", "data.source=mnist", "methods.1.mu=2"])
    assert (said.rounds, said.local.epochs, said.local.optimizer.momentum) == (9, 2, 0.5)
    assert said.data.source == "mnist"
    assert list(said.recipes()) == ["fedavg", "fedprox(mu=2)"]


def test_a_file_without_a_name_is_called_after_itself(file: Path) -> None:
    assert load_experiment(file).name == "study"
    assert load_experiment(file, ["name=other"]).name == "other"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("rouns=3", "there is no key 'rouns'; did you mean 'rounds'?"),
        ("dta.clients=3", "there is no key 'dta'; did you mean 'data'?"),
        ("data.client=3", "there is no key 'data.client'; did you mean 'clients'?"),
        ("local.optimizer.lrr=3", "there is no key 'local.optimizer.lrr'; did you mean 'lr'?"),
        ("epochs=5", "there is no key 'epochs'; did you mean 'local.epochs'?"),
        ("epocs=5", "there is no key 'epocs'; did you mean 'local.epochs'?"),
        ("lr=0.1", "there is no key 'lr'; did you mean 'local.optimizer.lr'?"),
        ("data.epochs=5", "there is no key 'data.epochs'; did you mean 'local.epochs'?"),
        ("alpha=0.1", "there is no key 'alpha'; did you mean 'data.partition.alpha'?"),
        ("judge.bin=3", "there is no key 'judge.bin'; did you mean 'bins'?"),
        ("data.partition.alpah=3", "data.partition: there is no key 'alpah'; did you mean 'alpha'?"),
        ("data.partition.kind=dirichle", "data.partition: kind is 'dirichle'; did you mean 'dirichlet'?"),
        ("data.partition={alpha=1}", "data.partition: kind is ''"),
        ("data.partition=iid", "data.partition"),
        ("methods.1.muu=3", "method 'fedprox' has no option 'muu'; did you mean 'mu'?"),
        ("methods.1.lable=x", "method 'fedprox' has no option 'lable'; did you mean 'label'?"),
        ("methods.0.name=fedavgg", "there is no method 'fedavgg'; did you mean 'fedavg'?"),
        ('methods.0.guard={name="krumm"}', "there is no guard 'krumm'; did you mean 'krum'?"),
        (
            'methods.0.guard={name="krum", byzantin=1}',
            "guard 'krum' has no option 'byzantin'; did you mean 'byzantine'?",
        ),
        ('methods.0.guard={name="krum", byzantine="x"}', "guard krum.byzantine is 'x', expected a valid integer"),
        ('methods.1.then={name="fedavg"}', "`rounds` and `then` belong together"),
    ],
)
def test_an_unknown_word_gets_a_suggestion(file: Path, said: str, expected: str) -> None:
    assert expected in complaint(file, said)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("data.partition.alpha=0", "it is 0, expected a number above 0"),
        ("data.partition.alpha=-1", "it is -1, expected a number above 0"),
        ("rounds=0", "rounds is 0, expected greater than 0"),
        ("data.server_fraction=1", "data.server_fraction is 1, expected less than 1"),
        ("local.optimizer.lr=nan", "local.optimizer.lr is nan, expected a finite number"),
        ("local.optimizer.name=sdg", "local.optimizer.name is 'sdg', expected 'sgd', 'adam' or 'amsgrad'"),
        ("methods.1.mu=-1", "method 'fedprox': option mu is -1, expected greater than or equal to 0"),
        ("methods=[]", "the experiment has no method"),
        ("seeds=[]", "seeds is [], expected a list of at least 1; leave it out for the default"),
        ("seeds=[1, 1]", "the seeds [1, 1] repeat themselves"),
        ('methods.1={name="fedavg"}', "two methods are labelled 'fedavg' and 'fedavg'"),
        ("rounds", "--set 'rounds' is not of the form key.key=value"),
        ("=3", "is not of the form key.key=value"),
        ("methods.7.name=x", "'7' is not a place in a list of 2"),
        ("methods.mu=1", "'mu' is not a place in a list of 2"),
        ("rounds.x=1", "'rounds' is a value, not a table"),
        ("sweep=[1]", "sweep must be a table"),
        ("sweep.rounds=3", "sweep must be a table"),
        ("sweep.rounds=[1, 1]", "two cells of the sweep have the same name"),
    ],
)
def test_an_impossible_value_is_explained(file: Path, said: str, expected: str) -> None:
    assert expected in complaint(file, said)


def test_files_that_are_none(tmp_path: Path, written: Callable[[str], Path]) -> None:
    assert "No such file" in complaint(tmp_path / "nowhere.toml")
    assert "Is a directory" in complaint(tmp_path)
    assert "is not a TOML file" in complaint(written("rounds = = 3"))
    assert "the key 'methods' is missing" in complaint(written("rounds = 3"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "is not a TOML file" in complaint(tmp_path / "bytes.toml")


def test_set_understands_toml_and_takes_the_rest_for_a_word() -> None:
    values: dict[str, Any] = {}
    for text in ("a.b=1", "a.c=[1, 2]", "d=fedavg", 'e={ x = "y" }', "f=a=b", "g=true"):
        assign(values, text)
    assert values == {"a": {"b": 1, "c": [1, 2]}, "d": "fedavg", "e": {"x": "y"}, "f": "a=b", "g": True}


def test_one_method_several_times_with_other_options(file: Path) -> None:
    sets = ['methods=[{name="fedprox", mu=0.1}, {name="fedprox", mu=1.0}, {name="fedprox", label="mine"}]']
    recipes = load_experiment(file, sets).recipes()
    assert list(recipes) == ["fedprox(mu=0.1)", "fedprox(mu=1.0)", "mine"]
    assert {r.name for r in recipes.values()} == {"fedprox"}


def test_a_guard_stands_before_the_aggregator_and_is_told(file: Path) -> None:
    sets = ['methods=[{name="fedavg", guard={name="krum", byzantine=2}}]']
    [(label, recipe)] = load_experiment(file, sets).recipes().items()
    assert label == "fedavg+krum"
    assert recipe.guard == Krum(byzantine=2)
    [(_, short)] = load_experiment(file, ['methods=[{name="fedavg", guard="krum"}]']).recipes().items()
    assert short.guard == Krum()


def test_then_hands_over_after_its_rounds(file: Path) -> None:
    sets = ['methods=[{name="fednova", rounds=2, then={name="fedprox", mu=0.5}}]']
    [(label, recipe)] = load_experiment(file, sets).recipes().items()
    assert label == "fednova→fedprox(mu=0.5)"
    assert [recipe.at(r).name for r in range(4)] == ["fednova", "fednova", "fedprox", "fedprox"]


def test_labels_become_file_names_that_differ() -> None:
    assert file_name("fedlpa(damping=0.1)") == "fedlpa_damping_0.1"
    assert file_name("→") != file_name("←")
    assert len(file_name("x" * 500)) <= 100
    assert file_name("x" * 500) != file_name("x" * 501)
    assert "/" not in file_name("../../etc/passwd")
    assert not file_name("../x").startswith(".")
    two = [{"name": "fedavg", "label": "a b"}, {"name": "fedavg", "label": "a_b"}]
    with pytest.raises(ConfigError, match="files would have one name"):
        Experiment(methods=two).recipes()


def test_a_sweep_is_one_experiment_per_combination(written: Callable[[str], Path]) -> None:
    sweep = '[sweep]\n"data.clients" = [2, 3]\nlocal.optimizer.lr = [0.1, 0.2]\n'
    path = written(FILE + sweep)
    cells = load_experiments(path)
    assert [c.name for c in cells] == ["study-2-0.1", "study-2-0.2", "study-3-0.1", "study-3-0.2"]
    assert [(c.data.clients, c.local.optimizer.lr) for c in cells] == [(2, 0.1), (2, 0.2), (3, 0.1), (3, 0.2)]
    assert load_experiment(path, ["sweep={}"]).data.clients == 7
    with pytest.raises(ConfigError, match="sweeps over 4 experiments"):
        load_experiment(path)


def test_a_sweep_over_tables_and_methods(written: Callable[[str], Path]) -> None:
    kinds = (
        'sweep = { "data.partition" = [{ kind = "iid" }, { kind = "dirichlet", alpha = 0.1 }], "methods.1.mu" = [1] }\n'
    )
    cells = load_experiments(written(kinds + FILE))
    assert [c.name for c in cells] == ["study-iid-1", "study-dirichlet-0.1-1"]
    assert [list(c.recipes())[1] for c in cells] == ["fedprox(mu=1)"] * 2


def test_a_swept_key_with_a_typo_is_refused(written: Callable[[str], Path]) -> None:
    assert "did you mean 'clients'?" in complaint(written(FILE + '[sweep]\n"data.client" = [2, 3]\n'))


partitions = st.one_of(
    st.just({"kind": "iid"}),
    st.builds(lambda a: {"kind": "dirichlet", "alpha": a}, st.floats(1e-6, 1e6)),
    st.builds(lambda k: {"kind": "classes", "per_client": k}, st.integers(1, 9)),
    st.just({"kind": "shares", "shares": [0.5, 0.25]}),
    st.just({"kind": "quantity", "sigma": 0.3}),
)
texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=6)
entries = st.one_of(
    st.builds(lambda m: {"name": "fedprox", "mu": m}, st.floats(0, 1e9)),
    st.builds(lambda label: {"name": "scaffold", "label": label}, texts),
    st.builds(lambda t: {"name": "fedavg", "guard": {"name": "trimmed", "trim": t}}, st.floats(0, 0.4)),
    st.builds(lambda n: {"name": "fednova", "rounds": n, "then": {"name": "fedavg"}}, st.integers(1, 5)),
)
experiments = st.fixed_dictionaries(
    {"methods": st.lists(entries, min_size=1, max_size=3)},
    optional={
        "name": texts,
        "rounds": st.integers(1, 10**6),
        "seeds": st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3, unique=True),
        "clients_per_round": st.integers(1, 9),
        "start": st.sampled_from(["shared", "separate"]),
        "data": st.fixed_dictionaries(
            {},
            optional={
                "source": texts,
                "partition": partitions,
                "train_limit": st.integers(1, 99),
                "server_rows": st.just({"count": 5, "classes": [1, 2]}),
                "options": st.dictionaries(texts, texts | st.integers(-5, 5), max_size=2),
            },
        ),
        "model": st.builds(lambda more: {"name": "mlp", **more}, st.dictionaries(texts, st.floats(-1, 1), max_size=2)),
        "models": st.just([{"name": "mlp", "first": 1, "every": 2, "hidden": [3]}]),
        "local": st.fixed_dictionaries(
            {},
            optional={
                "optimizer": st.just({"name": "adam", "betas": [0.8, 0.9]}),
                "decay": st.builds(lambda g: {"gamma": g, "milestones": [3, 5]}, st.floats(0.1, 1)),
                "augment": st.just(["crop", "flip"]),
                "clip": st.floats(1e-3, 1e3),
            },
        ),
        "judge": st.just({"bins": 3, "clients": "every"}),
    },
)


@given(experiments)
def test_a_resolved_experiment_reads_back_as_itself(values: dict[str, Any]) -> None:
    experiment = Experiment(**values)
    again = Experiment(**tomllib.loads(experiment.to_toml()))
    assert again == experiment
    assert again.to_toml() == experiment.to_toml()


def test_a_resolved_experiment_gives_the_same_recipes(file: Path) -> None:
    experiment = load_experiment(file)
    again: dict[str, Recipe] = Experiment(**tomllib.loads(experiment.to_toml())).recipes()
    assert again == experiment.recipes()


words = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
plain = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | words
values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(words, values, max_size=4))
def test_any_table_reads_back_as_it_was(table: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(table)) == table


def test_tables_inside_lists_of_tables() -> None:
    table = {"methods": [{"name": "a", "guard": {"name": "krum"}}, {"name": "b", "then": {"x": [{"y": 1}, {}]}}]}
    assert tomllib.loads(to_toml(table)) == table


def test_not_a_number_is_a_word_of_toml() -> None:
    assert str(tomllib.loads(to_toml({"x": float("nan")}))["x"]) == "nan"


DOCS = Path(__file__).resolve().parents[2] / "docs"


def recipe_of(**said: Any) -> tuple[str, Recipe]:
    [(label, recipe)] = Experiment(methods=[said]).recipes().items()
    return label, recipe


def test_one_word_aligns_before_any_method() -> None:
    label, recipe = recipe_of(name="swa", align="weights")
    assert label == "swa+weights"
    assert (recipe.align, recipe.aggregate) == (AlignUnits(ByWeights()), NonGaussianMean())


def test_a_table_gives_options_to_the_way_and_to_the_alignment() -> None:
    said = {"name": "transport", "reg": 0.05, "reference": "mean", "renorm": True}
    _, recipe = recipe_of(name="fedlpa", align=said)
    assert recipe.align == AlignUnits(ByTransport(reg=0.05), "mean")
    assert isinstance(recipe.aggregate, NaturalKron)
    assert recipe.steps[0] == RestateNorms()
    assert {"kron", "server_rows"} <= recipe.needs


def test_units_are_aligned_before_a_guard_measures_distances() -> None:
    label, recipe = recipe_of(name="fedavg", align="activations", guard={"name": "krum"})
    assert label == "fedavg+krum+activations"
    assert (recipe.align, recipe.guard) == (AlignUnits(ByActivations()), Krum())


def test_a_resolved_file_says_the_same(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    method = {"name": "fedavg", "align": {"name": "transport", "reg": 0.1}}
    experiment = tiny(methods=[method, {"name": "fedprox", "align": "graph"}])
    (tmp_path / "again.toml").write_text(experiment.to_toml())
    assert load_experiment(tmp_path / "again.toml") == experiment


@pytest.mark.parametrize(
    ("align", "words"),
    [
        ("weigths", "there is no alignment 'weigths'; did you mean 'weights'?"),
        ({"name": "weights", "sweep": 3}, "alignment 'weights' has no option 'sweep'; did you mean 'sweeps'?"),
        ({"name": "transport", "reg": "warm"}, "alignment transport.reg is 'warm', expected a valid number"),
        (
            {"name": "weights", "reference": "last"},
            "alignment weights.reference is 'last', expected 'first', 'largest'",
        ),
        ({"name": "transport", "reg": -1.0}, "reg is -1.0, expected 0 for exact plans"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(align: Any, words: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=".") as caught:
        recipe_of(name="fedavg", align=align)
    assert words in str(caught.value)


def test_rows_that_are_needed_are_missed_before_training(tiny: Callable[..., Experiment]) -> None:
    experiment = tiny(methods=[{"name": "fedavg", "align": {"name": "activations", "inputs": "server"}}])
    with pytest.raises(RecipeError, match="server's own rows and there are none"):
        prepare(experiment).check()


def test_networks_of_several_widths_run_through_transport(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    wide = [{"name": "mlp", "hidden": [6], "first": 1, "every": 2}]
    methods = [{"name": "otfusion"}, {"name": "fedprox", "align": {"name": "transport", "reference": "largest"}}]
    results = execute(tiny(models=wide, methods=methods, rounds=1), tmp_path / "run", workers=0)
    assert {row["label"] for row in results.rows} == {"otfusion", "fedprox+transport"}
    with pytest.raises(ConfigError, match="needs one network for all clients"):
        prepare(tiny(models=wide, methods=[{"name": "fedavg", "align": "weights"}])).check()


def test_aligned_methods_run_from_separate_starts(tiny: Callable[..., Experiment], tmp_path: Path) -> None:
    methods = [{"name": "fedavg", "align": way} for way in ALIGNMENTS] + [{"name": "fedlpa", "align": "weights"}]
    results = execute(tiny(methods=methods, start="separate", rounds=2), tmp_path / "run", workers=0)
    assert len(results.rows) == 10


def test_the_documents_name_every_way() -> None:
    text = (DOCS / "experiments.md").read_text(encoding="utf-8")
    assert all(f'"{way}"' in text for way in ALIGNMENTS)
