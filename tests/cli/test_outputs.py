"""No command destroys what it reads, waits for what never ends, or writes words that run elsewhere."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.builders import refused
from tests.conftest import Fedfuse

import fedfuse as library
from fedfuse.core.escape import markdown_text
from fedfuse.core.inputs import ArrayForm
from fedfuse.core.metadata import About, Contribution
from fedfuse.core.model import Single
from fedfuse.core.spec import Spec
from fedfuse.errors import ConfigError
from fedfuse.wire.files import save_model

RUN = '{"method": "wb", "label": "=wb|<b>", "seed": 0, "round": 1, "accuracy": 0.8}\n'
ROWS = "age,sex,ill\n" + "".join(f"{40 + k}.5,{'fm'[k % 2]},{('no', 'yes')[k % 3 == 0]}\n" for k in range(30))
TABLE = ("--task", "binary", "--target", "ill", "--columns", "age,sex:f|m")


def network() -> Single:
    spec = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": 3})
    torch.manual_seed(0)
    return Single.of(spec.build(), spec)


def save(path: str, names: tuple[str, ...] = ("a", "b", "c"), site: str = "north") -> None:
    sites = (Contribution(client=site, num_examples=30),)
    form = ArrayForm(shape=(4,))
    save_model(network(), Path(path), about=About(method="fedavg", class_names=names, inputs=form, sites=sites))


@pytest.fixture
def here(fedfuse: Fedfuse) -> Fedfuse:
    """Types one command in a folder with models, a table, a federation's folder, moments and a run."""
    save("one.safetensors")
    save("two.safetensors")
    np.savez("rows.npz", x=torch.randn(6, 4).numpy(), y=np.arange(6) % 3)
    Path("mine.csv").write_text(ROWS)
    Path("run").mkdir()
    Path("run/ledger.jsonl").write_text(RUN)
    Path("exp.toml").write_text('name = "exp"\n[[methods]]\nname = "fedavg"\n')
    fed = ("--task", "binary", "--target", "ill", "--classes", "no,yes", "--columns", "age,sex:f|m", "--unscaled")
    for words in (("init", "fed", *fed), ("moments", *TABLE, "--data", "mine.csv", "-o", "a.moments")):
        assert fedfuse(*words).code == 0
    return fedfuse


def contents() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}


WRITES = {
    "predict": ("predict", "one.safetensors", "--data", "rows.npz", "-o"),
    "export": ("export", "one.safetensors", "--to", "state-dict", "-o"),
    "fuse": ("fuse", "one.safetensors", "two.safetensors", "-o"),
    "update": ("update", "--federation", "fed", "--data", "mine.csv", "-o"),
    "evidence": ("evidence", "one.safetensors", "--data", "rows.npz", "-o"),
    "moments": ("moments", *TABLE, "--data", "mine.csv", "-o"),
    "card": ("show", "one.safetensors", "--card"),
    "report": ("report", "run", "-o"),
    "table": ("table", "run", "-o"),
    "plot": ("plot", "run", "-o"),
    "partition": ("partition", "exp.toml", "-o"),
}
INPUTS = {
    "predict": ("one.safetensors", "rows.npz"),
    "export": ("one.safetensors",),
    "fuse": ("one.safetensors", "two.safetensors"),
    "update": ("mine.csv", "fed/w0.safetensors", "fed/federation.toml"),
    "evidence": ("one.safetensors", "rows.npz"),
    "moments": ("mine.csv",),
    "card": ("one.safetensors",),
    "report": ("run/ledger.jsonl",),
    "table": ("run/ledger.jsonl",),
    "plot": ("run/ledger.jsonl",),
    "partition": ("exp.toml",),
}


@pytest.mark.parametrize("verb", WRITES)
def test_no_output_takes_the_place_of_an_input_by_any_name(here: Fedfuse, verb: str) -> None:
    for path in map(Path, INPUTS[verb]):
        Path("soft").symlink_to(path)
        Path("hard").hardlink_to(path)
        before = contents()
        for name in (path, Path.cwd() / path, Path("fed") / ".." / path, "soft", "hard"):
            refused(here(*WRITES[verb], name), "is to be written and is an input too")
        assert contents() == before
        Path("soft").unlink()
        Path("hard").unlink()


@pytest.mark.parametrize("verb", WRITES)
def test_no_output_takes_the_place_of_what_is_no_file(here: Fedfuse, verb: str) -> None:
    os.mkfifo("pipe")
    Path("to-device").symlink_to("/dev/null")
    for name, kind in (("pipe", "a pipe"), ("to-device", "a device"), ("run", "a folder")):
        if (verb, name) != ("fuse", "run"):
            refused(here(*WRITES[verb], name), f"cannot write {name}", kind)
    assert Path("pipe").is_fifo()
    assert Path("to-device").is_symlink()


