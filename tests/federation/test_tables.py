"""Tables of people: from columns that are agreed on to a model that answers, for every task, with every mistake."""

from __future__ import annotations

import csv
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.builders import ok, refused
from tests.conftest import Fedfuse

from fedfuse.core.inputs import CategoricalColumn, NumericColumn, TableForm, TargetColumn
from fedfuse.core.metadata import About
from fedfuse.core.model import Single
from fedfuse.core.spec import Spec
from fedfuse.data.tables import MISSING
from fedfuse.federation.agreement import FederationFolder, read_federation
from fedfuse.federation.create import create_federation
from fedfuse.federation.fusion import fuse_files
from fedfuse.federation.moments import TableAgreement, add_moments, moments_by_federation, scale_by_moments
from fedfuse.federation.site import update_by_federation
from fedfuse.wire.codec import read
from fedfuse.wire.codec import write as write_file
from fedfuse.wire.files import save_model

COLUMNS = "age[years],chol[mg/dl],sex:f|m,pain:1|2|3"
TASKS = {
    "binary": ("--target", "ill", "--classes", "healthy,ill"),
    "classification": ("--target", "stage", "--classes", "I,II,III"),
    "regression": ("--target", "cost[EUR]"),
    "multilabel": ("--target", "fever,cough"),
}
Row = dict[str, str]
Tables = Callable[..., Path]


def people(count: int, seed: int, older: float = 0.0) -> list[Row]:
    """Patients of whom age, sex and cholesterol tell most; some cholesterol is missing."""
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        age, chol, male, pain = draw.normal(55 + older, 10), draw.normal(240, 50), draw.random() < 0.5, draw.integers(3)
        risk = (age - 55) / 10 + male + 0.01 * (chol - 240) + 0.5 * (pain == 2) - 0.5 + draw.normal(0, 0.3)
        rows.append(
            {
                "age": f"{age:.1f}",
                "chol": "" if draw.random() < 0.1 else f"{chol:.0f}",
                "sex": "m" if male else "f",
                "pain": str(pain + 1),
                "ill": "ill" if risk > 0 else "healthy",
                "stage": ("I", "II", "III")[int(risk > -0.5) + int(risk > 0.8)],
                "cost": f"{1000 + 300 * risk:.1f}",
                "fever": str(int(risk > 0.3)),
                "cough": str(int(age > 55)),
            }
        )
    return rows


def write(path: Path, rows: Sequence[Row], order: Sequence[str] = ()) -> Path:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, order or list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    return path


@pytest.fixture
def hospitals(fedfuse: Fedfuse, tmp_path: Path) -> Path:
    """Three tables, of which one has its columns in another order, and one to test on."""
    rows = people(60, 2, 5.0)
    write(tmp_path / "b.csv", rows, sorted(rows[0], reverse=True))
    for name, count, seed, older in (("a", 80, 1, 0.0), ("c", 50, 3, -8.0), ("test", 90, 4, 0.0)):
        write(tmp_path / f"{name}.csv", people(count, seed, older))
    return tmp_path


def prepare(fedfuse: Fedfuse, task: str, method: str = "fedavg", *words: str) -> None:
    """A federation with a common scale."""
    sets = ("model.hidden=[6]", "local.epochs=8", "local.optimizer.lr=0.1")
    more = (word for text in sets for word in ("--set", text))
    ok(fedfuse("init", "fed", "--task", task, *TASKS[task], "--columns", COLUMNS, "--method", method, *more, *words))
    for site in "abc":
        ok(fedfuse("moments", "--federation", "fed", "--data", f"{site}.csv", "-o", f"{site}.moments"))
    ok(fedfuse("scale", "fed", *(f"{site}.moments" for site in "abc")))


def fuse(fedfuse: Fedfuse) -> None:
    for site in "abc":
        ok(fedfuse("update", "--federation", "fed", "--data", f"{site}.csv", "-o", f"{site}.safetensors"))
    files = [f"{site}.safetensors" for site in "abc"]
    assert "3 of 3 updates" in ok(fedfuse("fuse", *files, "--federation", "fed", "-o", "all.safetensors")).out


