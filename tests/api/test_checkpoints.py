"""Folders of `transformers`: tiny BERT, GPT-2, Llama-like and ViT with random weights, merged and loaded again."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tiny_checkpoints as tiny
from fedfuse import cli

pytestmark = pytest.mark.filterwarnings("ignore")  # another package's
tf = pytest.importorskip("transformers")

SMALL = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
PLACES = {"max_position_embeddings": 16}


def bert() -> Any:
    return tf.BertForSequenceClassification(tf.BertConfig(**SMALL, **PLACES, num_labels=3))


def gpt2() -> Any:
    config = tf.GPT2Config(vocab_size=40, n_embd=8, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=1)
    return tf.GPT2LMHeadModel(config)


def llama() -> Any:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, **PLACES, num_key_value_heads=1))


def vit() -> Any:
    small = {k: v for k, v in SMALL.items() if k != "vocab_size"}
    return tf.ViTForImageClassification(tf.ViTConfig(**small, image_size=8, patch_size=4, num_labels=3))


MAKE: dict[str, Callable[[], Any]] = {"bert": bert, "gpt2": gpt2, "llama": llama, "vit": vit}


def inputs(kind: str) -> dict[str, torch.Tensor]:
    if kind == "vit":
        return {"pixel_values": torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))}
    return {"input_ids": torch.arange(10).view(2, 5)}


def models(kind: str, home: Path, count: int = 3) -> list[Any]:
    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        made.append(MAKE[kind]().eval())
        made[-1].save_pretrained(home / f"m{seed}")
    return made


def typed(line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", shlex.split(line))
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("kind", MAKE)
def test_the_mean_of_folders_is_loaded_by_from_pretrained(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = models(kind, tmp_path)
    assert typed("fedfuse fuse m0 m1 m2/ -o merged --shard-size 1KB --num-examples 100,300,100", monkeypatch) == 0
    assert (tmp_path / "merged" / "model.safetensors.index.json").is_file()
    loaded = type(made[0]).from_pretrained(tmp_path / "merged").eval()
    expected = MAKE[kind]().eval()
    states = [m.state_dict() for m in made]
    expected.load_state_dict({n: (states[0][n] + 3 * states[1][n] + states[2][n]) / 5 for n in states[0]})
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs(kind)).logits, expected(**inputs(kind)).logits)


def test_a_rule_around_a_base_by_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = models("gpt2", tmp_path)
    line = "fedfuse fuse m1 m2 --method task_arithmetic --set scale=0.5 --base m0 -o merged --dtype bfloat16"
    assert typed(line, monkeypatch) == 0
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight is loaded.transformer.wte.weight  # tied again
    a, b = (m.state_dict()["transformer.wte.weight"] for m in made[1:])
    torch.testing.assert_close(loaded.lm_head.weight, ((a + b) / 2).bfloat16())


SHUFFLED = {  # what makes a block's hidden units, and what reads them, along which axis each
    "bert": (("intermediate.dense.weight", 0), ("intermediate.dense.bias", 0), ("0.output.dense.weight", 1)),
    "gpt2": (("mlp.c_fc.weight", 1), ("mlp.c_fc.bias", 0), ("mlp.c_proj.weight", 0)),
    "vit": (("mlp.fc1.weight", 0), ("mlp.fc1.bias", 0), ("mlp.fc2.weight", 1)),
}


@pytest.mark.parametrize("kind", SHUFFLED)
def test_folders_are_aligned_by_their_own_networks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy with its units shuffled comes back exactly, whatever files call its layers, alone and before a rule."""
    monkeypatch.chdir(tmp_path)
    (made,) = models(kind, tmp_path, 1)
    order, state = torch.randperm(len(made.state_dict()[name_of(made, SHUFFLED[kind][1][0])])), made.state_dict()
    for end, axis in SHUFFLED[kind]:
        name = name_of(made, end)
        state[name] = state[name].index_select(axis, order)
    moved = MAKE[kind]().eval()
    moved.load_state_dict(state)
    moved.save_pretrained(tmp_path / "moved")
    for line in ("", "--method ties --base m0"):
        assert typed(f"fedfuse fuse m0 moved --align weights {line} -o merged{len(line)}", monkeypatch) == 0
        found = type(made).from_pretrained(tmp_path / f"merged{len(line)}").state_dict()
        assert all(found[n].equal(t) for n, t in made.state_dict().items())


def name_of(network: Any, end: str) -> str:
    return next(name for name in network.state_dict() if name.endswith(end))


@pytest.mark.parametrize("kind", ["gpt2", "vit"])
def test_a_rule_around_a_base_by_evidence(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With λ = 1 the mean of moves in a metric is the mean in that metric, also of tied and renamed tensors."""
    monkeypatch.chdir(tiny.write_rows(tmp_path))
    rows = "pictures.npz" if kind == "vit" else "texts.jsonl"
    for seed in range(3):
        torch.manual_seed(seed)
        tiny.save(getattr(tiny, kind)(), tmp_path / f"m{seed}")
        assert typed(f"fedfuse evidence m{seed} --data {rows} --method regmean --set min_rows=1", monkeypatch) == 0
    assert typed("fedfuse fuse m1 m2 --method regmean -o plain", monkeypatch) == 0
    line = "--method task_arithmetic --set metric=regmean --set average=true --set scale=1 --base m0"
    assert typed(f"fedfuse fuse m1 m2 {line} -o moved", monkeypatch) == 0
    assert typed("fedfuse fuse m1 m2 --method ties --set metric=regmean --base m0 -o trimmed", monkeypatch) == 0
    plain, moved = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "moved"))
    assert plain.keys() == moved.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(moved[name], tensor)
    type(getattr(tiny, kind)()).from_pretrained(tmp_path / "trimmed")


def test_what_cannot_be_merged_is_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    models("bert", tmp_path / "bert", 1)
    models("gpt2", tmp_path / "gpt2", 2)
    for line, words in (
        ("fuse bert/m0 gpt2/m0 -o x", "architecture"),
        ("fuse gpt2/m0 gpt2/m9 -o x", "gpt2/m9"),
        ("fuse gpt2/m0 gpt2/m1 --method ties -o x", "--base"),
        ("fuse gpt2/m0 gpt2/m1 --num-examples 100,many -o x", "100,300"),
        ("fuse gpt2/m0 gpt2/m1 --dtype float8 -o x", "'float8'"),
        ("fuse gpt2/m0 gpt2/m1 --shard-size big -o x", "5GB"),
    ):
        assert typed(f"fedfuse {line}", monkeypatch) == 2, line
        assert words in " ".join(capsys.readouterr().err.split()), line
    assert not (tmp_path / "x").exists()


def test_json_for_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    models("vit", tmp_path, 3)
    capsys.readouterr()
    assert typed("fedfuse fuse m0 m1 --base m2 --method model_stock -o out --json", monkeypatch) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["method"] == "model_stock"
    assert "classifier.weight" in told["facts"]["ratio"]  # known once the folder is written
