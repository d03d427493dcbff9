"""The command line: `tierstore COMMAND`. Every command imports what it needs when it runs.

Exit codes: 0 done; 1 it failed, or the demo's gradients differ; 2 an argument cannot be used.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from .demo.settings import DemoSettings
from .errors import ConfigError, TierStoreError

__all__ = ["main"]

app = typer.Typer(
    name="tierstore",
    help="An asynchronous tiered store for the tensors that PyTorch saves for backward.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script. An expected error is one line on standard error, never a traceback."""
    try:
        app()
    except TierStoreError as error:
        print(f"tierstore: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        print(f"tierstore {version('tierstore')}")
    except PackageNotFoundError:
        print("tierstore (run from its source; no version is installed)")
    raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    pass


_DEMO = DemoSettings()


@app.command()
def demo(
    path: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Existing directory to spill to. Default: a temporary one on a disk, removed at the end.",
        ),
    ] = None,
    host_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help='Host memory for the store, such as "128MiB". Default: 1/8 of what the plain run adds.',
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help='"cpu", "cuda", ...; "auto" takes a GPU where there is one.')
    ] = _DEMO.device,
    text: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Train on this file's bytes. Default: the documentation of CPython."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = _DEMO.steps,
    layers: Annotated[int, typer.Option(help="Blocks of the transformer.")] = _DEMO.layers,
    width: Annotated[int, typer.Option(help="Features; a multiple of 64.")] = _DEMO.width,
    context: Annotated[int, typer.Option(help="Bytes of text in a sequence.")] = _DEMO.context,
    batch: Annotated[int, typer.Option(help="Sequences in a step.")] = _DEMO.batch,
    seed: Annotated[int, typer.Option(help="Of the parameters and the order of the text.")] = _DEMO.seed,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, nothing else.")] = False,
) -> None:
    """Train a small language model plainly, then with the store, and compare memory, time and gradients.

    Ends with exit code 1 if a single bit of any gradient differs.
    """
    from .demo.present import present_demo

    settings = DemoSettings(steps, layers, width, context, batch, text, device, seed)
    result = present_demo(settings, path=path, host_bytes=host_bytes, as_json=as_json)
    raise typer.Exit(0 if result.difference is None else 1)


if __name__ == "__main__":
    main()
