"""What README and the quick start tell a newcomer to type is typed here, in their order."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import fedfuse
from fedfuse import cli
from fedfuse.core.catalogue import FAMILIES
from fedfuse.core.registry import all_methods
from fedfuse.data import load
from fedfuse.extend import ALL_LAWS, Mean, Recipe, forget_method, method
from fedfuse.server.align.alignment import ALIGNMENTS
from fedfuse.server.guards import GUARDS
from fedfuse.testing import check_method

sys.path.insert(0, str(Path(__file__).parent))
from marks import between, write_between

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
    at = lines.index(update)
    for line in (*lines[: at + 1], *others, *lines[at + 1 :]):
        assert typed(line) == 0, line
    assert (tmp_path / "global.safetensors").is_file()


def table_of_people(path: Path, seed: int, count: int = 30) -> None:
    draw = np.random.default_rng(seed)
    ages, lipids = draw.normal(55, 10, count), draw.normal(240, 50, count)
    lines = [
        f"{age:.0f},{'fm'[k % 2]},{'' if k % 9 == 0 else f'{chol:.0f}'},{'ill' if age > 55 else 'healthy'}"
        for k, (age, chol) in enumerate(zip(ages, lipids, strict=True))
    ]
    path.write_text("\n".join(["age,sex,chol [mg/dl],ill", *lines]) + "\n")


def test_one_exchange_of_pictures_and_of_tables(typed: Typed, tmp_path: Path) -> None:
    """The first two sections of the document, line by line."""
    folder_of_pictures(tmp_path / "patients-a", ("benign", "malignant", "normal"), 1, 4)
    folder_of_pictures(tmp_path / "patients-b", ("benign", "normal"), 2, 6)
    folder_of_pictures(tmp_path / "patients-c", ("malignant", "normal", "benign"), 3, 4)
    folder_of_pictures(tmp_path / "patients-test", ("benign", "malignant", "normal"), 4, 2)
    for seed, name in enumerate(("a", "b", "new")):
        table_of_people(tmp_path / f"{name}.csv", seed)
    short = {"init": " --set local.epochs=2 --set model.hidden=[8]"}
    lines = [line for _, text in list(blocks("docs/one-shot.md"))[:2] for line in commands(text)]
    assert len(lines) == 17
    for line in lines:
        assert typed(line + short.get(line.split()[1], "")) == 0, line
    assert (tmp_path / "card.md").read_text().startswith("# all.safetensors")
    assert (tmp_path / "risks.csv").read_text().startswith("row,predicted,p(healthy),p(ill),entropy")
    assert typed("fedfuse export risk.safetensors --to onnx -o risk.onnx") == 0
    (program,) = (text for language, text in blocks("docs/one-shot.md") if "onnxruntime" in text)
    exec(compile(program, "one-shot.md", "exec"), known := dict[str, np.ndarray]())
    told = np.genfromtxt(tmp_path / "risks.csv", delimiter=",", skip_header=1, usecols=(2, 3))
    np.testing.assert_allclose(known["risks"], told, atol=1e-5)


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


def run_document(name: str, typed: Typed, folder: Path, known: dict[str, object]) -> None:
    """Do what a document says, from top to bottom: its experiment, its commands, its programs."""
    for language, text in blocks(name):
        if language == "toml":
            (folder / "study.toml").write_text(text)
        elif language == "python":
            exec(compile(text, name, "exec"), known)
        else:
            for line in commands(text):
                assert typed(line) == 0, line


def in_processes(folder: Path) -> Typed:
    """Types commands in a folder, each in a process of its own."""

    def call(line: str) -> int:
        command = [sys.executable, "-m", "fedfuse", *shlex.split(line)[1:]]
        return subprocess.run(command, cwd=folder, capture_output=True, timeout=200, check=False).returncode

    return call


# What documents print of runs stands between marks in them, to the last digit, and is written by `make catalogue`.


def demo_parts(typed: Typed, folder: Path) -> dict[str, str]:
    """README's first table."""
    assert typed("fedfuse demo --out demo --workers 1") == 0
    assert typed("fedfuse table demo --format md -o demo.md") == 0
    return {"demo": f"\n{(folder / 'demo.md').read_text(encoding='utf-8').strip()}\n"}


