"""What the documents say of experiment files is true."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from fedfuse.core.settings import Decay, Optimizer
from fedfuse.data import ServerRowsConfig
from fedfuse.experiment.config import (
    SCHEMES,
    DataConfig,
    Experiment,
    GroupConfig,
    JudgeConfig,
    LocalConfig,
    MethodConfig,
    ServerConfig,
    load_experiments,
)
from fedfuse.experiment.results import FLAT
from fedfuse.models import model_names
from fedfuse.server.guards import GUARDS

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "experiments.md").read_text(encoding="utf-8")


def blocks(language: str) -> Iterator[tuple[str, str]]:
    for name in ("quickstart.md", "experiments.md"):
        for text in re.findall(rf"```{language}\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.DOTALL):
            yield name, text


@pytest.mark.parametrize(
    "schema",
    [
        *(Experiment, DataConfig, GroupConfig, LocalConfig, MethodConfig, JudgeConfig, ServerConfig),
        *(Optimizer, Decay, ServerRowsConfig, *SCHEMES.values()),
    ],
    ids=lambda schema: schema.__name__,
)
def test_every_key_is_explained(schema: type[BaseModel]) -> None:
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`|\{[^}\n]+\}|\[\[?\w+\]\]?", TEXT))))
    assert set(schema.model_fields) <= words


def test_every_partition_model_guard_and_result_is_named() -> None:
    for word in (*SCHEMES, *model_names(), *FLAT):
        assert f"`{word}`" in TEXT, word
    for word in GUARDS:
        assert f'"{word}"' in TEXT, word


@pytest.mark.parametrize(("where", "text"), list(blocks("toml")))
def test_every_example_is_sound(where: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "example.toml"
    path.write_text(text)
    assert load_experiments(path), where


@pytest.mark.parametrize(("where", "text"), list(blocks("python")))
def test_every_program_compiles(where: str, text: str) -> None:
    compile(text, where, "exec")
