"""What holds for every model of the table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from fedfuse import models
from fedfuse.errors import ConfigError


@dataclass(frozen=True)
class Case:
    """A model small enough to run many times, and the shape of its images."""

    name: str
    image: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, **more: Any) -> nn.Module:
        torch.manual_seed(3)
        return models.MODELS[self.name](**{**self.options, **more})

    def batch(self, rows: int = 8) -> Tensor:
        return torch.randn(rows, *self.image, generator=torch.Generator().manual_seed(1))


NARROW = {"widths": 0.0625}
CASES = [
    Case("mlp", (1, 28, 28)),
    Case("mlp", (64,), {"inputs": 64, "hidden": [32, 16], "init": "pfnm"}),
    Case("lenet", (1, 28, 28)),
    Case("lenet", (1, 8, 8), {"size": 8}),
    Case("convnet_ams", (3, 32, 32)),
    Case("convnet_feddu", (3, 32, 32)),
    Case("vgg11", (3, 32, 32), {**NARROW, "hidden": [24]}),
    Case("vgg11", (3, 32, 32), {**NARROW, "hidden": [24], "norm": False}),
    Case("vgg16", (3, 32, 32), {**NARROW, "hidden": [24, 24], "dropout": 0.0}),
    Case("vgg16", (3, 64, 64), {**NARROW, "size": 64, "hidden": [], "norm": False}),
    Case("resnet18", (3, 32, 32), NARROW),
    Case("resnet18", (3, 64, 64), {**NARROW, "size": 64, "bias": True}),
    Case("resnet50", (3, 32, 32), {"widths": [4, 4, 8, 8]}),
    Case("random_convolution", (1, 28, 28)),
    Case("random_fourier", (13,), {"inputs": 13, "features": 20}),
]
TEXT = {"transformer", "text_classifier"}  # they read tokens: tests/models/test_transformer.py
PICTURE = [name for name in models.model_names() if name not in TEXT]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.name}-{c.image[-1]}-{len(c.options)}")


def linears(model: nn.Module) -> list[nn.Linear]:
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


def ran(model: nn.Module, x: Tensor, kind: type[nn.Module]) -> list[nn.Module]:
    """The layers of a kind in the order in which they ran."""
    order: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, kind):
            module.register_forward_hook(lambda m, *_: order.append(m))
    model(x)
    return order


def test_every_model_is_tried() -> None:
    assert {case.name for case in CASES} | TEXT == set(models.model_names()) == set(models.MODELS)


def test_the_table_is_closed() -> None:
    with pytest.raises(TypeError):
        models.MODELS["mine"] = nn.Linear  # type: ignore[index]


@pytest.mark.parametrize("name", PICTURE)
def test_every_model_has_classes_and_head(name: str) -> None:
    options = inspect.signature(models.MODELS[name]).parameters
    assert options["classes"].default == 10
    assert options["head"].default == 0


@every_case
def test_logits_of_every_shape(case: Case) -> None:
    model = case.build(classes=7).eval()
    assert model(case.batch(5)).shape == (5, 7)
    assert model(case.batch(1)).shape == (1, 7)


@every_case
def test_a_batch_of_one_trains(case: Case) -> None:
    loss = functional.cross_entropy(case.build()(case.batch(1)), torch.tensor([0]))
    loss.backward()
    assert torch.isfinite(loss)


@every_case
def test_fx_traces_it_to_the_same_function(case: Case) -> None:
    model = case.build().eval()
    traced = fx.symbolic_trace(model)
    torch.testing.assert_close(traced(case.batch()), model(case.batch()), rtol=0, atol=0)
    calls = {node.op for node in traced.graph.nodes}
    assert calls <= {"placeholder", "call_module", "call_function", "output"}


@every_case
def test_batch_norm_directly_follows_its_convolution(case: Case) -> None:
    traced = fx.symbolic_trace(case.build())
    for node in traced.graph.nodes:
        if node.op == "call_module" and isinstance(traced.get_submodule(node.target), nn.BatchNorm2d):
            assert isinstance(traced.get_submodule(node.args[0].target), nn.Conv2d)
    state = [m for m in case.build().modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d)]
    norms = [(a, b) for a, b in pairwise(state) if isinstance(b, nn.BatchNorm2d)]
    assert all(isinstance(a, nn.Conv2d) and a.out_channels == b.num_features for a, b in norms)


@every_case
@pytest.mark.parametrize("head", [0, 12])
def test_the_classifier_is_the_last_linear_registered_and_run(case: Case, head: int) -> None:
    model = case.build(head=head, classes=7).eval()
    assert ran(model, case.batch(2), nn.Linear) == linears(model)
    assert linears(model)[-1].out_features == 7


@every_case
def test_a_head_adds_two_layers(case: Case) -> None:
    plain, with_head = linears(case.build()), linears(case.build(head=256))
    d, classes = plain[-1].in_features, plain[-1].out_features
    shapes = [(layer.in_features, layer.out_features) for layer in with_head[len(plain) - 1 :]]
    assert shapes == [(d, d), (d, 256), (256, classes)]


@every_case
def test_the_seed_decides_the_weights(case: Case) -> None:
    one, two = case.build().state_dict(), case.build().state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    torch.manual_seed(4)
    other = models.MODELS[case.name](**case.options).state_dict()
    drawn = "seed" not in inspect.signature(models.MODELS[case.name]).parameters  # else an option decides
    assert torch.equal(one["classifier.weight"], other["classifier.weight"]) != drawn


@every_case
def test_channels_last_is_the_same_function(case: Case) -> None:
    model, x = case.build().eval(), case.batch()
    expected = model(x)
    if x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model.to(memory_format=torch.channels_last)(x), expected, rtol=1e-4, atol=1e-5)


@every_case
def test_one_step_of_descent_lowers_the_loss(case: Case) -> None:
    model, x, y = case.build(), case.batch(), torch.arange(8)
    before = functional.cross_entropy(model(x), y)
    before.backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    assert functional.cross_entropy(model(x), y) < before


@every_case
def test_every_tensor_is_filled_and_learns(case: Case) -> None:
    model = case.build()
    assert all(torch.isfinite(t).all() and t.abs().max() < 20 for t in model.state_dict().values())
    functional.cross_entropy(model(case.batch()), torch.arange(8)).backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


@every_case
@pytest.mark.parametrize("head", [0, 12])
def test_it_builds_without_memory_on_the_meta_device(case: Case, head: int) -> None:
    real = case.build(head=head).state_dict()
    with torch.device("meta"):
        ghost = case.build(head=head).state_dict()
    assert all(t.is_meta for t in ghost.values())
    assert [(n, t.shape, t.dtype) for n, t in ghost.items()] == [(n, t.shape, t.dtype) for n, t in real.items()]


@pytest.mark.parametrize("name", PICTURE)
@pytest.mark.parametrize(
    ("option", "value"), [("classes", 0), ("classes", 2.0), ("classes", True), ("head", -1), ("head", "256")]
)
def test_bad_options_are_named(name: str, option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"model {name}: {option} is .*, expected a whole number of at least"):
        models.MODELS[name](**{option: value})


@pytest.mark.parametrize(
    ("name", "least"),
    [("lenet", 4), ("convnet_ams", 8), ("convnet_feddu", 18), ("vgg11", 32), ("vgg16", 16), ("resnet18", 8)],
)
def test_the_least_size_works_and_one_less_is_refused(name: str, least: int) -> None:
    make: Callable[..., nn.Module] = models.MODELS[name]
    more = {} if name in ("lenet", "convnet_ams", "convnet_feddu") else NARROW
    x = torch.zeros(2, 3, least, least)
    assert make(channels=3, size=least, **more).eval()(x).shape == (2, 10)
    with pytest.raises(ConfigError, match=rf"model {name}: size is {least - 1}, .* at least {least};"):
        make(channels=3, size=least - 1, **more)


def test_an_unknown_model_is_answered_with_a_suggestion() -> None:
    assert models.model_factory("vgg16") is models.vgg16
    with pytest.raises(ConfigError, match=r"model 'lennet' is unknown, .* did you mean lenet"):
        models.model_factory("lennet")
    with pytest.raises(ConfigError, match=r"package\.module:Class"):
        models.model_factory("whatever")
