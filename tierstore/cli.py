"""The command line: `tierstore COMMAND`. Every command imports what it needs when it runs.

Exit codes: 0: done. 1: the command failed, its output could not be written, the demo's gradients differ, or the doctor
found a problem. 2: an argument cannot be used."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from . import __version__
from .commands.demo import demo
from .commands.doctor import doctor
from .commands.output import OutputError, checked_output, open_closed_streams
from .commands.run import run
from .commands.serve import serve
from .commands.stat import stat, top
from .commands.trace import trace_commands
from .commands.tune import tune
from .commands.usage import CONTEXT, Command, Group
from .errors import ConfigError, TierStoreError

app = typer.Typer(
    name="tierstore",
    help="An asynchronous tiered store for the tensors that PyTorch saves for backward.\n\n"
    "To begin, run `tierstore demo`, and `tierstore doctor PATH` with a folder on the drive that you want to use.",
    cls=Group,
    context_settings=CONTEXT,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script. An expected error is one line on standard error, never a traceback."""
    open_closed_streams()
    try:
        with checked_output():
            app()
    except OutputError as error:
        if error.is_wanted:
            print(f"tierstore: {error}", file=sys.stderr)
        sys.exit(1)
    except TierStoreError as error:
        print(f"tierstore: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    print(f"tierstore {__version__}")
    raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


for command in (demo, doctor, run, tune, serve, stat, top):
    launches = command in (run, tune)  # their COMMAND has options of its own
    app.command(cls=Command, context_settings={"allow_interspersed_args": not launches})(command)
app.add_typer(trace_commands)


if __name__ == "__main__":
    main()
