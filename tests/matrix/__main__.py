"""`python -m tests.matrix`: does tierstore run with the oldest and the newest torch, on each Python?

A pair that cannot be had on this machine is listed with the reason. The exit code is 1 only where tests failed.
"""

import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .rows import ROOT, run_row, table_of, written_into

_PAGE = ROOT / "docs" / "reference" / "compatibility.md"


def main(
    torches: Annotated[str, typer.Option(help='"oldest", "newest", versions; by spaces.')] = "oldest newest",
    pythons: Annotated[
        str, typer.Option(help="Versions, or paths of interpreters; by spaces.")
    ] = "3.11 3.12 3.13 3.14",
    folder: Annotated[Path, typer.Option(help="For what the tests say, and some GB meanwhile.")] = ROOT / ".matrix",
    write: Annotated[bool, typer.Option("--write", help="Write the table to docs/reference/compatibility.md.")] = False,
) -> None:
    """Run the bounded suite for each torch and each Python."""
    console = Console()
    folder.mkdir(exist_ok=True)
    rows = []
    for torch in torches.split():
        for python in pythons.split():
            rows.append(run_row(folder.resolve(), torch, python))
            console.print(f"torch {torch}, Python {python}: {rows[-1].outcome}")
    if write:
        table = table_of(rows, datetime.date.today())
        _PAGE.write_text(written_into(_PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")
    raise typer.Exit(1 if any(row.is_broken for row in rows) else 0)


if __name__ == "__main__":
    typer.run(main)
