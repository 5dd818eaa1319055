"""What a person does with a model's file: show it, ask it, export it."""

from __future__ import annotations

import csv
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.builders import refused
from tests.conftest import Fedfuse

from fedfuse.core.inputs import ArrayForm, PictureForm
from fedfuse.core.metadata import About, Contribution
from fedfuse.core.model import Apart, Model, Single
from fedfuse.core.spec import Spec
from fedfuse.models.bayes import BayesianLayers
from fedfuse.nets.forward import AtLayer
from fedfuse.nets.mixture import ClassShares, Combine, MeanLogit, MeanProbability, Mixture, OpenSetVote, TopLogit
from fedfuse.wire.codec import read, write
from fedfuse.wire.files import load_answering, save_model

NAMES = ("ill", "well", "unsure")
SITES = (Contribution(client="north", num_examples=30), Contribution(client="south", num_examples=1200))
FORM = ArrayForm(shape=(4,), mean=(1.0, 2.0, 3.0, 4.0), std=(2.0, 1.0, 0.5, 4.0))
ABOUT = About(method="fedavg", class_names=NAMES, inputs=FORM, sites=SITES)


@pytest.fixture
def fedfuse(fedfuse: Fedfuse, tmp_path: Path) -> Fedfuse:
    """Types one command in a folder with a model, a mixture, and rows without labels."""
    save_model(network(0), tmp_path / "one.safetensors", about=ABOUT)
    save_model(together(MeanProbability()), tmp_path / "two.safetensors", about=ABOUT)
    np.savez(tmp_path / "rows.npz", x=rows(7).numpy())
    return fedfuse


def network(seed: int, classes: int = 3) -> Single:
    spec = Spec("mlp", {"inputs": 4, "hidden": [5], "classes": classes})
    torch.manual_seed(seed)
    return Single.of(spec.build(), spec)


def together(rule: Combine, classes: int = 3) -> Mixture:
    return Mixture((network(0, classes), network(1, classes)), torch.tensor([0.25, 0.75], dtype=torch.float64), rule)


def rows(count: int) -> torch.Tensor:
    return 3 * torch.randn(count, 4, generator=torch.Generator().manual_seed(5))


def normalize(x: torch.Tensor) -> torch.Tensor:
    return (x - torch.tensor(FORM.mean)) / torch.tensor(FORM.std)


# show


def test_show_tells_what_a_file_is(fedfuse: Fedfuse) -> None:
    told = json.loads(fedfuse("show", "one.safetensors", "--json").out)
    assert told["kind"] == "model"
    assert told["class_names"] == list(NAMES)
    assert told["parameters"] == 4 * 5 + 5 + 5 * 3 + 3
    said = fedfuse("show", "two.safetensors", "--card", "cards/card.md")
    assert "2 networks that answer together" in said.out
    assert "north (30 examples), south (1,200 examples)" in said.out
    card = Path("cards/card.md").read_text()
    assert card.startswith("# two.safetensors\n\n2 networks that answer together, made by `fedavg`.\n")
    assert "\n0. ill\n1. well\n2. unsure\n" in card


def test_show_reads_updates_and_plain_tensors(fedfuse: Fedfuse) -> None:
    write(Path("plain.safetensors"), {"w": torch.ones(2, 3)}, {})
    assert json.loads(fedfuse("show", "plain.safetensors", "--json").out)["kind"] == "plain set of tensors"
    packet = read(Path("one.safetensors"))
    hostile = {"kind": "reply", "client": "a\x1b[2J[/b]|\n# b", "spec": {"factory": "os:system", "options": {}}}
    write(Path("up.safetensors"), {**packet.tensors, "~kron/0/in": torch.ones(3)}, hostile)
    said = fedfuse("show", "up.safetensors", "--card", "card.md")
    assert said.code == 0, "what it names is not imported"
    assert "\x1b" not in said.out
    assert "[/b]" in said.out, "words are no markup"
    assert "os:system()" in said.out
    card = Path("card.md").read_text()
    assert "\n\nAn update of a site.\n" in card
    assert "\n# b" not in card
    assert "kron" in card


