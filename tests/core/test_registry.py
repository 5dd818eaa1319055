"""Methods by name: discovery, schemas, labels, and errors that teach."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import ConfigDict, Field, PositiveFloat, create_model

from fedfuse.core import registry
from fedfuse.core.recipe import Recipe
from fedfuse.core.registry import Method, all_methods, describe_type, find_method, load_method, method
from fedfuse.core.settings import Settings
from fedfuse.errors import ConfigError
from fedfuse.server.aggregate.mean import Mean


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> dict[str, Method]:
    """A registry of its own, so that a test's methods do not stay."""
    known = dict(all_methods())
    monkeypatch.setattr(registry, "_METHODS", known)
    return known


def test_the_methods_folder_is_found_by_itself() -> None:
    known = all_methods()
    assert {"local", "fedavg", "fedprox", "fednova", "scaffold", "moon"} <= known.keys()
    assert list(known) == sorted(known)


@pytest.mark.parametrize("found", all_methods().values(), ids=lambda m: m.name)
def test_every_method_speaks_for_itself(found: Method) -> None:
    assert found.summary.endswith(".")
    assert all(option.text for option in found.options), "every option is explained under Args"
    recipe = found.recipe()
    assert (recipe.name, recipe.label) == (found.name, found.name)
    assert repr(recipe.aggregate) == repr(found.recipe().aggregate)
    assert " at 0x" not in repr(recipe), "a recipe's text is the same in every process"


def test_options_are_checked_against_the_signature() -> None:
    prox = find_method("fedprox")
    assert prox.recipe(mu="0.5").objective.mu == 0.5  # type: ignore[attr-defined]
    assert prox.recipe(mu=0.5).label == "fedprox(mu=0.5)"
    assert [(o.name, o.default) for o in prox.options] == [("mu", 0.01)]
    with pytest.raises(ConfigError, match="'fedprox' has no option 'muu'; did you mean 'mu'"):
        prox.recipe(muu=1)
    with pytest.raises(ConfigError, match="option mu is 'strong', expected a valid number"):
        prox.recipe(mu="strong")
    with pytest.raises(ConfigError, match="option mu is -1"):
        prox.recipe(mu=-1)


def test_unknown_methods_get_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="no method 'scafold'; did you mean 'scaffold'"):
        find_method("scafold")


def test_a_new_method_is_one_decorated_function(scratch: dict[str, Method]) -> None:
    @method("mine", paper="arXiv:0")
    def mine(uniform: bool = True) -> Recipe:
        """My own."""
        return Recipe(aggregate=Mean(uniform))

    assert find_method("mine").recipe(uniform=False).aggregate == Mean(False)
    assert find_method("mine").paper == "arXiv:0"


def test_two_methods_cannot_share_a_name(scratch: dict[str, Method]) -> None:
    with pytest.raises(ConfigError, match="two methods are called 'fedavg'"):

        @method("fedavg")
        def mine() -> Recipe:
            return Recipe(aggregate=Mean())


def test_a_method_says_where_it_takes_its_mean(scratch: dict[str, Method]) -> None:
    assert find_method("fedavg").family == "weights"
    with pytest.raises(ConfigError, match="method 'mine': family is 'posteriors'; did you mean 'posterior'"):
        method("mine", family="posteriors")  # type: ignore[arg-type]


def test_every_option_needs_a_default(scratch: dict[str, Method]) -> None:
    with pytest.raises(ConfigError, match="option 'mu' needs a default"):

        @method("mine")
        def mine(mu: float) -> Recipe:
            return Recipe(aggregate=Mean())


def test_installed_packages_bring_methods_by_entry_point(
    scratch: dict[str, Method], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    entry = EntryPoint("other", "other_package.methods", "fedfuse.methods")
    monkeypatch.setattr(EntryPoint, "load", lambda self: loaded.append(self.value))
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == "fedfuse.methods" else [])
    registry._discover.__wrapped__()
    assert loaded == ["other_package.methods"]


