"""Checkpoint folders: read shard by shard, refused by file and tensor name, written whole or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fedfuse
from fedfuse.core.messages import Form
from fedfuse.errors import ConfigError, QuorumLost
from fedfuse.wire.codec import LazyParams
from fedfuse.wire.folders import INDEX, open_weights, parse_dtype, parse_size, read_folder

CONFIG = {"model_type": "bert", "vocab_size": 7, "num_attention_heads": 2, "tie_word_embeddings": True}


def weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (7, 4), "layer.weight": (4, 4), "layer.bias": (4,)}
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}


def folder(path: Path, tensors: dict[str, Tensor], config: dict[str, object] | None = None) -> Path:
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    return path


def sharded(path: Path, tensors: dict[str, Tensor]) -> Path:
    path.mkdir(parents=True)
    homes = {name: f"model-0000{k}-of-00003.safetensors" for k, name in enumerate(tensors, 1)}
    for name, file in homes.items():
        save_file({name: tensors[name]}, path / file, {"format": "pt"})
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    return [folder(tmp_path / name, weights(seed)) for seed, name in enumerate("ab")]


def test_shards_and_one_file_are_the_same_model(tmp_path: Path) -> None:
    one, three = folder(tmp_path / "one", weights(0)), sharded(tmp_path / "three", weights(0))
    for source in (one, three, three / INDEX):
        found = open_weights(source).tensors
        assert {n: t.tolist() for n, t in found.items()} == {n: t.tolist() for n, t in sorted(weights(0).items())}
    mean = fedfuse.fuse([one, three, three / INDEX]).state_dict()
    assert all(mean[n].equal(t) for n, t in weights(0).items())


def test_a_missing_shard_is_named_with_a_tensor_it_should_hold(tmp_path: Path) -> None:
    broken = sharded(tmp_path / "broken", weights(0))
    (broken / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00003.safetensors is missing, .* 'layer.weight' .* fetch"):
        fedfuse.fuse([broken, sharded(tmp_path / "good", weights(1))])


def test_an_index_that_points_nowhere_is_refused(tmp_path: Path) -> None:
    broken = sharded(tmp_path / "broken", weights(0))
    index = json.loads((broken / INDEX).read_text())
    index["weight_map"]["gone.weight"] = "model-00001-of-00003.safetensors"
    (broken / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"'gone.weight' is in model-00001-of-00003.safetensors, which has no such"):
        read_folder(broken)
    for file in ("../secret.safetensors", "/etc/passwd", "..", 3):
        (broken / INDEX).write_text(json.dumps({"weight_map": {"w": file}}))
        with pytest.raises(ConfigError, match="expected a file of the folder"):
            read_folder(broken)
    for text in ("{", "[]", '{"weight_map": {}}'):
        (broken / INDEX).write_text(text)
        with pytest.raises(ConfigError, match="fetch the folder again"):
            read_folder(broken)


def test_pickles_are_refused_with_a_command_that_converts_them(tmp_path: Path, two: list[Path]) -> None:
    old = tmp_path / "old"
    old.mkdir()
    torch.save(weights(3), old / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="is a pickle, which could run any code") as caught:
        fedfuse.fuse([two[0], old])
    command = str(caught.value).partition('python -c "')[2].rstrip('"')
    exec(compile(command, "the command", "exec"), {})
    assert all(load_file(old / "model.safetensors")[n].equal(t) for n, t in weights(3).items())
    assert fedfuse.fuse([two[0], old]).refused == ()


def test_a_file_that_is_a_pickle_is_refused_with_the_command_too(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.bin")
    with pytest.raises(ConfigError, match="a.bin is a pickle, which could run any code") as told:
        fedfuse.fuse([tmp_path / "a.bin", tmp_path / "a.bin"])
    subprocess.run([sys.executable, "-c", str(told.value).partition('-c "')[2].rstrip('"')], check=True)
    assert fedfuse.fuse([tmp_path / "a.safetensors"] * 2).state_dict()["w"].tolist() == [1.0, 1.0]


def test_an_empty_folder_and_a_damaged_file_say_what_they_are(tmp_path: Path, two: list[Path]) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty has no model.safetensors; expected .* `save_pretrained`"):
        read_folder(tmp_path / "empty")
    (two[1] / "model.safetensors").write_bytes(b"\xff" * 99)
    with pytest.raises(ConfigError, match=r"model.safetensors is damaged: .* fetch the folder again"):
        fedfuse.fuse(two)


def test_other_architectures_and_vocabularies_are_refused_by_file_and_entry(tmp_path: Path, two: list[Path]) -> None:
    heads = folder(tmp_path / "heads", weights(2), {"num_attention_heads": 4})
    with pytest.raises(ConfigError, match=r"heads/config.json has another architecture .* num_attention_heads is 4"):
        fedfuse.fuse([*two, heads])
    words = folder(tmp_path / "words", weights(2), {"vocab_size": 8})
    with pytest.raises(ConfigError, match=r"another vocabulary .* vocab_size is 8 and there 7"):
        fedfuse.fuse([*two, words])
    for path, number in zip(two, (3, 4), strict=True):
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"the": number, "a": 1}}}))
    with pytest.raises(ConfigError, match=r"b/tokenizer.json is another vocabulary .* 'the' has number 4, there 3"):
        fedfuse.fuse(two)


def test_a_tensor_of_another_shape_is_named_and_all_folders_must_be_admitted(tmp_path: Path, two: list[Path]) -> None:
    odd = folder(tmp_path / "odd", weights(2) | {"layer.bias": torch.zeros(5)})
    with pytest.raises(QuorumLost, match=r"odd: layer.bias is 5 float32, expected 4 float32"):
        fedfuse.fuse([*two, odd])
    assert [r["client"] for r in fedfuse.fuse([*two, odd], quorum=0.5).refused] == ["odd"]
    nan = folder(tmp_path / "nan", weights(2) | {"layer.bias": torch.full((4,), float("nan"))})
    with pytest.raises(QuorumLost, match=r"nan: layer.bias is not finite"):
        fedfuse.fuse([*two, nan])


def test_folders_are_fused_with_folders(two: list[Path]) -> None:
    with pytest.raises(ConfigError, match="is a checkpoint folder and a dict is none"):
        fedfuse.fuse([two[0], weights(1)])


def test_half_precision_beside_full_is_widened_and_the_output_dtype_chosen(tmp_path: Path) -> None:
    half = folder(tmp_path / "half", weights(0, torch.bfloat16))
    full = folder(tmp_path / "full", weights(1), {"dtype": "float32"})
    fused = fedfuse.fuse([half, full])
    expected = {n: (weights(0, torch.bfloat16)[n].double() + weights(1)[n].double()) / 2 for n in weights(0)}
    assert all(fused.state_dict()[n].equal(t.float()) for n, t in expected.items())
    fused.save(tmp_path / "out", dtype="float16")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(written[n].equal(t.float().half()) for n, t in expected.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
    base = folder(tmp_path / "base", weights(2, torch.float16))
    merged = fedfuse.fuse([half, full], fedfuse.recipe("task_arithmetic", scale=0.5), start=base).state_dict()
    assert all(torch.allclose(merged[n].double(), t, atol=1e-6) for n, t in expected.items())


def test_plain_files_are_widened_too() -> None:
    half, full = ({"w": torch.ones(2, dtype=d)} for d in (torch.float16, torch.bfloat16))
    assert fedfuse.fuse([half, full]).state_dict()["w"].dtype == torch.float32


def test_a_tied_copy_is_left_out_and_does_not_divide_folders(tmp_path: Path) -> None:
    plain = folder(tmp_path / "plain", weights(0))
    copied = folder(tmp_path / "copied", weights(1) | {"lm_head.weight": weights(1)["embed.weight"].clone()})
    assert "lm_head.weight" not in fedfuse.fuse([plain, copied]).state_dict()
    other = folder(tmp_path / "other", weights(1) | {"lm_head.weight": torch.zeros(7, 4)})
    with pytest.raises(QuorumLost, match=r"lm_head.weight"):
        fedfuse.fuse([plain, other])


@pytest.mark.parametrize("name", ["fedavg", "ties", "dare", "slerp", "model_stock", "iso"])
def test_folders_give_the_bytes_of_state_dicts(name: str, tmp_path: Path, two: list[Path]) -> None:
    base = folder(tmp_path / "base", weights(9))
    start = None if name in ("fedavg", "slerp") else base
    plain = [dict(read_folder(path).tensors) for path in two]
    expected = fedfuse.fuse(plain, name, start=None if start is None else dict(read_folder(base).tensors))
    found = fedfuse.fuse(two, name, start=start)
    if name != "dare":  # lots are drawn by the models' names
        assert all(found.state_dict()[n].equal(t) for n, t in expected.state_dict().items())
    found.save(tmp_path / "out", shard_size="70B")
    written = read_folder(tmp_path / "out").tensors
    assert all(written[n].equal(t) for n, t in found.state_dict().items())


def test_a_method_that_looks_at_the_whole_network_says_so(two: list[Path]) -> None:
    fused = fedfuse.fuse(two, "fedavg", guard="clip", start=two[0])
    assert any("looks at the whole network at once" in remark for remark in fused.remarks)
    assert not fedfuse.fuse(two, "fedavg", guard="median").remarks


def test_one_tensor_of_the_fused_model_exists_at_a_time(two: list[Path]) -> None:
    """What is fused is fetched from the folders when it is asked for, and not before."""
    fused = fedfuse.fuse(two)
    assert isinstance(fused.state(), LazyParams)
    (two[0] / "model.safetensors").unlink()
    with pytest.raises(fedfuse.FuseError, match="cannot read"):
        fused.state_dict()


def test_nothing_half_written_is_left(tmp_path: Path, two: list[Path]) -> None:
    fused = fedfuse.fuse(two)
    (two[1] / "model.safetensors").unlink()
    with pytest.raises(fedfuse.FuseError):
        fused.save(tmp_path / "out" / "merged")
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(ConfigError, match="is there already; remove it or choose another name"):
        fused.save(two[0])


def test_a_fused_tensor_that_overflows_is_named(tmp_path: Path) -> None:
    full, base = ({"w": torch.full((2, 2), v, dtype=torch.float16)} for v in (2.0, 1.0))
    paths = [folder(tmp_path / n, t) for n, t in (("a", full), ("b", full), ("base", base))]
    fused = fedfuse.fuse(paths[:2], fedfuse.recipe("task_arithmetic", scale=1e5), start=paths[2])
    with pytest.raises(fedfuse.FuseError, match="the fused w is not finite"):
        fused.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_config_and_tokenizer_are_carried_over_and_nothing_else(tmp_path: Path, two: list[Path]) -> None:
    for name in ("tokenizer.json", "README.md", "training_args.bin", "optimizer.pt"):
        (two[0] / name).write_text("{}")
    fedfuse.fuse(two).save(tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_sizes_and_dtypes_are_read_or_refused() -> None:
    assert [parse_size(text) for text in ("5GB", "1.5 MB", "300")] == [5 * 10**9, 1_500_000, 300]
    for text in ("", "five", "0GB", "-1MB"):
        with pytest.raises(ConfigError, match="write it as in 5GB"):
            parse_size(text)
    with pytest.raises(ConfigError, match="no dtype 'int8' for weights; expected one of bfloat16, float16"):
        parse_dtype("int8")
    assert Form((1,), parse_dtype("float64")).dtype == torch.float64


def linear(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.ones(shape).to(dtype)}


# What libraries write in the place of a weight of 16 × 8, by their names, dtypes and shapes.
PACKED = {
    "bitsandbytes 4-bit": {
        **linear("fc.weight", torch.uint8, (64, 1)),
        **linear("fc.weight.absmax", torch.uint8, (2,)),
        **linear("fc.weight.nested_absmax", torch.float32, (1,)),
        **linear("fc.weight.nested_quant_map", torch.float32, (256,)),
        **linear("fc.weight.quant_map", torch.float32, (16,)),
        **linear("fc.weight.quant_state.bitsandbytes__nf4", torch.uint8, (93,)),
    },
    "bitsandbytes 4-bit, stored as bfloat16": {
        **linear("fc.weight", torch.bfloat16, (32, 1)),
        **linear("fc.weight.absmax", torch.float32, (2,)),
        **linear("fc.weight.quant_map", torch.float32, (16,)),
        **linear("fc.weight.quant_state.bitsandbytes__nf4", torch.uint8, (93,)),
    },
    "bitsandbytes 8-bit": {
        **linear("fc.weight", torch.int8, (16, 8)),
        **linear("fc.SCB", torch.float32, (16,)),
        **linear("fc.weight_format", torch.uint8, ()),
    },
    "GPTQ": {
        **linear("fc.qweight", torch.int32, (1, 16)),
        **linear("fc.qzeros", torch.int32, (1, 2)),
        **linear("fc.scales", torch.float16, (1, 16)),
        **linear("fc.g_idx", torch.int32, (8,)),
    },
    "AWQ": {
        **linear("fc.qweight", torch.int32, (8, 2)),
        **linear("fc.qzeros", torch.int32, (1, 2)),
        **linear("fc.scales", torch.float16, (1, 16)),
    },
    "compressed-tensors": {
        **linear("fc.weight_packed", torch.int32, (16, 1)),
        **linear("fc.weight_scale", torch.bfloat16, (16, 1)),
        **linear("fc.weight_shape", torch.int64, (2,)),
    },
    "MXFP4": {
        **linear("experts.down_proj_blocks", torch.uint8, (2, 16, 1, 4)),
        **linear("experts.down_proj_scales", torch.uint8, (2, 16, 1)),
    },
    "float8": {
        **linear("fc.weight", torch.float8_e4m3fn, (16, 8)),
        **linear("fc.weight_scale_inv", torch.float32, (1, 1)),
    },
}
WHAT_TO_DO = r"packed numbers; expected plain weights: dequantize the model \(`model.dequantize\(\)`"


@pytest.mark.parametrize("kind", PACKED)
def test_packed_weights_are_refused_by_name_with_what_to_do(kind: str, tmp_path: Path) -> None:
    good = [folder(tmp_path / name, weights(seed)) for seed, name in enumerate(("good", "fine"))]
    packed = [folder(tmp_path / name, {**weights(0), **PACKED[kind]}) for name in ("a", "b")]
    for folders in (packed, [*good, packed[0]]):
        with pytest.raises(ConfigError, match=rf"/a.*: tensor '(fc|experts)\.\w+(\.\w+)*' is .*{WHAT_TO_DO}"):
            fedfuse.fuse(folders)
    with pytest.raises(ConfigError, match=WHAT_TO_DO):
        fedfuse.fuse(good, "ties", start=packed[0])
    files = [path / "model.safetensors" for path in (*good, packed[0])]
    (refused,) = fedfuse.fuse([files[0].rename(tmp_path / "x.safetensors"), files[1], files[2]]).refused
    assert refused["field"].startswith(("fc.", "experts."))
    assert refused["expected"].startswith("plain weights: dequantize")


@pytest.mark.parametrize("kind", [kind for kind in PACKED if kind != "float8"])
def test_packed_state_dicts_are_refused_too(kind: str) -> None:
    with pytest.raises(QuorumLost, match=r"model-1: (fc|experts)\.\S+ is .*, expected plain weights: dequantize"):
        fedfuse.fuse([PACKED[kind], PACKED[kind]])
    (refused,) = fedfuse.fuse([weights(0), weights(1), PACKED[kind]]).refused
    assert refused["client"] == "model-3"


def test_state_dicts_of_short_floats_say_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"'fc.weight' is torch.float8_e4m3fn, .* floats of 16 bits or more"):
        fedfuse.fuse([PACKED["float8"]])


def test_a_config_that_tells_of_packing_is_refused_whatever_the_weights(tmp_path: Path) -> None:
    told: dict[str, object] = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    folders = [folder(tmp_path / name, weights(seed), told) for seed, name in enumerate("ab")]
    words = r"a/config.json: quantization_config says that the weights are packed by 'gptq'; expected plain weights"
    with pytest.raises(ConfigError, match=words):
        fedfuse.fuse(folders)


def test_a_packed_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=WHAT_TO_DO):
        fedfuse.fuse([sharded(tmp_path / "a", dict(list(PACKED["GPTQ"].items())[:3]))] * 2)


def test_buffers_of_whole_numbers_stay_what_they_are(tmp_path: Path) -> None:
    buffers = {
        "embeddings.position_ids": torch.arange(7)[None],
        "embeddings.short_ids": torch.arange(7, dtype=torch.int32)[None],
        "attn.bias": torch.ones(4, 4, dtype=torch.uint8).tril()[None, None],
        "attn.mask": torch.ones(4, 4, dtype=torch.bool).tril(),
        "window.relative_position_index": torch.arange(9).view(3, 3),
        "norm.num_batches_tracked": torch.tensor(5),
        "levels": torch.arange(3, dtype=torch.uint8),
    }
    folders = [folder(tmp_path / name, weights(seed) | buffers) for seed, name in enumerate("ab")]
    for sources in (folders, [weights(0) | buffers, weights(1) | buffers]):
        fused = fedfuse.fuse(sources).state_dict()
        assert all(fused[name].equal(buffer) for name, buffer in buffers.items())


class WithTable(torch.nn.Module):
    """A network that looks numbers up in a table of short whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 3)
        self.register_buffer("table", torch.arange(6, dtype=torch.int32).view(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)  # type: ignore[no-any-return]


def test_a_network_trained_here_has_the_buffers_it_likes(tmp_path: Path) -> None:
    network, rows = WithTable(), (torch.randn(8, 4), torch.arange(8) % 3)
    updates = [fedfuse.local_update(network, rows, "fedavg", client=name, epochs=1) for name in "ab"]
    files = [fedfuse.fuse(updates).save(tmp_path / f"{name}.safetensors") for name in "ab"]
    for sources in (updates, files):
        assert fedfuse.fuse(sources).state_dict()["table"].tolist() == [[0, 1, 2], [3, 4, 5]]