@pytest.mark.usefixtures("hospitals")
@pytest.mark.parametrize(
    ("task", "method", "score", "least"),
    [
        ("binary", "fedlpa", "auroc", 0.85),
        ("classification", "ensemble", "accuracy", 0.5),
        ("regression", "fedavg", "r2", 0.6),
        ("multilabel", "laplace", "auroc", 0.85),
        ("binary", "ridge", "auroc", 0.85),
        ("multilabel", "ridge", "auroc", 0.85),
        ("regression", "ridge", "r2", 0.6),
    ],
)
def test_from_columns_to_answers(fedfuse: Fedfuse, task: str, method: str, score: str, least: float) -> None:
    prepare(fedfuse, task, method)
    fuse(fedfuse)
    scores = json.loads(ok(fedfuse("evaluate", "all.safetensors", "--data", "test.csv", "--json")).out)
    assert scores["all.safetensors"]["rows"] == 90
    assert scores["all.safetensors"][score] > least
    ok(fedfuse("predict", "all.safetensors", "--data", "test.csv", "-o", "p.csv"))
    with Path("p.csv").open(newline="") as file:
        answers = list(csv.DictReader(file))
    truth = people(90, 4)
    assert len(answers) == 90
    if task == "regression":
        errors = [float(a["cost [EUR]"]) - float(t["cost"]) for a, t in zip(answers, truth, strict=True)]
        assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(scores["all.safetensors"]["rmse"], rel=1e-5)
        assert scores["all.safetensors"]["units"] == ["EUR"]
    elif task == "binary":
        right = [a["predicted"] == t["ill"] for a, t in zip(answers, truth, strict=True)]
        assert np.mean(right) == pytest.approx(scores["all.safetensors"]["accuracy"])
    elif task == "multilabel":
        named = [("fever" in a["predicted"]) == (t["fever"] == "1") for a, t in zip(answers, truth, strict=True)]
        assert np.mean(named) == pytest.approx(scores["all.safetensors"]["per_class"][0])
    else:
        assert {a["answered"] for a in answers} == {"a; b; c"}
    shown = ok(fedfuse("show", "all.safetensors", "--card", "card.md")).out
    assert "table of age [years], chol [mg/dl], sex (f|m), pain (1|2|3); predicts" in shown
    assert r"| chol \[mg/dl\] |" in Path("card.md").read_text()


def test_the_scale_is_that_of_the_pooled_rows(fedfuse: Fedfuse, hospitals: Path) -> None:
    prepare(fedfuse, "regression")
    rows = [row for name, *how in (("a", 80, 1, 0.0), ("b", 60, 2, 5.0), ("c", 50, 3, -8.0)) for row in people(*how)]
    age, chol, sex, pain = read_federation(hospitals / "fed").agreement.inputs.columns  # type: ignore[union-attr]
    target = read_federation(hospitals / "fed").agreement.inputs.targets[0]  # type: ignore[union-attr]
    for column, name in ((age, "age"), (chol, "chol"), (target, "cost")):
        values = [float(row[name]) for row in rows if row[name]]
        assert (column.mean, column.std) == pytest.approx((np.mean(values), np.std(values)))
    assert (age.indicator, chol.indicator) == (False, True)
    assert pain.mode == max("321", key=[row["pain"] for row in rows].count)
    assert sex.levels == ("f", "m")


