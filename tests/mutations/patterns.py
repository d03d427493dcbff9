"""Patterns are source text that is looked for in a syntax tree. Spaces, comments and line breaks do not matter.

A pattern is an expression, one or more statements that follow each other, or an argument `name=value`. A `...` in it
matches anything: any number of statements in a block, any number of arguments or elements in a list of them, and one
expression elsewhere. So `self.note(...)` is any call of it, and `if done: ...` has any body.

No tree is changed here. `replaced` makes a new one, which shares all that is equal with the old one.
"""

import ast
import copy
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

__all__ = ["Match", "Step", "find", "node_at", "replaced"]

_BLOCKS = ("body", "orelse", "finalbody")


class Step(NamedTuple):
    """From a node to one below it: the field, and the index where that is a list."""

    field: str
    index: int | None


class Match(NamedTuple):
    """Where a pattern was found.

    Attributes:
        steps: from the root of the tree to the node that was found, or to the first of several statements.
        length: how many nodes were found there, one after the other.
        caught: the nodes that each `...` of the pattern has matched.
    """

    steps: tuple[Step, ...]
    length: int
    caught: list[list[ast.AST]]


def find(pattern: str, tree: ast.AST, below: tuple[Step, ...]) -> list[Match]:
    """All places below a node where the pattern is found."""
    spellings = [_parse(pattern)]
    if argument := _as_argument(spellings[0]):
        spellings.append([argument])
    return [
        Match(steps, len(nodes), caught)
        for steps in _steps_below(node_at(tree, below), below)
        for nodes in spellings
        if (caught := _match_list(nodes, _from(tree, steps)[: len(nodes)])) is not None
    ]


def replaced(tree: ast.AST, match: Match, text: str | None) -> Any:
    """A new tree with other source in the place of a match, or with nothing in its place where the text is None.

    The first `...` of the text stands for what the first `...` of the pattern has matched, and so on. A block from
    which everything is taken becomes `pass`. `a or b` from which `a` is taken is written as `b`.

    Raises:
        ValueError: nothing of that kind can stand there, or it stands there already.
    """
    new = [] if text is None else _parse(text)
    steps = match.steps
    if not (new and isinstance(new[0], ast.expr)):
        steps = _to_item_of_list(tree, steps)
    if isinstance(node_at(tree, steps), ast.keyword) and (argument := _as_argument(new)):
        new = [argument]
    filled = _Filled(match.caught)
    nodes = [node for each in new for node in _as_list(filled.visit(each))]
    if isinstance(node_at(tree, steps), ast.stmt):
        nodes = [ast.Expr(node) if isinstance(node, ast.expr) else node for node in nodes]
    if [ast.dump(node) for node in nodes] == [ast.dump(node) for node in _from(tree, steps)[: match.length]]:
        raise ValueError("the replacement is the same")
    return _rebuilt(tree, steps, match.length, nodes)


def node_at(tree: ast.AST, steps: Sequence[Step]) -> Any:
    """The node to which the steps lead."""
    for field, index in steps:
        below = getattr(tree, field)
        tree = below if index is None else below[index]
    return tree


def _parse(text: str) -> list[ast.AST]:
    statements = ast.parse(textwrap.dedent(text)).body
    if len(statements) == 1 and isinstance(statements[0], ast.Expr):
        return [statements[0].value]
    return list(statements)


def _as_argument(nodes: list[ast.AST]) -> ast.keyword | None:
    """The argument `name=value`, which Python has parsed as an assignment."""
    match nodes:
        case [ast.Assign(targets=[ast.Name(id=name)], value=value)]:
            return ast.keyword(name, value)
    return None


def _steps_below(node: ast.AST, steps: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    for field, value in ast.iter_fields(node):
        for index, child in enumerate(_as_list(value)):
            if isinstance(child, ast.AST):
                here = (*steps, Step(field, index if isinstance(value, list) else None))
                yield here
                yield from _steps_below(child, here)


def _from(tree: ast.AST, steps: tuple[Step, ...]) -> list[ast.AST]:
    """The node to which the steps lead, and those that follow it in its list."""
    field, index = steps[-1]
    value = getattr(node_at(tree, steps[:-1]), field)
    return [value] if index is None else value[index:]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _parts(node: ast.AST) -> list[Any]:
    """The parts of a node. A call has one list of arguments, so that `...` matches both kinds of them."""
    if isinstance(node, ast.Call):
        return [node.func, [*node.args, *node.keywords]]
    return [getattr(node, field, None) for field in node._fields]


def _is_any(node: Any) -> bool:
    match node:
        case ast.Constant(value=value) | ast.Expr(value=ast.Constant(value=value)):
            return value is Ellipsis
    return False


def _match(pattern: Any, node: Any) -> list[list[ast.AST]] | None:
    """The nodes that each `...` has matched; None: the pattern and the node differ."""
    if _is_any(pattern):
        return [[node]] if isinstance(node, ast.AST) else None
    if isinstance(pattern, list):
        return _match_list(pattern, node)
    if type(pattern) is not type(node):
        return None
    if not isinstance(pattern, ast.AST):
        return [] if pattern == node else None
    caught = []
    for part_of_pattern, part_of_node in zip(_parts(pattern), _parts(node), strict=True):
        part = _match(part_of_pattern, part_of_node)
        if part is None:
            return None
        caught += part
    return caught


def _match_list(pattern: list[Any], nodes: list[Any]) -> list[list[ast.AST]] | None:
    if not pattern:
        return None if nodes else []
    least, most = (0, len(nodes)) if _is_any(pattern[0]) else (1, min(1, len(nodes)))
    for length in range(least, most + 1):
        first = [nodes[:length]] if least == 0 else _match(pattern[0], nodes[0])
        if first is not None and (rest := _match_list(pattern[1:], nodes[length:])) is not None:
            return first + rest
    return None


class _Filled(ast.NodeTransformer):
    """Puts what each `...` has matched in its place, in their order."""

    def __init__(self, caught: list[list[ast.AST]]) -> None:
        self._caught = iter(caught)

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Call):
            self.generic_visit(node)
            by_name = [argument for argument in node.args if isinstance(argument, ast.keyword)]
            node.args = [argument for argument in node.args if argument not in by_name]
            node.keywords = by_name + node.keywords
            return node
        if not _is_any(node):
            return self.generic_visit(node)
        nodes = next(self._caught, None)
        if nodes is None:
            raise ValueError("the replacement has more `...` than the pattern")
        return nodes[0] if len(nodes) == 1 else nodes


def _to_item_of_list(tree: ast.AST, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The way to what can be taken out: a statement for its expression, an item of `with` for its context."""
    above = node_at(tree, steps[:-1])
    if isinstance(above, (ast.Expr, ast.withitem)):
        steps = steps[:-1]
    if steps[-1].index is None:
        raise ValueError(f"the pattern is the {steps[-1].field} of a {type(above).__name__}, which needs one")
    return steps


def _rebuilt(node: Any, steps: Sequence[Step], length: int, nodes: list[ast.AST]) -> Any:
    """A copy of the node with other nodes where the steps lead. Only the nodes on the way are copied."""
    (field, index), *rest = steps
    rebuilt = copy.copy(node)
    value = getattr(node, field)
    if rest:
        nodes, length = [_rebuilt(node_at(node, steps[:1]), rest, length, nodes)], 1
    if index is None:
        [value] = nodes
    else:
        value = [*value[:index], *nodes, *value[index + length :]]
        if not value and field in _BLOCKS:
            value = [ast.Pass()]
    setattr(rebuilt, field, value)
    return rebuilt
