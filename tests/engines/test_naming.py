from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass, replace
from enum import Enum
from pathlib import Path
from types import FunctionType

import numpy as np
import odd_parts
import pytest
import torch

from fedfuse.client.class_sums import LabelCounts
from fedfuse.client.objectives import Proximal
from fedfuse.core.messages import Brief
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.settings import Decay, LocalSettings
from fedfuse.core.spec import Spec
from fedfuse.engines import memo
from fedfuse.engines.memo import Nameless, Namer, brief_digest, canonical, digest


@dataclass(frozen=True)
class Holds:
    what: object
    cache: list[int] = field(default_factory=list, compare=False)


class Colour(Enum):
    RED = 1
    BLUE = 2


def text(value: object) -> bytes:
    return digest(*canonical(value))


def _label(value: object) -> str:
    """The same in every process, unlike a repr with an address."""
    return getattr(value, "__name__", type(value).__name__)


ALIKE_BUT_NOT_EQUAL = [
    (1, 1.0),
    (1, True),
    (1, "1"),
    ("a", b"a"),
    ((1, 2), [1, 2]),
    (((1,), 2), (1, (2,))),
    ({"a": 1}, {"a": 2}),
    (frozenset({"a"}), frozenset({"b"})),
    (Colour.RED, Colour.BLUE),
    (Path("a"), "a"),
    (torch.float32, torch.float64),
    (torch.zeros(3), torch.zeros(3, 1)),
    (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
    (np.zeros(2), np.ones(2)),
    (Holds(1), Holds(2)),
    (Proximal(0.1), Proximal(0.1, base=Proximal(0.2))),
    (LocalSettings(epochs=1), LocalSettings(epochs=2)),
    (text, digest),
]


@pytest.mark.parametrize(("one", "other"), ALIKE_BUT_NOT_EQUAL, ids=_label)
def test_different_values_have_different_text(one: object, other: object) -> None:
    assert text(one) != text(other)
    assert text(one) == text(one)


def test_a_number_deep_in_a_large_tensor_counts() -> None:
    x = torch.zeros(100, 100)
    changed = x.clone()
    changed[50, 50] = 1
    one, other = (Holds(Rows(t, torch.arange(100))) for t in (x, changed))
    assert repr(one) == repr(other)  # printing leaves out the middle
    assert text(one) != text(other)


def test_what_a_class_leaves_out_of_equality_does_not_count() -> None:
    assert text(Holds(1, [1])) == text(Holds(1, [2]))


def test_classes_of_the_same_name_in_different_modules_differ() -> None:
    here = make_dataclass("Same", [("x", int)], namespace={"__module__": __name__})
    there = make_dataclass("Same", [("x", int)], namespace={"__module__": "odd_parts"})
    assert repr(here(1)) == repr(there(1))
    assert text(here(1)) != text(there(1))


@pytest.mark.parametrize("odd", [lambda: 0, object(), torch.Generator(), torch.nn.Linear(1, 1), open], ids=_label)
def test_what_has_no_canonical_form_makes_the_round_nameless(odd: object) -> None:
    with pytest.raises(Nameless):
        list(canonical(Holds((odd,))))
    assert Namer.of(Work(objective=odd), 0) is None  # type: ignore[arg-type]


def test_a_class_made_within_a_function_has_no_name() -> None:
    """What it closed over cannot be told."""

    def make(weight: float) -> object:
        @dataclass(frozen=True)
        class Local:
            def weighted(self) -> float:
                return weight

        return Local()

    with pytest.raises(Nameless):
        text(make(0.5))


def test_a_functions_defaults_count() -> None:
    def made(weight: float) -> FunctionType:
        return FunctionType(_weighted.__code__, vars(odd_parts), "_weighted", (weight,))

    assert text(made(0.5)) == text(made(0.5)) != text(made(1.0))


def _weighted(weight: float) -> float:
    return weight


def test_a_network_that_is_an_object_in_memory_has_no_name(brief: Brief) -> None:
    assert brief_digest(brief) is not None
    assert brief_digest(replace(brief, spec=Spec.of(odd_parts.Net()))) is None
    assert brief_digest(replace(brief, spec=Spec("no_such_module:Net"))) is None


def test_a_name_depends_on_all_that_an_answer_depends_on(brief: Brief, work: Work) -> None:
    def name(work: Work = work, seed: int = 0, brief: Brief = brief, client: str = "a", *rest: bytes) -> str:
        namer = Namer.of(work, seed)
        assert namer is not None
        found = namer.name(brief_digest(brief), client, *(rest or (b"rows", b"memory")))
        assert found is not None
        return found.whole

    told = {n: t.clone() for n, t in brief.params.items()}
    told["fc1.bias"][0] += 1
    names = [
        name(),
        name(replace(work, objective=Proximal(0.0))),
        name(replace(work, evidence=(LabelCounts(),))),
        name(replace(work, settings=work.settings.model_copy(update={"epochs": 9}))),
        name(replace(work, settings=work.settings.model_copy(update={"kernel": "torch"}))),
        name(seed=1),
        name(brief=replace(brief, round=1)),
        name(brief=replace(brief, params=told)),
        name(brief=replace(brief, memory={"control/w": torch.zeros(1)})),
        name(brief=replace(brief, classes=4)),
        name(client="b"),
        name(work, 0, brief, "a", b"other", b"memory"),
        name(work, 0, brief, "a", b"rows", b"other"),
    ]
    assert len(set(names)) == len(names)
    assert name() == names[0]


def test_the_training_alone_is_shared_by_works_that_differ_in_evidence(work: Work) -> None:
    plain, counted = Namer.of(work, 0), Namer.of(replace(work, evidence=(LabelCounts(),)), 0)
    assert plain is not None
    assert counted is not None
    assert plain.training is None  # the whole work is the training
    assert counted.training == plain.whole


def test_a_walk_cut_short_under_a_falling_rate_does_not_stand_alone(work: Work) -> None:
    cut = work.settings.model_copy(update={"max_steps": 3, "decay": Decay(gamma=0.5, every=1)})
    namer = Namer.of(replace(work, settings=cut, evidence=(LabelCounts(),)), 0)
    assert namer is not None
    assert namer.training is None


def test_another_compiler_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = memo.machine("cpu")
    memo.machine.cache_clear()
    monkeypatch.setattr(memo, "signature", lambda: "none")
    try:
        assert memo.machine("cpu") != before
    finally:
        memo.machine.cache_clear()
