"""The ways to break a piece of the product. Each is addressed by a qualified name and a pattern.

`places.py` says how a name is looked up, `patterns.py` what a pattern is. A change is made only if its pattern is found
exactly once in what has the name. It goes on to fit while the code around it changes and while files move. A pattern
should be no longer than it takes to be found once.
"""

import ast
import textwrap
from pathlib import Path
from typing import NamedTuple

from .patterns import Match, find, replaced
from .places import Place, names_like, places_named

__all__ = ["Change", "Changed", "UnfitChangeError", "after", "always", "before", "drop", "never", "replace"]


class UnfitChangeError(Exception):
    """A change does not fit the code as it is now."""


class Changed(NamedTuple):
    """A file of the product with a change made.

    Attributes:
        path: of the file, below the project's root.
        before, after: its syntax tree.
    """

    path: Path
    before: ast.Module
    after: ast.Module


class Change(NamedTuple):
    """One piece of code, and what it becomes.

    Attributes:
        name: of the function, class or constant that is changed, as `places_named` takes it.
        pattern: is found there exactly once.
        replacement: what replaces it; None: nothing does.
        inside: a pattern of the code around it. Only needed where the pattern alone is found more than once.
    """

    name: str
    pattern: str
    replacement: str | None
    inside: str | None

    def made(self) -> Changed:
        """Make the change in the tree of the file that it belongs to. No file is written.

        Raises:
            UnfitChangeError: there is no such name, the pattern is not there exactly once, or nothing would change.
        """
        places = places_named(self.name)
        if not places:
            raise UnfitChangeError(
                f"nothing is called {self.name}; there is {', '.join(names_like(self.name)) or 'none'}"
            )
        found = []
        for place in places:
            tree = place.parsed()
            found += [(place.path, tree, match) for match in self._matches(tree, place)]
        if len(found) != 1:
            files = ", ".join(str(place.path) for place in places)
            raise UnfitChangeError(f"found {len(found)} times in {self.name} ({files}): {self.pattern}")
        [(path, tree, match)] = found
        try:
            return Changed(path, tree, replaced(tree, match, self.replacement))
        except ValueError as error:
            raise UnfitChangeError(f"in {self.name}: {self.pattern}: {error}") from error

    def _matches(self, tree: ast.Module, place: Place) -> list[Match]:
        below = [place.steps]
        if self.inside is not None:
            below = [match.steps for match in find(self.inside, tree, place.steps)]
        matches = {match.steps: match for steps in below for match in find(self.pattern, tree, steps)}
        return list(matches.values())


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
    """Put other code in the place of some. A `...` in it stands for what the `...` of the pattern has matched."""
    return Change(name, pattern, replacement, inside)


def before(name: str, statement: str, added: str, *, inside: str | None = None) -> Change:
    """Do something else as well, before a statement."""
    return Change(name, statement, _joined(added, statement), inside)


def after(name: str, statement: str, added: str, *, inside: str | None = None) -> Change:
    """Do something else as well, after a statement."""
    return Change(name, statement, _joined(statement, added), inside)


def _joined(*statements: str) -> str:
    return "\n".join(textwrap.dedent(statement).strip("\n") for statement in statements)