@pytest.mark.usefixtures("hospitals")
def test_moments_hold_sums_and_say_what_they_reveal(fedfuse: Fedfuse) -> None:
    ok(fedfuse("init", "fed", "--task", "binary", *TASKS["binary"], "--columns", COLUMNS))
    said = ok(fedfuse("moments", "--federation", "fed", "--data", "a.csv", "-o", "a.moments"))
    assert (
        "it reveals: that there are 80 rows, and in how many each column is missing; mean and variance of" in said.out
    )
    told = json.loads(Path("a.moments").read_text())
    ages = [float(row["age"]) for row in people(80, 1)]
    assert told["columns"]["age"] == {
        "kind": "numeric",
        "count": 80,
        "missing": 0,
        "total": pytest.approx(sum(ages)),
        "square": pytest.approx(sum(a * a for a in ages)),
    }
    assert told["columns"].keys() == {"age", "chol", "sex", "pain"}, "nothing of other columns, nor of the target"
    write(Path("few.csv"), people(8, 1))
    refused(
        fedfuse("moments", "--federation", "fed", "--data", "few.csv", "-o", "few.moments"),
        "few.csv has 8 rows with a target, expected at least 10",
    )
    write(Path("rare.csv"), [row | {"pain": "1"} for row in people(20, 1)] + [people(1, 2)[0] | {"pain": "3"}])
    said = ok(fedfuse("moments", "--federation", "fed", "--data", "rare.csv", "-o", "rare.moments"))
    assert "a category of few rows points at persons: pain = 3 (1 row)" in said.err


@pytest.mark.usefixtures("hospitals")
def test_before_the_scale_is_there_nobody_trains_and_it_is_given_once(fedfuse: Fedfuse) -> None:
    prepare(fedfuse, "binary")
    refused(fedfuse("scale", "fed", "a.moments"), "fed does not wait for moments")
    ok(fedfuse("init", "draft", "--task", "binary", *TASKS["binary"], "--columns", COLUMNS))
    words = ("update", "--federation", "draft", "--data", "a.csv", "-o", "a.safetensors")
    refused(fedfuse(*words), "no common scale yet", "`fedfuse scale`")
    refused(fedfuse("scale", "draft", "a.moments", "a.moments"), "the site 'a' stands there twice")
    text = json.loads(Path("a.moments").read_text())
    text["columns"]["age"]["square"] = 1.0
    text |= {"format": 1}
    del text["sha256"]  # a liar's file has none
    Path("lie.moments").write_text(json.dumps(text))
    refused(fedfuse("scale", "draft", "lie.moments"), "lie.moments.columns.age", "which no numbers have")
    Path("none.moments").write_text("[1")
    refused(fedfuse("scale", "draft", "none.moments"), "none.moments is no file of moments")
    ok(fedfuse("moments", "--target", "cost", "--task", "regression", "--data", "a.csv", "-o", "r.moments"))
    refused(fedfuse("scale", "draft", "r.moments"), "the moments are for regression of cost, expected binary of ill")


@pytest.mark.usefixtures("hospitals")
def test_init_takes_everything_from_moments(fedfuse: Fedfuse) -> None:
    """Where nothing is agreed on yet: columns, kinds, classes and scale are what the sites' sums tell."""
    for site in "abc":
        columns = ("--columns", "age,chol,sex:f|m")
        ok(fedfuse("moments", "--data", f"{site}.csv", "--target", "ill", *columns, "-o", f"{site}.moments"))
    ok(fedfuse("init", "fed", "--moments", "a.moments", "b.moments", "c.moments", "--set", "local.epochs=2"))
    agreed = read_federation(Path("fed")).agreement
    assert (agreed.task, agreed.classes, agreed.model.name) == ("classification", ("healthy", "ill"), "mlp")
    assert [column.name for column in agreed.inputs.columns] == ["age", "chol", "sex"]  # type: ignore[union-attr]
    ok(fedfuse("update", "--federation", "fed", "--data", "a.csv", "-o", "a.safetensors"))
    refused(fedfuse("init", "other", "a.moments"), "name files of moments after --moments")


