"""What is built before training, from names or from objects, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedfuse
from fedfuse.core.model import Single
from fedfuse.core.spec import Spec
from fedfuse.data import Dataset, load
from fedfuse.errors import ConfigError, FuseError, RecipeError
from fedfuse.experiment.config import Experiment, load_experiment
from fedfuse.experiment.prepare import prepare
from fedfuse.experiment.run import execute
from fedfuse.federation.evaluate import Reading, evaluate_files
from fedfuse.nets.mixture import Mixture
from fedfuse.wire.files import load_model

Tiny = Callable[..., Experiment]

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, classes, inputs, width=4):
        super().__init__()
        if width == 13:
            raise RuntimeError("thirteen brings no luck\\nand more words")
        self.body, self.top = nn.Linear(inputs, width), nn.Linear(width, classes)

    def forward(self, x):
        return self.top(self.body(x.flatten(1)).relu())

class Silent(nn.Module):
    def forward(self, x):
        raise KeyError

class Pair(nn.Module):
    def forward(self, x):
        return x, x

def anything(**options):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, options.get("outputs", 10)))
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own networks, in a module of the folder at hand."""
    (tmp_path / "my_nets.py").write_text(NETS)
    (tmp_path / "my_typo.py").write_text("class = 3")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_nets", "my_typo"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def check(experiment: Experiment) -> None:
    prepare(experiment).check()


def complaint(experiment: Experiment) -> str:
    with pytest.raises(FuseError) as caught:
        check(experiment)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_data_fill_in_what_the_model_leaves_open(tiny: Tiny) -> None:
    assert prepare(tiny()).spec == Spec("mlp", {"classes": 10, "inputs": 64, "hidden": [4]})
    assert prepare(tiny(model={"name": "lenet"})).spec.options == {"classes": 10, "channels": 1, "size": 8}
    assert prepare(tiny(model={"name": "mlp", "classes": 11})).spec.options["classes"] == 11


@pytest.mark.usefixtures("nets")
def test_a_network_of_ones_own(tiny: Tiny) -> None:
    prepared = prepare(tiny(model={"name": "my_nets:Net", "width": 6}))
    prepared.check()
    assert prepared.spec.options == {"classes": 10, "inputs": 64, "width": 6}
    assert prepared.setting(0).plan.rules.trusted == {"my_nets:Net"}
    check(tiny(model={"name": "my_nets:anything", "colour": "red"}))


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"name": "mpl"}, "model 'mpl' is unknown, expected one of mlp, lenet"),
        ({"name": "mlp", "hiden": [3]}, "model 'mlp' has no option 'hiden'; did you mean 'hidden'?"),
        ({"name": "mlp", "hidden": "x"}, "hidden is 'x', expected a list"),
        ({"name": "mlp", "inputs": 5}, "cannot read rows of shape 1×8×8"),
        ({"name": "mlp", "classes": 3}, "gives outputs of shape (2, 3) for two rows, expected (2, 10)"),
        ({"name": "mlp", "classes": 30}, "gives outputs of shape (2, 30) for two rows, expected (2, 10)"),
        ({"name": "my_nets:Net", "widht": 3}, "model 'my_nets:Net' has no option 'widht'; did you mean 'width'?"),
        ({"name": "my_nets:Net", "width": 13}, "cannot be built with {'classes': 10, 'inputs': 64, 'width': 13}"),
        ({"name": "my_nets:Net", "width": "x"}, "cannot be built with"),
        ({"name": "my_nets:Nett"}, "model 'my_nets:Nett' cannot be imported"),
        ({"name": "my_net:Net"}, "model 'my_net:Net' cannot be imported (No module named 'my_net')"),
        ({"name": "my_typo:Net"}, "cannot be imported (SyntaxError: invalid syntax"),
        ({"name": "my_nets:Silent"}, "cannot read rows of shape 1×8×8: KeyError: no reason given"),
        (
            {"name": "my_nets:Pair"},
            "gives a tuple of (Tensor, Tensor), expected logits; say which: output = 0 or output = 1",
        ),
        ({"name": "my_nets:anything", "outputs": 4}, "gives outputs of shape (2, 4)"),
        ({"name": "builtins:dict"}, "gave a dict, expected a torch.nn.Module"),
    ],
)
def test_a_model_that_does_not_fit_is_explained(tiny: Tiny, model: dict[str, Any], expected: str) -> None:
    assert expected in complaint(tiny(model=model))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"source": "digitss"}, "the data source 'digitss' is unknown"),
        ({"clients": 91, "train_limit": 90}, "91 clients are to share 90 rows"),
        ({"partition": {"kind": "classes", "per_client": 11}}, "11"),
        ({"server_rows": {"count": 10**6}}, "the server is to hold 1000000 rows"),
        ({"server_fraction": 0.1, "server_rows": {"count": 5}}, "server_fraction and server_rows are both given"),
    ],
)
def test_data_that_cannot_be_are_explained(tiny: Tiny, data: dict[str, Any], expected: str) -> None:
    assert expected in complaint(tiny(data=data))


