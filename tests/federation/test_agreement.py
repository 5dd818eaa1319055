"""The federation folder: made once, read everywhere, and refused where it is not whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.conftest import Fedfuse
from tests.federation.conftest import CLASSES, Pictures

from fedfuse.core.inputs import ArrayForm, PictureForm
from fedfuse.errors import ConfigError, RecipeError
from fedfuse.federation.agreement import FILE, START, read_federation
from fedfuse.federation.create import create_federation

SMALL = ("model.maps=[2,3]", "model.hidden=[4]")


def made(folder: Path, **given: object) -> Path:
    values: dict[str, object] = {"classes": CLASSES, "image_size": 16, "channels": 1, "sets": SMALL}
    create_federation(folder, "lenet", "fedlpa", **(values | given))  # type: ignore[arg-type]
    return folder


def test_the_folder_is_read_back_as_it_was_made(tmp_path: Path) -> None:
    federation = read_federation(made(tmp_path / "fed", least_rows=7, name="clinics"))
    agreed = federation.agreement
    assert (agreed.classes, agreed.least_rows, agreed.name) == (CLASSES, 7, "clinics")
    assert agreed.inputs == PictureForm(height=16, width=16, channels=1)
    assert agreed.method.recipe().name == "fedlpa"
    assert agreed.spec.options["classes"] == 3
    assert (agreed.local.epochs, agreed.local.optimizer.momentum) == (20, 0.9)
    assert "classes = [" in (tmp_path / "fed" / FILE).read_text()
    assert safetensors.torch.load_file(federation.start).keys() == agreed.first_weights().keys()


def test_the_same_seed_draws_the_same_start(tmp_path: Path) -> None:
    starts = [read_federation(made(tmp_path / n, seed=s)).agreement.start for n, s in (("a", 0), ("b", 0), ("c", 1))]
    assert starts[0] == starts[1] != starts[2]
    again = read_federation(made(tmp_path / "d", start=tmp_path / "c" / START))
    assert again.agreement.start == starts[2]


def test_a_start_of_another_network_makes_no_folder(tmp_path: Path) -> None:
    other = made(tmp_path / "other", sets=("model.maps=[2,5]", "model.hidden=[4]")) / START
    with pytest.raises(ConfigError, match="the start does not fit the network 'lenet'"):
        made(tmp_path / "fed", start=other)
    assert not (tmp_path / "fed").exists()


def test_a_first_sites_folder_tells_classes_and_form(tmp_path: Path, pictures: Pictures) -> None:
    first = pictures("a")
    nothing = {"classes": (), "image_size": None, "channels": None}
    agreed = read_federation(made(tmp_path / "fed", data=str(first), normalize=True, **nothing)).agreement
    assert agreed.classes == CLASSES
    assert isinstance(agreed.inputs, PictureForm)
    assert agreed.inputs.shape == (1, 16, 16)
    assert 0.1 < agreed.inputs.mean[0] < 0.5
    assert agreed.inputs.is_normalized
    mixed = pictures("b", mixed=True)
    with pytest.raises(ConfigError, match=r"come in 2 sizes, 16×16 \(12\), 14×18 \(12\); .*--image-size 16"):
        made(tmp_path / "no", data=str(mixed), **nothing)
    colour = made(tmp_path / "colour", data=str(mixed), **(nothing | {"image_size": 12}))
    assert read_federation(colour).agreement.inputs.shape == (3, 12, 12)
    gray = made(tmp_path / "gray", data=str(mixed), **(nothing | {"image_size": 12, "channels": 1}))
    assert read_federation(gray).agreement.inputs.shape == (1, 12, 12)


def test_arrays_have_a_shape(tmp_path: Path) -> None:
    create_federation(tmp_path / "fed", "mlp", "fedavg", classes=["a", "b"], shape=[13])
    assert read_federation(tmp_path / "fed").agreement.inputs == ArrayForm(shape=(13,))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"classes": ()}, "expected two or more classes"),
        ({"classes": ("a", "a")}, "'a' stands there twice"),
        ({"image_size": None}, "nobody says what rows look like"),
        ({"channels": 2}, "inputs.channels is 2, expected 1 or 3"),
        ({"sets": ("model.classes=4",)}, "gives 4 outputs, expected 3, one per class"),
        ({"sets": ("models.classes=4",)}, "must begin with model., local. or method."),
        ({"sets": ("local.epoch=4",)}, "did you mean 'epochs'"),
        ({"normalize": True}, "name it with --data"),
        ({"image_size": 3}, "lenet"),
    ],
)
def test_what_does_not_fit_is_said_when_the_folder_is_made(
    tmp_path: Path, given: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        made(tmp_path / "fed", **given)
    assert not (tmp_path / "fed" / FILE).exists()


def test_a_method_that_needs_a_server_is_no_method_of_files(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="a federation of files"):
        create_federation(tmp_path / "f", "mlp", "data_sharing", classes=["a", "b"], shape=[4])


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    made(tmp_path / "fed")
    with pytest.raises(ConfigError, match="holds a federation already"):
        made(tmp_path / "fed")


def test_a_folder_that_is_not_whole_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name the folder that `fedfuse init` made"):
        read_federation(tmp_path / "nowhere")
    folder = made(tmp_path / "fed")
    other = made(tmp_path / "other", seed=1)
    (folder / START).write_bytes((other / START).read_bytes())
    with pytest.raises(ConfigError, match="holds other weights than federation.toml speaks of"):
        read_federation(folder)
    (folder / START).unlink()
    with pytest.raises(ConfigError, match="has no w0.safetensors"):
        read_federation(folder)
    text = (other / FILE).read_text()
    (other / FILE).write_text(text.replace("least_rows", "lest_rows"))
    with pytest.raises(ConfigError, match="no key 'lest_rows'; did you mean 'least_rows'"):
        read_federation(other)
    (other / FILE).write_text("classes = [")
    with pytest.raises(ConfigError, match="is not a TOML file"):
        read_federation(other)


def test_code_that_a_folder_names_is_not_imported_unasked(tmp_path: Path) -> None:
    create_federation(
        tmp_path / "f",
        "torch.nn:Linear",
        "fedavg",
        classes=["a", "b"],
        shape=[4],
        sets=["model.in_features=4", "model.out_features=2"],
    )
    with pytest.raises(ConfigError, match="name it yourself .--model torch.nn:Linear. if you"):
        read_federation(tmp_path / "f")
    assert read_federation(tmp_path / "f", trusted=["torch.nn:Linear"]).agreement.spec.factory == "torch.nn:Linear"


def test_a_site_may_change_how_it_trains_and_nothing_else(tmp_path: Path) -> None:
    folder = made(tmp_path / "fed")
    assert read_federation(folder, ["local.epochs=3"]).agreement.local.epochs == 3
    with pytest.raises(ConfigError, match="changes how it trains"):
        read_federation(folder, ["model.hidden=[9]"])


def test_init_on_the_command_line(fedfuse: Fedfuse, pictures: Pictures) -> None:
    words = ("--model", "lenet", "--method", "fedlpa", "--classes", "benign, malignant,normal")
    said = fedfuse("init", "fed", *words, "--image-size", "16", "--channels", "1", "--json")
    told = json.loads(said.out)
    assert (told["folder"], told["classes"], told["inputs"]["height"]) == ("fed", list(CLASSES), 16)
    assert fedfuse("init", "fed", *words).code == 2
    assert "whole numbers" in fedfuse("init", "g", "--shape", "a,b", "--classes", "a,b").err
    assert torch.is_tensor(safetensors.torch.load_file("fed/w0.safetensors")["classifier.bias"])
