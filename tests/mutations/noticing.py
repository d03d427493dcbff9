"""Finds tests by their names alone, in whichever file they lie."""

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from .places import ROOT

__all__ = ["UnknownTestError", "node_id"]

_DEFINITION = re.compile(r"^(?:class (?P<group>\w+)|(?P<method> +)?(?:async )?def (?P<test>test_\w+)\()", re.MULTILINE)


class UnknownTestError(LookupError):
    """No test is called so, or several are."""


def node_id(name: str) -> str:
    """The file or node id, below `tests/`, of a test.

    Args:
        name: `test_one`, with its parameters in brackets where it should be one case. `test_file.py` is a whole file.
            `test_file.py::test_one` tells which, where several files have a test of that name.

    Raises:
        UnknownTestError: no test is called so, or several are.
    """
    name, bracket, parameters = name.partition("[")
    path, _, test = (name, "", "") if name.endswith(".py") else name.rpartition("::")
    found = [node for node in _nodes(ROOT)[test] if f"/{node.partition('::')[0]}".endswith(f"/{path}" if path else "")]
    if len(found) != 1:
        raise UnknownTestError(f"{name}: {len(found)} tests are called so: {', '.join(found)}")
    return f"{found[0]}{bracket}{parameters}"


@cache
def _nodes(root: Path) -> dict[str, list[str]]:
    """Node ids by the name of the test. That of a whole file is empty."""
    found = defaultdict(list)
    for path in sorted((root / "tests").rglob("test_*.py")):
        file = path.relative_to(root / "tests").as_posix()
        found[""].append(file)
        group = ""
        for match in _DEFINITION.finditer(path.read_text(encoding="utf-8")):
            if match["group"] is not None:
                group = match["group"]
            else:
                found[match["test"]].append("::".join([file, *([group] if match["method"] else []), match["test"]]))
    return found