@pytest.mark.usefixtures("hospitals")
def test_another_unit_is_noticed(fedfuse: Fedfuse) -> None:
    prepare(fedfuse, "binary")
    heading = [{("chol [mmol/l]" if k == "chol" else k): v for k, v in row.items()} for row in people(40, 6)]
    write(Path("d.csv"), heading)
    for command in (("update", "-o", "d.safetensors"), ("moments", "-o", "d.moments")):
        said = fedfuse(command[0], "--federation", "fed", "--data", "d.csv", *command[1:])
        refused(said, "d.csv: column 'chol' is in mmol/l, expected mg/dl; convert it first")
    silent = [row | {"chol": row["chol"] and f"{float(row['chol']) / 38.67:.2f}"} for row in people(40, 6)]
    write(Path("d.csv"), silent)
    said = ok(fedfuse("update", "--federation", "fed", "--data", "d.csv", "-o", "d.safetensors"))
    assert "d.csv: column 'chol' has mean 6." in said.err
    assert "another unit" in said.err
    ok(fedfuse("moments", "--federation", "fed", "--data", "d.csv", "-o", "d.moments"))
    warned = add_moments([Path(f"{site}.moments") for site in "abcd"]).warnings
    assert [warning.partition(" has ")[0] for warning in warned] == ["column 'chol'"]
    assert "at d and 2" in warned[0]


@pytest.mark.parametrize(
    ("column", "row", "value", "words"),
    [
        ("age", 2, "old", "d.csv: column 'age' holds 'old' in row 3, expected numbers"),
        ("sex", 0, "x", "d.csv: column 'sex' holds 'x' in row 1, expected one of f, m"),
        ("ill", 4, "il", "d.csv: column 'ill' holds 'il' in row 5, expected one of healthy, ill; did you mean 'ill'?"),
    ],
)
@pytest.mark.usefixtures("hospitals")
def test_what_does_not_fit_is_told_by_file_column_and_row(
    fedfuse: Fedfuse, column: str, row: int, value: str, words: str
) -> None:
    ok(fedfuse("init", "fed", "--task", "binary", *TASKS["binary"], "--columns", COLUMNS, "--unscaled"))
    rows = people(20, 5)
    rows[row][column] = value
    write(Path("d.csv"), rows)
    refused(fedfuse("update", "--federation", "fed", "--data", "d.csv", "-o", "d.safetensors"), words)


@pytest.mark.usefixtures("hospitals")
def test_columns_and_rows_that_are_too_few_or_too_many(fedfuse: Fedfuse) -> None:
    ok(fedfuse("init", "fed", "--task", "binary", *TASKS["binary"], "--columns", COLUMNS, "--unscaled"))
    words = ("update", "--federation", "fed", "--data", "d.csv", "-o", "d.safetensors")
    write(Path("d.csv"), [{k: v for k, v in row.items() if k != "chol"} for row in people(20, 5)])
    refused(fedfuse(*words), "d.csv has no column 'chol'", "it has age, sex, pain")
    rows = [row | {"name": "somebody"} for row in people(20, 5)]
    rows[3]["ill"] = rows[7]["ill"] = ""
    write(Path("d.csv"), rows)
    said = ok(fedfuse(*words, "--json"))
    assert json.loads(said.out)["examples"] == 18
    assert json.loads(said.out)["warnings"][:2] == [
        "d.csv has columns that are not read: stage, cost, fever, cough, name",
        "2 rows of d.csv without a target were left out",
    ]
    write(Path("d.csv"), [row | {"fever": "2"} for row in people(20, 5)])
    ok(fedfuse("init", "labels", "--task", "multilabel", *TASKS["multilabel"], "--columns", COLUMNS, "--unscaled"))
    said = fedfuse("update", "--federation", "labels", "--data", "d.csv", "-o", "d.safetensors")
    refused(said, "label 'fever' is 2 in row 1, expected 0 or 1")
    refused(
        fedfuse("update", "--data", "a.csv", "-o", "a.safetensors"), "say which column is to be predicted: --target"
    )
    refused(fedfuse("init", "x", "--task", "guess", "--columns", "age"), "--task is 'guess', expected one of")
    refused(fedfuse("init", "x", "--columns", "sex:f|", "--target", "ill"), "'sex:f|' is no column")
    refused(fedfuse("init", "x", "--columns", "age", "--target", "age", "--classes", "a,b"), "'age' stands there twice")
    refused(fedfuse("init", "x", "--columns", "age", "--target", "ill"), "the classes of 'ill' are not named")
    named = [row | {"name": f"patient {k}"} for k, row in enumerate(people(40, 5))]
    write(Path("d.csv"), named)
    for command in (("init", "x"), ("moments", "-o", "d.moments"), ("update", "-o", "d.safetensors")):
        said = fedfuse(*command, "--data", "d.csv", "--target", "ill")
        refused(said, "d.csv: column 'name' has another word in every row", "--columns")
    said = fedfuse("init", "x", "--columns", "age", "--target", "ill,b", "--task", "regression", "--method", "ams")
    assert said.code == 2
    assert "task is regression; use another method" in said.err


