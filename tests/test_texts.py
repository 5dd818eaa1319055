"""Every text of an error and of help stands in texts.txt, where it can be read, and rewritten, as text.

`make texts` writes the file; its diff is how a change of words is reviewed. Tests elsewhere assert an error's type and
the field or value it must name, so that a better sentence costs a change here and nowhere else.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "fedfuse"
PAGE = ROOT / "tests" / "texts.txt"
HEAD = """\
Every text of an error and of help in src/fedfuse, one a line, by package and in alphabetical order.

A placeholder is a name, `{…}` a longer expression, `{this|that}` a choice. Under "phrases" stand the other texts of
three words and more: parts of errors, notes, log lines, titles. Do not edit: `make texts` writes this file.
"""
BUILTIN = {name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)}
WORD = re.compile(r"[^\W\d_]{2,}")


def template(node: ast.expr) -> str:
    """A string expression as a reader would write it; empty for what is no string."""
    match node:
        case ast.Constant(value=str(text)):
            return text.replace("\n", "⏎")
        case ast.JoinedStr(values=parts):
            return "".join(template(part) for part in parts)
        case ast.FormattedValue(value=value):
            return placeholder(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right) if template(left) or template(right):
            return (template(left) or placeholder(left)) + (template(right) or placeholder(right))
        case ast.IfExp() if "|" in (choice := placeholder(node)):
            return choice
    return ""


def placeholder(node: ast.expr) -> str:
    match node:
        case ast.Call(func=ast.Name(id="map"), args=[_, inner]) | ast.Call(args=[inner, *_]):
            return placeholder(inner)
        case ast.Attribute(value=inner, attr="__name__") | ast.Subscript(value=inner, slice=ast.Slice()):
            return placeholder(inner)
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(place))):
            return f"{{{name}[{place}]}}"
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return f"{{{name}}}"
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return f"{{{name}}}"
        case ast.IfExp(body=body, orelse=other) if template(body) or template(other):
            return f"{{{template(body) or placeholder(body)}|{template(other) or placeholder(other)}}}"
    return "{…}"


def exceptions(trees: list[ast.Module]) -> set[str]:
    """The names of all exceptions: Python's, and the classes here that are made of one."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    known, before = set(BUILTIN), 0
    while len(known) > before:
        before = len(known)
        known |= {c.name for c in classes if {getattr(base, "id", "") for base in c.bases} & known}
    return known


def commands(trees: list[ast.Module]) -> Iterator[ast.FunctionDef]:
    """The functions that are commands: decorated by the app, or in a tuple of functions that a loop registers."""
    loops = [node.iter for tree in trees for node in tree.body if isinstance(node, ast.For)]
    registered = {n.attr for loop in loops for n in getattr(loop, "elts", []) if isinstance(n, ast.Attribute)}
    for function in (node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)):
        if function.name in registered or any("app." in ast.unparse(each) for each in function.decorator_list):
            yield function


def texts_of(tree: ast.Module, errors: set[str]) -> Iterator[tuple[str, str]]:
    """The kind and the template of every text of a module."""
    seen = set[ast.AST]()  # what stands in a text already, or is none: docstrings and types
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant() as none):
                seen.add(none)
            case ast.AnnAssign(annotation=ast.Name(id="TypeAlias"), value=ast.Constant() as none):
                seen.add(none)
    raised = {node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        parts = [*node.args, *(word.value for word in node.keywords)]
        if name == "Refused" and len(node.args) == 4:
            who, field, got, expected = (template(part) or placeholder(part) for part in node.args)
            yield "errors", f"{who}: {field} is {got}, expected {expected}"
            seen |= {inner for part in parts for inner in ast.walk(part)}
        elif name in errors or node in raised:
            for part in parts:
                if WORD.search(re.sub(r"{[^|]*?}", "", text := template(part))):
                    yield "errors", text
                    seen |= set(ast.walk(part))
        for word in node.keywords:
            if word.arg == "help" or (word.arg == "description" and name == "Field"):
                yield "help", template(word.value)
                seen |= set(ast.walk(word.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and node not in seen and (text := template(node)):
            seen |= set(ast.walk(node))
            if len(WORD.findall(text)) > 2 and " " in text.strip() and text[0] not in "<|" and "⏎" not in text[:-1]:
                yield "phrases", text


def gathered() -> str:
    """The file as it should be."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
    errors, found = exceptions(list(trees.values())), defaultdict[tuple[str, str], set[str]](set)
    for path, tree in trees.items():
        package, *inside = path.relative_to(SOURCE).parts
        for kind, text in texts_of(tree, errors):
            found[package if inside else "fedfuse", kind].add(text)
    for command in commands([tree for path, tree in trees.items() if path.parent.name == "cli"]):
        paragraphs = inspect.cleandoc(ast.get_docstring(command) or "").split("\n\n")
        found["cli", "help"].add(f"{command.name}: " + " ⏎ ".join(" ".join(words.split()) for words in paragraphs))
    parts = [[f"# {package}: {kind}", "", *sorted(texts), ""] for (package, kind), texts in found.items()]
    return "\n".join([HEAD, *("\n".join(part) for part in sorted(parts))])


def test_the_file_has_every_text() -> None:
    assert PAGE.read_text(encoding="utf-8") == gathered(), "a text has changed: read the diff that `make texts` makes"


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        ("raise ConfigError('no ' 'rows')", "errors", "no rows"),
        ("raise ConfigError(f'{path.name}: no {key!r}; ' + what)", "errors", "{name}: no {key}; {what}"),
        ("raise ConfigError(f'{name[:80]} has {len(rows):,} rows')", "errors", "{name} has {rows} rows"),
        ("raise ConfigError(f'it {\"is\" if one else are} odd')", "errors", "it {is|{are}} odd"),
        ("raise damaged(path, 'it is short')", "errors", "it is short"),
        ("return Mine('of our own')", "errors", "of our own"),
        ("Refused(who, 'steps', got, 'a number')", "errors", "{who}: steps is {got}, expected a number"),
        ("typer.Option(help='Go on.')", "help", "Go on."),
        ("Field(3, description='How many.')", "help", "How many."),
        ("def flaw():\n    yield f'labels run to {y.max()}'", "phrases", "labels run to {…}"),
    ],
)
def test_texts_are_seen(code: str, kind: str, text: str) -> None:
    assert list(texts_of(ast.parse(code), {"ConfigError", "Mine"})) == [(kind, text)]


def test_what_is_no_text_is_not_seen() -> None:
    code = '"""A module of ours."""\nA: TypeAlias = "Guard | str | None"\nraise KeyError(name)\npath = "a/b"'
    assert not list(texts_of(ast.parse(code), {"KeyError"}))


if __name__ == "__main__":
    PAGE.write_text(gathered(), encoding="utf-8")
