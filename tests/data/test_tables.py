"""Tables as sources: columns by name, one scale for all sites, and what cannot be is refused by name."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fedfuse.data import Natural, load, partition
from fedfuse.data.tables import Kind, RawTable, TableMoments, encode_table, read_table
from fedfuse.errors import ConfigError
from fedfuse.tasks import BINARY, CLASSIFICATION, MULTILABEL, REGRESSION

HEADER = ["age", "sex", "pain", "site", "ill", "cost"]
DRAW = random.Random(0)
LINES = [
    [
        "?" if row % 7 == 0 else str(40 + row % 30),
        "fm"[row % 2],
        "" if row in (3, 4, 5, 8) else str(float(row % 3)),
        f"s{row % 4}",
        "yes" if (row * 7) % 10 > 4 else "no",
        f"{DRAW.random():.3f}",
    ]
    for row in range(60)
]


def write(path: Path, header: list[str] = HEADER, lines: list[list[str]] = LINES) -> str:
    path.write_text("\n".join(",".join(line) for line in [header, *lines]) + "\n")
    return str(path)


OPTIONS = {"target": "ill", "categorical": ["pain"], "client": "site", "drop": ["cost"]}


def test_a_csv_is_a_source(tmp_path: Path) -> None:
    found = load(write(tmp_path / "a.csv"), options=OPTIONS, task=BINARY)
    assert (len(found.train), len(found.test), found.classes) == (48, 12, ("no", "yes"))
    assert found.features == ("age", "age missing", "pain=1", "pain=2", "pain missing", "sex=m")
    ages = found.train.x[found.train.x[:, 1] == 0, 0]
    assert float(ages.mean()) == pytest.approx(0, abs=1e-5)
    assert float(ages.std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert set(found.train.x[found.train.x[:, 1] == 1, 0].tolist()) == {0.0}  # the mean stands for what is missing
    assert sorted(set(found.owners)) == ["s0", "s1", "s2", "s3"]
    parts = partition(found.labels(), Natural(), 1, 0, owners=found.owners).clients
    assert {found.owners[i] for i in parts["s2"].tolist()} == {"s2"}


def test_the_order_of_columns_does_not_matter(tmp_path: Path) -> None:
    order = [4, 2, 5, 0, 3, 1]
    turned = write(tmp_path / "b.csv", [HEADER[i] for i in order], [[line[i] for i in order] for line in LINES])
    a, b = (load(source, options=OPTIONS) for source in (write(tmp_path / "a.csv"), turned))
    assert a.features == b.features
    assert torch.equal(a.train.x, b.train.x)


def test_parquet_is_the_same_table(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    source = write(tmp_path / "a.csv")
    pandas.read_csv(source, na_values="?").to_parquet(tmp_path / "a.parquet")
    a, b = (load(str(path), options=OPTIONS) for path in (source, tmp_path / "a.parquet"))
    assert torch.equal(a.train.x, b.train.x)
    assert torch.equal(a.test.y, b.test.y)


def test_without_pyarrow_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"install pyarrow: pip install 'fedfuse\[tables\]'"):
        read_table(tmp_path / "a.parquet")


def test_numbers_and_several_labels_are_targets(tmp_path: Path) -> None:
    source = write(tmp_path / "a.csv")
    cost = load(source, options={"target": "cost", "drop": ["ill", "site"]}, task=REGRESSION)
    assert (cost.train.y.dtype, cost.train.y.ndim, cost.classes) == (torch.float32, 1, ("cost",))
    lines = [[*line, str(row % 2), str(row % 3 % 2)] for row, line in enumerate(LINES)]
    both = write(tmp_path / "b.csv", [*HEADER, "p", "q"], lines)
    labels = load(both, options={"target": ["p", "q"], "drop": ["ill", "site", "cost"]}, task=MULTILABEL)
    assert (tuple(labels.train.y.shape[1:]), labels.classes) == ((2,), ("p", "q"))


def test_summed_moments_are_the_pooled_ones(tmp_path: Path) -> None:
    table, names = read_table(Path(write(tmp_path / "a.csv"))), ["age", "sex", "pain"]
    kinds: dict[str, Kind] = {"pain": "categorical"}
    whole = TableMoments.of(table, names, kinds)
    parts = [TableMoments.of(table.take(rows), names, kinds) for rows in (range(5), range(5, 31), range(31, 60))]
    summed = sum(parts[1:], parts[0])
    for ours, theirs in zip(summed.form().columns, whole.form().columns, strict=True):
        assert ours.model_dump(exclude={"mean", "std"}) == theirs.model_dump(exclude={"mean", "std"})
    ages = table.numbers("age")
    column = next(c for c in summed.form().columns if c.name == "age")
    assert (column.mean, column.std) == pytest.approx((np.nanmean(ages), np.nanstd(ages)))  # type: ignore[union-attr]


def test_columns_that_differ_between_sites_are_refused_by_name() -> None:
    a, b, c = ({"age": ["1", "2"]}, {"age": ["old", "2"]}, {"years": ["1"]})
    first, other, third = (TableMoments.of(RawTable("x", t), list(t)) for t in (a, b, c))
    with pytest.raises(ConfigError, match="'age' is numeric at one site and categorical at another"):
        first + other
    with pytest.raises(ConfigError, match="column 'age' is in one site's moments"):
        first + third
    form = first.form()
    with pytest.raises(ConfigError, match="has no column 'age'"):
        encode_table(form, RawTable("b.csv", c))
    with pytest.raises(ConfigError, match="column 'age' holds 'old' in row 1, expected numbers"):
        encode_table(form, RawTable("b.csv", b))
    levels = TableMoments.of(RawTable("x", {"sex": ["f", "m"]}), ["sex"]).form()
    with pytest.raises(ConfigError, match="column 'sex' holds 'x' in row 1, expected one of f, m"):
        encode_table(levels, RawTable("b.csv", {"sex": ["x"]}))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "say which column is to be predicted"),
        ({"target": "il"}, "has no column 'il'; did you mean 'ill'"),
        ({"target": "ill", "colums": ["age"]}, "option 'colums' is unknown"),
        ({"target": ["ill", "sex"]}, "2 target columns came"),
        ({"target": "ill", "test_fraction": "half"}, "test_fraction is 'half'"),
        ({"target": "ill", "drop": 3}, "drop is 3"),
    ],
)
def test_bad_options_are_told(tmp_path: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(write(tmp_path / "a.csv"), options=options)


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "has no rows"), ("a,a\n1,2\n", "stands there twice"), ("a,b\n1\n", "row 1 has 1 values")],
)
def test_files_that_are_no_tables_are_told(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_table(tmp_path / "a.csv")


def test_rows_with_something_missing_can_be_dropped(tmp_path: Path) -> None:
    found = load(write(tmp_path / "a.csv"), options={**OPTIONS, "missing": "drop"}, task=CLASSIFICATION)
    assert len(found.train) + len(found.test) == 60 - 9 - 4
    assert "age missing" not in found.features


def test_natural_owners_must_be_known() -> None:
    with pytest.raises(ConfigError, match="does not say where that is"):
        partition(torch.zeros(4, dtype=torch.int64), Natural(), 2, 0)


@pytest.mark.paper
def test_the_four_hospitals_have_flambys_rows(real_data: Path) -> None:
    found = load("heart-disease", task=BINARY)
    assert {o: found.owners.count(o) for o in sorted(set(found.owners))} == {
        "cleveland": 199,
        "hungarian": 172,
        "switzerland": 30,
        "va": 85,
    }
    assert (len(found.test), len(found.features)) == (254, 13)
