"""Folders that bring their evidence: fused layer by layer into a folder that loads, or refused by file."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedfuse
import tiny_checkpoints as tiny
from fedfuse.api.fusion import Fused
from fedfuse.errors import ConfigError, QuorumLost
from fedfuse.federation.checkpoint import checkpoint_evidence
from fedfuse.nets.kronecker import read_factor
from fedfuse.wire.codec import LazyParams, read
from fedfuse.wire.folders import EVIDENCE, read_folder
from fedfuse.wire.messages import split

transformers = pytest.importorskip("transformers")

NETWORKS: dict[str, tuple[Callable[..., nn.Module], str, str, str]] = {
    "bert": (
        lambda: tiny.bert("ForSequenceClassification", num_labels=2),
        "texts.jsonl",
        "AutoModelForSequenceClassification",
        "bert.encoder.layer.1.output.dense",
    ),
    "gpt2": (tiny.gpt2, "texts.jsonl", "AutoModelForCausalLM", "transformer.h.1.mlp.c_proj"),
    "llama": (tiny.llama, "texts.jsonl", "AutoModelForCausalLM", "model.layers.1.mlp.down_proj"),
    "vit": (tiny.vit, "pictures.npz", "AutoModelForImageClassification", "mlp.fc2"),
}
ALPHA = {"regmean": {"alpha": 1.0}}


def bring(folder: Path, kind: str, method: str = "regmean", where: Path | None = None) -> Path:
    source = str(folder.parent / NETWORKS[kind][1])
    options = ["min_rows=1"] * (method != "fisher")
    update = checkpoint_evidence(folder, source, method, options, client=folder.name, length=12)
    return update.without_weights().save(where or folder / EVIDENCE)


def folders(home: Path, kind: str, method: str = "regmean", count: int = 2) -> list[Path]:
    torch.manual_seed(0)
    tiny.write_rows(home)
    made = [tiny.save(NETWORKS[kind][0](), home / f"{kind}-{i}") for i in range(count)]
    for folder in made:
        bring(folder, kind, method)
    return made


def updates(made: list[Path], kind: str, method: str) -> list[fedfuse.Update]:
    source = str(made[0].parent / NETWORKS[kind][1])
    options = ["min_rows=1"] * (method != "fisher")
    return [checkpoint_evidence(f, source, method, options, client=f.name, length=12) for f in made]


def regression(made: list[Path], name: str) -> tuple[Tensor, Tensor]:
    """Both sides of the normal equations of one layer: Σ A_k and Σ M_k A_k, by hand."""
    total = right = torch.zeros((), dtype=torch.float64)
    for folder in made:
        A = read_factor(split(read(folder / EVIDENCE))[1], f"kron/{name}/in")
        assert isinstance(A, Tensor)
        M = matrix(read_folder(folder).tensors, in_files(folder, name))
        total, right = total + A.double(), right + M @ A.double()
    return total, right


def in_files(folder: Path, name: str) -> str:
    """What the folder calls a layer that the network calls otherwise."""
    names = read(folder / EVIDENCE).header.get("names", {})
    return str(names.get(f"{name}.weight", f"{name}.weight")).removesuffix(".weight") if "weight" not in name else name


def matrix(tensors: LazyParams, name: str) -> Tensor:
    """[W | b] of a linear layer, also of one whose weight is in × out."""
    path = name.removesuffix(".weight")
    weight = tensors[f"{path}.weight"].double()
    weight = weight.mT if name != path else weight
    return torch.cat([weight, tensors[f"{path}.bias"].double()[:, None]], 1) if f"{path}.bias" in tensors else weight


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_layer_solves_the_normal_equations_and_the_folder_loads(kind: str, tmp_path: Path) -> None:
    made = folders(tmp_path, kind)
    fused = fedfuse.fuse(made, fedfuse.recipe("regmean", alpha=1.0))
    fused.save(tmp_path / "merged", shard_size="2KB")
    written = read_folder(tmp_path / "merged").tensors
    notes = split(read(made[0] / EVIDENCE))[1]
    layers = {n.split("/")[1] for n in notes if n.endswith("/in")}
    name = next(n for n in sorted(layers) if NETWORKS[kind][3] in n)
    A, right = regression(made, name)
    torch.testing.assert_close(matrix(written, in_files(made[0], name)) @ A, right, rtol=1e-4, atol=1e-5)
    loaded, info = getattr(transformers, NETWORKS[kind][2]).from_pretrained(
        tmp_path / "merged", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    loaded.save_pretrained(tmp_path / "again")  # under the names that files have
    again = read_folder(tmp_path / "again").tensors
    assert {n: t.tolist() for n, t in again.items()} == {n: t.tolist() for n, t in written.items()}
    assert not (tmp_path / "merged" / EVIDENCE).exists(), "evidence is not about the fused model"


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((kind, "regmean") for kind in NETWORKS),
        ("bert", "fisher"),
        ("gpt2", "fedlpa"),
        pytest.param("vit", "fedlpa", marks=pytest.mark.slow),
        pytest.param("llama", "fisher", marks=pytest.mark.slow),
        pytest.param("llama", "fedlpa", marks=pytest.mark.slow),
    ],
)
def test_folders_give_the_bytes_of_their_updates(kind: str, method: str, tmp_path: Path) -> None:
    made = folders(tmp_path, kind, method)
    found, whole = fedfuse.fuse(made, method), fedfuse.fuse(updates(made, kind, method), method)
    assert isinstance(found.state(), LazyParams), "nothing is fused before it is asked for"
    assert not found.remarks
    expected = whole.state_dict()
    assert found.state_dict().keys() == expected.keys()
    assert all(t.equal(expected[n]) for n, t in found.state_dict().items())
    assert set(found.facts.get("averaged", ())) <= set(whole.facts.get("averaged", ())), "tied ones have one name here"


@pytest.mark.parametrize("method", ["regmean", "fisher", "fedlpa"])
def test_models_that_agree_come_back_unchanged(method: str, tmp_path: Path) -> None:
    (one,) = folders(tmp_path, "bert", method, 1)
    two = Path(shutil.copytree(one, tmp_path / "other"))
    found = fedfuse.fuse([one, two], method).state_dict()
    for name, tensor in read_folder(one).tensors.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_one_layer_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer is solved once, though its weight and bias are asked for one after the other."""
    made = folders(tmp_path, "bert")
    fused = fedfuse.fuse(made, "regmean")
    solved: list[str] = []
    from fedfuse.methods.regmean import RegressionMean

    plain = RegressionMean.fuse_block
    monkeypatch.setattr(RegressionMean, "fuse_block", lambda self, c, b: (solved.append(b.name), plain(self, c, b))[1])
    fused.save(tmp_path / "merged")
    assert solved
    assert len(solved) == len(set(solved))


