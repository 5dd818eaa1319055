from __future__ import annotations

from fedfuse.report.scores import COLUMNS, marks_of, summary

ACCURACY, BYTES, NLL = (next(c for c in COLUMNS if c.key == key) for key in ("accuracy", "bytes_up", "nll"))


def rows(key: str, **values: list[float]) -> list[dict[str, object]]:
    return [
        {"method": label, "seed": seed, "round": 1, key: value}
        for label, given in values.items()
        for seed, value in enumerate(given)
    ]


def test_a_tie_is_what_the_pairs_do_not_tell_apart() -> None:
    table = summary(
        rows("accuracy", top=[0.80, 0.82, 0.81, 0.83], near=[0.81, 0.79, 0.82, 0.80], far=[0.70, 0.72, 0.71, 0.73])
    )
    assert marks_of(ACCURACY, table, decimals=1, factor=0.01) == ["best", "tie", ""]


def test_pairs_see_what_spreads_hide() -> None:
    """Seeds differ by 20 points, the methods on each seed by one: intervals overlap, the pairs do not."""
    table = summary(rows("accuracy", top=[0.61, 0.71, 0.811], less=[0.60, 0.70, 0.80], none=[0.1, 0.1, 0.1]))
    assert marks_of(ACCURACY, table, decimals=1, factor=0.01) == ["best", "", ""]


def test_low_is_better_where_it_is() -> None:
    table = summary(rows("nll", a=[0.5, 0.51, 0.52], b=[0.9, 0.91, 0.92]))
    assert marks_of(NLL, table, decimals=3, factor=1.0) == ["best", ""]


def test_header_bytes_are_no_difference() -> None:
    table = summary(rows("bytes_up", a=[154_340], b=[154_350], c=[403_940]))
    assert marks_of(BYTES, table, decimals=2, factor=1e3) == ["best", "best", ""]
    assert marks_of(BYTES, table[:2], decimals=2, factor=1e3) == ["", ""]


def test_where_nobody_is_told_apart_nobody_is_best() -> None:
    table = summary(rows("accuracy", a=[0.5, 0.9], b=[0.6, 0.7]))
    assert marks_of(ACCURACY, table, decimals=1, factor=0.01) == ["", ""]


def test_one_seed_marks_the_best_and_claims_no_tie() -> None:
    table = summary(rows("accuracy", a=[0.50], b=[0.49]))
    assert marks_of(ACCURACY, table, decimals=1, factor=0.01) == ["best", ""]


def test_who_spends_nothing_is_not_praised() -> None:
    table = summary(rows("bytes_up", a=[0.0, 0.0], b=[0.0, 0.0], c=[5.0, 5.0]))
    assert marks_of(BYTES, table, decimals=0, factor=1.0) == ["", "", ""]
