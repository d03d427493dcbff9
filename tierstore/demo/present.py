"""Runs the demo from the command line: progress on standard error, the result on standard output."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ..base.config import SizeLike, format_bytes
from ..base.interrupts import ended_by_signals
from ..plain_text import plain
from .compare import DemoResult, DemoWatch, run_demo
from .launch import WatchedRun
from .place import file_system_of, is_in_memory
from .settings import DemoSettings, check_device
from .table import result_table, verdict
from .text import DEFAULT_TEXT

__all__ = ["present_demo"]


def present_demo(settings: DemoSettings, *, path: str | None, host_bytes: SizeLike | None, as_json: bool) -> DemoResult:
    """Run and print; blocks until it is done. SIGTERM and SIGHUP end it as Ctrl-C does. Main thread only.

    Raises:
        ConfigError: an option cannot be used; an accelerator without a driver is refused before all else.
        TierStoreError: a run failed.
    """
    check_device(settings.device)
    messages = Console(stderr=True, highlight=False, soft_wrap=True)
    with ended_by_signals(), _progress(messages) as progress:
        result = run_demo(settings, path=path, host_bytes=host_bytes, watch=_watch(settings, progress))
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        console = Console(highlight=False)
        console.print(result_table(result))
        console.print(verdict(result), style="bold")
    return result


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def _watch(settings: DemoSettings, progress: Progress) -> DemoWatch:
    """Callbacks that show messages and one bar per run."""

    def say(text: str) -> None:
        progress.console.print(plain(text), markup=False)

    def chosen(directory: Path) -> None:
        say(
            f"Training a byte-level transformer ({settings.layers} layers of {settings.width}, "
            f"{settings.batch} x {settings.context} bytes a step) on {settings.text or DEFAULT_TEXT}."
        )
        say("The training runs twice, in a fresh process each time, from the same seed. This takes a minute or two.")
        say('The store returns freed memory to the system at once (return_memory="always"). All else is the default.')
        say(f"The store spills to {directory} ({file_system_of(directory)}).")
        if is_in_memory(directory):
            say("That file system is in memory, so spilled tensors still take memory.")

    def running(host_bytes: int | None) -> WatchedRun:
        if host_bytes is not None:
            say(f"The store may hold {format_bytes(host_bytes)} of host memory.")
        name = "1/2 plain" if host_bytes is None else "2/2 tierstore"
        return _bar(progress, progress.add_task(name, total=settings.steps, note="starting"))

    return DemoWatch(chosen, running)


def _bar(progress: Progress, task: TaskID) -> WatchedRun:
    def started(device: str) -> None:
        progress.update(task, note=f"on {device}")

    def stepped(step: int, loss: float) -> None:
        progress.update(task, completed=step, note=f"loss {loss:.3f}")

    return WatchedRun(started, stepped)
