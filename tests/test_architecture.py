"""The shape of the project: dependencies point one way, and what is banned stays out."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fedfuse.core.catalogue import list_catalogue
from fedfuse.core.recipe import Recipe

sys.path.insert(0, str(Path(__file__).parent))
from marks import between, write_between

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "fedfuse"
PAGE = ROOT / "docs" / "architecture.md"

# What each part may import of ours, beside itself; "a.b" allows that one module or package of `a` only.
# cli → {api, flower, federation} → experiment → {methods, engines, data, report}; methods → {client, server}; client
# and server do not know each other: what both need (networks, training) lies below both; all may raise our errors.
BELOW = {"core", "tasks", "nets", "wire", "linalg", "models", "kernels", "training", "errors"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "tasks": {"errors"},
    "core": {"tasks", "linalg", "errors"},
    "linalg": {"errors"},
    "nets": {"core", "tasks", "linalg", "errors"},
    "kernels": {"core", "models", "errors"},
    "models": {"core", "tasks", "wire", "errors"},
    "wire": {"core", "tasks", "nets", "errors"},
    "training": {"core", "tasks", "nets", "kernels", "wire", "errors"},
    "client": BELOW,
    "server": BELOW,
    "engines": {"core", "kernels", "wire", "training", "errors"},
    "methods": {*BELOW, "client", "server"},
    "data": {"core", "tasks", "errors"},
    "report": {"core.files", "core.escape", "errors"},
    "api": {"core", "linalg", "tasks", "nets", "wire", "models", "training", "server", "engines", "errors"},
    "experiment": {*BELOW, "client", "server", "methods", "engines", "data", "report", "api"},
    "flower": {*BELOW, "client", "server", "engines", "data", "report", "api", "experiment"},
    "federation": {*BELOW, "server", "data", "api", "experiment"},
    "cli": {
        *("core", "api", "models", "data", "experiment", "federation", "report", "flower", "loggers", "errors"),
        "engines.starting",
    },
    "loggers": {"core", "experiment", "errors"},
    "extend": {"core", "tasks", "nets", "client", "server", "methods"},
    "testing": {"core", "tasks", "server", "training", "errors"},
    "__init__": {"api", "core", "errors"},
    "__main__": {"cli"},
}

# Imports made late, inside a function or for types only, where the table above says no; each needs a reason.
LATE = {
    ("api", "experiment"): "`fedfuse.run` starts an experiment; whoever only fuses does not pay for it",
}

# Names the core imports at run time, so that what registers itself is found without the core knowing it.
DYNAMIC = {"core/spec.py": {"fedfuse.models"}, "core/registry.py": {"fedfuse.methods"}}

METHOD_NAMES = {entry["name"] for entry in list_catalogue()}
LOOKUPS = {"find_method", "load_method", "recipe", "method_options"}  # what takes a method's name and gives the method

BANNED = {
    "a pickle": r"\bimport pickle\b|\bfrom pickle\b|torch\.load\(|allow_pickle=True",
    "a promise": r"TODO|FIXME|XXX|NotImplementedError|raise NotImplemented",
    "global randomness": r"np\.random\.(seed|rand|randn|shuffle|choice)\(|\brandom\.seed\(",
    "a path of one machine": r"[\"'](/work|/farm|/root|/home)/",
}

FILES = sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(node: ast.AST) -> list[str]:
    """The modules an import statement names, in full."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def ours(path: Path, nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        yield from (name.removeprefix("fedfuse.") for name in imported(node) if name.startswith("fedfuse."))


def is_allowed(part: str, module: str) -> bool:
    allowed = MAY_IMPORT[part] | {part}
    return any(module == a or module.startswith(f"{a}.") for a in allowed)


def test_the_table_knows_every_part() -> None:
    parts = {part_of(path) for path in FILES}
    assert parts <= MAY_IMPORT.keys(), "say in MAY_IMPORT what the new part may import"


def test_the_table_itself_points_one_way() -> None:
    """Walking down the allowed imports one never comes back."""

    def below(part: str, path: tuple[str, ...] = ()) -> None:
        assert part not in path, f"a circle: {' → '.join([*path, part])}"
        for module in MAY_IMPORT[part]:
            below(module.partition(".")[0], (*path, part))

    for part in MAY_IMPORT:
        below(part)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_dependencies_point_one_way(path: Path) -> None:
    part = part_of(path)
    at_import = set(ours(path, iter(tree(path).body)))
    anywhere = set(ours(path, ast.walk(tree(path))))  # type: ignore[arg-type]
    late = {m for m in anywhere - at_import if (part, m.partition(".")[0]) in LATE}
    wrong = sorted(m for m in anywhere - late if not is_allowed(part, m))
    assert not wrong, f"{part} may import {sorted(MAY_IMPORT[part])}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_at_run_time_are_known(path: Path) -> None:
    calls = [n for n in ast.walk(tree(path)) if isinstance(n, ast.Call) and "import_module" in ast.unparse(n.func)]
    literal = {a.value for call in calls for a in call.args[:1] if isinstance(a, ast.Constant)}
    named = {name for name in literal if str(name).startswith("fedfuse")}
    if part_of(path) in ("core", "nets", "linalg", "models", "wire", "training", "client", "server", "engines"):
        assert named <= DYNAMIC.get(name_of(path), set())


