"""Low-rank adapters as `peft` writes them: the mean of products, its best approximation, merged into the base."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fedfuse
import tiny_checkpoints as tiny
from fedfuse import cli
from fedfuse.errors import ConfigError
from fedfuse.linalg.lowrank import norm_of, truncate, truncate_for_inputs

pytestmark = pytest.mark.filterwarnings("ignore")  # other packages'

HEAD = "base_model.model."
SHAPES = {"fc.query": (6, 5), "fc.key": (4, 6)}


def draw(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator)


def adapter(home: Path, name: str, seed: int, rank: int = 2, alpha: float = 4, **config: Any) -> Path:
    """A folder in peft's format, made by hand."""
    folder, make = home / name, draw(seed)
    folder.mkdir(parents=True)
    tensors = {}
    for module, (out, inputs) in SHAPES.items():
        own = config.get("rank_pattern", {}).get(module.rpartition(".")[2], rank)
        tensors |= {f"{HEAD}{module}.lora_A.weight": make(own, inputs), f"{HEAD}{module}.lora_B.weight": make(out, own)}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "base_model_name_or_path": "base", **config}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


def product(folder: Path, module: str) -> Tensor:
    """s B A of one module, read as the format says."""
    config, tensors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    a, b = (tensors[f"{HEAD}{module}.lora_{side}.weight"].double() for side in "AB")
    alpha = next((v for k, v in config.get("alpha_pattern", {}).items() if module.endswith(k)), config["lora_alpha"])
    return alpha / (len(a) ** 0.5 if config.get("use_rslora") else len(a)) * b @ a


