"""Three hospitals, one file each: typed as a newcomer would, with every mistake that was seen."""

from __future__ import annotations

import json
import shutil
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conftest import Fedfuse
from tests.federation.conftest import CLASSES, Pictures

from fedfuse.data.site import read_site
from fedfuse.federation.agreement import FederationFolder, read_federation
from fedfuse.federation.create import create_federation
from fedfuse.federation.fusion import fuse_files
from fedfuse.federation.site import update_by_federation
from fedfuse.wire.codec import read
from fedfuse.wire.files import load_answering

TRAIN = ("local.epochs=8", "local.batch_size=8", "local.optimizer.lr=0.05")
INIT = (
    *("init", "fed", "--model", "lenet", "--method", "fedlpa", "--classes", ",".join(CLASSES), "--image-size", "16"),
    *(
        "--channels",
        "1",
        *(word for text in (*TRAIN, "model.maps=[4,6]", "model.hidden=[12]") for word in ("--set", text)),
    ),
)


@pytest.fixture
def hospitals(fedfuse: Fedfuse, pictures: Pictures) -> Path:
    """A federation and three hospitals: one has mixed pictures, one lacks a class."""
    pictures("patients-a", seed=1, mixed=True)
    pictures("patients-b", ("benign", "normal"), seed=2)
    pictures("patients-c", seed=3)
    test = pictures("patients-test", seed=4, mixed=True)
    assert fedfuse(*INIT).code == 0
    return test.parent


def update(fedfuse: Fedfuse, site: str, *words: str) -> dict[str, object]:
    said = fedfuse(
        "update", "--federation", "fed", "--data", f"patients-{site}", "-o", f"{site}.safetensors", "--json", *words
    )
    assert said.code == 0, said.err
    told: dict[str, object] = json.loads(said.out)
    return told


def test_from_a_federation_to_a_model_that_all_can_use(fedfuse: Fedfuse, hospitals: Path) -> None:
    told = {site: update(fedfuse, site) for site in "abc"}
    assert told["b"]["classes"] == {"benign": 8, "malignant": 0, "normal": 8}
    assert told["a"]["rows"] == told["a"]["examples"] == 24, "all rows are trained on"
    said = fedfuse(
        "fuse", "a.safetensors", "b.safetensors", "c.safetensors", "--federation", "fed", "-o", "all.safetensors"
    )
    assert said.code == 0, said.err
    assert "3 of 3 updates fused by fedlpa" in said.out
    scores = json.loads(
        fedfuse("evaluate", "all.safetensors", "b.safetensors", "--data", "patients-test", "--json").out
    )
    fused, alone = scores["all.safetensors"], scores["b.safetensors"]
    assert fused["rows"] == 24, "all rows are scored"
    assert fused["accuracy"] > alone["accuracy"]
    assert alone["per_class"][1] == 0.0, "an update can be scored, and b never saw a malignant one"
    assert fused["classes"] == list(CLASSES)


def test_the_fused_file_says_what_is_in_it(fedfuse: Fedfuse, hospitals: Path) -> None:
    for site in "ac":
        update(fedfuse, site)
    Path("broken.safetensors").write_bytes(Path("a.safetensors").read_bytes()[:500])
    said = fedfuse(
        "fuse", *(f"{n}.safetensors" for n in ("a", "c", "broken")), "--federation", "fed", "-o", "all.safetensors"
    )
    assert said.code == 0, said.err
    _, about = load_answering(Path("all.safetensors"))
    assert (about.class_names, about.method, about.federation) == (CLASSES, "fedlpa", "fed")
    assert [(s.client, s.num_examples) for s in about.sites] == [("a", 24.0), ("c", 24.0)]
    assert [r["client"] for r in about.refused] == ["broken"]
    assert about.reveals[0].startswith("second moments")
    assert str(about.inputs) == "16×16 grey"
    header = read(Path("a.safetensors")).header
    assert header["training"]["epochs"] == 8
    assert header["versions"].keys() == {"fedfuse", "python", "torch"}


