"""Runs the demo from the command line: progress on standard error, the result on standard output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..base.config import SizeLike, format_bytes
from ..base.interrupts import ended_by_signals
from ..plain_text import plain
from .compare import DemoResult, Told, run_demo
from .place import file_system_of, is_in_memory
from .settings import DEFAULT_TEXT, DemoSettings, check_device


def present_demo(settings: DemoSettings, *, path: str | None, host_bytes: SizeLike | None, as_json: bool) -> DemoResult:
    """Run and print; blocks until it is done. SIGTERM and SIGHUP end it as Ctrl-C does. Main thread only. Raises as
    `run_demo`; an accelerator without a driver is refused before all else."""
    check_device(settings.device)
    columns = ("{task.description}", BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("steps"))
    messages = Console(stderr=True, highlight=False, soft_wrap=True)
    progress = Progress(*columns, TimeElapsedColumn(), "{task.fields[note]}", console=messages)

    def say(text: str) -> None:
        messages.print(plain(text), markup=False)

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

    def running(host_bytes: int | None) -> Told:
        if host_bytes is not None:
            say(f"The store may hold {format_bytes(host_bytes)} of host memory.")
        name = "1/2 plain" if host_bytes is None else "2/2 tierstore"
        task = progress.add_task(name, total=settings.steps, note="starting")

        def told(event: dict[str, Any]) -> None:
            if "started" in event:
                progress.update(task, note=f"on {event['started']}")
            else:
                progress.update(task, completed=event["step"], note=f"loss {event['loss']:.3f}")

        return told

    with ended_by_signals(), progress:
        result = run_demo(settings, path=path, host_bytes=host_bytes, chosen=chosen, running=running)
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        console = Console(highlight=False)
        console.print(result_table(result))
        console.print(verdict(result), style="bold")
    return result


def verdict(result: DemoResult) -> str:
    """The one line that says whether the gradients are the same."""
    if (difference := result.difference) is None:
        return "gradients bitwise identical: yes"
    what = "the loss" if difference.name == "loss" else f"the gradient of {difference.name}"
    return f"gradients bitwise identical: no (first at step {difference.step}: {what})"


def result_table(result: DemoResult) -> Table:
    """One table: the costs of both trainings, then what the store did."""
    one, other, stats = result.plain, result.stored, result.stored.stats or {}
    table = Table("", title=f"{result.settings.steps} training steps on {one.device}", title_justify="left")
    table.caption, table.caption_justify = "Below the line: totals of all steps, except host memory.", "left"
    for name in ("plain", "tierstore", "ratio"):
        table.add_column(name, justify="right")

    def compare(name: str, plainly: float, stored: float, text: Callable[[Any], str]) -> None:
        table.add_row(name, text(plainly), text(stored), f"{stored / plainly:.2f}" if plainly else "")

    if one.peak_device_bytes is not None and other.peak_device_bytes is not None:
        compare("peak accelerator memory added", one.peak_device_bytes, other.peak_device_bytes, format_bytes)
    compare("peak host memory added", one.peak_host_bytes, other.peak_host_bytes, format_bytes)
    compare("step time (median)", one.typical_step_seconds, other.typical_step_seconds, "{:.3f} s".format)
    table.add_row("loss at the last step", f"{one.losses[-1]:.6f}", f"{other.losses[-1]:.6f}", "")
    table.add_section()
    for name, num_bytes in {
        "host memory: budget": result.host_bytes,
        "host memory: most held at once": stats["host_bytes_peak"],
        "saved tensors: left in place, each save": sum(stats["kept_bytes"].values()),
        "saved tensors: handed to the store": stats["packed_bytes"],
        "spilled to disk": stats["spilled_bytes"],
        "written on disk for that": stats["written_bytes"],
        "restored": stats["restored_bytes"],
    }.items():
        table.add_row(name, "", format_bytes(num_bytes))
    prefetched = f"{stats['prefetch_hits']} / {stats['prefetch_late']} / {stats['prefetch_misses']}"
    table.add_row("prefetch: in time / late / missed", "", prefetched)
    for cause, seconds in stats["stall_seconds"].items():
        table.add_row(f"stall: {cause}", "", f"{seconds:.2f} s")
    return table
