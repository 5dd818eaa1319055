"""The example of four hospitals runs, and its Newton steps end at the pooled fit."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from statsmodels.stats.proportion import proportion_confint
from tests.conftest import Fedfuse

from fedfuse.data.rows import Array
from fedfuse.data.tables import read_table

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "heart_disease"


def script(name: str = "run") -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"heart_disease_{name}", EXAMPLE / f"{name}.py")
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


@pytest.mark.paper
def test_the_journey_from_init_to_a_card(
    fedfuse: Fedfuse, real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))

    def command(*words: str) -> None:
        said = fedfuse(*words)
        assert said.code == 0, said.err

    told = script("journey").main(tmp_path, command)
    lines = {line.split("|")[1].strip(): line.split("|") for line in told.splitlines() if line.startswith("|")}
    away = {name: line[7] for name, line in lines.items() if "files each" in name or "pooled" in name}
    assert float(away["newton, 7 files each"]) < 1e-4, "files hold float32"
    assert lines["newton, 7 files each"][2:5] == lines["pooled fit"][2:5]
    card = (tmp_path / "card.md").read_text(encoding="utf-8")
    assert "- switzerland: 30 examples" in card
    assert r"| chol \[mg/dl\] |" in card
    assert len((tmp_path / "predictions.csv").read_text(encoding="utf-8").splitlines()) == 255
    head, *rows = csv.reader((tmp_path / "test.csv").read_text(encoding="utf-8").splitlines())
    gaps = [
        ["" if (3 * row + column) % 7 == 0 else word for column, word in enumerate(line)]
        for row, line in enumerate(rows)
    ]
    with (tmp_path / "gaps.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *gaps])
    command("export", "newton.safetensors", "--to", "onnx", "-o", "newton.onnx")
    for table in ("test.csv", "gaps.csv"):
        command("predict", "newton.safetensors", "--data", table, "-o", "predictions.csv")
        with (tmp_path / "predictions.csv").open(newline="", encoding="utf-8") as file:
            expected = [float(row["p(ill)"]) for row in csv.DictReader(file)]
        np.testing.assert_allclose(asked_of_onnx(tmp_path / "newton.onnx", tmp_path / table), expected, atol=1e-5)


def asked_of_onnx(graph: Path, source: Path) -> Array:
    """The probability of illness of every row of a raw table, by onnxruntime."""
    runtime = pytest.importorskip("onnxruntime")
    session, table = runtime.InferenceSession(str(graph)), read_table(source).with_units()
    given = {
        column.name: table.numbers(column.name)[:, None]
        if column.type == "tensor(double)"
        else np.array([[word or ""] for word in table.column(column.name)], dtype=object)
        for column in session.get_inputs()
    }
    found: Array = session.run(["probabilities"], given)[0][:, 1]
    return found


@pytest.mark.paper
def test_the_files_hold_the_rows_of_the_experiment(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    script("journey").write_tables(tmp_path)
    counts = {path.stem: len(path.read_text().splitlines()) - 1 for path in tmp_path.glob("*.csv")}
    assert (counts["pooled"], counts["test"]) == (486, 254)
    assert [counts[name] for name in ("cleveland", "hungarian", "switzerland", "va")] == [199, 172, 30, 85]