class Shared(Settings):
    """Options several methods have.

    Attributes:
        mu: how strong
            the pull is.
        names: of what.
    """

    mu: PositiveFloat = 0.5
    names: tuple[str, ...] = ()


def test_a_group_of_settings_is_spread_out_into_options(scratch: dict[str, Method]) -> None:
    @method("grouped")
    def grouped(uniform: bool = False, how: Shared = Shared()) -> Recipe:  # noqa: B008 - a value
        """Average.

        Args:
            uniform: weigh alike.
        """
        return Recipe(aggregate=Mean(uniform), label=f"{how.mu} {how.names}")

    found = find_method("grouped")
    assert [(o.name, o.type, o.default) for o in found.options] == [
        ("uniform", "true | false", False),
        ("mu", "number > 0", 0.5),
        ("names", "list: text", ()),
    ]
    assert [o.text for o in found.options] == ["weigh alike.", "how strong the pull is.", "of what."]
    assert found.recipe(mu=2, names=["a"]).label == "2.0 ('a',)"
    assert found.recipe().label == "0.5 ()"
    with pytest.raises(ConfigError, match="option mu is -1, expected greater than 0"):
        found.recipe(mu=-1)
    with pytest.raises(ConfigError, match=r"no option 'muu'; did you mean 'mu'\? it has uniform, mu, names"):
        found.recipe(muu=1)
    with pytest.raises(ConfigError, match="no option 'how'"):
        found.recipe(how=Shared())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (PositiveFloat | Literal["evidence"], 'number > 0, or "evidence"'),
        (Literal["one", "trace"] | None, '"one" | "trace"'),
        (Annotated[float, Field(ge=0, lt=1)], "number ≥ 0 and < 1"),
        (dict[str, int], "table"),
        (EntryPoint, "EntryPoint"),
    ],
)
def test_what_an_option_takes_is_said_in_words(kind: object, words: str) -> None:
    model = create_model("any", __config__=ConfigDict(arbitrary_types_allowed=True), it=(kind, None))
    assert describe_type(model.model_fields["it"]) == words


def test_no_method_shows_a_type_of_the_programs_own() -> None:
    for found in all_methods().values():
        for option in found.options:
            assert not re.search(r"Annotated|Literal|Positive|NonNegative|\[|None", option.type), (found.name, option)


OWN = """
from fedfuse.extend import Mean, Recipe, method

@method("mine")
def registered(uniform: bool = True) -> Recipe:
    '''My own.'''
    return Recipe(aggregate=Mean(uniform))

def plain(uniform: bool = False) -> Recipe:
    '''A function and no more.'''
    return Recipe(aggregate=Mean(uniform))

number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scratch: dict[str, Method]) -> Path:
    (tmp_path / "my_method_file.py").write_text(OWN)
    (tmp_path / "broken_method.py").write_text("1 / 0")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("my_method_file", "broken_method"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_method_of_ones_own_is_named_by_module_or_file(own: Path) -> None:
    assert load_method("my_method_file:registered").recipe(uniform=False).aggregate == Mean(False)
    assert load_method("my_method_file:registered").name == "mine"
    found = load_method(f"{own}/my_method_file.py:plain")
    assert (found.name, found.recipe(uniform=True).label) == ("plain", "plain(uniform=True)")
    assert load_method(f"{own}/my_method_file.py:plain") == found
    assert load_method("fedavg") == find_method("fedavg")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my_method_file:nothing", "cannot be imported .*has no attribute 'nothing'"),
        ("nowhere_at_all:mine", "cannot be imported .*No module named 'nowhere_at_all'"),
        ("broken_method:mine", "cannot be imported .ZeroDivisionError: division by zero"),
        ("nowhere.py:mine", "there is no file nowhere.py; expected file.py:function"),
        ("my_method_file:number", "is a int, expected a function that returns a Recipe"),
    ],
)
def test_what_is_no_method_is_said(own: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_method(name)


def test_a_name_that_came_from_elsewhere_imports_nothing(own: Path) -> None:
    with pytest.raises(ConfigError, match="there is no method 'broken_method:mine'"):
        find_method("broken_method:mine")
    assert "broken_method" not in sys.modules
