"""What README and the quick start tell a newcomer to type is typed here, in their order."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import fedfuse
from fedfuse import cli
from fedfuse.data import load
from fedfuse.extend import ALL_LAWS, forget_method
from fedfuse.testing import check_method

ROOT = Path(__file__).resolve().parents[1]
Typed = Callable[[str], int]


def blocks(name: str) -> Iterator[tuple[str, str]]:
    """A document's code blocks in order: the language ("" for a terminal) and the text."""
    text = (ROOT / name).read_text(encoding="utf-8")
    yield from re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line.startswith("fedfuse "):
            yield line.partition("#")[0].strip()


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Types one command in a folder of its own and gives its exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("my_net", "my_data"):
        monkeypatch.delitem(sys.modules, module, raising=False)

    def call(line: str) -> int:
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        try:
            cli.main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return call


def folder_of_pictures(folder: Path, classes: tuple[str, ...], seed: int, count: int = 12) -> None:
    draw = np.random.default_rng(seed)
    for place, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = draw.integers(0, 60, (28, 28), dtype=np.uint8)
            pixels[8 * place : 8 * place + 8] += 120
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


def test_readmes_three_sites_exchange_one_file_each(typed: Typed, tmp_path: Path) -> None:
    for seed, site in enumerate(("a", "b", "c", "test")):
        folder_of_pictures(tmp_path / f"patients-{site}", ("benign", "malignant", "normal"), seed)
    (journey,) = (text for _, text in blocks("README.md") if "patients-a" in text)
    lines = list(commands(journey))
    update = next(line for line in lines if " update " in line)
    others = [update.replace("patients-a", f"patients-{s}").replace("a.safetensors", f"{s}.safetensors") for s in "bc"]
    for line in (update, *others, *lines[1:]):
        assert typed(line) == 0, line
    assert (tmp_path / "global.safetensors").is_file()


def test_readmes_experiment_is_sound(typed: Typed, tmp_path: Path) -> None:
    (experiment,) = (text for language, text in blocks("README.md") if language == "toml")
    (tmp_path / "one-shot.toml").write_text(experiment)
    for line in (line for _, text in blocks("README.md") for line in commands(text) if "one-shot.toml" in line):
        if " run " in line:
            assert typed(f"{line} --check") == 0, line
    assert typed("fedfuse methods fedlpa") == 0


class OwnNetwork(nn.Module):
    """A user's network, with the commonest flatten there is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4 * 6 * 6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        return self.fc(x.view(x.size(0), -1))


def test_readmes_program_runs_as_printed_on_a_network_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    digits, model = load("digits").train, OwnNetwork()
    shares = digits.take(range(300)), digits.take(range(300, 600)), digits.take(range(600, 900))
    for name, rows in zip("bc", shares[1:], strict=True):
        fedfuse.local_update(model, rows, "fedlpa", client=name, epochs=2).save(f"{name}.safetensors")
    known = {
        "model": model,
        "x": shares[0].x,
        "y": shares[0].y,
        **{f"state_dict_{k}": {n: t + k for n, t in model.state_dict().items()} for k in (1, 2)},
    }
    for language, text in blocks("README.md"):
        if language == "python":
            exec(compile(text, "README.md", "exec"), known)
    fused = known["fused"]
    assert isinstance(fused, fedfuse.Fused)
    assert fused.refused == ()
    assert isinstance(fused.module(), OwnNetwork)
    assert fused.logits(shares[0].x).shape == (300, 10)


@pytest.mark.slow
def test_the_quick_start_from_top_to_bottom(typed: Typed, tmp_path: Path) -> None:
    known: dict[str, object] = {"__name__": "quickstart"}
    for language, text in blocks("docs/quickstart.md"):
        if language == "toml":
            (tmp_path / "first.toml").write_text(text)
        elif "class Net" in text:
            (tmp_path / "my_net.py").write_text(text)
        elif language == "python":
            torch.manual_seed(0)
            exec(
                compile(text.replace('out="runs/python")', 'out="runs/python", workers=0)'), "quickstart", "exec"),
                known,
            )
        else:
            for line in commands(text):
                assert typed(line) == 0, line
    assert (tmp_path / "both.html").is_file()


def test_the_quick_starts_mistake_is_explained(
    typed: Typed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {language: text for language, text in blocks("docs/quickstart.md") if language == "toml"}
    (tmp_path / "first.toml").write_text(found["toml"])
    (mistake,) = (text for _, text in blocks("docs/quickstart.md") if text.startswith("$ fedfuse"))
    line, said = mistake.splitlines()
    assert typed(line.removeprefix("$ ")) == 2
    assert said in capsys.readouterr().err


def test_a_method_is_added_as_the_document_says(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, object] = {"__name__": "my_package"}
    try:
        for language, text in blocks("docs/add-a-method.md"):
            if language == "python":
                exec(compile(text, "add-a-method.md", "exec", dont_inherit=True), known)
        known["test_my_prox_keeps_the_laws"]()  # type: ignore[operator]
        assert check_method("root_mean") == tuple(sorted(ALL_LAWS))
    finally:
        for name in ("my_prox", "root_mean"):
            forget_method(name)


def test_readmes_table_names_every_method_and_no_other() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Methods")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    named = {word for row in rows for word in re.findall(r"`(\w+)`", row.split("|")[2])}
    assert named == set(fedfuse.list_methods())
