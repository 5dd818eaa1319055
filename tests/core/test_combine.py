"""Rules of combination come from a closed table."""

from __future__ import annotations

import pytest

from fedfuse.core.combine import COMBINES, combine_named
from fedfuse.errors import ConfigError


def test_rules_are_found_by_name() -> None:
    assert repr(combine_named("MeanProbability", {})) == "MeanProbability()"
    assert "MeanProbability" in COMBINES


@pytest.mark.parametrize("name", ["os.system", "builtins:exec", "meanprobability"])
def test_a_file_cannot_name_anything_else(name: str) -> None:
    with pytest.raises(ConfigError, match="no way to combine"):
        combine_named(name, {})