def test_show_refuses_what_is_no_such_file(fedfuse: Fedfuse) -> None:
    Path("text.txt").write_text("hello")
    refused(fedfuse("show", "text.txt"), "text.txt cannot be shown")
    refused(fedfuse("show", "nowhere.safetensors"), "nowhere.safetensors")
    refused(fedfuse("show", "one.safetensors", "--card", "./one.safetensors"), "is to be written and is an input too")
    assert read(Path("one.safetensors")).header["kind"] == "model"


# predict


def table(path: str) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def test_predict_writes_the_models_own_answers(fedfuse: Fedfuse) -> None:
    said = fedfuse("predict", "one.safetensors", "--data", "rows.npz", "-o", "predictions.csv", "--json")
    found, p = table("predictions.csv"), network(0).logits(normalize(rows(7))).softmax(-1)
    told = json.loads(said.out)
    assert told["rows"] == len(found) == sum(told["predicted"].values()) == 7
    assert list(found[0]) == ["row", "predicted", "p(ill)", "p(well)", "p(unsure)", "entropy"]
    assert [row["predicted"] for row in found] == [NAMES[k] for k in p.argmax(-1)]
    assert torch.allclose(torch.tensor([[float(row[f"p({n})"]) for n in NAMES] for row in found]), p, atol=1e-5)
    assert float(found[0]["entropy"]) == pytest.approx(float(torch.special.entr(p[0]).sum()), abs=1e-5)


@pytest.mark.parametrize("rule", [TopLogit(), AtLayer(), OpenSetVote(1)])
def test_predict_says_who_of_several_answered(fedfuse: Fedfuse, rule: Combine) -> None:
    classes = 4 if isinstance(rule, OpenSetVote) else 3
    save_model(together(rule, classes), Path("m.safetensors"), about=ABOUT)
    assert fedfuse("predict", "m.safetensors", "--data", "rows.npz", "-o", "p.csv", "--limit", "6").code == 0
    answered = [row["answered"] for row in table("p.csv")]
    assert len(answered) == 6
    assert set(answered) <= {"north", "south"}, "one of two"
    save_model(together(rule, classes), Path("nameless.safetensors"))
    fedfuse("predict", "nameless.safetensors", "--data", "rows.npz", "-o", "p.csv")
    assert set(table("p.csv")[0]) >= {"p(0)", "p(1)", "p(2)", "answered"}
    assert "p(3)" not in table("p.csv")[0]


def test_all_answer_where_nobody_is_chosen(fedfuse: Fedfuse) -> None:
    assert "7 rows" in fedfuse("predict", "two.safetensors", "--data", "rows.npz", "-o", "p.csv").out
    assert {row["answered"] for row in table("p.csv")} == {"north; south"}


def test_predict_refuses_what_does_not_fit(fedfuse: Fedfuse) -> None:
    np.savez("wide.npz", x=np.zeros((2, 5), np.float32))
    say = ("-o", "p.csv")
    refused(fedfuse("predict", "one.safetensors", "--data", "wide.npz", *say), "a row of wide.npz is 5, expected 4")
    refused(fedfuse("predict", "rows.npz", "--data", "rows.npz", *say), "neither a model nor an update")
    refused(fedfuse("predict", "one.safetensors", "--data", "nowhere.npz", *say), "nowhere.npz")
    save_model(Apart((network(0), network(1))), Path("apart.safetensors"), about=ABOUT)
    assert fedfuse("predict", "apart.safetensors", "--data", "rows.npz", *say).code != 0
    same = fedfuse("predict", "one.safetensors", "--data", "rows.npz", "-o", "one.safetensors")
    refused(same, "is to be written and is an input too")
    save_model(network(0), Path("few.safetensors"), about=About(class_names=("a", "b", "c", "d")))
    refused(fedfuse("predict", "few.safetensors", "--data", "rows.npz", *say), "names 4 classes and has 3 outputs")
    assert not Path("p.csv").exists()


