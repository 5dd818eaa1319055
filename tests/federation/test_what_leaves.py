"""What a site writes holds none of its patients' values, whatever stands in their cells."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.builders import ok
from tests.conftest import Fedfuse

from fedfuse.wire.codec import Malformed, read

Row = dict[str, str]

TASKS = {
    "binary": ("--target", "ill", "--classes", "no,yes"),
    "classification": ("--target", "stage", "--classes", "I,II,III"),
    "regression": ("--target", "cost[EUR]"),
    "multilabel": ("--target", "fever,cough"),
}
COLUMNS = "age[years],chol[mg/dl],sex:f|m"
VALUES = ("age", "chol", "cost")


def patients(count: int, seed: int) -> list[Row]:
    """Rows of which every number is another one, with digits enough that no file has it by chance."""
    draw = np.random.default_rng(seed)
    return [
        {
            "age": f"{draw.normal(55, 10):.6f}",
            "chol": f"{draw.normal(240, 50):.6f}",
            "cost": f"{draw.normal(1000, 300):.6f}",
            "sex": "fm"[k % 2],
            "ill": ("no", "yes")[k % 3 == 0],
            "stage": ("I", "II", "III")[k % 3],
            "fever": str(k % 2),
            "cough": str(int(k % 5 < 2)),
        }
        for k in range(count)
    ]


def write(path: str, rows: Sequence[Row]) -> None:
    with Path(path).open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def written() -> set[Path]:
    return {path for path in Path().rglob("*") if path.is_file()}


def numbers_in(path: Path) -> set[float]:
    """Every number of a file's tensors; none where it has no tensors."""
    try:
        tensors = read(path).tensors
    except Malformed:
        return set()
    return {value for name in tensors for value in tensors[name].double().flatten().tolist()}


@pytest.mark.parametrize("task", TASKS)
def test_no_file_of_a_site_holds_a_raw_value(fedfuse: Fedfuse, task: str) -> None:
    rows = {name: patients(40, seed) for seed, name in enumerate("ab")}
    for name, own in rows.items():
        write(f"{name}.csv", own)
    tables, target = written(), ("--target", TASKS[task][1].partition("[")[0])
    short = ("--set", "model.hidden=[4]", "--set", "local.epochs=1")
    ok(fedfuse("init", "fed", "--task", task, *TASKS[task], "--columns", COLUMNS, "--method", "fedlpa", *short))
    for name in rows:
        ok(fedfuse("moments", "--federation", "fed", "--data", f"{name}.csv", "-o", f"{name}.moments"))
    ok(fedfuse("scale", "fed", "a.moments", "b.moments"))
    for name in rows:
        words = ("--federation", "fed", "--data", f"{name}.csv", "-o", f"{name}.safetensors")
        ok(fedfuse("update", *words, "--privacy-ledger", "ledger.json"))
    ok(fedfuse("fuse", "a.safetensors", "b.safetensors", "--federation", "fed", "-o", "all.safetensors"))
    ok(fedfuse("evidence", "all.safetensors", "--method", "fedlpa", "--data", "a.csv", "-o", "evidence.safetensors"))
    ok(fedfuse("evaluate", "all.safetensors", "--data", "a.csv"))
    ok(fedfuse("predict", "all.safetensors", "--data", "a.csv", "-o", "p.csv"))
    ok(fedfuse("export", "all.safetensors", "--to", "state-dict", "-o", "plain.safetensors"))
    ok(fedfuse("show", "all.safetensors", "--card", "card.md"))
    alone = (*target, "--task", task, "--columns", "age,chol,sex:f|m")  # where nothing is agreed on
    ok(fedfuse("moments", *alone, "--data", "a.csv", "-o", "own.moments"))
    ok(fedfuse("update", *alone, "--data", "a.csv", "--set", "local.epochs=1", "-o", "own.safetensors"))
    ok(fedfuse("init", "own", *target, *TASKS[task][2:], "--task", task, "--data", "a.csv", "--normalize"))
    raw = {row[name] for own in rows.values() for row in own for name in VALUES}
    as_numbers = {float(v) for v in raw} | {float(np.float32(v)) for v in raw}
    made = written() - tables
    assert len(made) > 15
    for path in made:
        contents = path.read_bytes()
        assert not [value for value in raw if value.encode() in contents], path
        assert not numbers_in(path) & as_numbers, path


