"""How many rows of each class a client has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedfuse.core.messages import Brief, Flaw, Form
from fedfuse.core.params import Params
from fedfuse.core.seams import PlainEvidence
from fedfuse.core.state import Local


@dataclass(frozen=True, slots=True)
class LabelCounts(PlainEvidence):
    """The client's label histogram, as whole numbers that sum to its num_examples."""

    name: ClassVar[str] = "counts"
    needs_classes: ClassVar[bool] = True
    reveals: ClassVar[str] = "how many rows of each class the client has"

    def __call__(self, local: Local) -> Params:
        """Rows per class."""
        return {"counts/labels": local.rows.counts(local.brief.classes).cpu()}

    def expects(self, brief: Brief) -> Mapping[str, Form]:
        """One whole number per class."""
        return {"counts/labels": Form((brief.classes,), torch.int64)}

    def check(self, notes: Params, num_examples: float) -> Flaw | None:
        """Counts are not negative and sum to the num_examples."""
        counts = notes["counts/labels"]
        if (counts < 0).any():
            return Flaw("counts/labels", int(counts.min()), "whole numbers ≥ 0")
        total = sum(counts.tolist())  # Python's whole numbers do not wrap around
        if total != num_examples:
            return Flaw("counts/labels", f"a sum of {total}", f"the num_examples {num_examples:g}")
        return None
