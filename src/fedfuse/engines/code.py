"""The code an answer depends on: our whole package, and of the user's all that is imported, near and far.

Nothing is listed by hand. The user's modules are followed from import to import, by reading their text and by looking
at what they hold once they are loaded, until the standard library or an installed distribution is reached; what is
installed so that its sources stay where they are edited counts as the user's.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import pkgutil
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Literal, NamedTuple

PACKAGE = Path(__file__).resolve().parents[1]
MISSING = "missing"  # in the place of a digest: an import that found nothing, and would be another one if it did

_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARY = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")})


def is_ours(module: str) -> bool:
    """Whether a module lies in our package, and so in `source`."""
    return module.partition(".")[0] == PACKAGE.name


@lru_cache
def source() -> str:
    """The digest of our package, code and data: a repaired line is another function."""
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if "__pycache__" not in path.parts and path.is_file():
            for part in (path.relative_to(PACKAGE).as_posix().encode(), path.read_bytes()):
                found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


class ModuleSource(NamedTuple):
    """A module of the user's: its file, below the folder it was found in, and the digest of what is in it."""

    file: str
    digest: str


@dataclass(frozen=True, slots=True)
class UserCode:
    """The user's modules that some others lead to.

    Attributes:
        modules: by name.
        installed: the packages they import that are installed distributions.
        doubts: why these modules do not say all that is run.
    """

    modules: dict[str, ModuleSource] = field(default_factory=dict)
    installed: set[str] = field(default_factory=set)
    doubts: list[str] = field(default_factory=list)


def follow(roots: Iterable[str]) -> UserCode:
    """All that some modules lead to; nothing is imported for it.

    Example:
        >>> follow(["json", "fedfuse.core.rng"]) == UserCode()
        True
    """
    found, seen = UserCode(), set[str]()
    waiting = [_Import(name) for name in roots]
    needed = {name for name, _ in waiting}
    while waiting:
        name, may_be_a_name = waiting.pop()
        if is_ours(name) or name in seen or not all(name.split(".")):  # beyond the top of a package
            continue
        spec = _locate(name)
        if spec is None and may_be_a_name:
            continue
        seen.add(name)
        if "." in name:
            waiting.append(_Import(name.rpartition(".")[0]))  # importing a.b runs a
        if spec is None:
            found.modules[name] = ModuleSource(f"{name.replace('.', '/')}.py", MISSING)
            found.doubts.extend([f"{name} cannot be found"] if name in needed else [])
        elif (kind := _kind(spec)) == "installed" and installed_digest(package := name.partition(".")[0]) is not None:
            found.installed.add(package)
        elif kind != "library" and spec.origin is not None and spec.has_location:
            waiting += _read(name, spec, found)
    return found


class _Import(NamedTuple):
    """What an import statement names; `from a import b` may name a module a.b, or something within a."""

    module: str
    may_be_a_name: bool = False


def _read(name: str, spec: ModuleSpec, found: UserCode) -> list[_Import]:
    """Note a module of the user's, and say where it leads."""
    path = Path(str(spec.origin))
    try:
        text = path.read_bytes()
    except OSError as why:
        found.doubts.append(f"{path} cannot be read ({why.strerror or why})")
        return []
    digest = hashlib.sha256(text).hexdigest()
    found.modules[name] = ModuleSource(
        "/".join([*name.split(".")[: -1 if path.stem != "__init__" else None], path.name]), digest
    )
    if name in sys.modules and not _is_as_loaded(name, path, digest):
        found.doubts.append(f"{path} was edited after it was imported")
    if path.suffix != ".py":
        return []
    statements = _parse(text, spec.parent or "")
    found.doubts.extend([f"{path} imports by a name it computes when it runs"] if statements.computes_late else [])
    return [*statements.imports, *_held(name, statements.computes_names)]


_first_seen: dict[str, tuple[object, str]] = {}


def _is_as_loaded(name: str, path: Path, digest: str) -> bool:
    """Whether a loaded module's file is still what was loaded: a notebook imports once, and edits go on."""
    module = sys.modules[name]
    spec: ModuleSpec | None = getattr(module, "__spec__", None)
    before = _first_seen.get(name)
    if before is not None and before[0] is (spec or module):  # a reloaded module has another spec
        return before[1] == digest
    if spec is not None and not sys.dont_write_bytecode and not _is_as_compiled(spec, path):
        return False
    _first_seen[name] = spec or module, digest
    return True