def test_a_class_that_should_not_be_there_is_refused_by_name(
    fedfuse: Fedfuse, hospitals: Path, pictures: Pictures
) -> None:
    pictures("patients-x", ("aaa", "benign", "normal", "zoster"))
    said = fedfuse("update", "--federation", "fed", "--data", "patients-x", "-o", "x.safetensors")
    assert said.code == 2
    assert "patients-x has the classes 'aaa', 'zoster', expected none but benign, malignant, normal" in said.err
    assert not Path("x.safetensors").exists()
    update(fedfuse, "a")
    said = fedfuse("evaluate", "a.safetensors", "--data", "patients-x")
    assert said.code == 2
    assert "'aaa', 'zoster'" in said.err


def test_without_a_federation_other_classes_and_other_starts_are_told_with_the_remedy(
    fedfuse: Fedfuse, hospitals: Path, pictures: Pictures
) -> None:
    pictures("patients-x", ("aaa", "benign", "normal"))
    plain = ("--model", "mlp", "--set", "model.hidden=[4]", "--image-size", "16")
    pictures("patients-d", seed=5)
    for site, seed in (("a", 0), ("c", 0), ("d", 0), ("x", 0), ("b", 1)):
        data = "patients-c" if site == "b" else f"patients-{site}"
        words = ("update", "--data", data, *plain, "--seed", str(seed), "-o", f"{site}.safetensors")
        assert fedfuse(*words).code == 0
    files = [f"{site}.safetensors" for site in "cxb"]
    said = fedfuse("fuse", *files, "d.safetensors", "-o", "all.safetensors")
    assert said.code == 0, said.err
    assert (
        "refused x: classes is aaa, benign, normal (with aaa, without malignant), expected benign, malignant"
        in said.err
    )
    assert (
        "refused b: start is another one than most began with, expected the same first weights everywhere" in said.err
    )
    assert "fedfuse init" in said.err
    said = fedfuse("fuse", "a.safetensors", "c.safetensors", "-o", "none.safetensors")
    assert said.code == 3
    assert "a has 16×16 colour; c has 16×16 grey; make one federation file" in said.err


def test_a_sites_training_that_failed_is_noticed(fedfuse: Fedfuse, hospitals: Path) -> None:
    said = fedfuse(
        "update",
        "--federation",
        "fed",
        "--data",
        "patients-c",
        "-o",
        "c.safetensors",
        "--set",
        "local.epochs=1",
        "--set",
        "local.optimizer.lr=1e-9",
    )
    assert said.code == 0
    assert "patients-c: 24 rows (benign 8, malignant 8, normal 8)" in said.out
    assert "warning: the network did not learn" in said.err
    good = fedfuse("update", "--federation", "fed", "--data", "patients-c", "-o", "c.safetensors")
    assert "warning" not in good.err
    assert "loss " in good.out
    assert "24 rows it was trained on (commonest class: 33.3%)" in good.out


def test_a_site_can_judge_by_rows_it_keeps(fedfuse: Fedfuse, hospitals: Path) -> None:
    told = update(fedfuse, "c", "--hold-out", "0.25")
    assert (told["examples"], told["rows"], told["accuracy_rows"]) == (18, 24, 6)
    told = update(fedfuse, "c", "--cross-validate", "3")
    assert (told["examples"], told["accuracy_rows"], told["accuracy_on"]) == (24, 24, "rows of 3 folds")
    assert (
        fedfuse(
            "update",
            "--federation",
            "fed",
            "--data",
            "patients-c",
            "--hold-out",
            "0.2",
            "--cross-validate",
            "3",
            "-o",
            "c.safetensors",
        ).code
        == 2
    )


