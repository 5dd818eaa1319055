"""Which modules an answer depends on: followed, not listed."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedfuse.engines import code
from fedfuse.engines.code import MISSING, follow, is_ours
from fedfuse.engines.memo import Nameless, code_of

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes a file of the user's; its modules are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def make(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()
        return path

    yield make
    for name in set(sys.modules) - before:
        del sys.modules[name]


def modules(*roots: str) -> set[str]:
    return set(follow(roots).modules)


@pytest.fixture(scope="module")
def closure() -> list[str]:
    """All of ours that a client's round imports, asked of a fresh process."""
    program = "import sys, json, fedfuse.training.round; print(json.dumps(sorted(m for m in sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return [name for name in json.loads(done.stdout) if is_ours(name)]


def test_a_line_in_any_package_that_a_round_imports_is_another_source(
    closure: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shutil.copytree(code.PACKAGE, tmp_path / "fedfuse", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code, "PACKAGE", root)
    one_each = {name.split(".")[1]: name for name in closure if "." in name}
    seen = [code.source.__wrapped__()]
    for name in one_each.values():
        path = root.joinpath(*name.split(".")[1:])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        with file.open("a") as stream:
            stream.write("\n")
        seen.append(code.source.__wrapped__())
    assert {"training", "nets", "tasks", "errors"} <= one_each.keys()
    assert len(set(seen)) == len(one_each) + 1


def test_a_data_file_of_ours_is_source_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "PACKAGE", tmp_path)
    (tmp_path / "table.json").write_text("1")
    before = code.source.__wrapped__()
    (tmp_path / "table.json").write_text("2")
    assert code.source.__wrapped__() != before


@pytest.mark.parametrize(
    "statement",
    [
        "import root_pkg.deep.leaf",
        "import root_pkg.deep.leaf as l",
        "from root_pkg.deep import leaf",
        "from root_pkg.deep.leaf import value",
        "from root_pkg.deep.leaf import *",
        "def late():\n    from root_pkg.deep import leaf",
        "import importlib\nleaf = importlib.import_module('root_pkg.deep.leaf')",
        "try:\n    import root_pkg.deep.leaf\nexcept ImportError:\n    pass",
    ],
)
@pytest.mark.parametrize("loaded", [False, True])
def test_every_kind_of_import_is_followed(statement: str, loaded: bool, write: Write) -> None:
    write("root_of_it.py", statement)
    write("root_pkg/__init__.py", "")
    write("root_pkg/deep/leaf.py", "import far_away\nvalue = 1")  # deep is a namespace
    write("far_away.py", "")
    if loaded:
        importlib.import_module("root_of_it")
    assert modules("root_of_it") == {"root_of_it", "root_pkg", "root_pkg.deep.leaf", "far_away"}


def test_relative_imports_and_what_a_package_gathers(write: Write) -> None:
    write("rel_pkg/__init__.py", "from .net import Net")
    write("rel_pkg/net.py", "from . import blocks\nfrom .sub.part import x\nclass Net: ...")
    write("rel_pkg/blocks.py", "")
    write("rel_pkg/sub/__init__.py", "from .. import other as o")
    write("rel_pkg/sub/part.py", "x = 1")
    write("rel_pkg/other.py", "")
    write("rel_pkg/unused.py", "")
    wanted = {"rel_pkg", *(f"rel_pkg.{n}" for n in ("net", "blocks", "sub", "sub.part", "other"))}
    assert modules("rel_pkg") == wanted
    importlib.import_module("rel_pkg.unused")  # by somebody else: the package holds it, and does not use it
    assert modules("rel_pkg") == wanted
    assert follow(["rel_pkg"]).modules["rel_pkg.sub.part"].file == "rel_pkg/sub/part.py"


def test_names_computed_while_a_module_loads_are_followed_and_those_computed_later_are_doubtful(write: Write) -> None:
    write("found_pkg/__init__.py", "import importlib\nimportlib.import_module('found_pkg.' + 'on' + 'e')")
    write("found_pkg/one.py", "")
    importlib.import_module("found_pkg")
    assert modules("found_pkg") == {"found_pkg", "found_pkg.one"}
    write("computes_late.py", "import importlib\ndef make(name):\n    return importlib.import_module(name)")
    with pytest.raises(Nameless, match="computes_late"):
        code_of("computes_late")


def test_values_count_wherever_they_come_from(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("takes_value.py", "import os, gives_value\nODD = open\nDATA = {'a': [1.0, None]}")
    write("gives_value.py", "import os, numpy\nSCALE = float(os.environ.get('SCALE', 1))\nWORDS = numpy.array(['a'])")
    importlib.import_module("takes_value")
    before = code_of("takes_value")
    assert code_of("takes_value") == before
    monkeypatch.setattr("gives_value.SCALE", 2.0)
    assert code_of("takes_value") != before


def test_an_import_that_finds_nothing_counts_and_so_does_finding_it_later(write: Write) -> None:
    write("tries_it.py", "try:\n    import not_there_yet\nexcept ImportError:\n    pass")
    assert follow(["tries_it"]).modules["not_there_yet"].digest == MISSING
    before = code_of("tries_it")
    write("not_there_yet.py", "")
    assert code_of("tries_it") != before
    with pytest.raises(Nameless, match="no_such_root"):
        code_of("no_such_root")


def test_what_is_edited_after_it_was_imported_has_no_name_until_it_is_imported_again(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("edited_later.py", "A = 1")
    module = importlib.import_module("edited_later")
    before = code_of("edited_later")
    path.write_text("A = 1000")
    with pytest.raises(Nameless, match="edited_later"):
        code_of("edited_later")
    importlib.reload(module)
    assert code_of("edited_later") != before
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    fresh = write("edited_at_once.py", "A = 1")
    importlib.import_module("edited_at_once")
    fresh.write_text("A = 1000")  # before anybody asked
    with pytest.raises(Nameless, match="edited_at_once"):
        code_of("edited_at_once")


def test_what_is_installed_counts_as_one_and_editable_sources_are_followed(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("site-packages/left_there.py", "import other_dependency")  # belongs to no distribution
    write("project/src/editable_pkg/__init__.py", "from . import parts")
    write("project/src/editable_pkg/parts.py", "import torch, numpy.linalg, left_there")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")

    class Finder(importlib.abc.MetaPathFinder):
        """As an editable installation adds one."""

        def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
            folder = tmp_path / "project" / "src" / "editable_pkg"
            found = None if name != "editable_pkg" else folder / "__init__.py"
            return found and importlib.util.spec_from_file_location(
                name, found, submodule_search_locations=[str(folder)]
            )

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    found = follow(["editable_pkg"])
    assert set(found.modules) == {"editable_pkg", "editable_pkg.parts", "left_there", "other_dependency"}
    assert found.installed == {"torch", "numpy"}
    assert code.installed_digest("torch") != code.installed_digest("numpy")


def test_a_link_into_sources_is_an_editable_installation(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("elsewhere/linked_pkg/__init__.py", "")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "linked_pkg").symlink_to(tmp_path / "elsewhere" / "linked_pkg")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert modules("linked_pkg") == {"linked_pkg"}


def test_a_file_of_the_users_with_a_name_of_pythons_own_counts(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "chunk", raising=False)
    write("chunk.py", "")
    write("uses_chunk.py", "import chunk, json")
    assert modules("uses_chunk") == {"uses_chunk", "chunk"}