@pytest.mark.parametrize("path", [p for p in FILES if part_of(p) == "report"], ids=name_of)
def test_reports_need_no_torch(path: Path) -> None:
    outside = {name.partition(".")[0] for node in ast.walk(tree(path)) for name in imported(node)}
    assert "torch" not in outside


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_branch_on_a_methods_name_outside_methods(path: Path) -> None:
    if part_of(path) != "methods":
        assert not list(named_methods(tree(path))), "the seam is wrong, not the method"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("if name == 'refit': ...", {"refit"}),
        ("if recipe.name in ('x', 'fedadam'): ...", {"fedadam"}),
        ("match name:\n    case 'ridge' | 'x': ...", {"ridge"}),
        ("load_method('refit').recipe()", {"refit"}),
        ("registry.find_method(name='laplace')", {"laplace"}),
        ("First = Literal['sums', 'local']\nif self.first == 'local': ...", set()),
        ("for name in ('fedavg', 'ridge'): ...", set()),
        ("if 'alpha' in facts and draw('dare') > 0: ...", set()),
    ],
)
def test_branches_on_methods_are_seen(text: str, found: set[str]) -> None:
    assert set(named_methods(ast.parse(text))) == found


def named_methods(module: ast.Module) -> Iterator[str]:
    """The methods that a module compares with or looks up by name; a word that it types as an option's is none."""
    options: set[object] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            options |= {n.value for n in ast.walk(node.slice) if isinstance(n, ast.Constant)}
    for node in ast.walk(module):
        if isinstance(node, ast.Compare):
            held = isinstance(node.ops[0], ast.In | ast.NotIn)  # of "key in table", the key is no method
            asked: list[ast.AST] = [*([] if held else [node.left]), *node.comparators]
        elif isinstance(node, ast.match_case):
            asked = [n.value for n in ast.walk(node.pattern) if isinstance(n, ast.MatchValue)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in LOOKUPS:
            asked = [*node.args, *(keyword.value for keyword in node.keywords)]
        else:
            continue
        each = [item for part in asked for item in getattr(part, "elts", [part])]
        words = {item.value for item in each if isinstance(item, ast.Constant)}
        yield from (str(word) for word in words & METHOD_NAMES - options)


@pytest.mark.parametrize("what", BANNED)
def test_what_is_banned_stays_out(what: str) -> None:
    pattern = re.compile(BANNED[what])
    found = [
        f"{name_of(path)}:{number}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found


def import_graph() -> str:
    """The packages' imports as a picture; an arrow is left out where a longer path says the same."""
    below: dict[str, set[str]] = {part: set() for part in MAY_IMPORT if part not in ("errors", "__init__", "__main__")}
    for path in (p for p in FILES if part_of(p) in below):
        part = part_of(path)
        below[part] |= {m.partition(".")[0] for m in ours(path, iter(tree(path).body))} & below.keys() - {part}

    def reaches(part: str, goal: str) -> bool:
        return any(n == goal or reaches(n, goal) for n in below[part])

    arrows = [(a, b) for a, found in below.items() for b in found if not any(reaches(n, b) for n in found - {b})]
    return "\n".join(["```mermaid", "graph TD", *(f"  {a} --> {b}" for a, b in sorted(arrows)), "```"])


def walk() -> dict[str, int]:
    words = [sys.executable, str(ROOT / "tests" / "walk_a_round.py")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_page_draws_the_imports_as_they_are() -> None:
    assert between(PAGE.read_text(), "graph") == import_graph(), "write it anew: python tests/test_architecture.py"


def test_the_page_counts_the_walk_of_a_tensor() -> None:
    counted, text = walk(), PAGE.read_text()
    told = {mark: int(between(text, mark).replace(",", "")) for mark in ("files", "returns")}
    assert told == {mark: counted[mark] for mark in told}, "write it anew: python tests/test_architecture.py"


def test_the_page_names_every_package_and_every_seam() -> None:
    text = PAGE.read_text()
    packages = {p.name for p in SOURCE.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert not [name for name in packages if f"`{name}/`" not in text]
    fields = set(Recipe.__dataclass_fields__) - {"name", "label", "publishes", "later"}
    assert not [name for name in fields if f"| `{name}` |" not in text]


if __name__ == "__main__":
    counts = walk()
    write_between(
        PAGE, {"graph": f"\n{import_graph()}\n", "files": str(counts["files"]), "returns": f"{counts['returns']:,}"}
    )
