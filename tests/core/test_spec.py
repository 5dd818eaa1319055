"""Specs build, travel, change shape, choose an output, and never import what they were not told to."""

from __future__ import annotations

import copy
import json
import sys
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedfuse.core.messages import Form
from fedfuse.core.spec import (
    ChooseOutput,
    Spec,
    choose_output,
    drop_tied_names,
    logits_in,
    output_of,
    tie,
    validate_output,
)
from fedfuse.errors import ConfigError

BATCH_NORM = ("0.weight", "0.bias", "0.running_mean", "0.running_var")
MLP = Spec("mlp", {"inputs": 4, "hidden": [3], "classes": 2})


def test_specs_travel_as_plain_json() -> None:
    cut = Spec("mlp", {"inputs": 4, "hidden": (3,)}, {"fc1.weight": (2, 4)}, {"fc1": (0, 2)})
    back = Spec.from_json(json.loads(json.dumps(cut.to_json())))
    assert back == cut
    assert hash(back) == hash(cut)
    assert back.to_text() == cut.to_text()


def test_canonical_text_ignores_the_order_of_options() -> None:
    assert Spec("mlp", {"a": 1, "b": 2}).to_text() == Spec("mlp", {"b": 2, "a": 1}).to_text()


def test_what_is_derived_is_derived_once_and_travels_or_is_derived_again() -> None:
    assert MLP.layout is MLP.layout
    assert MLP.layout.trainable is MLP.layout.trainable
    again = copy.deepcopy(MLP)
    assert (again, hash(again), again.layout) == (MLP, hash(MLP), MLP.layout)
    wider = replace(MLP, options={**MLP.options, "hidden": [5]})
    assert wider.to_text() != MLP.to_text()
    assert len(wider.skeleton().state_dict()["fc1.weight"]) == 5


def test_options_must_be_plain_data() -> None:
    with pytest.raises(ConfigError, match="plain data"):
        Spec("mlp", {"hidden": torch.ones(1)})