def test_evidence_files_in_the_order_of_folders_and_half_precision(tmp_path: Path) -> None:
    made = folders(tmp_path, "gpt2")
    inside = fedfuse.fuse(made, "regmean").state_dict()
    files = [Path(shutil.move(f / EVIDENCE, tmp_path / f"{f.name}.st")) for f in made]
    outside = fedfuse.fuse(made, "regmean", evidence=files).state_dict()
    assert all(t.equal(inside[n]) for n, t in outside.items())
    with pytest.raises(ConfigError, match="other weights"):
        fedfuse.fuse(made, "regmean", evidence=files[::-1])
    with pytest.raises(ConfigError, match="1 evidence .* 2 folders"):
        fedfuse.fuse(made, "regmean", evidence=files[:1])
    with pytest.raises(ConfigError, match="'fedavg'"):
        fedfuse.fuse(made, "fedavg", evidence=files)
    fedfuse.fuse([made[1], made[1]]).save(tmp_path / "half", dtype="bfloat16")
    bring(tmp_path / "half", "gpt2")
    bring(made[0], "gpt2")
    mixed = fedfuse.fuse([made[0], tmp_path / "half"], "regmean")
    assert all(t.dtype == torch.float32 for t in mixed.state_dict().values())
    mixed.save(tmp_path / "narrow", dtype="bfloat16")
    assert {f.dtype for f in read_folder(tmp_path / "narrow").tensors.forms.values()} == {torch.bfloat16}


def fuse_error(kind: type[Exception], *args: Any, **options: Any) -> str:
    with pytest.raises(kind) as raised:
        fedfuse.fuse(*args, **options)
    return str(raised.value)


def test_what_does_not_go_with_a_folder_is_refused_by_file(tmp_path: Path) -> None:
    made = folders(tmp_path, "bert")
    file = made[1] / EVIDENCE
    kept = file.read_bytes()
    assert "'fisher'" in fuse_error(ConfigError, made, "fisher")
    words = fuse_error(QuorumLost, made, "fedlpa")
    assert re.search(r"kron/\S+/out .*'regmean\(min_rows=1\)'", words)
    file.unlink()
    words = fuse_error(ConfigError, made, "regmean")
    assert re.search(r"bert-1 .* fedfuse evidence .*bert-1 --data … --method regmean", words)
    file.write_bytes(kept[:-8])
    assert f"{file} is damaged" in fuse_error(ConfigError, made, "regmean")
    shutil.copyfile(made[0] / "model.safetensors", file)
    assert f"{file} " in fuse_error(ConfigError, made, "regmean")
    shutil.copyfile(made[0] / EVIDENCE, file)
    assert re.search(f"{file} .*other weights", fuse_error(ConfigError, made, "regmean"))


def test_a_network_that_calls_its_tensors_otherwise_is_refused(tmp_path: Path) -> None:
    tiny.write_rows(tmp_path)
    folder = tiny.save(NETWORKS["bert"][0](), tmp_path / "odd")
    fused = fedfuse.fuse([folder])
    tensors = dict(fused.state()) | {"extra.weight": torch.ones(2, 2)}
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="'extra.weight'"):
        checkpoint_evidence(folder, str(tmp_path / "texts.jsonl"), "regmean")


def test_by_the_command_line(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    made = folders(tmp_path, "bert")
    command = request.getfixturevalue("fedfuse")
    for folder in made:
        (folder / EVIDENCE).unlink()
        said = command("evidence", folder, "--data", tmp_path / "texts.jsonl", "--method", "regmean")
        assert said.code == 0, said.err
        assert str(folder / EVIDENCE) in said.out.replace("\n", "")
    said = command("fuse", *made, "--method", "regmean", "-o", tmp_path / "merged", "--shard-size", "3KB")
    assert said.code == 0, said.err
    transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    files = ",".join(str(folder / EVIDENCE) for folder in made)
    said = command("fuse", *made, "--method", "regmean", "--evidence", files, "-o", tmp_path / "again")
    assert said.code == 0, said.err
    assert isinstance(fedfuse.fuse(made, "regmean"), Fused)
