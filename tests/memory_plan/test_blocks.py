"""Which modules become the blocks of a plan."""

from __future__ import annotations

import pytest

from tierstore.memory_plan.call_tree import blocks_of


def layers(path: str, num_layers: int, num_bytes: int) -> dict[str | None, int]:
    return {f"{path}{number}": num_bytes for number in range(num_layers)}


CASES: dict[str, tuple[dict[str | None, int], list[str]]] = {
    "nothing saved": ({"": 0, "a": 0}, []),
    "nothing called": ({}, []),
    "layers of a body of a model": (
        {"": 0, "body": 0, **layers("body.list.", 12, 100), "head": 50},
        [*layers("body.list.", 12, 0), "head"],
    ),
    "a model whose members are called, but not itself": (layers("", 4, 100), [*layers("", 4, 0)]),
    "a model of leaves": ({"": 0, **layers("", 4, 100)}, [*layers("", 4, 0)]),
    "a large block that saves most itself": ({"": 0, "a": 900, "a.b": 50, "a.b.c": 10, "d": 500}, ["a", "d"]),
    "one member that saves all": ({"": 0, "a": 0, "a.b": 400, "d": 900}, ["a", "d"]),
    "one member that is taken apart": ({"a": 0, "a.b": 0, "a.b.c": 400, "a.b.d": 900}, ["a.b.c", "a.b.d"]),
    "most is saved by the loss": ({None: 10_000, "": 0, "a": 0, "a.b": 400, "a.c": 900}, [""]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_blocks_of(case: tuple[dict[str | None, int], list[str]]) -> None:
    """Each module saves a storage of its own."""
    sizes, expected = case
    saved = {name: {number: size} if size else {} for number, (name, size) in enumerate(({None: 0} | sizes).items())}
    assert blocks_of(saved) == expected