def _is_as_compiled(spec: ModuleSpec, path: Path) -> bool:
    """Whether the code that Python keeps of a file was made of the file as it is: its head has the time and size."""
    try:
        with Path(str(spec.cached)).open("rb") as file:
            head, facts = file.read(16), path.stat()
    except OSError:
        return True
    by_time = head[4:8] == bytes(4)
    now = b"".join((int(n) & 0xFFFFFFFF).to_bytes(4, "little") for n in (facts.st_mtime, facts.st_size))
    return not by_time or head[8:] == now


def _held(name: str, computes_names: bool) -> Iterator[_Import]:
    """The modules of what a loaded module holds, however it came there.

    A package holds whatever of its own modules was imported by anybody; they count if it imports by computed names.
    """
    for value in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
        if isinstance(value, ModuleType):
            if computes_names or value.__name__.rpartition(".")[0] != name:
                yield _Import(value.__name__, may_be_a_name=True)
        else:
            kind = value if isinstance(value, type | FunctionType) else type(value)
            yield _Import(str(kind.__module__), may_be_a_name=True)


class _Statements(NamedTuple):
    imports: tuple[_Import, ...]
    computes_names: bool
    computes_late: bool  # in a function, which may not have run yet


@lru_cache(maxsize=4096)
def _parse(text: bytes, package: str) -> _Statements:
    """What a module's text imports, anywhere in it."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return _Statements((), computes_names=False, computes_late=False)
    found: list[_Import] = []
    computed = list[ast.Call]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [_Import(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute("." * node.level + (node.module or ""), package)
            found += [_Import(base), *(_Import(f"{base}.{alias.name}", may_be_a_name=True) for alias in node.names)]
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                found.append(_Import(_absolute(first.value, package)))
            else:
                computed.append(node)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    late = {id(inner) for function in functions for inner in ast.walk(function)}
    return _Statements(tuple(found), bool(computed), any(id(call) in late for call in computed))


def _called(node: ast.Call) -> str:
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def _absolute(name: str, package: str) -> str:
    try:
        return importlib.util.resolve_name(name, package)
    except ImportError:  # beyond the top: the module could not have been imported either
        return name.lstrip(".")


def _locate(name: str) -> ModuleSpec | None:
    """Where a module is, without importing the packages around it."""
    if name in sys.modules:
        spec: ModuleSpec | None = getattr(sys.modules[name], "__spec__", None)
        file = getattr(sys.modules[name], "__file__", None)  # a script has no more
        return spec if spec or not file else importlib.util.spec_from_file_location(name, file)
    parent = name.rpartition(".")[0]
    if not parent:
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        return next((found for find in finders if find is not None and (found := find(name, None)) is not None), None)
    around, portions = _locate(parent), list[str]()
    for place in (around and around.submodule_search_locations) or ():
        found = finder.find_spec(name) if (finder := pkgutil.get_importer(place)) is not None else None
        if found is not None and found.loader is not None:
            return found
        portions += (found and found.submodule_search_locations) or []
    gathered = ModuleSpec(name, None, is_package=True)  # a package without a file of its own, or nothing
    gathered.submodule_search_locations = portions
    return gathered if portions else None


def _kind(spec: ModuleSpec) -> Literal["user", "installed", "library"]:
    """Whose a module is; of a package without a file of its own, whose the folders are."""
    if spec.origin in ("built-in", "frozen"):
        return "library"
    folders = [str(Path(spec.origin).parent)] if spec.origin and spec.has_location else spec.submodule_search_locations
    found = {_kind_of_folder(folder) for folder in folders or ()}
    return "user" if "user" in found else "installed" if "installed" in found else "library"


@cache
def _kind_of_folder(folder: str) -> Literal["user", "installed", "library"]:
    path = Path(folder).resolve()  # a link into a folder of sources is an editable installation
    if _INSTALLED.intersection(path.parts):
        return "installed"
    return "library" if any(path.is_relative_to(library) for library in _LIBRARY) else "user"


@cache
def installed_digest(package: str) -> str | None:
    """What tells one installation of a package from another: the list of its files with their checksums.

    None for what lies among the installed packages and belongs to none of them.
    """
    try:
        found = distribution(package)
    except PackageNotFoundError:
        names = _distributions().get(package)
        if not names:
            return None
        found = distribution(names[0])
    return hashlib.sha256((found.read_text("RECORD") or found.version).encode()).hexdigest()


_distributions: Callable[[], Mapping[str, list[str]]] = cache(packages_distributions)