def mean(folders: list[Path], module: str, shares: list[float]) -> Tensor:
    return sum((f * product(path, module) for f, path in zip(shares, folders, strict=True)), torch.zeros(()))


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Of different ranks, scales and conventions."""
    return [
        adapter(tmp_path, "a", 0, rank=2, alpha=4),
        adapter(tmp_path, "b", 1, rank=1, alpha=3, use_rslora=True),
        adapter(tmp_path, "c", 2, rank=2, alpha=8, rank_pattern={"key": 3}, alpha_pattern={"key": 5}),
    ]


def test_stacked_adapters_are_the_exact_mean(three: list[Path], tmp_path: Path) -> None:
    fused = fedfuse.fuse(three, "flora", num_examples=[1, 2, 1])
    fused.save(tmp_path / "out")
    for module in SHAPES:
        torch.testing.assert_close(
            product(tmp_path / "out", module), mean(three, module, [0.25, 0.5, 0.25]), atol=1e-6, rtol=1e-6
        )
    assert fused.facts["adapter_error"] == 0
    assert fused.facts["adapter_ranks"] == {f"{HEAD}fc.key": 6, f"{HEAD}fc.query": 5}  # sums of ranks


def test_a_truncated_mean_is_the_nearest_of_its_rank_and_says_what_is_lost(three: list[Path], tmp_path: Path) -> None:
    fused = fedfuse.fuse(three, fedfuse.recipe("flexlora", rank=2))
    fused.save(tmp_path / "out")
    lost = total = 0.0
    for module in SHAPES:
        whole = mean(three, module, [1 / 3] * 3)
        u, s, v = torch.linalg.svd(whole, full_matrices=False)
        nearest = u[:, :2] * s[:2] @ v[:2]
        torch.testing.assert_close(product(tmp_path / "out", module), nearest, atol=1e-5, rtol=1e-5)
        lost, total = lost + float(s[2:].square().sum()), total + float(s.square().sum())
        assert fused.facts["adapter_errors"][HEAD + module] == pytest.approx(
            float((s[2:].square().sum() / s.square().sum()).sqrt()), rel=1e-4
        )
    assert fused.facts["adapter_error"] == pytest.approx((lost / total) ** 0.5, rel=1e-4)


def test_a_rank_beyond_what_there_is_loses_nothing(three: list[Path], tmp_path: Path) -> None:
    fused = fedfuse.fuse(three, fedfuse.recipe("flexlora", rank=9))
    fused.save(tmp_path / "out")
    assert fused.facts["adapter_error"] < 1e-7
    assert load_file(tmp_path / "out" / "adapter_model.safetensors")[f"{HEAD}fc.key.lora_A.weight"].shape == (9, 6)


def test_separate_means_are_far_off_and_say_how_far(three: list[Path]) -> None:
    two = [three[0], three[2]]
    fused = fedfuse.fuse([three[0], three[0].parent / "a"], "fedit")
    assert fused.facts["adapter_error"] == pytest.approx(0, abs=1e-6)
    fused = fedfuse.fuse(two, "fedit")
    wrong = right = 0.0
    for module in SHAPES:
        b, a = (fused.state_dict()[f"{HEAD}{module}.lora_{side}.weight"].double() for side in "BA")
        whole = mean(two, module, [0.5, 0.5])
        wrong, right = wrong + float((b @ a - whole).square().sum()), right + float(whole.square().sum())
    assert fused.facts["adapter_error"] == pytest.approx((wrong / right) ** 0.5, rel=1e-4)
    assert "flora" in fused.remarks[0]


def test_other_methods_are_kept_from_fusing_factors_apart(three: list[Path]) -> None:
    with pytest.raises(ConfigError, match="'fedavg' .* flora"):
        fedfuse.fuse(three, "fedavg")


def base_folder(home: Path, dtype: torch.dtype = torch.float32) -> Path:
    folder = home / "base"
    folder.mkdir()
    weights = {f"{module}.weight": draw(9)(*shape).to(dtype) for module, shape in SHAPES.items()}
    save_file(weights | {"norm.weight": torch.ones(3, dtype=dtype)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "dtype": str(dtype).removeprefix("torch.")}))
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_are_merged_into_their_base_exactly(dtype: torch.dtype, three: list[Path], tmp_path: Path) -> None:
    base = base_folder(tmp_path, dtype)
    fedfuse.fuse(three, "fedavg", start=base).save(tmp_path / "out")
    written, begin = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", base))
    for module in SHAPES:
        exact = begin[f"{module}.weight"].double() + mean(three, module, [1 / 3] * 3)
        torch.testing.assert_close(written[f"{module}.weight"], exact.float().to(dtype))  # rounded once
    assert written["norm.weight"].equal(begin["norm.weight"])
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_any_rule_fuses_adapters_at_their_base(three: list[Path], tmp_path: Path) -> None:
    base = base_folder(tmp_path)
    found = fedfuse.fuse(three, fedfuse.recipe("ties", density=0.5), start=base).state_dict()
    begin = load_file(base / "model.safetensors")
    whole = [{n: t.clone() for n, t in begin.items()} for _ in three]
    for folder, model in zip(three, whole, strict=True):
        for module in SHAPES:
            model[f"{module}.weight"] += product(folder, module).float()
    expected = fedfuse.fuse(whole, fedfuse.recipe("ties", density=0.5), start=begin).state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected LORA"),
        ({"bias": "all"}, "bias is 'all', expected 'none'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"base_model_name_or_path": "other"}, "base_model_name_or_path is 'other', expected 'base'"),
    ],
)
def test_what_is_no_plain_adapter_of_the_same_base_is_refused(
    entry: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folders = [adapter(tmp_path, "a", 0), adapter(tmp_path, "odd", 1, **entry)]
    with pytest.raises(ConfigError, match=f"odd/adapter_config.json: {words}"):
        fedfuse.fuse(folders, "flora")


def test_other_targets_other_bases_and_broken_factors_are_refused_by_tensor(three: list[Path], tmp_path: Path) -> None:
    odd = adapter(tmp_path, "odd", 5)
    file = odd / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if "key" not in n}, file)
    with pytest.raises(ConfigError, match=r"'fc.key' .*odd"):
        fedfuse.fuse([three[0], odd], "flora")
    save_file({n: t for n, t in tensors.items() if "key.lora_B" not in n}, file)
    with pytest.raises(ConfigError, match="rank"):
        fedfuse.fuse([three[0], odd], "flora")
    save_file(tensors | {f"{HEAD}fc.key.lora_magnitude_vector": torch.ones(4)}, file)
    with pytest.raises(ConfigError, match="lora_magnitude_vector"):
        fedfuse.fuse([three[0], odd], "flora")
    file.unlink()
    with pytest.raises(ConfigError, match="odd .*adapter_model.safetensors"):
        fedfuse.fuse([three[0], odd], "flora")
    base = base_folder(tmp_path)
    save_file({"fc.query.weight": torch.zeros(6, 5), "fc.key.weight": torch.zeros(4, 4)}, base / "model.safetensors")
    with pytest.raises(ConfigError, match=r"4×6 .*base 'fc.key.weight' is 4×4"):
        fedfuse.fuse(three, "fedavg", start=base)
    with pytest.raises(ConfigError, match="adapter and .*base"):
        fedfuse.fuse([three[0], base], "flora")


def test_an_adapter_in_shards_is_the_adapter_and_one_in_pickles_is_refused_with_a_command(
    three: list[Path], tmp_path: Path
) -> None:
    whole = fedfuse.fuse(three, "flora").state_dict()
    file = three[1] / "adapter_model.safetensors"
    tensors = load_file(file)
    file.unlink()
    homes = {name: f"adapter_model-{1 + k % 2:05d}-of-00002.safetensors" for k, name in enumerate(sorted(tensors))}
    for shard in set(homes.values()):
        save_file({n: t for n, t in tensors.items() if homes[n] == shard}, three[1] / shard, {"format": "pt"})
    for index in ("model.safetensors.index.json", "adapter_model.safetensors.index.json"):
        (three[1] / index).write_text(json.dumps({"weight_map": homes}))
        assert all(t.equal(whole[n]) for n, t in fedfuse.fuse(three, "flora").state_dict().items())
    (three[1] / shard).unlink()
    with pytest.raises(ConfigError, match=f"{shard} .*adapter_model.safetensors.index.json"):
        fedfuse.fuse(three, "flora")
    pickled = adapter(tmp_path, "pickled", 3)
    torch.save(load_file(pickled / "adapter_model.safetensors"), pickled / "adapter_model.bin")
    (pickled / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match="adapter_model.bin .*pickle") as told:
        fedfuse.fuse([three[0], pickled], "flora")
    subprocess.run([sys.executable, "-c", str(told.value).partition('-c "')[2].rstrip('"')], check=True)
    fedfuse.fuse([three[0], pickled], "flora")


def test_a_rank_that_is_not_the_configs_is_refused(three: list[Path], tmp_path: Path) -> None:
    odd = adapter(tmp_path, "odd", 4, rank=2)
    told = json.loads((odd / "adapter_config.json").read_text())
    (odd / "adapter_config.json").write_text(json.dumps(told | {"r": 7}))
    with pytest.raises(ConfigError, match=r"lora_A.weight' .* 2 .*adapter_config.json .* 7"):
        fedfuse.fuse([three[0], odd], "flora")


def test_an_adapter_is_not_merged_into_another_base_than_it_names(three: list[Path], tmp_path: Path) -> None:
    bases = [tmp_path / "base", tmp_path / "other"]
    for seed, folder in enumerate(bases):
        folder.mkdir()
        weights = {f"{module}.weight": draw(seed)(*shape) for module, shape in SHAPES.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text("{}")
    for folder in three:
        told = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(told | {"base_model_name_or_path": str(bases[0])}))
    fedfuse.fuse(three, "fedavg", start=bases[0])
    with pytest.raises(ConfigError, match="a/adapter_config.json: base_model_name_or_path is '.*base'"):
        fedfuse.fuse(three, "fedavg", start=bases[1])


def test_a_network_that_renames_its_layers_takes_adapters_into_its_files(tmp_path: Path) -> None:
    """Files of a ViT have older names than its modules, which adapters are named by."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    base = tiny.save(tiny.vit(), tmp_path / "base")
    network, merged = transformers.AutoModelForImageClassification, []
    for k in range(2):
        config = peft.LoraConfig(r=2 + k, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
        adapted = peft.get_peft_model(network.from_pretrained(base), config)
        for name, tensor in adapted.named_parameters():
            tensor.data += 0.1 * torch.randn_like(tensor) * ("lora" in name or "modules_to_save" in name)
        adapted.save_pretrained(tmp_path / f"lora-{k}")
        merged.append(adapted.merge_and_unload().state_dict())
    fedfuse.fuse([tmp_path / "lora-0", tmp_path / "lora-1"], "fedavg", start=base).save(tmp_path / "out")
    found = network.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, (merged[0][name] + merged[1][name]) / 2)


