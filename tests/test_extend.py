"""A method of another package: written, tested and registered with public names alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import pytest

import fedfuse
from fedfuse import extend, testing
from fedfuse.core.catalogue import describe_methods, list_catalogue
from fedfuse.core.registry import all_methods
from fedfuse.extend import ALL_LAWS, Bench, Cohort, Recipe, ServerPart, ServerState, forget_method, method


@dataclass(frozen=True, slots=True)
class FirstClient(ServerPart):
    """The first client's weights: it claims more than it keeps."""

    laws: ClassVar[frozenset[str]] = ALL_LAWS

    def __call__(self, cohort: Cohort, state: ServerState, bench: Bench) -> ServerState:
        return state.fused({n: t.clone() for n, t in cohort.updates[0].posterior.mean.items()})


@pytest.fixture
def dictator() -> object:
    @method("dictator")
    def dictator() -> Recipe:
        """The first client decides."""
        return Recipe(aggregate=FirstClient())

    yield "dictator"
    forget_method("dictator")


def test_a_broken_law_is_named(dictator: str) -> None:
    assert "dictator" in fedfuse.list_methods()
    with pytest.raises(testing.LawBroken, match="'dictator' .*'order'"):
        testing.check_method(dictator)


@pytest.mark.slow  # tests/laws holds every method to them too; this is the function that is shipped
@pytest.mark.parametrize("name", sorted(all_methods()))
def test_every_method_keeps_the_laws_it_claims(name: str) -> None:
    options = {"dense": {"epochs": 1, "steps": 1, "batch": 4}, "imc": {"at": 1, "times": 1}}.get(name, {})
    assert set(testing.check_method(name, **options)) == all_methods()[name].recipe(**options).laws


def test_the_surface_is_what_it_says() -> None:
    assert sorted(extend.__all__) == list(extend.__all__)
    assert all(hasattr(extend, name) for name in extend.__all__)
    assert all(hasattr(fedfuse, name) for name in fedfuse.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+", fedfuse.__version__)
    with pytest.raises(AttributeError, match="'fuze'"):
        _ = fedfuse.fuze


def test_results_of_a_run_can_be_loaded_again(tmp_path: pytest.TempPathFactory) -> None:
    file = tmp_path / "tiny.toml"  # type: ignore[operator]
    file.write_text('methods = [{ name = "fedavg" }]\n[data]\ntrain_limit = 60\nclients = 2\n')
    run = fedfuse.run(file, out=tmp_path / "run", workers=0, memo=False)  # type: ignore[operator]
    again = fedfuse.load(tmp_path / "run")  # type: ignore[operator]
    assert again.table() == run.table()
    with pytest.raises(fedfuse.ConfigError, match="directory"):
        fedfuse.load(tmp_path / "nowhere")  # type: ignore[operator]


def test_the_catalogue_is_what_the_methods_say_of_themselves() -> None:
    """Renew it with `make catalogue`."""
    plain = [{k: v if k != "options" else [dict(o) for o in v] for k, v in entry.items()} for entry in list_catalogue()]
    for entry, fresh in zip(plain, describe_methods(), strict=True):
        for option in fresh["options"]:
            option["default"] = _as_json(option["default"])
        assert entry == fresh


def _as_json(value: object) -> object:
    import json

    return json.loads(json.dumps(value, default=str))
