"""The package as an index would have it: built, installed where nothing of the checkout is seen, and used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("src", "pyproject.toml", "README.md", "LICENSE")
STUDY = """
seeds = [0]
methods = [{ name = "fedavg" }, { name = "fedlpa" }]
data = { clients = 2, train_limit = 60, test_limit = 40 }
model = { name = "mlp", hidden = [4] }
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files a release is made of, in a folder of their own."""
    folder = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for part in PARTS:
        kept = ROOT / part
        shutil.copytree(kept, folder / part, ignore=ignored) if kept.is_dir() else shutil.copy(kept, folder / part)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def build(what: str, source: Path, out: Path) -> Path:
    code = f"from setuptools import build_meta; print(build_meta.build_{what}({str(out)!r}))"
    return out / call([sys.executable, "-W", "ignore", "-c", code], source).splitlines()[-1]


def call(command: list[str], folder: Path) -> str:
    """What a command prints that knows nothing of the checkout."""
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def install(archive: Path, folder: Path) -> str:
    """A fresh environment with the archive alone, which borrows the libraries of ours; the path of its Python."""
    venv.create(folder, symlinks=True)
    python = str(folder / "bin" / "python")
    own = Path(call([python, "-c", "import site; print(site.getsitepackages()[0])"], folder).strip())
    (own / "borrowed.pth").write_text(next(path for path in sys.path if path.endswith("site-packages")) + "\n")
    asked = ["install", "--quiet", "--no-index", "--no-deps", "--ignore-installed", str(archive)]
    call([sys.executable, "-m", "pip", "--python", python, *asked], folder)
    return python


@pytest.mark.slow
def test_a_wheel_is_installed_and_used_where_the_checkout_is_not_seen(wheel: Path, tmp_path: Path) -> None:
    python = install(wheel, tmp_path / "env")
    (tmp_path / "study.toml").write_text(STUDY)
    where = call([python, "-c", "import fedfuse.report as found; print(found.__file__)"], tmp_path)
    assert where.startswith(str(tmp_path / "env"))
    call([python, "-m", "fedfuse", "run", "study.toml", "--out", "run", "--workers", "0", "--no-memo"], tmp_path)
    assert (tmp_path / "run" / "report.html").is_file()  # the page's own files came along
    assert "\\toprule" in call(
        [str(tmp_path / "env" / "bin" / "fedfuse"), "table", "run", "--format", "latex"], tmp_path
    )


@pytest.mark.slow
def test_an_sdist_gives_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", source, tmp_path)) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build("wheel", unpacked, tmp_path)
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_a_wheel_holds_what_it_should_and_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    assert {f"fedfuse/{name}" for name in ("py.typed", "report/page.html", "methods/catalogue.json")} <= names
    assert not [name for name in names if name.startswith("tests") or "__pycache__" in name]
    (text,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    metadata = text.splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "# fedfuse" in metadata  # README is the description
    assert f"Requires-Python: {project['requires-python']}" in metadata
    assert {f"Provides-Extra: {extra}" for extra in project["optional-dependencies"]} <= set(metadata)