def test_a_damaged_data_file_is_named(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    rows = {"x_train": np.zeros((20, 4), np.float32), "y_train": np.arange(20) % 2}
    np.savez(path, **rows, x_test=rows["x_train"], y_test=rows["y_train"])
    good = {"source": str(path), "clients": 2}
    check(tiny(data=good))
    path.write_bytes(path.read_bytes()[:-200])
    assert "rows.npz" in complaint(tiny(data=good))


@pytest.mark.parametrize("device", ["cud", "meta", "cuda:99"])
def test_a_device_that_cannot_be_used_is_named(tiny: Tiny, device: str) -> None:
    said = complaint(tiny(local={"device": device}))
    assert f"local.device is {device!r}, which cannot be used here" in said


def test_methods_are_checked_against_rounds_and_server_rows(tiny: Tiny) -> None:
    with pytest.raises(RecipeError, match="mixture"):
        check(tiny("ensemble", rounds=2))
    check(tiny("ensemble", rounds=1))
    assert "select = 'best-on-server'" in complaint(tiny(select="best-on-server"))


def test_every_method_of_a_seed_begins_alike_and_seeds_differ(tiny: Tiny) -> None:
    prepared = prepare(tiny())
    one, again, other = prepared.setting(0), prepared.setting(0), prepared.setting(1)
    mean = one.start.single.posterior.mean
    assert all(torch.equal(t, again.start.single.posterior.mean[n]) for n, t in mean.items())
    assert any(not torch.equal(t, other.start.single.posterior.mean[n]) for n, t in mean.items())
    assert one.population.sizes() == again.population.sizes()


def test_held_out_rows_are_nobodys_training_rows(tiny: Tiny) -> None:
    setting = prepare(tiny(data={"clients": 3, "train_limit": 90, "validation_fraction": 0.2})).setting(0)
    assert sum(map(len, setting.judge.held_out.values())) + sum(setting.population.sizes().values()) == 90
    assert set(setting.judge.held_out) == set(setting.population.clients)


def test_augmentations_of_standardized_rows_act_on_pixels(tiny: Tiny) -> None:
    plain, moved, turned = (
        prepare(tiny(data={"standardize": s, "clients": 2}, local={"augment": [name]})).local.augment
        for s, name in ((False, "rotate"), (True, "flip"), (True, "rotate"))
    )
    assert type(plain) is type(moved)
    assert type(turned).__name__ == "BeforeStandardizing"


def test_standardized_rows_have_mean_zero_and_deviation_one(tiny: Tiny) -> None:
    train = prepare(tiny(data={"standardize": True, "clients": 2})).dataset.train.x
    assert abs(float(train.mean())) < 1e-5
    assert abs(float(train.std()) - 1) < 1e-3


def test_augmentations_by_name(tiny: Tiny) -> None:
    assert prepare(tiny(local={"augment": ["flip"]})).local.augment is not None
    with pytest.raises(ConfigError, match="did you mean 'crop'"):
        prepare(tiny(local={"augment": ["crp"]}))


def test_inputs_from_elsewhere_are_seen_as_ours_are(tiny: Tiny, tmp_path: Path) -> None:
    """Strangers are the test rows of another source, standardized as ours, and must have our shape."""
    data = {"clients": 3, "train_limit": 90, "test_limit": 20, "standardize": True}
    setting = prepare(tiny(data=data, judge={"ood": "digits"})).setting(0)
    assert setting.judge.ood_inputs is not None
    assert setting.judge.ood_inputs.equal(setting.judge.test.x)
    assert prepare(tiny()).setting(0).judge.ood_inputs is None
    x, y = np.zeros((6, 3, 8, 8), np.float32), np.arange(6) % 2
    np.savez(tmp_path / "odd.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(ConfigError, match=r"judge\.ood: the inputs of .* are 3×8×8, expected 1×8×8 as here"):
        prepare(tiny(judge={"ood": str(tmp_path / "odd.npz")}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clients_per_round": 50}, "clients_per_round is 50 and data.clients is 3; ask at most as many"),
        ({"data": {"clients": 3, "train_limit": 99_999}}, "data.train_limit is 99,999 and digits has 1,438 such rows"),
        ({"data": {"clients": 3, "test_limit": 99_999}}, "data.test_limit is 99,999 and digits has 359 such rows"),
    ],
)
def test_nobody_can_take_more_than_there_is(tiny: Tiny, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(tiny(**changes)).check()


TINY: dict[str, Any] = {"rounds": 2, "data": {"clients": 2}, "methods": [{"name": "fedavg"}, {"name": "scaffold"}]}


class WideNet(nn.Module):
    """A network that cannot be built without arguments."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.fc1(x.flatten(1)).relu())
        return out


@pytest.fixture
def network() -> WideNet:
    torch.manual_seed(0)
    return WideNet(5)


@pytest.fixture(scope="module")
def rows() -> Dataset:
    return load("digits", train_limit=60, test_limit=30)


def run(out: Path, values: dict[str, Any] = TINY, **given: Any) -> Any:
    return fedfuse.run(values, out=out, workers=0, memo=False, **given)


def test_a_network_and_arrays_run_like_names(network: WideNet, rows: Dataset, tmp_path: Path) -> None:
    arrays = [np.asarray(part) for part in (rows.train.x, rows.train.y, rows.test.x, rows.test.y)]
    limits = {"clients": 2, "train_limit": 60, "test_limit": 30}
    named = run(tmp_path / "named", TINY | {"data": limits}, model=network)
    given = run(tmp_path / "given", model=network, data=arrays)
    assert given.table() == named.table()
    assert [row["nll"] for row in given.rows] == [row["nll"] for row in named.rows]
    assert run(tmp_path / "dataset", model=network, data=rows).table() == given.table()


def test_every_seed_begins_with_the_given_weights(network: WideNet, rows: Dataset, tmp_path: Path) -> None:
    still = {"local": {"optimizer": {"lr": 1e-30}}, "methods": [{"name": "fedavg"}]}
    run(tmp_path / "run", TINY | {"rounds": 1, "seeds": [0, 1]} | still, model=network, data=rows)
    for seed in (0, 1):
        path = tmp_path / "run" / "models" / f"fedavg-{seed}.safetensors"
        model, _ = load_model(path, {f"{WideNet.__module__}:WideNet"}, Spec.of(network))
        assert isinstance(model, Single)
        torch.testing.assert_close(model.posterior.mean["fc1.weight"], network.fc1.weight.detach())


def test_it_goes_on_with_the_same_objects_and_not_with_others(network: WideNet, rows: Dataset, tmp_path: Path) -> None:
    run(tmp_path / "run", TINY | {"rounds": 1}, model=network, data=rows)
    went_on = run(tmp_path / "run", TINY | {"select": "last"}, model=network, data=rows, resume=True)
    assert [row["round"] for row in went_on.rows] == [1, 2, 1, 2]
    assert went_on.table() == run(tmp_path / "whole", model=network, data=rows).table()
    with pytest.raises(ConfigError, match=r"another run: model.weights was "):
        run(tmp_path / "run", model=WideNet(5), data=rows, resume=True)


def test_the_best_round_may_be_chosen_and_the_run_go_on(network: WideNet, rows: Dataset, tmp_path: Path) -> None:
    chosen = TINY | {"select": "best-on-server", "data": {"clients": 2, "server_fraction": 0.2}}
    run(tmp_path / "run", chosen | {"rounds": 1}, model=network, data=rows)
    went_on = run(tmp_path / "run", chosen, model=network, data=rows, resume=True)
    assert went_on.table() == run(tmp_path / "whole", chosen, model=network, data=rows).table()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": WideNet}, "model is a type, expected a torch.nn.Module"),
        ({"data": "digits"}, "data is a str, expected a fedfuse.data.Dataset or"),
        ({"data": (1, 2)}, "data is a tuple, expected"),
    ],
)
def test_anything_else_is_refused(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        run(tmp_path / "run", **given)


def test_limits_do_not_cut_what_a_program_gives(rows: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data.train_limit cannot cut a Dataset that a program gives"):
        run(tmp_path / "run", TINY | {"data": {"train_limit": 5}}, data=rows)


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