def test_predict_writes_numbers(fedfuse: Fedfuse) -> None:
    save_model(network(0), Path("numbers.safetensors"), about=About(task="regression", class_names=("a", "b", "c")))
    assert fedfuse("predict", "numbers.safetensors", "--data", "rows.npz", "-o", "p.csv").code == 0
    found = [[float(row[name]) for name in "abc"] for row in table("p.csv")]
    assert torch.allclose(torch.tensor(found), network(0).logits(rows(7)), atol=1e-5)
    said = fedfuse("predict", "numbers.safetensors", "--data", "rows.npz", "-o", "p.csv", "--task", "binary")
    refused(said, "numbers.safetensors is for regression, and --task is binary")


# export


def answers(file: str, x: torch.Tensor) -> torch.Tensor:
    """What another program makes of rows."""
    if file.endswith(".onnx"):
        runtime = pytest.importorskip("onnxruntime")
        session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
        return torch.from_numpy(session.run(["logits"], {"rows": x.numpy()})[0])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is old
        logits: torch.Tensor = torch.jit.load(file)(x)
    return logits


@pytest.mark.parametrize("to", ["onnx", "torchscript"])
@pytest.mark.parametrize("name", ["one", "two"])
def test_an_exported_model_answers_as_here(fedfuse: Fedfuse, name: str, to: str) -> None:
    out = "made/model.onnx" if to == "onnx" else "made/model.pt"
    said = fedfuse("export", f"{name}.safetensors", "--to", to, "-o", out, "--json")
    assert json.loads(said.out) == {"files": [out, f"{out}.json"]}, said.err
    note = json.loads(Path(f"{out}.json").read_text())
    assert note["class_names"] == list(NAMES)
    assert note["normalizes"]
    model, _ = load_answering(Path(f"{name}.safetensors"))
    for count in (1, 5):
        x = rows(count)
        assert isinstance(model, Single | Mixture)
        assert torch.allclose(answers(out, x), model.logits(normalize(x)).float(), atol=1e-5)


def test_the_note_says_the_size_of_pictures_which_the_graph_cannot_change(fedfuse: Fedfuse) -> None:
    runtime = pytest.importorskip("onnxruntime")
    form = PictureForm(height=28, width=28, channels=1, mean=(0.4,), std=(0.2,))
    spec, draw = Spec("lenet", {"classes": 3}), np.random.default_rng(0)
    torch.manual_seed(0)
    save_model(Single.of(spec.build(), spec), Path("m.safetensors"), about=About(class_names=NAMES, inputs=form))
    Path("seen").mkdir()
    for k, size in enumerate(((28, 28), (28, 28), (50, 35))):
        Image.fromarray(draw.integers(0, 255, size, dtype=np.uint8)).save(f"seen/{k}.png")
    assert fedfuse("export", "m.safetensors", "--to", "onnx", "-o", "m.onnx").code == 0
    assert fedfuse("predict", "m.safetensors", "--data", "seen", "-o", "p.csv").code == 0
    note = json.loads(Path("m.onnx.json").read_text())
    told = "n × 1 × 28 × 28: float32, pictures of this size and no other, channels first, their bytes divided by 255"
    assert note["reads"] == {"rows": told}
    assert note["normalizes"]
    session = runtime.InferenceSession("m.onnx", providers=["CPUExecutionProvider"])
    opened = [Image.open(f"seen/{k}.png") for k in range(3)]
    resized = [picture.resize((28, 28), Image.Resampling.BILINEAR) for picture in opened]
    pixels = np.stack([np.asarray(picture, dtype=np.float32)[None] / 255 for picture in resized])
    (found,) = session.run(["probabilities"], {"rows": pixels})
    expected = [[float(row[f"p({name})"]) for name in NAMES] for row in table("p.csv")]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    with pytest.raises(Exception, match="Got: 50 Expected: 28"):
        session.run(["probabilities"], {"rows": np.zeros((1, 1, 50, 35), np.float32)})


