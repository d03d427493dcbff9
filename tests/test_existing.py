"""No test sets a private attribute that the object does not have: many of them run on no machine of ours."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.existing import set_existing

TESTS = Path(__file__).parent


def _set_in_vain_unnoticed(source: str) -> Iterator[tuple[int, str]]:
    """Assignments to another object's private attribute, or through one: (line, target)."""
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        for target in targets:
            owner, names = target, []
            while isinstance(owner, ast.Attribute):
                names.append(owner.attr)
                owner = owner.value
            is_own = isinstance(owner, ast.Name) and owner.id in ("self", "cls") and len(names) == 1
            if not is_own and names and names[0].startswith("_") and not names[0].endswith("__"):
                yield node.lineno, ast.unparse(target)


def test_private_attributes_are_set_by_set_existing() -> None:
    found = [
        f"{file.relative_to(TESTS)}:{line}: {target}"
        for file in sorted(TESTS.rglob("*.py"))
        for line, target in _set_in_vain_unnoticed(file.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_scan_finds_what_set_existing_refuses() -> None:
    source = "self._own = 1\nother.shown = 1\nself.other._hidden = 1\nother.a._hidden += 1\nname = 1\n"
    assert list(_set_in_vain_unnoticed(source)) == [(3, "self.other._hidden"), (4, "other.a._hidden")]
    target = SimpleNamespace(there=1)
    with pytest.raises(AttributeError, match="has no attribute 'gone'"):
        set_existing(target, there=2, gone=3)
    assert target.there == 1