@pytest.mark.usefixtures("hospitals")
def test_without_a_folder_by_flags(fedfuse: Fedfuse) -> None:
    flags = ("--task", "binary", "--target", "ill", "--columns", "age,chol,sex:f|m")
    for site in "abc":
        ok(fedfuse("moments", "--data", f"{site}.csv", *flags, "-o", f"{site}.moments"))
    sums = [word for site in "abc" for word in ("--moments", f"{site}.moments")]
    for site in "abc":
        words = ("--set", "local.epochs=3", "-o", f"{site}.safetensors")
        ok(fedfuse("update", "--data", f"{site}.csv", *flags, *sums, *words))
    ok(fedfuse("fuse", *(f"{site}.safetensors" for site in "abc"), "-o", "all.safetensors"))
    by_file = json.loads(ok(fedfuse("evaluate", "all.safetensors", "--data", "test.csv", "--json")).out)
    ok(fedfuse("export", "all.safetensors", "--to", "state-dict", "-o", "plain.safetensors"))
    said = ok(fedfuse("update", "--data", "a.csv", *flags, "--set", "local.epochs=1", "-o", "own.safetensors"))
    assert "columns are scaled by the rows of a.csv themselves" in said.err.replace(str(Path.cwd()) + "/", "")
    said = fedfuse("fuse", "a.safetensors", "b.safetensors", "own.safetensors", "-o", "x.safetensors")
    assert "refused own: the form of inputs is a table whose" in said.err
    bare = read(Path("all.safetensors"))
    write_file(Path("bare.safetensors"), bare.tensors, {k: bare.header[k] for k in ("kind", "spec")})
    by_flags = ok(fedfuse("evaluate", "bare.safetensors", "--data", "test.csv", *flags, *sums, "--json"))
    assert json.loads(by_flags.out)["bare.safetensors"]["auroc"] == by_file["all.safetensors"]["auroc"]
    ok(fedfuse("predict", "bare.safetensors", "--data", "test.csv", *flags, *sums, "-o", "p.csv"))
    assert Path("p.csv").read_text().startswith("row,predicted,p(0),p(1),entropy\n")


@pytest.mark.usefixtures("hospitals")
def test_scores_by_site(fedfuse: Fedfuse) -> None:
    prepare(fedfuse, "regression")
    fuse(fedfuse)
    data = [word for site in "abc" for word in ("--data", f"{site}.csv")]
    told = json.loads(ok(fedfuse("evaluate", "all.safetensors", "a.safetensors", *data, "--json")).out)
    assert {site: each["all.safetensors"]["rows"] for site, each in told.items()} == {
        "a.csv": 80,
        "b.csv": 60,
        "c.csv": 50,
    }
    shown = ok(fedfuse("evaluate", "all.safetensors", "a.safetensors", *data)).out
    assert shown.splitlines()[0].split() == ["rows", "of", "model", "rows", "RMSE", "MAE", "R²"]
    assert shown.count("a.safetensors") == 3