def study_parts(typed: Typed, folder: Path) -> dict[str, str]:
    """The table of the tutorial that compares methods."""
    with contextlib.chdir(folder):
        run_document("docs/tutorials/compare.md", typed, folder, {})
    (line,) = (
        line for _, text in blocks("docs/tutorials/compare.md") for line in commands(text) if "--columns" in line
    )
    assert typed(f"{line} --format md -o study.md") == 0
    return {"study": f"\n\n{(folder / 'study.md').read_text(encoding='utf-8').strip()}\n\n"}


def sites_parts(typed: Typed, folder: Path) -> dict[str, str]:
    """How much the networks of the tutorial of three sites know, in percent."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as said:
        run_document("docs/tutorials/three-sites.md", typed, folder, {})
    return dict(re.findall(r"^(fedavg|fedlpa) (\d+)%$", said.getvalue(), re.MULTILINE))


PRINTED = {
    "README.md": demo_parts,
    "docs/tutorials/compare.md": study_parts,
    "docs/tutorials/three-sites.md": sites_parts,
}


@pytest.mark.slow
@pytest.mark.parametrize("page", PRINTED)
def test_tables_are_what_is_typed_to_the_digit(page: str, typed: Typed, tmp_path: Path) -> None:
    text, parts = (ROOT / page).read_text(encoding="utf-8"), PRINTED[page](typed, tmp_path)
    assert parts
    for mark, printed in parts.items():
        assert between(text, mark) == printed.strip(), "write it anew: make catalogue"
    if page.endswith("compare.md"):
        assert (tmp_path / "table.tex").read_text().count(r"\\") == 5
        assert (tmp_path / "sweep.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.flower
def test_the_tutorial_of_a_federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own, for Flower's engine leaves some behind in ours."""
    monkeypatch.chdir(tmp_path)
    run_document("docs/tutorials/federation.md", in_processes(tmp_path), tmp_path, {})
    assert (tmp_path / "app" / "pyproject.toml").is_file()


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


def methods_table() -> str:
    """README's table of methods: one row per family, and what any method can be put behind."""
    every = all_methods().values()
    rows = {words: [m.name for m in every if m.family == family] for family, words in FAMILIES.items()}
    cells = {words: " ".join(f"`{name}`" for name in names) for words, names in rows.items() if names}
    ways, guards = (" ".join(f'`"{name}"`' for name in known) for known in (ALIGNMENTS, GUARDS))
    cells |= {"after hidden units are aligned": f"any of them with `align =` {ways}"}
    cells |= {"behind a robust filter": f"any of them with `guard =` {guards}"}
    lines = ["| where the mean is taken | methods |", "|---|---|", *(f"| {w} | {cell} |" for w, cell in cells.items())]
    return "\n".join(lines)


def test_every_test_that_the_threat_model_names_exists() -> None:
    """A promise whose test was renamed or lost is found here."""
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs/threat-model.md").read_text(encoding="utf-8"))
    assert len(named) > 40
    for path, name in named:
        assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8"), (path, name)


def test_readmes_table_is_what_the_methods_say_of_themselves() -> None:
    written = between((ROOT / "README.md").read_text(encoding="utf-8"), "methods")
    assert written == methods_table(), "write it anew: make catalogue"
    assert set(re.findall(r"`(\w+)`", written)) == set(fedfuse.list_methods())


def test_a_method_of_another_family_appears_in_the_table_by_itself() -> None:
    @method("my_statistic", family="statistics")
    def my_statistic() -> Recipe:
        """The mean."""
        return Recipe(aggregate=Mean())

    try:
        (row,) = (line for line in methods_table().splitlines() if "`my_statistic`" in line)
        assert row.startswith("| of sufficient statistics |")
    finally:
        forget_method("my_statistic")


def test_the_map_of_tests_names_what_is_there() -> None:
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\]\(([^)]+)\)", text))
    assert not sorted(path for path in named if not (ROOT / "tests" / path).exists())
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("**/test_*.py"))}
    assert not sorted(folders - named), "say in tests/README.md what these tests hold"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == [m.partition(":")[0] for m in settings["markers"]]


if __name__ == "__main__":
    write_between(ROOT / "README.md", {"methods": f"\n{methods_table()}\n"})
    for page, parts in PRINTED.items():
        with tempfile.TemporaryDirectory() as made:
            write_between(ROOT / page, parts(in_processes(Path(made)), Path(made)))
