"""The example of four hospitals runs, and its Newton steps end at the pooled fit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from statsmodels.stats.proportion import proportion_confint

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "heart_disease"


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("heart_disease_run", EXAMPLE / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_interval_is_wilsons() -> None:
    assert script().interval(0.8, 250) == pytest.approx(proportion_confint(200, 250, method="wilson"))


@pytest.mark.paper
def test_the_hospitals_reach_the_pooled_fit(real_data: Path, tmp_path: Path) -> None:
    told = script().main(tmp_path, "seeds=[0]", "rounds=8").read_text(encoding="utf-8")
    backwards = reversed([line.split("|") for line in told.splitlines() if line.startswith("|")])
    lines = {line[1].strip(): line for line in backwards}  # where two tables name a method, the first
    assert float(lines["newton"][7]) < 1e-10
    assert lines["newton"][2:7] == lines["pooled fit"][2:7]
    assert "below 1e-10 at exchange 6" in told
    assert {"age", "cp=4", "constant"} <= lines.keys()