def test_factors_of_matrices_of_low_rank_are_exact() -> None:
    make = draw(3)
    left, right = make(7, 3).double(), make(3, 9).double()
    found = truncate(left, right, 3)
    torch.testing.assert_close(found.left @ found.right, left @ right)
    assert found.error == 0
    assert norm_of(left, right) == pytest.approx(float((left @ right).norm()))
    assert truncate(0 * left, right, 2).error == 0


def with_peft(home: Path, kind: str, seed: int, rank: int, **options: Any) -> tuple[Any, Path]:
    """A tiny network of `transformers` with an adapter of `peft`, its factors drawn, saved as peft saves it."""
    tf, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = tf.GPT2Config(
            vocab_size=40, n_embd=8, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=1
        )
        net, targets = tf.GPT2LMHeadModel(config), ["c_attn", "c_proj"]
    else:
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
        net = tf.BertForSequenceClassification(
            tf.BertConfig(vocab_size=40, max_position_embeddings=16, num_labels=3, **sizes)
        )
        targets = ["query", "word_embeddings"]
    net.save_pretrained(home / "base")
    net.config._name_or_path = "base"
    made = peft.get_peft_model(net, peft.LoraConfig(r=rank, lora_alpha=6, target_modules=targets, **options)).eval()
    make = draw(seed)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                weight.copy_(make(*weight.shape))
    made.save_pretrained(home / f"p{seed}")
    return made, home / f"p{seed}"