@pytest.fixture
def agreed(tmp_path: Path) -> FederationFolder:
    """A federation of tables scaled by two sites."""
    folder, columns = tmp_path / "agreed", tuple(COLUMNS.split(","))
    sets = ["model.hidden=[4]", "local.epochs=2", "local.batch_size=8"]
    table = TableAgreement(("ill",), columns)
    create_federation(folder, None, "fedlpa", task="binary", table=table, classes=["healthy", "ill"], sets=sets)
    files = []
    for name, seed in (("a", 1), ("b", 2)):
        source = write(tmp_path / f"{name}.csv", people(20, seed))
        files.append(
            moments_by_federation(read_federation(folder), str(source), name).save(tmp_path / f"{name}.moments")
        )
    turned, _ = scale_by_moments(read_federation(folder), files[::-1])
    assert turned.agreement == read_federation(folder).agreement
    return turned


@given(st.permutations(list(people(1, 0)[0])), st.integers(0, 3))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_order_of_a_sites_columns_never_changes_the_fused_answers(
    agreed: FederationFolder, tmp_path: Path, order: list[str], seed: int
) -> None:
    rows, fused = people(12, seed), []
    for name, columns in (("same", ()), ("turned", order)):
        source = write(tmp_path / f"{name}.csv", rows, columns)
        moments = moments_by_federation(agreed, str(source), "site")
        made = update_by_federation(agreed, str(source), client="site")
        path = made.update.save(tmp_path / f"{name}.safetensors")
        fused.append((fuse_files([path], federation=agreed).logits(made.site.rows.x), moments))
    assert torch.equal(fused[0][0], fused[1][0])
    assert fused[0][1] == fused[1][1]


@pytest.mark.usefixtures("hospitals")
def test_a_runs_model_reads_another_table(fedfuse: Fedfuse) -> None:
    """A model file of `run` tells the columns and the scale it was trained with."""
    Path("study.toml").write_text(
        'name = "cost"\ntask = "regression"\nrounds = 2\n[data]\nsource = "a.csv"\nclients = 2\n'
        'partition = { kind = "iid" }\noptions = { target = "cost", columns = ["age", "sex", "chol"] }\n'
        '[model]\nname = "mlp"\nhidden = []\n[local]\nepochs = 20\noptimizer = { name = "sgd", lr = 0.1 }\n'
        '[[methods]]\nname = "fedavg"\n'
    )
    ok(fedfuse("run", "study.toml", "--workers", "0", "--out", "run"))
    (model,) = Path("run/models").glob("*.safetensors")
    scores = json.loads(ok(fedfuse("evaluate", model, "--data", "test.csv", "--json")).out)
    assert scores[str(model)]["rows"] == 90
    assert scores[str(model)]["rmse"] < 400
    ok(fedfuse("predict", model, "--data", "test.csv", "-o", "p.csv"))
    assert Path("p.csv").read_text().startswith("row,cost\n")


# export: raw rows into another program's hands, the answers of `predict` out of it