def test_a_note_claims_nothing_that_the_file_does_not_say(fedfuse: Fedfuse) -> None:
    save_model(network(0), Path("bare.safetensors"))
    for to in ("onnx", "torchscript"):
        assert fedfuse("export", "bare.safetensors", "--to", to, "-o", "m").code == 0
        note = json.loads(Path("m.json").read_text())
        assert note == {
            "format": to,
            "normalizes": False,
            "reads": {"rows": "as the network reads them"},
            "gives": {"logits": "before they become probabilities"},
        }
    save_model(network(0), Path("few.safetensors"), about=About(class_names=("a", "b", "c", "d")))
    refused(fedfuse("export", "few.safetensors", "--to", "onnx", "-o", "x"), "names 4 classes and its network has 3")


def test_an_output_for_no_class_is_left_out_as_by_predict(fedfuse: Fedfuse) -> None:
    save_model(network(0, 4), Path("open.safetensors"), about=ABOUT)
    assert fedfuse("export", "open.safetensors", "--to", "torchscript", "-o", "open.pt").code == 0
    assert fedfuse("predict", "open.safetensors", "--data", "rows.npz", "-o", "p.csv").code == 0
    expected = [[float(row[f"p({name})"]) for name in NAMES] for row in table("p.csv")]
    np.testing.assert_allclose(answers("open.pt", rows(7)).softmax(-1), expected, atol=1e-5)


@pytest.mark.parametrize("rule", [MeanLogit(), ClassShares(((9.0, 0.0, 2.0), (1.0, 5.0, 2.0)))])
def test_other_rules_that_take_all_members_are_traced(fedfuse: Fedfuse, rule: Combine) -> None:
    model = together(rule)
    save_model(model, Path("m.safetensors"))
    assert fedfuse("export", "m.safetensors", "--to", "torchscript", "-o", "m.pt").code == 0
    for count in (1, 5):
        assert torch.allclose(answers("m.pt", rows(count)), model.logits(rows(count)).float(), atol=1e-5)


def test_weights_are_plain(fedfuse: Fedfuse) -> None:
    assert (
        "weights.safetensors: "
        in fedfuse("export", "one.safetensors", "--to", "state-dict", "-o", "weights.safetensors").out
    )
    mine, own = load_file("weights.safetensors"), network(0).posterior.mean
    assert mine.keys() == own.keys()
    assert all(torch.equal(mine[name], own[name]) for name in own)
    assert not json.loads(Path("weights.safetensors.json").read_text())["normalizes"]


@pytest.mark.parametrize("to", ["onnx", "torchscript"])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (together(TopLogit()), "of which each row chooses some, cannot be exported"),
        (together(AtLayer()), "of which each row chooses some, cannot be exported"),
        (together(OpenSetVote(1), 4), "of which each row chooses some, cannot be exported"),
        (Apart((network(0), network(1))), "networks that stay apart"),
        (BayesianLayers()(network(0), 3, 0), "a Bayesian network draws while it answers"),
    ],
)
def test_what_would_answer_otherwise_elsewhere_is_not_exported(
    fedfuse: Fedfuse, model: Model, words: str, to: str
) -> None:
    save_model(model, Path("m.safetensors"), about=ABOUT)
    refused(fedfuse("export", "m.safetensors", "--to", to, "-o", "out"), words)
    assert not Path("out").exists()


def test_export_refuses_bad_input(fedfuse: Fedfuse) -> None:
    refused(fedfuse("export", "one.safetensors", "--to", "pickle", "-o", "x"), "expected onnx, torchscript, state-dict")
    refused(
        fedfuse("export", "two.safetensors", "--to", "state-dict", "-o", "x"), "2 networks are no state dict of one"
    )
    same = fedfuse("export", "one.safetensors", "--to", "state-dict", "-o", "./one.safetensors")
    refused(same, "is to be written and is an input too")
    refused(fedfuse("export", "rows.npz", "--to", "onnx", "-o", "x"), "neither a model nor an update")
    spec = Spec("torch.nn:Linear", {"in_features": 4, "out_features": 3})
    save_model(Single.of(torch.nn.Linear(4, 3), spec), Path("other.safetensors"))
    words = ("export", "other.safetensors", "--to", "torchscript", "-o", "x")
    refused(fedfuse(*words), "was not named here")
    refused(fedfuse(*words, "--model", "torch.nn:Linear"), "nobody says what the inputs")
