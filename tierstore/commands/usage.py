"""What all commands have in common: the look of their help pages, the option `--json`, and how JSON is printed."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["CONTEXT", "Command", "Group", "JsonOption", "print_json"]

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
"""For the program; its commands inherit it."""

JsonOption = typer.Option("--json", help="Print JSON on standard output, and nothing else.")


def _flags_without_a_value(parameters: list[Any]) -> list[Any]:
    """Some versions of typer show the type `<bool>` beside a flag, as if it took a value. An empty text hides that."""
    for each in parameters:
        if getattr(each, "is_flag", False) and each.metavar is None:
            each.metavar = ""
    return parameters


class Command(TyperCommand):
    """A command. Its help page shows a type beside options that take a value, and only there."""

    def get_params(self, ctx: Any) -> list[Any]:
        """As typer's."""
        return _flags_without_a_value(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands, with the same help page."""

    def get_params(self, ctx: Any) -> list[Any]:
        """As typer's."""
        return _flags_without_a_value(super().get_params(ctx))


def print_json(value: object) -> None:
    """Print plain values or records as JSON, indented for people."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