def test_what_python_writes_takes_the_place_of_files_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    update = library.local_update(network().spec.build(), (x, y), "fedavg", epochs=1)
    fused = library.fuse([update, update], "fedavg", model=network().spec.build())
    saves: tuple[Callable[[Path], object], ...] = (update.save, fused.save)
    for write in saves:
        with pytest.raises(ConfigError, match="is a pipe"):
            write(tmp_path / "pipe")


def test_texts_go_to_standard_output_and_files_do_not(here: Fedfuse) -> None:
    assert here(*WRITES["predict"], "-").out.startswith("row,predicted,p(a),p(b),p(c),entropy\n0,")
    assert here(*WRITES["card"], "-").out.startswith("# one.safetensors\n")
    assert here(*WRITES["report"], "-").out.lower().startswith("<!doctype html>")
    assert here(*WRITES["table"], "-").out.startswith("| method |")
    refused(here(*WRITES["predict"], "-", "--json"), "--json and an output to -")
    for verb in ("export", "fuse", "update", "evidence", "moments", "plot", "partition"):
        refused(here(*WRITES[verb], "-"), "- is standard output, to which this cannot be written")
    refused(here("run", "exp.toml", "--out", "-"), "--out is -")
    refused(here("run", "exp.toml", "--out", "mine.csv"), "--out is mine.csv")
    assert not Path("-").exists()


def test_a_picture_of_the_data_is_an_input_and_other_files_beside_it_are_not(here: Fedfuse) -> None:
    Path("pictures").mkdir()
    for name in ("scan.png", "old.csv"):
        Path("pictures", name).write_bytes(b"")
    words = ("predict", "one.safetensors", "--data", "pictures", "-o")
    refused(here(*words, "pictures/scan.png"), "is an input too")
    assert "input too" not in here(*words, "pictures/old.csv").err


@pytest.mark.parametrize(
    "words",
    [
        ("fuse", "one.safetensors", "pipe", "-o", "all.safetensors"),
        ("fuse", "one.safetensors", "two.safetensors", "--start", "pipe", "-o", "all.safetensors"),
        ("fuse", "pipe.safetensors", "-o", "all.safetensors"),
        ("show", "pipe"),
        ("evaluate", "pipe", "--data", "rows.npz"),
        ("predict", "one.safetensors", "--data", "pipe.npz", "-o", "p.csv"),
        ("predict", "pipe", "--data", "rows.npz", "-o", "p.csv"),
        ("export", "pipe", "--to", "state-dict", "-o", "plain.safetensors"),
        ("evidence", "pipe", "--data", "rows.npz", "-o", "e.safetensors"),
        ("moments", *TABLE, "--data", "pipe.csv", "-o", "b.moments"),
        ("update", "--federation", "pipe", "--data", "mine.csv", "-o", "u.safetensors"),
        ("update", *TABLE, "--data", "mine.csv", "--start", "pipe", "-o", "u.safetensors"),
        ("update", *TABLE, "--data", "mine.csv", "--moments", "pipe", "-o", "u.safetensors"),
        ("init", "new", "--moments", "a.moments", "pipe"),
        ("init", "new", "--task", "language-model", "--characters", "pipe"),
        ("run", "pipe"),
        ("report", "piped"),
    ],
)
def test_an_input_that_never_ends_is_refused_at_once(here: Fedfuse, words: tuple[str, ...]) -> None:
    Path("piped").mkdir()
    for name in ("pipe", "pipe.safetensors", "pipe.csv", "pipe.npz", "piped/ledger.jsonl"):
        os.mkfifo(name)
    refused(here(*words), "a pipe, expected a regular file")


def test_names_are_no_formulas_in_a_spreadsheet(here: Fedfuse) -> None:
    names = ('=HYPERLINK("http://x","y")', "@sum", "-1")
    save("one.safetensors", names)
    assert here(*WRITES["predict"], "p.csv").code == 0
    with Path("p.csv").open(newline="") as file:
        cells = {line["predicted"] for line in csv.DictReader(file)}
    assert cells <= {f"'{names[0]}", f"'{names[1]}", names[2]}, "a plain number is no formula"
    assert here("table", "run", "--format", "csv").out.splitlines()[1].split(",")[1] == "'=wb|<b>"


def test_names_are_neither_html_nor_pictures_in_markdown(here: Fedfuse) -> None:
    hostile = ("<script>alert(1)</script>", "![](http://evil.example/x.png)", "# big | [a]: `b`")
    save("one.safetensors", hostile, site="<img src=x>")
    card = here(*WRITES["card"], "-").out
    for piece in ("<script", "<img", "![", "http://"):
        assert piece not in card, piece
    assert f"2. {markdown_text(hostile[2])}\n" in card
    assert "| =wb\\|&lt;b&gt; |" in here("table", "run").out
