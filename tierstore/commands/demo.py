"""`tierstore demo`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..demo.settings import DemoSettings
from .usage import JsonOption

_DEMO = DemoSettings()


def demo(
    path: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Existing directory for the store's files. Default: the current one, if on a disk. Nothing stays.",
        ),
    ] = None,
    host_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help='Host memory for the store, such as "128MiB". Default: 1/8 of the memory that plain training adds.',
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help='"cpu", "cuda", ...; "auto" uses an accelerator if there is one.')
    ] = _DEMO.device,
    text: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Train on the bytes of this file. Default: the documentation of CPython."),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="NUMBER", help="Optimizer steps of each training.")] = _DEMO.steps,
    layers: Annotated[int, typer.Option(metavar="NUMBER", help="Blocks of the transformer.")] = _DEMO.layers,
    width: Annotated[
        int, typer.Option(metavar="NUMBER", help="Features of the transformer; a multiple of 64.")
    ] = _DEMO.width,
    context: Annotated[int, typer.Option(metavar="NUMBER", help="Bytes of text in a sequence.")] = _DEMO.context,
    batch: Annotated[int, typer.Option(metavar="NUMBER", help="Sequences in a step.")] = _DEMO.batch,
    seed: Annotated[
        int, typer.Option(metavar="NUMBER", help="Seed of the parameters and of the order of the text.")
    ] = _DEMO.seed,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Train a small language model without and with the store, and compare memory, time and gradients.

    The exit code is 1 if any bit of any gradient differs."""
    from rich.console import Console

    from ..base.interrupts import ended_by_signals
    from ..base.json_text import json_text
    from ..demo.compare import run_demo
    from ..plain_text import plain

    settings = DemoSettings(steps, layers, width, context, batch, text, device, seed)
    messages = Console(stderr=True, highlight=False)
    messages.soft_wrap = not messages.is_terminal  # a terminal would break words
    with ended_by_signals():
        result = run_demo(
            settings, path=path, host_bytes=host_bytes, say=lambda line: messages.print(plain(line), markup=False)
        )
    if as_json:
        print(json_text(result.as_dict()))
    else:
        console = Console(highlight=False)
        console.print(result.table())
        console.print(result.verdict(), style="bold")
        if (reason := result.why_nothing_moved()) is not None:
            console.print(reason)
    raise typer.Exit(0 if result.difference is None else 1)
