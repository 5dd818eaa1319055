"""`align` in an experiment file: one line before any method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedfuse.core.recipe import Recipe
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.experiment.config import Experiment, load_experiment
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
