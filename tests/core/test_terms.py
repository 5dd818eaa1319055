"""What rosters arrange."""

from __future__ import annotations

from fedfuse.core.terms import Terms, terms_of


class Engine:
    terms = Terms(always=("server",), lent=3)


def test_an_engine_that_does_not_say_has_arranged_nothing() -> None:
    assert terms_of(object()) == Terms()
    assert terms_of(Engine()).always == ("server",)


def test_lent_rows_widen_everybodys_claim_alike() -> None:
    assert terms_of(Engine()).enrolled({"a": 10, "b": 0}) == {"a": 13, "b": 3}
    assert Terms().enrolled({"a": 10}) == {"a": 10}