def asked_of_onnx(path: str, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """What onnxruntime makes of a table's raw rows, column by column, by the words of the graph itself."""
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    told = session.get_modelmeta().custom_metadata_map
    assert json.loads(told["columns"]) == [column.name for column in session.get_inputs()]
    given = {}
    for column in session.get_inputs():
        words = [row[column.name] for row in rows]
        as_numbers = column.type == "tensor(double)"
        values = [float(w) if w.lower() not in MISSING else np.nan for w in words] if as_numbers else words
        given[column.name] = np.array(values, dtype=np.float64 if as_numbers else object)[:, None]
    names = [output.name for output in session.get_outputs()]
    found = zip(names, session.run(names, given), strict=True)
    return {name: torch.from_numpy(values).double() for name, values in found}


def told_by_predict(fedfuse: Fedfuse, table: str) -> torch.Tensor:
    """The probabilities or numbers of `fedfuse predict`, row by row."""
    ok(fedfuse("predict", "all.safetensors", "--data", table, "-o", "p.csv"))
    with Path("p.csv").open(newline="") as file:
        head, *lines = list(csv.reader(file))
    places = [k for k, name in enumerate(head) if name.startswith("p(")] or [
        k for k, name in enumerate(head) if name not in ("row", "predicted", "entropy", "answered")
    ]
    return torch.tensor([[float(line[k]) for k in places] for line in lines], dtype=torch.float64)


@pytest.mark.usefixtures("hospitals")
@pytest.mark.parametrize(
    ("task", "method"),
    [
        ("binary", "fedlpa"),
        ("classification", "fedavg"),
        ("classification", "ensemble"),
        ("regression", "fedavg"),
        ("regression", "ensemble"),
        ("multilabel", "laplace"),
    ],
)
def test_onnx_takes_raw_rows_and_gives_the_answers_of_predict(fedfuse: Fedfuse, task: str, method: str) -> None:
    prepare(fedfuse, task, method)
    fuse(fedfuse)
    ok(fedfuse("export", "all.safetensors", "--to", "onnx", "-o", "all.onnx"))
    spelt = {
        "age": ["NaN", "?", "61"],
        "chol": ["n/a", "None", ""],
        "sex": ["", "Null", "m"],
        "pain": ["2.0", "NA", "3"],
    }
    rows = people(60, 4)
    for place, (name, words) in enumerate(spelt.items()):
        for k, word in enumerate(words):
            rows[3 * place + k][name] = word
    write(Path("odd.csv"), rows)
    expected, found = told_by_predict(fedfuse, "odd.csv"), asked_of_onnx("all.onnx", rows)
    wanted = "numbers" if task == "regression" else "probabilities"
    assert found.keys() == {wanted} if task == "regression" else {wanted, "logits"}
    assert found[wanted].shape == expected.shape
    assert torch.allclose(found[wanted], expected, rtol=1e-6, atol=1e-5)
    (alone,) = asked_of_onnx("all.onnx", rows[:1])[wanted]
    assert torch.allclose(alone, expected[0], rtol=1e-6, atol=1e-5)
    note = json.loads(Path("all.onnx.json").read_text())
    assert note["normalizes"]
    assert (note["task"], note["columns"]) == (task, ["age", "chol", "sex", "pain"])
    assert note["units"] == {"age": "years", "chol": "mg/dl"}
    assert note["reads"]["chol"] == "float64, n × 1, in mg/dl; NaN where it is missing"
    assert note["reads"]["pain"] == "text, n × 1: 1, 2, 3; empty where it is missing"
    if task == "regression":
        assert note["gives"] == {"numbers": "cost [EUR]"}
    onnx = pytest.importorskip("onnx")
    graph = onnx.load("all.onnx")
    onnx.checker.check_model(graph, full_check=True)
    assert {prop.key: prop.value for prop in graph.metadata_props}["task"] == task


@pytest.mark.usefixtures("hospitals")
def test_what_predict_refuses_has_no_answer_in_onnx(fedfuse: Fedfuse) -> None:
    """A graph cannot complain; a wrong answer would be worse than none."""
    prepare(fedfuse, "binary")
    fuse(fedfuse)
    ok(fedfuse("export", "all.safetensors", "--to", "onnx", "-o", "all.onnx"))
    rows = people(7, 4)
    write(Path("good.csv"), rows)
    expected = told_by_predict(fedfuse, "good.csv")
    odd = [rows[0] | {"sex": "M"}, rows[1] | {"pain": "4"}, rows[2] | {"age": "inf"}, rows[3] | {"pain": "unknown"}]
    for k, row in enumerate(odd):
        write(Path("odd.csv"), [row])
        refused(
            fedfuse("predict", "all.safetensors", "--data", "odd.csv", "-o", "p.csv"), "odd.csv: column", "in row 1"
        )
        assert asked_of_onnx("all.onnx", [row])["probabilities"].isnan().all(), odd[k]
    found = asked_of_onnx("all.onnx", [*odd, *rows[4:]])["probabilities"]
    assert found[:4].isnan().all()
    assert torch.allclose(found[4:], expected[4:], atol=1e-5)


def of_table(path: str, columns: Sequence[NumericColumn | CategoricalColumn]) -> None:
    """A model's file for a table of these columns, its weights drawn."""
    form = TableForm(columns=tuple(columns), scale="moments", targets=(TargetColumn(name="stage"),))
    spec = Spec("mlp", {"inputs": len(form.features), "hidden": [8], "classes": 3})
    torch.manual_seed(0)
    save_model(Single.of(spec.build(), spec), Path(path), about=About(class_names=("I", "II", "III"), inputs=form))
    return form


@pytest.mark.usefixtures("hospitals")
def test_columns_may_be_called_and_scaled_as_they_like(fedfuse: Fedfuse) -> None:
    names = ("where", "fedfuse:where", "linear", "chest pain (type)", "rows", "Größe")
    seconds = NumericColumn(name="seen", unit="s", mean=1.7e9, std=50.0, indicator=True)
    words = CategoricalColumn(name="word", levels=("b", "none at all", "10"), mode="10", indicator=True)
    plain = CategoricalColumn(name="plain", levels=("x", "y"))
    of_table("all.safetensors", [*(NumericColumn(name=name) for name in names), seconds, words, plain])
    draw = np.random.default_rng(0)
    rows = [
        {name: f"{draw.normal():.3f}" for name in names}
        | {"seen": "" if k % 4 == 0 else f"{1.7e9 + draw.normal() * 50:.2f}"}
        | {"word": ("b", "none at all", "10", "10.0", "")[k % 5], "plain": ("x", "y", "")[k % 3]}
        for k in range(20)
    ]
    write(Path("all.csv"), rows)
    ok(fedfuse("export", "all.safetensors", "--to", "onnx", "-o", "all.onnx"))
    expected = told_by_predict(fedfuse, "all.csv")
    assert torch.allclose(asked_of_onnx("all.onnx", rows)["probabilities"], expected, atol=2e-6)
    of_table("all.safetensors", [NumericColumn(name="probabilities")])
    said = fedfuse("export", "all.safetensors", "--to", "onnx", "-o", "x.onnx")
    refused(said, "an output of the graph is called 'probabilities' as a column is")
    assert not Path("x.onnx").exists()


@pytest.mark.usefixtures("hospitals")
def test_torchscript_takes_raw_rows_too_with_categories_by_their_places(fedfuse: Fedfuse) -> None:
    prepare(fedfuse, "classification")
    fuse(fedfuse)
    ok(fedfuse("export", "all.safetensors", "--to", "torchscript", "-o", "all.pt"))
    rows = [*people(20, 4), people(1, 5)[0] | {"age": "", "sex": "", "pain": "", "chol": ""}]
    write(Path("odd.csv"), rows)
    order = {"sex": "fm", "pain": "123"}
    numbers = [
        [
            np.nan if not w else order[c].index(w) if c in order else float(w)
            for c in ("age", "chol", "sex", "pain")
            for w in (row[c],)
        ]
        for row in rows
    ]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is old
        logits = torch.jit.load("all.pt")(torch.tensor(numbers, dtype=torch.float64))
        assert torch.jit.load("all.pt")(torch.tensor([[50.0, 200.0, 2.0, 0.0]]).double()).isnan().all()
    assert torch.allclose(logits.softmax(-1).double(), told_by_predict(fedfuse, "odd.csv"), atol=1e-5)
    note = json.loads(Path("all.pt.json").read_text())
    assert note["gives"] == {"logits": "before they become probabilities"}
    assert note["reads"]["rows"].startswith("n × 4: float64, a column of `inputs` each, in their order and units")
    assert [column["name"] for column in note["inputs"]["columns"]] == note["columns"]


@pytest.mark.usefixtures("hospitals")
def test_the_note_of_bare_weights_says_that_rows_come_scaled(fedfuse: Fedfuse) -> None:
    of_table("all.safetensors", [NumericColumn(name="age", mean=50, std=10)])
    ok(fedfuse("export", "all.safetensors", "--to", "state-dict", "-o", "weights.safetensors"))
    note = json.loads(Path("weights.safetensors.json").read_text())
    assert not note["normalizes"]
    assert "reads" not in note
    assert note["inputs"]["columns"][0]["mean"] == 50
