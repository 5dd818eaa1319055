"""Label histograms and their check at the door."""

from __future__ import annotations

import pytest
import torch

from fedfuse.client.class_sums import LabelCounts
from fedfuse.core.messages import Brief, Envelope
from fedfuse.core.rows import Rows
from fedfuse.core.seams import Work
from fedfuse.core.spec import Spec
from fedfuse.server.admission.admit import Contract, admit
from fedfuse.training.round import client_round

SPEC = Spec("mlp", {"inputs": 2, "hidden": [], "classes": 4})
BRIEF = Brief(0, SPEC, SPEC.build().state_dict(), classes=4)


def test_counts_are_whole_numbers_that_sum_to_the_mass() -> None:
    rows = Rows(torch.zeros(5, 2), torch.tensor([0, 2, 2, 2, 0]))
    answer = client_round(Work(evidence=(LabelCounts(),)), BRIEF, "a", rows)
    update = admit(Envelope("a", answer.payload), Contract.of(BRIEF, (LabelCounts(),)))
    assert update.notes["counts/labels"].tolist() == [2, 0, 3, 0]
    assert update.num_examples == 5.0


@pytest.mark.parametrize(
    ("counts", "got"),
    [
        ([6, -1, 0, 0], -1),
        ([2, 2, 0, 0], "a sum of 4"),
        ([0, 0, 0, 0], "a sum of 0"),
        ([2**62, 2**62, 2**62, 2**62 + 5], f"a sum of {2**64 + 5}"),  # as int64 this wraps around to 5
    ],
)
def test_counts_that_lie_are_found_out(counts: list[int], got: object) -> None:
    flaw = LabelCounts().check({"counts/labels": torch.tensor(counts)}, 5.0)
    assert flaw is not None
    assert (flaw.field, flaw.got) == ("counts/labels", got)


def test_honest_counts_pass() -> None:
    assert LabelCounts().check({"counts/labels": torch.tensor([5, 0])}, 5.0) is None
