"""Tiny folders of `transformers` with random weights and a tokenizer of a few words; no hub is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "fine", "poor", "the", "film", "is", "was", "a"]
SMALL = {"vocab_size": len(WORDS), "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}


def save_tokenizer(folder: Path, **special: str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    table = {word: place for place, word in enumerate(WORDS)}
    plain = Tokenizer(models.WordLevel(table, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", table["[CLS]"]), ("[SEP]", table["[SEP]"])]
    )
    names = {
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "mask_token": "[MASK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
    }
    PreTrainedTokenizerFast(tokenizer_object=plain, **names | special).save_pretrained(folder)


def bert(kind: str, **more: Any) -> torch.nn.Module:
    import transformers

    config = transformers.BertConfig(
        **SMALL, intermediate_size=12, max_position_embeddings=16, hidden_dropout_prob=0.0, **more
    )
    network: torch.nn.Module = getattr(transformers, f"Bert{kind}")(config)
    return network.eval()


def gpt2(**more: Any) -> torch.nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=len(WORDS), n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=2, eos_token_id=3, **more
    )
    network: torch.nn.Module = transformers.GPT2LMHeadModel(config)
    return network.eval()


def llama(**more: Any) -> torch.nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        **SMALL,
        num_key_value_heads=1,
        intermediate_size=12,
        max_position_embeddings=16,
        bos_token_id=2,
        eos_token_id=3,
        **more,
    )
    network: torch.nn.Module = transformers.LlamaForCausalLM(config)
    return network.eval()


def vit(**more: Any) -> torch.nn.Module:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=12,
        image_size=8,
        patch_size=4,
        num_channels=1,
        num_labels=3,
        **more,
    )
    network: torch.nn.Module = transformers.ViTForImageClassification(config)
    return network.eval()


def write_rows(folder: Path) -> Path:
    """Rows for every kind of network: texts.jsonl with labels, pictures.npz of 8 × 8."""
    import numpy as np

    texts = [f"the film is {'good ' * (i % 4)}{'fine' if i % 2 else 'poor a bad film'}" for i in range(12)]
    lines = [json.dumps({"text": text, "label": i % 2}) for i, text in enumerate(texts)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    draw, names = np.random.default_rng(0), np.array(["LABEL_0", "LABEL_1", "LABEL_2"])
    np.savez(folder / "pictures.npz", x=draw.random((12, 1, 8, 8), np.float32), y=np.arange(12) % 3, classes=names)
    return folder


def save(network: torch.nn.Module, folder: Path) -> Path:
    network.save_pretrained(folder)  # type: ignore[operator]
    save_tokenizer(folder)
    return folder
