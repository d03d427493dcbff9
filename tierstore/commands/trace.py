"""`tierstore trace`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.new_file import check_distinct
from ..errors import ConfigError
from ..plain_text import plain
from .files import unwritable, write_file
from .usage import Command, Group, JsonOption, print_json

if TYPE_CHECKING:
    from ..tracing.events import Header
    from ..tracing.reader import RecordedTrace
    from ..tracing.steps import Step
    from ..tracing.summary import StepSummary

__all__ = ["trace_commands"]

trace_commands = typer.Typer(
    name="trace",
    help="Show what `tiered_offload(store, trace=FILE)` recorded: why a step is slow.",
    cls=Group,
    no_args_is_help=True,
)

_MOST_DRAWN_STEPS, _MOST_DRAWN_EVENTS = 50, 100_000  # on one page, which then has some 10 MB

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A recorded trace.")]
StepOption = Annotated[
    int | None,
    typer.Option("--step", metavar="NUMBER", help="Number of the step to draw. Default: the one that waited longest."),
]


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
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a picture here. This needs matplotlib.")
    ] = None,
    step: StepOption = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Draw one step: what threads, codec and drive did, what each tier held, and what each wait was for.

    The command writes a page of HTML, unless only other files are asked for. On the page other steps can be chosen too.
    The command prints the names of the files, and why the step is slow.
    """
    from ..tracing.picture import draw_picture
    from ..tracing.steps import choose_step, thread_names_of
    from ..tracing.summary import summarize
    from ..tracing.timeline import timeline_of

    if html is None and perfetto is None and png is None:
        html = file.with_suffix(".html")
    check_distinct({"the trace": file}, {"--html": html, "--perfetto": perfetto, "--png": png})
    trace, steps = _read(file)
    chosen = choose_step(steps, step)
    summary = summarize(chosen, trace.header)
    names = thread_names_of(trace)
    if html is not None:
        write_file(html, "--html", _as_page(steps, chosen, names, trace.header))
    if perfetto is not None:
        write_file(perfetto, "--perfetto", _as_perfetto(steps, names, trace.header))
    if png is not None:
        try:
            draw_picture(timeline_of(chosen, names), summary, len(steps), png)
        except OSError as error:
            raise unwritable("--png", png, error) from error
    wrote = {name: str(file) for name, file in (("html", html), ("perfetto", perfetto), ("png", png)) if file}
    if as_json:
        print_json({"wrote": wrote, "num_steps": len(steps), "step": summary.as_dict()})
        return
    for written in wrote.values():
        print(plain(f"wrote {written}"))
    print(plain(f"step {summary.number} of {len(steps)}: {_in_words(summary)}"))


@trace_commands.command(cls=Command)
def show(
    file: FileArgument,
    step: Annotated[
        int | None, typer.Option("--step", metavar="NUMBER", help="Number of the step to show. Default: all steps.")
    ] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Print figures of each step: its time, the bytes that moved, and the waits by their cause."""
    from ..tracing.steps import choose_step
    from ..tracing.summary import summarize

    trace, steps = _read(file)
    chosen = steps if step is None else [choose_step(steps, step)]
    summaries = [summarize(each, trace.header) for each in chosen]
    if as_json:
        print_json({"is_complete": trace.is_complete, "steps": [summary.as_dict() for summary in summaries]})
        return
    from rich.console import Console

    from .trace_views import steps_table

    console = Console(highlight=False)
    console.print(steps_table(summaries))
    for summary in summaries:
        console.print(plain(f"step {summary.number}: {_in_words(summary)}"), markup=False)


def _in_words(summary: StepSummary) -> str:
    return " ".join((*summary.headline, *filter(None, (summary.memory, summary.why_memory_stays))))


def _read(file: Path) -> tuple[RecordedTrace, list[Step]]:
    from ..tracing.reader import read_trace
    from ..tracing.steps import steps_of

    trace = read_trace(file)
    steps = steps_of(trace)
    if not steps:
        raise ConfigError("trace", str(file), "it has no step: nothing was packed while it was recorded")
    return trace, steps


def _as_page(steps: list[Step], chosen: Step, names: dict[int, str], header: Header) -> bytes:
    from ..tracing.page import drawn_step, page_of
    from ..tracing.steps import longest_waits
    from ..tracing.summary import summarize

    drawn = [
        drawn_step(step, summarize(step, header), header.store, names)
        for step in longest_waits(steps, chosen, _MOST_DRAWN_STEPS, _MOST_DRAWN_EVENTS)
    ]
    return page_of(drawn, len(steps), first=chosen.number).encode()


def _as_perfetto(steps: list[Step], names: dict[int, str], header: Header) -> bytes:
    import msgspec

    from ..tracing.perfetto import trace_events

    return msgspec.json.encode(trace_events(steps, names, header.pid, header.began_ns))