def test_a_module_the_user_built_is_copied_not_rebuilt() -> None:
    module = nn.Linear(3, 2)
    spec = Spec.of(module)
    built = spec.build()
    assert built is not module
    assert built.weight.equal(module.weight)
    assert spec.factory == "torch.nn.modules.linear:Linear"
    assert not spec.is_ours


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "table with a factory"),
        ([], "table with a factory"),
        ({"factory": 3}, "table with a factory"),
        ({"factory": "mlp", "evil": 1}, "unknown entries"),
        ({"factory": "mlp", "options": [1]}, "options must be a table"),
        ({"factory": "mlp", "surgery": {"w": [1.5]}}, "table of shapes"),
        ({"factory": "mlp", "surgery": {"w": [True]}}, "table of shapes"),
        ({"factory": "mlp", "surgery": {"w": [-1]}}, "table of shapes"),
        ({"factory": "mlp", "kept": [1]}, "table of shapes"),
        ({"factory": "os:system"}, "was not named here"),
        ({"factory": "builtins:exec", "options": {"source": "1"}}, "was not named here"),
    ],
)
def test_a_spec_from_outside_is_read_with_suspicion(data: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Spec.from_json(data)


def test_reading_a_spec_imports_nothing() -> None:
    name = "antigravity"
    assert name not in sys.modules
    with pytest.raises(ConfigError, match="not named here"):
        Spec.from_json({"factory": f"{name}:geohash"})
    Spec.from_json({"factory": f"{name}:geohash"}, trusted={f"{name}:geohash"})
    assert name not in sys.modules, "a trusted name is imported when it is built, not when it is read"


def test_a_factory_the_user_named_is_called_with_the_options() -> None:
    module = Spec("torch.nn:Linear", {"in_features": 3, "out_features": 2}).build()
    assert isinstance(module, nn.Linear)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (Spec("lenett"), "did you mean"),
        (Spec("torch.nn:Nothing"), "cannot be imported"),
        (Spec("no_such_package_here:Net"), "cannot be imported"),
        (Spec("torch.nn:Linear", {"width": 3}), "cannot be built"),
        (Spec("builtins:dict"), "expected a torch.nn.Module"),
        (Spec("mlp", surgery={"fc9.weight": (1, 1)}), "which the network does not have"),
    ],
)
def test_what_cannot_be_built_says_so(spec: Spec, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spec.build()


def test_forward_uses_the_borrowed_weights_only() -> None:
    module = MLP.build()
    x = torch.randn(5, 4)
    assert MLP.forward(module.state_dict(), x).equal(module.eval()(x))
    assert MLP.skeleton() is MLP.skeleton()
    assert not any(p.requires_grad for p in MLP.skeleton().parameters())


def test_making_a_skeleton_does_not_move_the_random_stream() -> None:
    """Else dropout would depend on what the same process happened to build before."""
    spec = Spec("mlp", {"inputs": 7, "hidden": [5]})
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    assert spec.layout.roles
    assert torch.random.get_rng_state().equal(before)


def test_surgery_rebuilds_a_cut_network_from_its_shapes() -> None:
    spec = Spec("convnet_feddu", {"channels": 1, "size": 18})
    params = {n: t.clone() for n, t in spec.build().state_dict().items()}
    layers = spec.layout.layers
    first, second = layers[0], layers[1]
    keep = torch.tensor([0, 2])
    params[first.weight] = params[first.weight][keep]
    params[str(first.bias)] = params[str(first.bias)][keep]
    params[second.weight] = params[second.weight][:, keep]
    cut = spec.with_shapes_of(params, {first.name: (0, 2)})
    again = Spec.from_json(json.loads(json.dumps(cut.to_json())))
    built = again.build()
    assert {n: t.shape for n, t in built.state_dict().items()} == {n: t.shape for n, t in params.items()}
    conv = built.get_submodule(first.name)
    assert conv.out_channels == 2
    assert again.forward(params, torch.randn(2, 1, 18, 18)).shape == (2, 10)
    assert again.kept == {first.name: (0, 2)}
    assert cut.with_shapes_of(params) == cut


@pytest.mark.parametrize(
    ("module", "shapes", "x"),
    [
        (
            nn.Sequential(nn.BatchNorm1d(4)),
            {"0.weight": 2, "0.bias": 2, "0.running_mean": 2, "0.running_var": 2},
            (3, 2),
        ),
        (nn.Sequential(nn.GroupNorm(2, 4)), {"0.weight": 2, "0.bias": 2}, (3, 2, 5)),
        (nn.Sequential(nn.LayerNorm(4)), {"0.weight": 2, "0.bias": 2}, (3, 2)),
        (nn.Sequential(nn.Conv2d(4, 8, 3, groups=4, bias=False)), {"0.weight": (4, 1, 3, 3)}, (1, 2, 5, 5)),
        (nn.Sequential(nn.Linear(4, 4, bias=False)), {"0.weight": (3, 2)}, (1, 2)),
    ],
)
def test_resized_layers_know_their_new_sizes(
    module: nn.Module, shapes: dict[str, int | tuple[int, ...]], x: tuple[int, ...]
) -> None:
    """A depthwise convolution loses groups with its channels; norms and linear layers their features."""
    new = {n: torch.ones(s if isinstance(s, tuple) else (s,)) for n, s in shapes.items()}
    spec = Spec.of(module).with_shapes_of(new)
    state = {**dict(module.state_dict()), **new}
    assert spec.forward(state, torch.ones(x)).isfinite().all()


def test_options_that_would_fill_the_memory_are_refused_without_allocating() -> None:
    huge = Spec("mlp", {"inputs": 4, "hidden": [10**14, 10**14], "classes": 2})
    with pytest.raises(ConfigError, match="cannot be built"):
        huge.shapes()
    large = Spec("mlp", {"inputs": 4, "hidden": [10**6, 10**6], "classes": 2})  # four terabytes
    assert large.shapes()["fc2.weight"] == ((10**6, 10**6), torch.float32)


def tied() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    net[1].weight = net[0].weight
    net[2].weight.requires_grad_(False)
    return net


def test_what_trains_is_the_authors_word_and_not_the_skeletons() -> None:
    spec = Spec.of(tied())
    assert not any(p.requires_grad for p in spec.skeleton().parameters())
    assert spec.layout.trainable == ("0.weight", "0.bias", "1.bias", "2.bias")
    assert spec.layout.tied == (("0.weight", "1.weight"),)
    assert MLP.layout.trainable == tuple(n for n, _ in MLP.build().named_parameters())


def test_names_without_a_network_are_all_taken_to_train() -> None:
    forms = {n: Form.of(t) for n, t in nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict().items()}
    bundle = Spec.of_tensors({n: form.blank() for n, form in forms.items()})
    assert bundle.layout.trainable == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert bundle.layout.tied == ()


def test_tied_weights_are_called_under_one_name_and_made_equal_by_the_first() -> None:
    spec = Spec.of(tied())
    params = {n: torch.randn_like(t) for n, t in tied().state_dict().items()}
    assert list(drop_tied_names(spec, params)) == [n for n in params if n != "1.weight"]
    same = tie(spec, params)
    assert same["1.weight"].equal(params["0.weight"])
    assert list(same) == list(params)
    module = spec.build()
    module.load_state_dict(dict(same))
    assert spec.forward(params, torch.ones(1, 3)).equal(module(torch.ones(1, 3)))
    free = {"classifier.bias": torch.ones(2)}
    assert tie(MLP, free) is free


def test_surgery_leaves_ties_tied_and_frozen_weights_frozen() -> None:
    whole = Spec.of(tied())
    shapes = {"0.weight": (2, 3), "0.bias": (2,), "1.weight": (2, 3), "2.weight": (2, 2)}
    small = whole.with_shapes_of({n: torch.ones(shapes.get(n, tuple(t.shape))) for n, t in tied().state_dict().items()})
    assert small.layout.tied == whole.layout.tied
    assert small.layout.trainable == whole.layout.trainable


def test_inputs_are_cast_to_the_first_parameters_dtype() -> None:
    net = nn.Linear(2, 2).half()
    net.register_buffer("scale", torch.ones(1, dtype=torch.float64))
    assert Spec.of(net).cast(torch.ones(1, 2)).dtype == torch.float16
    assert Spec.of(net).forward(net.state_dict(), torch.ones(1, 2)).dtype == torch.float16


Two = namedtuple("Two", ["features", "logits"])


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Two:
        return Two(x, self.fc(x))


@pytest.mark.parametrize(
    ("out", "output"),
    [
        ((1, torch.ones(1)), 1),
        ([torch.ones(1), 2], 0),
        ([3, torch.ones(1)], -1),
        ({"logits": torch.ones(1)}, "logits"),
        ({0: torch.ones(1)}, 0),
        (Two(None, torch.ones(1)), "logits"),
        (Two(None, torch.ones(1)), 1),
    ],
)
def test_a_place_a_key_or_an_attribute(out: object, output: int | str) -> None:
    assert ChooseOutput(output)(nn.Identity(), (), out).equal(torch.ones(1))


@pytest.mark.parametrize(
    ("out", "output", "sentence"),
    [
        ((torch.ones(1),), 1, r"output = 1 is not there: the network gives a tuple of \(Tensor\); choose another one"),
        ((torch.ones(1), 5), 1, "output = 1 is no tensor: .*: output = 0"),
        ({"a": torch.ones(1)}, "b", "output = 'b' is not there: the network gives a dict with 'a'; .*: output = 'a'"),
        (torch.ones(1), "T", "output = 'T' is not there: the network gives a Tensor; leave `output` out"),
        (None, 0, "the network gives a NoneType; it gives no tensor"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(out: object, output: int | str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ChooseOutput(output)(nn.Identity(), (), out)


def test_a_new_choice_takes_the_place_of_the_old_one() -> None:
    net = choose_output(choose_output(Both(), 0), "logits")
    assert output_of(net) == output_of(copy.deepcopy(net)) == "logits"
    assert net(torch.ones(4, 2)).shape == (4, 3)
    assert list(net.state_dict()) == ["fc.weight", "fc.bias"]
    assert output_of(Both()) is None


def test_a_spec_carries_the_choice() -> None:
    spec = Spec.of(Both(), "logits")
    assert spec.to_json() == {"factory": f"{__name__}:Both", "options": {}, "output": "logits"}
    assert Spec.from_json(spec.to_json(), {spec.factory}).output == "logits"
    assert (hash(spec) != hash(Spec.of(Both())), "output" in Spec("mlp").to_json()) == (True, False)
    assert Spec.of(spec.build()).output == "logits"
    x = torch.ones(2, 2)
    weights = spec.build().state_dict()
    assert spec.forward(weights, x).equal(spec.build()(x))
    with pytest.raises(ConfigError, match=r"gives a Two of \(Tensor, Tensor\), expected logits; say which: output = 0"):
        Spec.of(Both()).forward(weights, x)


@pytest.mark.parametrize("output", [True, 1.5, "", [0], 10**6])
def test_a_choice_is_a_place_or_a_name(output: object) -> None:
    with pytest.raises(ConfigError, match="expected a place such as 0 or a name such as 'logits'"):
        validate_output(output)
    with pytest.raises(ConfigError, match="expected a place"):
        Spec.from_json({"factory": "mlp", "output": output})


def test_logits_are_a_tensor() -> None:
    assert logits_in(torch.ones(1), "mlp").equal(torch.ones(1))
    with pytest.raises(ConfigError, match="model 'mlp' gives a dict with 'a', expected logits; it gives no tensor"):
        logits_in({"a": 1}, "mlp")
