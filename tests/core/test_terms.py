"""What rosters arrange."""

from __future__ import annotations

from fedfuse.core.seams import Terms


def test_lent_rows_widen_everybodys_claim_alike() -> None:
    assert Terms(always=("server",), shared_rows=3).claimable_examples({"a": 10, "b": 0}) == {"a": 13, "b": 3}
    assert Terms().claimable_examples({"a": 10}) == {"a": 10}
