"""`tierstore trace`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.new_file import check_distinct, check_written_file
from ..errors import ConfigError
from ..plain_text import plain
from .usage import Command, Group, JsonOption

if TYPE_CHECKING:
    from rich.table import Table

    from ..tracing.reader import RecordedTrace
    from ..tracing.steps import Step
    from ..tracing.summary import StepSummary

trace_commands = typer.Typer(
    name="trace",
    help="Show what `tiered_offload(store, trace=FILE)` recorded: why a step is slow.",
    cls=Group,
    no_args_is_help=True,
)

_MOST_DRAWN_STEPS, _MOST_DRAWN_EVENTS = 50, 100_000  # on one page, which then has some 10 MB

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A recorded trace.")]


@trace_commands.command(cls=Command)
def view(
    file: FileArgument,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page here. Default: beside the trace, with the suffix .html."),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write all steps here, for ui.perfetto.dev or chrome://tracing."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", help="Number of the step to draw. Default: the one that waited longest."),
    ] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Draw one step: what threads, codec and drive did, what each tier held, and what each wait was for.

    The command writes a page of HTML, unless only other files are asked for. On the page other steps can be chosen too.
    The command prints the names of the files, and why the step is slow."""
    import msgspec

    from ..base.json_text import json_text
    from ..tracing.page import page_of
    from ..tracing.steps import choose_step, longest_waits, thread_names_of
    from ..tracing.summary import summarize
    from ..tracing.timeline import trace_events

    trace, steps = _read(file)
    if html is None and perfetto is None:
        html = file.with_suffix(".html")
    outputs = {"--html": html, "--perfetto": perfetto}
    check_distinct({"the trace": file}, outputs)
    for option, output in outputs.items():
        if output is not None:
            check_written_file(option, output)  # both, before one of them is written
    chosen, names, header = choose_step(steps, step), thread_names_of(trace), trace.header
    summary = summarize(chosen, header)
    if html is not None:
        drawn = longest_waits(steps, chosen, _MOST_DRAWN_STEPS, _MOST_DRAWN_EVENTS)
        _write(html, "--html", page_of(drawn, header, names, len(steps), first=chosen.number).encode())
    if perfetto is not None:
        events = trace_events(steps, names, header.pid, header.began_ns)
        _write(perfetto, "--perfetto", msgspec.json.encode(events))
    wrote = {name: str(file) for name, file in (("html", html), ("perfetto", perfetto)) if file}
    if as_json:
        print(json_text({"wrote": wrote, "num_steps": len(steps), "step": summary}))
        return
    for written in wrote.values():
        print(plain(f"wrote {written}"))
    _tell(f"step {summary.number} of {len(steps)}", summary)


@trace_commands.command(cls=Command)
def show(
    file: FileArgument,
    step: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="Number of the step to show. Default: all steps.")
    ] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Print figures of each step: its time, the bytes that moved, and the waits by their cause."""
    from ..base.json_text import json_text
    from ..tracing.steps import choose_step
    from ..tracing.summary import summarize

    trace, steps = _read(file)
    chosen = steps if step is None else [choose_step(steps, step)]
    summaries = [summarize(each, trace.header) for each in chosen]
    if as_json:
        print(json_text({"is_complete": trace.is_complete, "steps": summaries}))
        return
    from rich.console import Console

    Console(highlight=False).print(_table(summaries))
    for summary in summaries:
        _tell(f"step {summary.number}", summary)


def _write(file: Path, option: str, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as error:
        raise ConfigError(option, str(file), f"cannot be written: {error.strerror or error}") from error


def _tell(which: str, summary: StepSummary) -> None:
    """In one line, whose words a terminal does not break."""
    from rich.console import Console

    words = " ".join((*summary.headline, *filter(None, (summary.memory, summary.why_memory_stays))))
    console = Console(highlight=False)
    console.print(plain(f"{which}: {words}"), markup=False, soft_wrap=not console.is_terminal)


def _read(file: Path) -> tuple[RecordedTrace, list[Step]]:
    from ..tracing.reader import read_trace
    from ..tracing.steps import steps_of

    trace = read_trace(file)
    steps = steps_of(trace)
    if not steps:
        raise ConfigError("trace", str(file), "it has no step: nothing was packed while it was recorded")
    return trace, steps


def _table(summaries: Sequence[StepSummary]) -> Table:
    from rich.table import Table

    from ..base.config import format_bytes
    from ..tracing.causes import CAUSES

    causes = [cause for cause in CAUSES if any(_waited(summary, cause) for summary in summaries)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("step", "seconds", "forward", "backward", *(f"waits: {cause}" for cause in causes), "written", "read"):
        table.add_column(name, justify="right")
    for summary in summaries:
        backward = "-" if summary.backward_seconds is None else f"{summary.backward_seconds:.3f}"
        table.add_row(
            str(summary.number),
            f"{summary.seconds:.3f}",
            f"{summary.forward_seconds:.3f}",
            backward,
            *(f"{_waited(summary, cause):.3f}" for cause in causes),
            format_bytes(summary.written.nbytes),
            format_bytes(summary.read.nbytes),
        )
    return table


def _waited(summary: StepSummary, cause: str) -> float:
    return sum(by_cause.get(cause, 0.0) for by_cause in summary.wait_seconds.values())  # type: ignore[call-overload]
