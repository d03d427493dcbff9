"""What all commands have in common: the look of their help pages, and the option `--json`."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
"""For the program; its commands inherit it."""

JsonOption = typer.Option("--json", help="Print JSON on standard output, and nothing else.")


def _without_types(parameters: list[Any]) -> list[Any]:
    """Some versions of typer show `<bool>` beside a flag, as if it took a value, `<str>` beside an argument, and the
    name of an argument in braces: show none of that."""
    for each in parameters:
        if getattr(each, "is_flag", False) and each.metavar is None:
            each.metavar = ""
        if each.param_type_name == "argument":
            each.display_type_rich = lambda ctx: None
            usage = each.metavar + ("" if each.nargs == 1 else "...")
            each.get_usage_pieces = lambda ctx, usage=usage: [usage]
    return parameters


class Command(TyperCommand):
    """A command. Its help page shows a type beside options that take a value, and only there."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands, with the same help page."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))
