"""Briefs, cohorts and the order of clients."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import torch

from fedfuse.core.messages import Brief, ClientUpdate, Cohort, Form, Start, client_order
from fedfuse.core.posterior import Posterior
from fedfuse.core.spec import Spec

SPEC, OTHER = Spec("mlp"), Spec("lenet")


def update(client: str, value: float, num_examples: float = 1.0) -> ClientUpdate:
    return ClientUpdate(client, Posterior({"w": torch.full((2, 3), value)}), num_examples, 1, SPEC)


def test_form_of_a_tensor() -> None:
    assert Form.of(torch.zeros(2, 3, dtype=torch.int64)) == ((2, 3), torch.int64)


def test_a_brief_is_told_to_each_client_in_its_own_way() -> None:
    brief = Brief(2, SPEC, {"w": torch.zeros(1)}, own={"b": Start(OTHER, {"v": torch.ones(1)})}, classes=3)
    assert brief.to("a") == replace(brief, own={})
    mine = brief.to("b")
    assert (mine.round, mine.spec, list(mine.params), mine.classes, mine.own) == (2, OTHER, ["v"], 3, {})


def test_clients_sort_by_their_numbers_and_never_tie() -> None:
    names = ["site-10", "site-2", "site-02", "site", "10", "2", "a", "", "a1b10", "a1b9", "9" * 30]
    once = sorted(names, key=client_order)
    assert once.index("site-2") < once.index("site-10")
    assert once.index("a1b9") < once.index("a1b10")
    for order in (names[::-1], sorted(names)):
        assert sorted(order, key=client_order) == once


def test_a_cohort_does_not_depend_on_who_answered_first() -> None:
    updates = [update("c2", 2.0, 3.0), update("c10", 10.0, 5.0), update("c02", 1.0, 2.0)]
    cohorts = [Cohort.of(list(order)) for order in permutations(updates)]
    assert {c.clients for c in cohorts} == {("c02", "c2", "c10")}
    assert all(c.weights.equal(torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)) for c in cohorts)


def test_one_tensor_across_clients() -> None:
    cohort = Cohort.of([update("b", 2.0), update("a", 1.0)])
    assert cohort.names == ("w",)
    assert cohort.stack("w")[:, 0, 0].tolist() == [1.0, 2.0]
    assert [float(t.sum()) for t in cohort.tensors("w")] == [6.0, 12.0]
    assert len(cohort) == 2
    assert [u.client for u in cohort] == ["a", "b"]
