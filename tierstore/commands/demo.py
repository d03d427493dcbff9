"""`tierstore demo`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..demo.settings import DemoSettings

__all__ = ["demo"]

_DEMO = DemoSettings()


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
    from ..demo.present import present_demo

    settings = DemoSettings(steps, layers, width, context, batch, text, device, seed)
    result = present_demo(settings, path=path, host_bytes=host_bytes, as_json=as_json)
    raise typer.Exit(0 if result.difference is None else 1)