@pytest.mark.parametrize(
    ("kind", "options"),
    [("gpt2", {"fan_in_fan_out": True, "use_rslora": True}), ("bert", {"modules_to_save": ["classifier"]})],
    ids=["gpt2", "bert"],
)
def test_what_peft_wrote_is_fused_and_read_by_peft_again(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The fused adapter, loaded by peft and merged by it, is the mean of adapters that peft merged, and so is ours."""
    peft, tf = pytest.importorskip("peft"), pytest.importorskip("transformers")
    pairs = [with_peft(tmp_path, kind, seed, rank, **options) for seed, rank in ((1, 2), (2, 3))]
    folders = [folder for _, folder in pairs]
    merged = [{n: t.double() for n, t in model.merge_and_unload().state_dict().items()} for model, _ in pairs]
    wanted = {n: (merged[0][n] + merged[1][n]) / 2 for n in merged[0] if merged[0][n].is_floating_point()}
    auto = tf.AutoModelForCausalLM if kind == "gpt2" else tf.AutoModelForSequenceClassification
    fedfuse.fuse(folders, "flora").save(tmp_path / "stacked")
    fedfuse.fuse(folders, "fedavg", start=tmp_path / "base").save(tmp_path / "whole")
    base = (
        auto.from_pretrained(tmp_path / "base", num_labels=3)
        if kind == "bert"
        else auto.from_pretrained(tmp_path / "base")
    )
    stacked = peft.PeftModel.from_pretrained(base, tmp_path / "stacked").merge_and_unload()
    for found in (stacked.state_dict(), auto.from_pretrained(tmp_path / "whole").state_dict()):
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name].double(), tensor, atol=1e-5, rtol=1e-5)


def test_adapters_by_the_command_line(
    three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, told in (
        (["a", "b", "c", "-o", "stacked"], "lost of the mean of the adapters: 0.00% of its norm"),
        (["a", "b", "--method", "flexlora", "--set", "rank=1", "-o", "thin"], "lost of the mean"),
        (["a", "b", "--method", "fedit", "-o", "apart"], "away from the mean of the adapters"),
    ):
        monkeypatch.setattr(sys, "argv", ["fedfuse", "fuse", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code
        said = capsys.readouterr()
        assert told in " ".join((said.out + said.err).split())
        assert (tmp_path / words[-1] / "adapter_config.json").is_file()


def dense_best(whole: Tensor, moments: Tensor, rank: int) -> tuple[Tensor, float]:
    """The truncated SVD of ΔW C^½ times C^−½, written out, and the share of ‖ΔW C^½‖ that it loses."""
    values, vectors = torch.linalg.eigh(moments)
    root, back = (vectors * values.sqrt()) @ vectors.mT, (vectors / values.sqrt()) @ vectors.mT
    u, s, v = torch.linalg.svd(whole @ root, full_matrices=False)
    return u[:, :rank] * s[:rank] @ v[:rank] @ back, float(s[rank:].norm() / s.norm())


def moments_of(seed: int, size: int) -> Tensor:
    rows = draw(seed)(30, size).double() * torch.logspace(-1, 1, size).double()
    return rows.mT @ rows / len(rows)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_the_best_adapter_for_given_inputs_is_the_dense_closed_form(rank: int) -> None:
    left, right, C = draw(0)(7, 4).double(), draw(1)(4, 9).double(), moments_of(2, 9)
    found = truncate_for_inputs(left, right, right @ C @ right.mT, rank)
    best, error = dense_best(left @ right, C, rank)
    torch.testing.assert_close(found.left @ found.right, best, atol=1e-8, rtol=1e-8)
    assert found.error == pytest.approx(error, abs=1e-7)
    assert found.norm == pytest.approx(math.sqrt(float((left @ right @ C @ (left @ right).mT).trace())))
    plain = truncate(left, right, rank)
    off = [left @ right - x.left @ x.right for x in (found, plain)]
    seen = [float((d @ C @ d.mT).trace()) for d in off]
    assert seen[0] <= seen[1] + 1e-9, "no other of that rank answers these inputs better"
    torch.testing.assert_close(*(x.norm(dim=d) for x, d in ((found.left, 0), (found.right, 1))))  # balanced


def test_inputs_that_nobody_has_seen_are_answered_as_before() -> None:
    """A singular C has no root to divide by; what the factors do beyond it stays as far as outputs allow."""
    left, right = draw(0)(5, 2).double(), draw(1)(2, 6).double()
    seen = torch.zeros(6, 6, dtype=torch.float64)
    seen[0, 0] = 1.0
    found = truncate_for_inputs(left, right, right @ seen @ right.mT, 2)
    torch.testing.assert_close(found.left @ found.right, left @ right)
    assert found.error == pytest.approx(0, abs=1e-7)


def test_adapters_are_fused_in_the_metric_of_what_clients_read(tmp_path: Path) -> None:
    """Folders of peft with evidence: moments are those of the adapted network, and the fused adapter is the best."""
    pytest.importorskip("peft")
    from fedfuse.federation.checkpoint import checkpoint_evidence, open_folder
    from fedfuse.nets.kronecker import read_factor
    from fedfuse.wire.codec import read
    from fedfuse.wire.folders import EVIDENCE
    from fedfuse.wire.messages import split

    made = [with_peft(tmp_path, "gpt2", seed, rank, fan_in_fan_out=True) for seed, rank in ((1, 2), (2, 3))]
    folders, base = [folder for _, folder in made], tmp_path / "base"
    tiny.save_tokenizer(base)
    tiny.write_rows(tmp_path)
    texts, options = str(tmp_path / "texts.jsonl"), ["moments=true", "min_rows=1"]
    for folder in folders:
        found = checkpoint_evidence(folder, texts, "flexlora", options, client=folder.name, length=12, base=base)
        found.without_weights().save(folder / EVIDENCE)
    name, module = "transformer.h.0.mlp.c_proj", "base_model.model.transformer.h.0.mlp.c_proj"
    moments = []
    for model, folder in made:
        seen: list[Tensor] = []
        layer = model.get_submodule(module).base_layer
        handle = layer.register_forward_hook(lambda _, args, __, seen=seen: seen.append(args[0][0]))
        tokens = open_folder(base).tokenizer
        with torch.no_grad():
            for line in (tmp_path / "texts.jsonl").read_text().splitlines():
                model(
                    torch.tensor(tokens([json.loads(line)["text"]], truncation=True, max_length=13)["input_ids"])[
                        :, :-1
                    ]
                )
        handle.remove()
        rows = torch.cat(seen).double()
        moments.append(rows.mT @ rows / len(seen))
        told = read_factor(split(read(folder / EVIDENCE))[1], f"inputs/{module}.lora_A/in")
        torch.testing.assert_close(told.double(), moments[-1], rtol=1e-4, atol=1e-5)
    fused = fedfuse.fuse(folders, fedfuse.recipe("flexlora", rank=2, moments=True))
    whole = sum((product_in(folder, name) for folder in folders), torch.zeros(())) / 2
    C = (moments[0] + moments[1]) / 2
    best, error = dense_best(whole, C + 1e-12 * torch.eye(len(C)), 2)
    state = fused.state_dict()
    a, b = (state[f"{module}.lora_{side}.weight"].double() for side in "AB")
    for row in (b @ a - best,):
        assert float((row @ C @ row.mT).trace()) == pytest.approx(0, abs=1e-7 * float((whole @ C @ whole.mT).trace()))
    assert fused.facts["adapter_errors"][module] == pytest.approx(error, rel=1e-3)
    assert fused.facts["adapter_metric"] == "inputs"
    assert not fused.facts["unseen_modules"]
    fused.save(tmp_path / "fused")
    merged = fedfuse.fuse(folders, "fedavg", start=base)
    assert merged.state_dict().keys() >= {f"{name}.weight"}
    with pytest.raises(ConfigError, match="evidence"):
        checkpoint_evidence(folders[0], texts, "flexlora", base=base)
    with pytest.raises(ConfigError, match="adapter"):
        checkpoint_evidence(folders[0], texts, "flexlora", options)
    (folders[1] / EVIDENCE).unlink()
    with pytest.raises(ConfigError, match="p2"):
        fedfuse.fuse(folders, fedfuse.recipe("flexlora", moments=True))


def product_in(folder: Path, module: str) -> Tensor:
    tensors = load_file(folder / "adapter_model.safetensors")
    a, b = (tensors[f"{HEAD}{module}.lora_{side}.weight"].double() for side in "AB")
    return 6 / len(a) * b @ a


def test_adapters_at_their_base_bring_evidence_of_whole_models(tmp_path: Path) -> None:
    """RegMean of merged adapters is RegMean of the models they make."""
    tf = pytest.importorskip("transformers")
    from fedfuse.federation.checkpoint import checkpoint_evidence
    from fedfuse.wire.folders import EVIDENCE

    made = [with_peft(tmp_path, "gpt2", seed, 2, fan_in_fan_out=True) for seed in (1, 2)]
    base = tmp_path / "base"
    tiny.save_tokenizer(base)
    tiny.write_rows(tmp_path)
    texts, whole = str(tmp_path / "texts.jsonl"), []
    for k, (model, folder) in enumerate(made):
        update = checkpoint_evidence(folder, texts, "regmean", ["min_rows=1"], client="x", length=12, base=base)
        update.without_weights().save(folder / EVIDENCE)
        model.merge_and_unload().save_pretrained(tmp_path / f"whole{k}")
        tiny.save_tokenizer(tmp_path / f"whole{k}")
        whole.append(tmp_path / f"whole{k}")
        update = checkpoint_evidence(whole[-1], texts, "regmean", ["min_rows=1"], client="x", length=12)
        update.without_weights().save(whole[-1] / EVIDENCE)
    folders = [folder for _, folder in made]
    found, wanted = fedfuse.fuse(folders, "regmean", start=base), fedfuse.fuse(whole, "regmean")
    found.save(tmp_path / "merged")
    tf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    expected = wanted.state_dict()
    for name, tensor in found.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4, msg=name)


def test_an_adapter_in_a_round_keeps_its_rank() -> None:
    """In a run the network has adapters of one rank: flexlora fuses products into factors of that rank."""
    names = ("fc.lora_A.weight", "fc.lora_B.weight")
    clients = [{names[0]: draw(s)(2, 5), names[1]: draw(s + 10)(4, 2)} for s in range(3)]
    found = fedfuse.fuse(clients, "flexlora").state_dict()
    whole = sum((c[names[1]].double() @ c[names[0]].double() for c in clients), torch.zeros(())) / 3
    u, s, v = torch.linalg.svd(whole, full_matrices=False)
    torch.testing.assert_close(
        (found[names[1]] @ found[names[0]]).double(), u[:, :2] * s[:2] @ v[:2], atol=1e-5, rtol=1e-5
    )
