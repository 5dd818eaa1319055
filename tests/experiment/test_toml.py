"""What is written reads back as what it was."""

from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fedfuse.experiment.config import to_toml

words = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
plain = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | words
values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(words, values, max_size=4))
def test_any_table_reads_back_as_it_was(table: dict[str, Any]) -> None:
    assert tomllib.loads(to_toml(table)) == table


def test_tables_inside_lists_of_tables() -> None:
    table = {"methods": [{"name": "a", "guard": {"name": "krum"}}, {"name": "b", "then": {"x": [{"y": 1}, {}]}}]}
    assert tomllib.loads(to_toml(table)) == table


def test_not_a_number_is_a_word_of_toml() -> None:
    assert str(tomllib.loads(to_toml({"x": float("nan")}))["x"]) == "nan"
