"""Groups of clients with networks of their own, and inputs without labels, from the file to the model on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedfuse.core.model import Single
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.experiment.config import Experiment, load_experiment
from fedfuse.experiment.prepare import prepare
from fedfuse.experiment.run import execute
from fedfuse.federation.evaluate import Reading, evaluate_files
from fedfuse.nets.mixture import Mixture
from fedfuse.wire.files import load_model

Tiny = Callable[..., Experiment]

DEPTHS = [{"name": "mlp", "hidden": [4] * depth, "first": depth - 1, "every": 5} for depth in range(1, 6)]
FIVE = {"clients": 5, "train_limit": 150, "test_limit": 60}


def networks(experiment: Experiment) -> list[list[int]]:
    setting = prepare(experiment).setting(0)
    brief = setting.start.brief(())
    return [brief.to(client).spec.options["hidden"] for client in setting.population.clients]


def test_depths_one_to_five_in_turn(tiny: Tiny) -> None:
    deal = networks(tiny("ams", rounds=1, data=FIVE | {"clients": 7}, models=DEPTHS))
    assert deal == [[4], [4] * 2, [4] * 3, [4] * 4, [4] * 5, [4], [4] * 2]


def test_the_last_group_that_names_a_client_counts_and_others_have_the_common_network(tiny: Tiny) -> None:
    groups = [{"name": "mlp", "hidden": [7], "first": 1}, {"name": "mlp", "hidden": [8], "first": 2, "every": 2}]
    assert networks(tiny("ams", rounds=1, data=FIVE, models=groups)) == [[4], [7], [8], [7], [8]]


def test_clients_of_one_group_start_alike_or_each_by_itself(tiny: Tiny) -> None:
    groups = [{"name": "mlp", "hidden": [7], "first": 1, "every": 2}]
    for start, alike in (("shared", True), ("separate", False)):
        brief = prepare(tiny("ams", rounds=1, data=FIVE, models=groups, start=start)).setting(0).start.brief(())
        first, third = (brief.to(f"client-{i:02d}").params["fc1.weight"] for i in (1, 3))
        assert first.equal(third) == alike
        zero, second = (brief.to(f"client-{i:02d}").params["fc1.weight"] for i in (0, 2))
        assert zero.equal(second) == alike


def test_networks_of_every_depth_answer_together(tiny: Tiny, tmp_path: Path) -> None:
    methods = [
        {"name": "ensemble"},
        {"name": "ams"},
        {"name": "ams", "layer": "first", "label": "early"},
        {"name": "ams", "distill": "server", "epochs": 2, "label": "one"},
    ]
    data = FIVE | {"server_fraction": 0.1}
    experiment = tiny(rounds=1, data=data, models=DEPTHS, methods=methods)
    results = execute(experiment, tmp_path / "run", workers=0)
    assert [row["label"] for row in results.rows] == ["ensemble", "ams", "early", "one"]
    model, _ = load_model(tmp_path / "run" / "models" / "ams-0.safetensors")
    assert isinstance(model, Mixture)
    assert [m.spec.options["hidden"] for m in model.members] == [[4] * d for d in range(1, 6)]
    student, _ = load_model(tmp_path / "run" / "models" / "one-0.safetensors")
    assert isinstance(student, Single)
    assert student.spec.options["hidden"] == [4], "the experiment's own network"
    again, _ = evaluate_files([tmp_path / "run" / "models" / "ams-0.safetensors"], "digits", Reading(limit=60))
    assert next(iter(again.values()))["accuracy"] == results.rows[1]["accuracy"]
    assert results.rows[1]["facts"]["members"] == 5
    assert 0 <= results.rows[1]["facts"]["disturbance"] <= 1


def test_methods_of_one_network_refuse_groups_by_name(tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match="method 'fedavg' needs one network for all clients"):
        prepare(tiny("fedavg", rounds=1, data=FIVE, models=DEPTHS)).check()
    guarded = [{"name": "ensemble", "guard": {"name": "krum"}}]
    with pytest.raises(ConfigError, match="method 'ensemble' needs one network for all clients"):
        prepare(tiny(rounds=1, data=FIVE, models=DEPTHS, methods=guarded)).check()


def test_networks_with_other_outputs_are_refused_before_training(tiny: Tiny) -> None:
    groups = [{"name": "mlp", "classes": 11, "first": 1}]
    with pytest.raises(ConfigError, match="give 10 and 11 logits"):
        prepare(tiny("ams", rounds=1, data=FIVE, models=groups)).check()


def test_no_round_goes_on_from_a_mixture(tiny: Tiny) -> None:
    with pytest.raises(RecipeError, match="recipe 'ams' ends a round with a mixture of networks"):
        prepare(tiny("ams", rounds=2)).check()
    handover = [{"name": "ensemble", "rounds": 1, "then": {"name": "fedavg"}}]
    with pytest.raises(RecipeError, match="recipe 'ensemble' ends a round with a mixture"):
        prepare(tiny(rounds=2, methods=handover)).check()
    prepare(
        tiny(rounds=2, data=FIVE | {"server_fraction": 0.1}, methods=[{"name": "ams", "distill": "server"}])
    ).check()


def test_groups_survive_the_resolved_file(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "again.toml"
    path.write_text(tiny("ams", rounds=1, data=FIVE, models=DEPTHS).to_toml())
    assert load_experiment(path).models == tiny("ams", models=DEPTHS).models


@pytest.fixture
def unlabelled(tmp_path: Path) -> Path:
    path = tmp_path / "more.npz"
    x, y = np.random.default_rng(0).random((40, 1, 8, 8), dtype=np.float32), np.zeros(40, dtype=np.int64)
    np.savez(path, x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    return path


def test_inputs_without_labels_teach_one_network(tiny: Tiny, tmp_path: Path, unlabelled: Path) -> None:
    data: dict[str, Any] = FIVE | {"unlabelled": str(unlabelled), "unlabelled_limit": 30}
    methods = [{"name": "ensemble", "distill": "unlabelled", "epochs": 2}]
    setting = prepare(tiny(data=data, methods=methods)).setting(0)
    assert setting.bench.unlabelled is not None
    assert setting.bench.unlabelled.shape == (30, 1, 8, 8)
    results = execute(tiny(rounds=2, data=data, methods=methods), tmp_path / "run", workers=0)
    assert [row["facts"]["distilled"]["inputs"] for row in results.rows] == [30, 30]


def test_inputs_without_labels_are_standardized_like_the_others(tiny: Tiny, unlabelled: Path) -> None:
    data: dict[str, Any] = FIVE | {"unlabelled": str(unlabelled)}
    plain, scaled = (prepare(tiny(data=data | {"standardize": s})) for s in (False, True))
    assert plain.unlabelled is not None
    assert scaled.unlabelled is not None
    pixels = plain.dataset.train.x
    mean, std = float(pixels.mean()), float(pixels.std(correction=0))
    assert torch.allclose(scaled.unlabelled, (plain.unlabelled - mean) / std, atol=1e-5)
    assert plain.inputs.shape == (1, 8, 8)
    assert (plain.inputs.low, plain.inputs.high) == ((0.0,), (1.0,))
    assert scaled.inputs.low == pytest.approx((-mean / std,), abs=1e-5)
    assert scaled.inputs.high == pytest.approx(((1 - mean) / std,), abs=1e-5)


def test_missing_or_odd_inputs_are_told_before_training(tiny: Tiny, tmp_path: Path) -> None:
    wants = [{"name": "ams", "distill": "unlabelled"}]
    with pytest.raises(RecipeError, match=r"recipe 'ams' learns on inputs without labels .* set data\.unlabelled"):
        prepare(tiny(rounds=1, methods=wants)).check()
    path = tmp_path / "odd.npz"
    np.savez(
        path,
        **{
            f"{a}_{b}": np.zeros((9, 5) if a == "x" else 9, np.float32 if a == "x" else np.int64)
            for a in "xy"
            for b in ("train", "test")
        },
    )
    with pytest.raises(ConfigError, match=r"data\.unlabelled: the inputs of .* are 5, expected 1×8×8"):
        prepare(tiny(data=FIVE | {"unlabelled": str(path)}))