@pytest.mark.parametrize("odd", ["<100", "-", "pending"])
@pytest.mark.parametrize("task", TASKS)
def test_a_word_among_agreed_numbers_is_told_by_its_place_and_nothing_is_written(
    fedfuse: Fedfuse, task: str, odd: str
) -> None:
    rows = patients(40, 0)
    rows[2] = dict.fromkeys(rows[2], "")  # a row without a target counts where rows are numbered
    rows[6]["chol"] = odd
    write("a.csv", rows)
    ok(fedfuse("init", "fed", "--task", task, *TASKS[task], "--columns", COLUMNS))
    before = written()
    said = fedfuse("moments", "--federation", "fed", "--data", "a.csv", "-o", "a.moments")
    assert said.code == 2
    assert f"a.csv: column 'chol' holds {odd!r} in row 7, expected numbers" in said.err
    assert written() == before
    ok(fedfuse("init", "plain", "--task", task, *TASKS[task], "--columns", COLUMNS, "--unscaled"))
    said = fedfuse("update", "--federation", "plain", "--data", "a.csv", "-o", "a.safetensors")
    assert f"a.csv: column 'chol' holds {odd!r} in row 7, expected numbers" in said.err


def test_agreed_numbers_of_a_target_stay_numbers(fedfuse: Fedfuse) -> None:
    rows = patients(40, 0)
    rows[6]["cost"] = "unknown yet"
    write("a.csv", rows)
    ok(fedfuse("init", "fed", "--task", "regression", *TASKS["regression"], "--columns", COLUMNS))
    said = fedfuse("moments", "--federation", "fed", "--data", "a.csv", "-o", "a.moments")
    assert "column 'cost' holds 'unknown yet' in row 7" in said.err
    assert not Path("a.moments").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chol": lambda k, v: "<100" if k == 6 else v}, "column 'chol' holds '<100' in row 7 among numbers"),
        ({"chol": lambda _, v: f"{v} mg"}, "column 'chol' has another word in every row"),
        ({"ward": lambda k, _: f"ward {k // 5}"}, "column 'ward' has 60 different words"),
        ({"note": lambda k, _: "calls at night" if k == 6 else "none known"}, "has 'calls at night' in 1 row"),
        ({"ill": lambda _, v: v, "--target": "age"}, "column 'age' has 300 different words"),
        ({"ill": lambda k, v: "perhaps" if k == 6 else v}, "column 'ill' has 'perhaps' in 1 row"),
        ({"chol": lambda k, v: v if k < 4 else ""}, "column 'chol' has a number in 4 of 300 rows"),
    ],
)
def test_where_nothing_is_agreed_on_cells_name_no_patient(fedfuse: Fedfuse, change: Row, words: str) -> None:
    target = change.pop("--target", "ill")
    rows = [
        row | {name: make(k, row.get(name, "")) for name, make in change.items()}  # type: ignore[operator]
        for k, row in enumerate(patients(300, 0))
    ]
    write("a.csv", rows)
    before = written()
    for command in (("moments", "-o", "a.moments"), ("update", "-o", "a.safetensors"), ("init", "fed", "--normalize")):
        said = fedfuse(*command, "--data", "a.csv", "--target", target)
        assert said.code == 2, command
        assert words in said.err, command
    assert written() == before


def test_categories_that_were_named_may_be_rare_and_no_others_are_told(fedfuse: Fedfuse) -> None:
    rows = patients(40, 0)
    rows[6]["sex"] = "x"
    write("a.csv", rows)
    words = ("moments", "--data", "a.csv", "--target", "ill", "-o", "a.moments", "--columns")
    said = fedfuse(*words, "age,sex:f|m")
    assert said.code == 2
    assert "column 'sex' holds 'x' in row 7, expected one of f, m" in said.err
    assert "sex = x (1 row)" in ok(fedfuse(*words, "age,sex:f|m|x")).err
