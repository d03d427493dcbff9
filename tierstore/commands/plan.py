"""`tierstore plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.config import format_bytes
from ..errors import ConfigError
from ..plain_text import plain
from .usage import JsonOption, print_json

if TYPE_CHECKING:
    from ..tuning.machines import Machine

__all__ = ["plan"]

_EQUAL = 1.02  # steps within this factor of each other


def _size(what: str) -> Any:
    return typer.Option(metavar="SIZE", help=f"{what}, for each rank. Default: as in the trace.")


def plan(
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Trace from `tiered_offload(store, trace=FILE)`. Its last complete step is simulated."
        ),
    ] = None,
    hardware: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE",
            help="A machine of --list-hardware, or a file from `tierstore doctor --hardware`. Can be repeated. "
            "Default: all machines of --list-hardware.",
        ),
    ] = None,
    list_hardware: Annotated[
        bool, typer.Option("--list-hardware", help="Print the machines that come with tierstore, and exit.")
    ] = False,
    ranks: Annotated[
        list[int] | None,
        typer.Option(
            metavar="NUMBER", min=1, max=128, help="Ranks that share the machine. Can be repeated. Default: 1."
        ),
    ] = None,
    host_bytes: Annotated[str | None, _size("Host memory of the store")] = None,
    staging_bytes: Annotated[str | None, _size("Memory for tensors in transfer")] = None,
    device_bytes: Annotated[str | None, _size("Accelerator memory for saved tensors")] = None,
    codec: Annotated[str | None, typer.Option(metavar="CODEC", help="Default: as in the trace.")] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Predict how a recorded step would run on other hardware: its time, what limits it, and how long drives last.

    A simulator runs the step in virtual time, and assumes that computing takes as long as on the recording machine. It
    measures nothing on this machine, and stores nothing.
    """
    from ..simulator.from_trace import workload_of
    from ..tracing.reader import read_trace
    from ..tuning.machines import find_machine, shipped_machines
    from ..tuning.plan import answer, last_whole_step, planned_settings

    if list_hardware:
        _print_machines(shipped_machines(), as_json)
        return
    if trace is None:
        raise ConfigError("--trace", None, "give the file that tiered_offload(store, trace=FILE) has written")
    recorded = read_trace(trace)
    step = last_whole_step(recorded, str(trace))
    sizes = {"host_bytes": host_bytes, "staging_bytes": staging_bytes, "device_bytes": device_bytes}
    settings = planned_settings(recorded, step, codec, **sizes)
    workload = workload_of(recorded, step)
    every = [each for each in shipped_machines() if each.hardware.accelerators or not workload.uses_device]
    machines = [find_machine(name) for name in hardware] if hardware else every
    answers = [answer(workload, each, settings, number) for each in machines for number in ranks or [1]]
    warnings = []
    if workload.uses_device and not recorded.header.machine.launches_block:
        warnings = ["The trace has the host's times, which may be far too short: record with CUDA_LAUNCH_BLOCKING=1."]
    if as_json:
        asked = {"trace": str(trace), "step": step.number, "settings": settings, "warnings": warnings}
        print_json(asked | {"answers": answers})
        return
    for line in warnings:
        typer.echo(line)
    _print_answers(answers)


def _print_machines(machines: Sequence[Machine], as_json: bool) -> None:
    if as_json:
        print_json({"machines": [{"name": each.name, "title": each.title} for each in machines]})
    else:
        _print_rows(["hardware", "what it is"], [[each.name, each.title] for each in machines])


def _print_answers(answers: Sequence[dict[str, Any]]) -> None:
    """One line where all machines are equal; else a row for each."""
    seconds = [each["prediction"]["seconds"] for each in answers if each["prediction"]]
    if len(answers) > 1 and len(seconds) == len(answers) and max(seconds) <= _EQUAL * min(seconds):
        limits = sorted({each["prediction"]["limit"] for each in answers})
        print(f"Equal on all of them: {min(seconds):.3g} s a step, bound by {' or '.join(limits)}.")
        return
    columns = ["hardware", "ranks", "step", "compute", "bound by", "written", "worn out in"]
    _print_rows(columns, [[each["machine"], str(each["num_ranks"]), *_cells(each)] for each in answers])


def _cells(answer: dict[str, Any]) -> Iterator[str]:
    if misfit := answer["misfit"]:
        needed, available = format_bytes(misfit["needed_bytes"]), format_bytes(misfit["available_bytes"])
        yield from ("does not fit:", f"needs {needed} of {misfit['tier']}, has {available}")
        return
    found, years = answer["prediction"], answer["costs"]["years_to_rating"]
    yield from (f"{found['seconds']:.3g} s", f"{found['compute_seconds']:.3g} s", found["limit"])
    yield format_bytes(found["written_bytes"])
    yield "-" if years is None else f"{years:.1f} years" if years >= 1 else f"{365 * years:.0f} days"


def _print_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, no_wrap=not place)  # a name is never cut
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    Console(highlight=False).print(table)
