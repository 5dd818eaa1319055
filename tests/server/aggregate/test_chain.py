"""Which networks are one layer after another, and what units become when they move."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedfuse.core.inputs import InputForm
from fedfuse.core.messages import ClientUpdate, Cohort
from fedfuse.core.posterior import Posterior
from fedfuse.core.spec import Spec
from fedfuse.core.state import Bench
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.server.aggregate.chain import (
    Matcher,
    check_same_depth,
    class_shares,
    expand_units,
    hidden_layers,
    select_units,
)

LENET = Spec("lenet", {"size": 8, "maps": [3, 4], "hidden": [5]})


def weights(spec: Spec, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {n: t.detach().clone() for n, t in spec.build().state_dict().items()}


def test_the_layers_of_shipped_chains_are_found_in_order() -> None:
    assert [h.maker.name for h in hidden_layers("x", LENET, Bench())] == ["conv1", "conv2", "fc1"]
    vgg = Spec("vgg11", {"widths": 0.125, "hidden": [6]})
    names = [h.maker.name for h in hidden_layers("x", vgg, Bench())]
    assert names == [*(f"conv{i}" for i in range(1, 9)), "fc1"]
    assert [h.reader.name for h in hidden_layers("x", Spec("mlp", {"hidden": [4, 3]}), Bench())] == [
        "fc2",
        "classifier",
    ]


def test_a_network_of_ones_own_needs_an_input_only_where_it_convolves() -> None:
    flat = Spec.of(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    assert [h.maker.name for h in hidden_layers("x", flat, Bench())] == ["0"]
    images = Spec.of(nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)))
    with pytest.raises(RecipeError, match="nobody says what its inputs look like"):
        hidden_layers("x", images, Bench())
    (hidden,) = hidden_layers("x", images, Bench(inputs=InputForm((1, 4, 4))))
    assert hidden.outgoing(weights(images)).shape == (3, 4 * 2)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (Spec("resnet18", {"widths": 0.0625}), "fedma goes layer by layer and model 'resnet18' is not one plain layer"),
        (Spec("mlp", {"hidden": []}), "fedma matches hidden units and model 'mlp' has none"),
        (
            Spec.of(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2))),
            "normalizes over them by LayerNorm; use BatchNorm",
        ),
    ],
)
def test_other_networks_are_refused_by_name(spec: Spec, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        hidden_layers("fedma", spec, Bench())


def test_different_depths_are_refused_by_name() -> None:
    chains = {c: hidden_layers("x", Spec("mlp", {"hidden": h}), Bench()) for c, h in {"": [3], "b": [9]}.items()}
    check_same_depth("pfnm", chains)
    chains["site-3"] = hidden_layers("x", Spec("mlp", {"hidden": [3, 3]}), Bench())
    with pytest.raises(ConfigError, match=r"site-3 has 2 hidden layers \(fc1-fc2\) and everybody else 1 \(fc1\)"):
        check_same_depth("pfnm", chains)


def test_spreading_out_keeps_the_function_and_drawing_in_gives_it_back() -> None:
    params, x = weights(LENET), torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    layers = hidden_layers("x", LENET, Bench())
    places = {layers[0]: torch.tensor([4, 0, 2]), layers[1]: torch.tensor([5, 1, 3, 0]), layers[2]: torch.arange(5)}
    wide = params
    for hidden, place in places.items():
        wide = expand_units(wide, hidden, place, 7)
    assert wide["conv2.weight"].shape == (7, 7, 3, 3)
    assert torch.allclose(LENET.with_shapes_of(wide).forward(wide, x), LENET.forward(params, x), atol=1e-6)
    back = select_units(wide, places)
    assert all(back[n].equal(params[n]) for n in params)


def told(client: str, counts: list[int]) -> ClientUpdate:
    return ClientUpdate(client, Posterior({}), 1.0, 1, LENET, {"counts/labels": torch.tensor(counts)})


def test_class_shares() -> None:
    shares = class_shares(Cohort((told("a", [3, 0, 0]), told("b", [1, 4, 0]))), 4)
    expected = [[0.75, 0.0, 0.5, 0.5], [0.25, 1.0, 0.5, 0.5]]
    assert shares.tolist() == expected, "a class nobody has, or nobody told of, is everybody's alike"


def test_matching_is_shrunk_only_if_asked() -> None:
    values = 3 * torch.randn(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(9, dtype=torch.float64)
    matcher = Matcher(variance=0.5, prior_variance=2.0)
    found, units = matcher([values, values.flip(0)], [one, one], zero, torch.Generator())
    assert torch.allclose(units[found.assignment[1]], values.flip(0) * 2 / (2 + 0.25))
    assert torch.allclose(replace(matcher, shrink=False)([values] * 2, [one] * 2, zero, torch.Generator())[1], values)


def test_variances_by_layer_do_not_depend_on_the_size_of_weights() -> None:
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(5, 9, generator=draw, dtype=torch.float64) for _ in range(3)]
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(9, dtype=torch.float64)
    for scale, alike in (("layer", True), ("absolute", False)):
        matcher = Matcher(gamma=2.0, variance=3.0, scale=scale)  # type: ignore[arg-type]
        small, large = (matcher([f * v for v in values], [one] * 3, zero, torch.Generator()) for f in (0.01, 10.0))
        same = len(small[0]) == len(large[0]) and torch.allclose(1000 * small[1], large[1])
        assert same is alike
    nothing = [torch.zeros(2, 9, dtype=torch.float64)] * 2
    assert len(Matcher(scale="layer")(nothing, [one] * 2, zero, torch.Generator())[0]) >= 2
