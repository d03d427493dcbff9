"""Finds what the product defines by its name, in whichever file it lies. A file that moves needs no change here."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .patterns import Step

__all__ = ["PRODUCT", "ROOT", "Place", "names_like", "places_named"]

ROOT = Path(__file__).parents[2]
PRODUCT = ("tierstore", "hooks", "daemon")
"""The folders of the product, below `ROOT`."""


class Place(NamedTuple):
    """A definition.

    Attributes:
        path: its file, below `ROOT`.
        steps: from the file's tree to the definition.
    """

    path: Path
    steps: tuple[Step, ...]

    def parsed(self) -> ast.Module:
        """The file's tree. It is not kept: the garbage collector would look through all of them again and again."""
        return ast.parse((ROOT / self.path).read_text(encoding="utf-8"))


def places_named(name: str) -> list[Place]:
    """All definitions that have a name: `function`, `Class.method`, `function.inner` or `CONSTANT`.

    `module:name` tells which one where several modules have the name, and `module:` is the whole file. The end of an
    import path is enough for a module: `moves:` is every `moves.py`, and `simulator.moves:` the simulator's.
    """
    module, _, rest = name.rpartition(":")
    found = _places(ROOT).get(rest, [])
    return [place for place in found if f".{_module(place.path)}".endswith(f".{module}" if module else "")]


def names_like(name: str) -> list[str]:
    """The qualified names with the same last part: where a function may have gone."""
    last = name.rpartition(":")[2].rpartition(".")[2]
    return sorted(each for each in _places(ROOT) if each and each.rpartition(".")[2] == last)


@cache
def _places(root: Path) -> dict[str, list[Place]]:
    """By qualified name. That of a whole file is empty."""
    found = defaultdict(list)
    for folder in PRODUCT:
        for path in sorted((root / folder).rglob("*.py")):
            if path.resolve() != path:
                continue  # a link to another folder of the product
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for name, steps in [("", ()), *_definitions(tree, "", ())]:
                found[name].append(Place(path.relative_to(root), steps))
    return dict(found)


def _definitions(node: ast.AST, prefix: str, steps: tuple[Step, ...]) -> Iterator[tuple[str, tuple[Step, ...]]]:
    for field in ("body", "orelse", "handlers", "finalbody"):
        for index, statement in enumerate(getattr(node, field, ())):
            here = (*steps, Step(field, index))
            match statement:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    yield prefix + name, here
                    yield from _definitions(statement, f"{prefix}{name}.", here)
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    yield prefix + name, here
                case _:
                    yield from _definitions(statement, prefix, here)


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")
