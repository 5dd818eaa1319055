"""Evidence at folders of `transformers`: every kind of network, against sums taken by hand, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedfuse
import tiny_checkpoints as tiny
from fedfuse.errors import ConfigError
from fedfuse.federation.checkpoint import checkpoint_evidence, open_folder
from fedfuse.nets.kronecker import read_factor
from fedfuse.wire.codec import decode
from fedfuse.wire.messages import split

pytest.importorskip("transformers")

KINDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sequence": (lambda: tiny.bert("ForSequenceClassification", num_labels=2), "texts.jsonl"),
    "tokens": (lambda: tiny.bert("ForTokenClassification", num_labels=2), "words.jsonl"),
    "masked": (lambda: tiny.bert("ForMaskedLM"), "texts.jsonl"),
    "next": (tiny.gpt2, "texts.jsonl"),
    "pictures": (tiny.vit, "pictures.npz"),
}
TEXTS = [f"the film is {'good ' * (i % 4)}{'fine' if i % 2 else 'poor a bad film'}" for i in range(12)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines = [{"text": text, "label": i % 2} for i, text in enumerate(TEXTS)]
    words = [{"tokens": text.split(), "labels": [len(w) % 2 for w in text.split()]} for text in TEXTS]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "words.jsonl").write_text("\n".join(map(json.dumps, words)))
    draw = np.random.default_rng(0)
    names = np.array(["LABEL_0", "LABEL_1", "LABEL_2"])
    np.savez(tmp_path / "pictures.npz", x=draw.random((12, 1, 8, 8), np.float32), y=np.arange(12) % 3, classes=names)
    return tmp_path


def folders(where: Path, kind: str, count: int = 2) -> list[Path]:
    torch.manual_seed(0)
    return [tiny.save(KINDS[kind][0](), where / f"{kind}-{i}") for i in range(count)]


def notes_of(update: fedfuse.Update) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in split(decode(update.payload))[1].items()}


SLOW = [pytest.param(kind, m, marks=pytest.mark.slow) for kind in ("tokens", "masked") for m in ("fisher", "fedlpa")]


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((kind, "regmean") for kind in KINDS),
        *((kind, m) for kind in ("sequence", "next", "pictures") for m in ("fisher", "fedlpa")),
        *SLOW,
    ],
)
def test_every_kind_of_network_brings_evidence(data: Path, kind: str, method: str) -> None:
    updates = [
        checkpoint_evidence(folder, str(data / KINDS[kind][1]), method, client=folder.name, length=12)
        for folder in folders(data, kind)
    ]
    fused = fedfuse.fuse(updates, method)
    assert not fused.refused
    weights = fused.state_dict()
    assert (
        weights.keys() == updates[0].state_dict().keys() == open_folder(data / f"{kind}-0").module.state_dict().keys()
    )
    assert all(bool(t.isfinite().all()) for t in weights.values())


def test_padding_leaves_no_trace(data: Path) -> None:
    (folder,) = folders(data, "sequence", 1)
    update = checkpoint_evidence(folder, str(data / "texts.jsonl"), "regmean", ["min_rows=1"], length=12)
    layer = "bert.encoder.layer.1.intermediate.dense"
    found = read_factor(notes_of(update), f"kron/{layer}/in")
    opened = open_folder(folder)
    seen: list[Tensor] = []
    handle = opened.module.get_submodule(layer).register_forward_hook(lambda _, args, __: seen.append(args[0][0]))
    with torch.no_grad():
        for text in TEXTS:  # alone, a text needs no padding
            opened.module(torch.tensor(opened.tokenizer([text])["input_ids"]))
    handle.remove()
    rows = torch.cat([torch.cat([x, torch.ones(len(x), 1)], 1) for x in seen]).double()
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found.double(), rows.mT @ rows / len(TEXTS), rtol=1e-4, atol=1e-5)


def test_positions_that_rows_share_have_gradients_of_each_row(data: Path) -> None:
    (folder,) = folders(data, "masked", 1)
    source, options = str(data / "texts.jsonl"), ["min_rows=1", "layers=all"]
    path = "kron/bert.embeddings.position_embeddings.weight"
    once = notes_of(checkpoint_evidence(folder, source, "fedlpa", options, length=12))
    assert f"{path}/in/diagonal" in once
    counts = once[f"{path}/in/diagonal"]
    lengths = torch.tensor([len(text.split()) + 2 for text in TEXTS])
    shares = torch.stack([(lengths > place).double().mean() for place in range(11)])
    ratio = counts[:11].double() / shares
    torch.testing.assert_close(ratio, ratio[:1].expand(11), rtol=1e-5, atol=0, msg="as often as rows are that long")


def test_gpt2s_turned_layers_are_merged_by_regression(data: Path) -> None:
    both = folders(data, "next")
    source, layer = str(data / "texts.jsonl"), "transformer.h.0.mlp.c_fc"
    updates = [
        checkpoint_evidence(f, source, "regmean", ["min_rows=1", "alpha=1.0"], client=f.name, length=12) for f in both
    ]
    fused = fedfuse.fuse(updates, fedfuse.recipe("regmean", alpha=1.0)).state_dict()
    grams, right = torch.zeros(9, 9, dtype=torch.float64), torch.zeros(9, 32, dtype=torch.float64)
    for update in updates:
        A = read_factor(notes_of(update), f"kron/{layer}.weight/in")
        assert isinstance(A, Tensor)
        state = update.state_dict()
        M = torch.cat([state[f"{layer}.weight"], state[f"{layer}.bias"][None]]).double()  # in × out, as x W + b
        grams += A.double()
        right += A.double() @ M
    together = torch.cat([fused[f"{layer}.weight"], fused[f"{layer}.bias"][None]]).double()
    torch.testing.assert_close(
        grams @ together, right, rtol=1e-3, atol=1e-4
    )  # a norm's output has no mean: A is singular


def test_memory_is_bound_by_layers(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder,) = folders(data, "next", 1)
    source = str(data / "texts.jsonl")
    options = ["min_rows=1"]
    whole = notes_of(checkpoint_evidence(folder, source, "fedlpa", options, length=12))
    monkeypatch.setattr("fedfuse.client.kfac._SUMS", 1)
    for name, note in notes_of(checkpoint_evidence(folder, source, "fedlpa", options, length=12)).items():
        torch.testing.assert_close(note, whole[name], msg=name)


def test_the_command_writes_a_file_that_fuse_reads(data: Path, request: pytest.FixtureRequest) -> None:
    command = request.getfixturevalue("fedfuse")
    for folder in folders(data, "sequence"):
        said = command("evidence", folder, "--data", "texts.jsonl", "--method", "regmean", "-o", f"{folder.name}.st")
        assert said.code == 0, said.err
        assert "of 12 rows" in said.out
    assert not fedfuse.fuse(["sequence-0.st", "sequence-1.st"], "regmean").refused
    said = command("evidence", folder, "--data", "texts.jsonl", "--method", "regmeen", "-o", "a.st")
    assert said.code != 0
    assert "regmean" in said.err


def test_a_network_of_transformers_trains_as_it_is() -> None:
    torch.manual_seed(0)
    net = tiny.bert("ForSequenceClassification", num_labels=2)
    rows = (torch.randint(5, 14, (16, 7)), torch.arange(16) % 2)
    update = fedfuse.local_update(net, rows, epochs=1, lr=0.1)
    assert update.facts["loss"] > 0
    assert fedfuse.fuse([update, update.telling(client="b")], "fedavg").state_dict().keys() == net.state_dict().keys()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('{"text": "good", "label": "great"}', "line 1: the label is 'great', expected one of LABEL_0, LABEL_1"),
        ('{"text": "good", "label": 2}', "the label is 2"),
        ('{"body": "good", "label": 0}', "'text' is no text; the line has 'body', 'label'"),
        ("[", "line 1 is no JSON"),
        ("", "has no lines"),
    ],
)
def test_rows_that_do_not_suit_are_named(data: Path, lines: str, words: str) -> None:
    (folder,) = folders(data, "sequence", 1)
    (data / "odd.jsonl").write_text(lines)
    with pytest.raises(ConfigError, match=re.escape(words)):
        checkpoint_evidence(folder, str(data / "odd.jsonl"), "regmean")


def test_folders_that_cannot_be_are_named(data: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no readable config\.json"):
        open_folder(data)
    (data / "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(ConfigError, match="names the network 'BertModel', expected one that ends in ForSequence"):
        open_folder(data)
    (data / "config.json").write_text('{"architectures": ["BertForMaskedLM"], "model_type": "bert"}')
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_folder(data)
