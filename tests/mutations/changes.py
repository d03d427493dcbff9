"""The ways to break a piece of the product: what is called so, a piece of its code, and what that becomes.

A name is `function`, `Class.method`, `function.inner` or `CONSTANT`, in whichever file it lies. `module:name` tells
which one where several modules have it, by the end of the import path; `module:` is the whole file.

A pattern is an expression, one or more statements that follow each other, or an argument `name=value`. Spaces, comments
and line breaks do not matter, and a `...` in it matches anything; one in the replacement stands for what that matched.
A change is made only if its pattern is found exactly once in what has the name, or there in what matches `inside`.
"""

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["PRODUCT", "ROOT", "Change", "UnfitChangeError", "after", "always", "before", "drop", "never", "replace"]

ROOT = Path(__file__).parents[2]
PRODUCT = ("tierstore", "hooks", "daemon")


class UnfitChangeError(Exception):
    """A change does not fit the code as it is now."""


class _Match(NamedTuple):
    """Nodes that follow each other in a field of their parent, and what each `...` of the pattern has matched."""

    nodes: list[Any]
    parent: ast.AST
    field: str
    caught: tuple[str | None, ...]


class Change(NamedTuple):
    """One piece of code, and what it becomes; None: it is left out."""

    name: str
    pattern: str
    replacement: str | None
    inside: str | None

    def made(self) -> tuple[Path, str]:
        """The file that it belongs to, below the root, and its text with the change. Nothing is written."""
        module, _, rest = self.name.rpartition(":")
        places = [
            (path, node)
            for path, node in _definitions(ROOT).get(rest, [])
            if f".{_module(path)}".endswith(f".{module}" if module else "")
        ]
        found = {}
        for path, node in places:
            around = [node]
            if self.inside is not None:
                around = [each for match in _find(self.inside, node) for each in match.nodes]
            for match in (match for each in around for match in _find(self.pattern, each)):
                found[id(match.nodes[0])] = path, match
        if len(found) != 1:
            raise UnfitChangeError(f"found {len(found)} times in {self.name}, {len(places)} places: {self.pattern}")
        [(path, match)] = found.values()
        text = (ROOT / path).read_text(encoding="utf-8")
        return path, _left_out(text, match) if self.replacement is None else _put_in(text, match, self.replacement)


def drop(name: str, pattern: str, *, inside: str | None = None) -> Change:
    """Leave out a statement, an operand of `and` or `or`, an argument, an element, a base class or a decorator."""
    return Change(name, pattern, None, inside)


def never(name: str, condition: str, *, inside: str | None = None) -> Change:
    """Take a condition for false."""
    return Change(name, condition, "False", inside)


def always(name: str, condition: str, *, inside: str | None = None) -> Change:
    """Take a condition for true."""
    return Change(name, condition, "True", inside)


def replace(name: str, pattern: str, replacement: str, *, inside: str | None = None) -> Change:
    """Put other code in the place of some."""
    return Change(name, pattern, replacement, inside)


def before(name: str, statement: str, added: str) -> Change:
    """Do something else as well, before a statement."""
    return Change(name, statement, f"{added}\n{statement}", None)


def after(name: str, statement: str, added: str) -> Change:
    """Do something else as well, after a statement."""
    return Change(name, statement, f"{statement}\n{added}", None)


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@cache
def _definitions(root: Path) -> dict[str, list[tuple[Path, ast.AST]]]:
    """All that the product defines, by qualified name; a whole file has none."""
    found = defaultdict(list)
    for folder in PRODUCT:
        for path in sorted((root / folder).rglob("*.py")):
            if path.resolve() == path:  # no link to another folder of the product
                for name, node in _named(ast.parse(path.read_text(encoding="utf-8")), ""):
                    found[name].append((path.relative_to(root), node))
    return dict(found)


def _named(node: ast.AST, name: str) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, (ast.Module, ast.stmt)):
        yield name, node
    prefix = f"{name}." if name else ""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef(name=own) | ast.AsyncFunctionDef(name=own) | ast.ClassDef(name=own):
                yield from _named(child, prefix + own)
            case ast.Assign(targets=[ast.Name(id=own)]) | ast.AnnAssign(target=ast.Name(id=own)):
                yield prefix + own, child
            case ast.stmt() | ast.ExceptHandler():
                yield from ((inner, found) for inner, found in _named(child, name) if inner != name)


def _code(text: str) -> list[Any]:
    """The expression, or the statements, of a text."""
    statements = ast.parse(textwrap.dedent(text)).body
    return [statements[0].value] if len(statements) == 1 and isinstance(statements[0], ast.Expr) else statements


def _kind(node: Any) -> tuple[type, type]:
    """Its type, and whether it is read or set."""
    return type(node), type(getattr(node, "ctx", None))


def _find(pattern: str, root: ast.AST) -> Iterator[_Match]:
    code = _code(pattern)
    kinds = [[_kind(node) for node in code]]
    if isinstance(code[0], ast.Assign):
        kinds.append([_kind(ast.keyword())])
    wanted = re.escape("\n".join(map(ast.unparse, code)))
    wanted = wanted.replace(r",\ \.\.\.", r"(?:,\ (.*))?").replace(r"\.\.\.", "(.*)").replace(r"\ =\ ", r"\ ?=\ ?")
    for parent in ast.walk(root):
        for field, value in ast.iter_fields(parent):
            children = value if isinstance(value, list) else [value]
            for start in range(len(children)):
                nodes = children[start : start + len(code)]
                if [_kind(node) for node in nodes] in kinds:
                    found = re.fullmatch(wanted, "\n".join(map(ast.unparse, nodes)), re.DOTALL)
                    if found:
                        yield _Match(nodes, parent, field, found.groups())


def _put_in(text: str, match: _Match, replacement: str) -> str:
    caught = iter(match.caught)
    code = _code(replacement)
    new = re.sub(r"\.\.\.", lambda _: next(caught) or "", "\n".join(map(ast.unparse, code)))
    if new == "\n".join(map(ast.unparse, match.nodes)):
        raise UnfitChangeError(f"the replacement is the same: {new}")
    if isinstance(match.nodes[0], ast.keyword):
        return _cut(text, match.nodes, new.replace(" = ", "=", 1))
    if isinstance(match.nodes[0], ast.expr) and not isinstance(match.parent, ast.Expr):
        return _cut(text, match.nodes, f"({new})")
    indent = " " * match.nodes[0].col_offset
    return _cut(text, match.nodes, textwrap.indent(new, indent).removeprefix(indent))


def _left_out(text: str, match: _Match) -> str:
    if isinstance(match.nodes[0], ast.stmt) or isinstance(match.parent, ast.Expr):
        return _cut(text, match.nodes, "pass")
    if isinstance(match.parent, ast.BoolOp):
        return _cut(text, match.nodes, str(isinstance(match.parent.op, ast.And)))
    if isinstance(match.parent, ast.withitem):
        return _cut(text, match.nodes, "__import__('contextlib').nullcontext()")
    marked = _cut(text, match.nodes, "\0")
    return re.sub(r"@\0|\0\s*,\s*|,\s*\0|\0", "", marked)


def _cut(text: str, nodes: list[Any], new: str) -> str:
    lines = text.encode().splitlines(keepends=True)
    first, last = nodes[0], nodes[-1]
    head = b"".join(lines[: first.lineno - 1]) + lines[first.lineno - 1][: first.col_offset]
    tail = lines[last.end_lineno - 1][last.end_col_offset :] + b"".join(lines[last.end_lineno :])
    return (head + new.encode() + tail).decode()