def test_broken_pictures_are_one_list(fedfuse: Fedfuse, hospitals: Path) -> None:
    for name in ("benign/0.png", "normal/2.png"):
        (hospitals / "patients-c" / name).write_text("none")
    words = ("update", "--federation", "fed", "--data", "patients-c", "-o", "c.safetensors")
    said = fedfuse(*words)
    assert said.code == 2
    assert "2 of 24 pictures in patients-c cannot be read: benign/0.png (no picture); normal/2.png" in said.err
    said = fedfuse(*words, "--skip-broken")
    assert said.code == 0
    assert "2 broken pictures were left out, listed in c.broken.txt" in said.out
    assert Path("c.broken.txt").read_text().splitlines() == ["benign/0.png\tno picture", "normal/2.png\tno picture"]
    said = fedfuse("evaluate", "c.safetensors", "--data", "patients-c", "--skip-broken")
    assert "22 rows" in said.out
    assert "2 broken pictures were left out: benign/0.png, normal/2.png" in said.err


def test_what_the_federation_says_is_not_said_again(fedfuse: Fedfuse, hospitals: Path) -> None:
    words = ("update", "--federation", "fed", "--data", "patients-c", "-o", "c.safetensors")
    for more in (("--method", "fedavg"), ("--seed", "3"), ("--image-size", "9"), ("--start", "fed/w0.safetensors")):
        said = fedfuse(*words, *more)
        assert said.code == 2
        assert f"{more[0]} is said by the federation" in said.err
    assert "the federation's is 'lenet'" in fedfuse(*words, "--model", "mlp").err


def test_a_site_with_few_rows_brings_nothing(fedfuse: Fedfuse, hospitals: Path, pictures: Pictures) -> None:
    pictures("patients-few", count=2)
    said = fedfuse("update", "--federation", "fed", "--data", "patients-few", "-o", "few.safetensors")
    assert said.code == 2
    assert "has 6 rows and the federation 'fed' asks for at least 10" in said.err


def test_files_of_another_federation_are_not_fused_by_this_one(fedfuse: Fedfuse, hospitals: Path) -> None:
    update(fedfuse, "c")
    assert fedfuse(*INIT[:1], "other", *INIT[2:], "--seed", "9").code == 0
    said = fedfuse("fuse", "c.safetensors", "--federation", "other", "-o", "all.safetensors")
    assert said.code == 3
    assert "c: start is" in said.err
    assert "as the federation folder says" in said.err


@pytest.fixture
def agreed(tmp_path: Path) -> FederationFolder:
    folder = tmp_path / "agreed"
    sets = ["model.hidden=[5]", "local.epochs=2", "local.batch_size=8"]
    create_federation(folder, "mlp", "fedlpa", classes=CLASSES, shape=[4], sets=sets, least_rows=4)
    return read_federation(folder)


@given(st.permutations(CLASSES), st.integers(0, 5))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_order_of_a_sites_classes_never_changes_the_fused_answers(
    agreed: FederationFolder, tmp_path: Path, order: list[str], seed: int
) -> None:
    """A site may number its classes as it likes: rows, update and fused model are the same to the last bit."""
    draw = np.random.default_rng(seed)
    x, truth = draw.normal(size=(12, 4)).astype(np.float32), np.arange(12) % 3
    fused = []
    for name, names in (("same", list(CLASSES)), ("turned", order)):
        y = np.array([names.index(CLASSES[t]) for t in truth])
        np.savez(tmp_path / f"{name}.npz", x=x, y=y, classes=np.array(names))
        assert read_site(str(tmp_path / f"{name}.npz"), classes=CLASSES).rows.y.tolist() == truth.tolist()
        made = update_by_federation(agreed, str(tmp_path / f"{name}.npz"), client="site")
        path = made.update.save(tmp_path / f"{name}.safetensors")
        fused.append(fuse_files([path], federation=agreed).logits(torch.from_numpy(x)))
    assert torch.equal(*fused)


@pytest.mark.parametrize("order", list(permutations(CLASSES))[1::2])
def test_the_order_in_which_a_site_made_its_class_folders_does_not_matter(
    order: tuple[str, ...], fedfuse: Fedfuse, hospitals: Path
) -> None:
    for name in order:
        shutil.copytree(hospitals / "patients-a" / name, hospitals / "patients-z" / name)
    for site in "az":
        update(fedfuse, site, "--client", "same")
    own, other = (read(hospitals / f"{site}.safetensors").tensors for site in "az")
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
