"""A method whose fused model does not fit its network is named, with the tensor, through every door; no client is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.conftest import Fedfuse
from torch import Tensor

from fedfuse.api import fuse, recipe
from fedfuse.core.messages import Cohort
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import method
from fedfuse.core.seams import ServerPart
from fedfuse.core.state import Bench, ServerState
from fedfuse.errors import MethodFault
from fedfuse.server.aggregate.mean import ALL_LAWS, mean_of
from fedfuse.testing import check_method

Means = Mapping[str, Tensor]

ODD: dict[str, tuple[Callable[[Means], Any], str]] = {
    "without biases": (
        lambda m: {n: t for n, t in m.items() if "bias" not in n},
        "bias is missing, expected 3 float32",
    ),
    "wide": (lambda m: {n: torch.cat([t, t]) for n, t in m.items()}, "bias is 6 float32, expected 3 float32"),
    "double": (lambda m: {n: t.double() for n, t in m.items()}, "bias is 3 float64, expected 3 float32"),
    "more": (lambda m: {**m, "zz": torch.zeros(2)}, "zz is 2 float32, expected no such tensor"),
    "numpy": (lambda m: {n: t.numpy() for n, t in m.items()}, "weight is a ndarray, expected a tensor"),
    "none": (lambda _: None, r"fused nothing \(None\), expected a mapping"),
}


@dataclass(frozen=True, slots=True)
class Odd(ServerPart):
    """A mean with something wrong."""

    change: Callable[[Means], Any]
    laws: ClassVar[frozenset[str]] = ALL_LAWS

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        return state.fused(self.change(mean_of(cohort)))


class Forgets(ServerPart):
    """It forgets its `return`, as an aggregator and as a step."""

    laws: ClassVar[frozenset[str]] = ALL_LAWS

    def __call__(self, *_: object) -> None:
        pass


@pytest.fixture(params=ODD)
def odd(request: pytest.FixtureRequest) -> tuple[Recipe, str]:
    """A recipe that is registered as "odd", and what is to be said of it."""
    change, words = ODD[request.param]
    method("odd")(lambda: Recipe(aggregate=Odd(change)))
    return recipe("odd"), f"method 'odd': Odd .*{words}"


def test_files_and_state_dicts(odd: tuple[Recipe, str]) -> None:
    made, words = odd
    network = torch.nn.Linear(2, 3)
    with pytest.raises(MethodFault, match=words):
        fuse([network.state_dict()] * 3, made, num_examples=[1, 1, 1])
    with pytest.raises(MethodFault, match=words):
        fuse([network] * 3, made, model=network, num_examples=[1, 1, 1])


def test_a_run(odd: tuple[Recipe, str], fedfuse: Fedfuse, tmp_path: Path) -> None:
    said = 'rounds = 2\nmethods = [{ name = "odd" }]\n[model]\nname = "mlp"\nhidden = []\n'
    (tmp_path / "odd.toml").write_text(said + "[data]\ntrain_limit = 40\ntest_limit = 20\nclients = 2\n")
    code, _, err = fedfuse("run", str(tmp_path / "odd.toml"), "--out", str(tmp_path / "run"), "--workers", "0")
    assert code == 1
    assert "method 'odd': Odd" in err
    assert not list((tmp_path / "run").glob("models/*"))


class Tied(torch.nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight


def test_a_lost_tensor_that_is_tied_to_another_is_named_too() -> None:
    made = Recipe(name="mine", aggregate=Odd(lambda m: {n: t for n, t in m.items() if n != "first.weight"}))
    with pytest.raises(MethodFault, match=r"'mine': Odd .* first.weight is missing, expected 3×3 float32"):
        fuse([Tied()] * 3, made, model=Tied(), num_examples=[1, 1, 1])


def test_the_laws(odd: tuple[Recipe, str]) -> None:
    with pytest.raises(MethodFault, match="method 'odd': Odd"):
        check_method("odd")


@pytest.mark.parametrize("seam", ["aggregate", "steps"])
def test_a_forgotten_return(seam: str) -> None:
    parts: dict[str, Any] = {"aggregate": Odd(dict)} | {seam: Forgets() if seam == "aggregate" else (Forgets(),)}
    network = torch.nn.Linear(2, 3)
    with pytest.raises(MethodFault, match=r"method 'mine': Forgets returned nothing \(None\), expected a ServerState"):
        fuse([network.state_dict()] * 3, Recipe(name="mine", **parts), num_examples=[1, 1, 1])
