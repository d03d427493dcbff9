"""Which modules become the blocks of a plan."""

from __future__ import annotations

import pytest

from tierstore.memory_plan.call_tree import CallNode, blocks_of

_NAMES = iter(range(10**6))


def call(name: str, nbytes: int = 0, *inside: CallNode) -> CallNode:
    """A call that saves a storage of its own, and those of the calls inside it."""
    saved = {next(_NAMES): nbytes} if nbytes else {}
    return CallNode(name, not inside, saved, list(inside))


def layers(path: str, num_layers: int, nbytes: int) -> list[CallNode]:
    return [call(f"{path}.{number}", 0, call(f"{path}.{number}.inner", nbytes)) for number in range(num_layers)]


def root(*inside: CallNode) -> CallNode:
    return call("", 0, *inside)


CASES: dict[str, tuple[CallNode, list[str]]] = {
    "nothing saved": (root(call("net", 0, call("net.a", 0))), []),
    "nothing called": (root(), []),
    "layers of a body of a model": (
        root(call("net", 0, call("net.body", 0, *layers("net.body", 12, 100)), call("net.head", 50))),
        [*(f"net.body.{number}" for number in range(12)), "net.head"],
    ),
    "a model of leaves": (
        root(call("net", 0, *(call(f"net.{number}", 100) for number in range(4)))),
        [f"net.{number}" for number in range(4)],
    ),
    "a large block that saves most itself": (
        root(call("net", 0, call("net.a", 900, call("net.a.b", 50, call("net.a.b.c", 10))), call("net.d", 500))),
        ["net.a", "net.d"],
    ),
    "a large block of leaves alone": (
        root(call("net", 0, call("net.a", 0, call("net.a.x", 500), call("net.a.y", 500)), call("net.b", 100))),
        ["net.a", "net.b"],
    ),
    "one member that saves all": (
        root(call("net", 0, call("net.a", 0, call("net.a.b", 400, call("net.a.b.c", 100))), call("net.d", 900))),
        ["net.a", "net.d"],
    ),
    "called twice": (
        root(call("net", 0, *layers("net.body", 2, 50), *layers("net.body", 2, 50), *layers("net.rest", 6, 50))),
        ["net.body.0", "net.body.1", *(f"net.rest.{number}" for number in range(6))],
    ),
    "a block inside another one, called by itself too": (
        root(call("net", 0, *layers("net.body", 10, 100), call("net.body.3.inner", 40))),
        [f"net.body.{number}" for number in range(10) if number != 3] + ["net.body.3"],
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_blocks_of(case: tuple[CallNode, list[str]]) -> None:
    tree, expected = case
    assert sorted(blocks_of(tree)) == sorted(expected)
