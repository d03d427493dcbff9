"""`tierstore plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.new_file import check_distinct
from ..errors import ConfigError
from ..plain_text import plain
from .files import write_file
from .usage import JsonOption, print_json

if TYPE_CHECKING:
    from ..planning import Answer, Machine, Use
    from ..simulator import Settings, Workload

__all__ = ["plan"]

Text = str | None

# --- the options, as --help shows them --------------------------------------------------------------------------------

_Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Trace from `tiered_offload(store, trace=FILE)`. Its last complete step is simulated."
    ),
]
_Hardware = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|FILE",
        help="A machine of --list-hardware, or a file from `tierstore doctor --hardware`. Can be repeated. "
        "Default: all machines of --list-hardware.",
    ),
]
_ListHardware = Annotated[
    bool, typer.Option("--list-hardware", help="Print the machines that come with tierstore, and exit.")
]
_Ranks = Annotated[
    list[int] | None,
    typer.Option(
        metavar="NUMBER",
        min=1,
        max=128,
        help="Ranks on each host, which share its drive. Can be repeated. Default: 1.",
    ),
]
_Hosts = Annotated[int, typer.Option(metavar="NUMBER", min=1, help="Number of hosts, all alike.")]
_Config = Annotated[
    Text,
    typer.Option(metavar="FILE", help="Settings as for TierStore.from_config(). Default: those of the trace."),
]
_HostBytes = Annotated[
    Text, typer.Option(metavar="SIZE", help="Host memory of the store, for each rank. Default: as in the trace.")
]
_StagingBytes = Annotated[
    Text, typer.Option(metavar="SIZE", help="Memory for tensors in transfer, for each rank. Default: as in the trace.")
]
_DiskBytes = Annotated[
    Text, typer.Option(metavar="SIZE", help="Disk space, for each rank. Default: an equal share of the drive.")
]
_Codec = Annotated[
    Text,
    typer.Option(
        metavar="CODEC", help='"auto", "none", "zstd[:LEVEL]" or "shuffle-zstd[:LEVEL]". Default: as in the trace.'
    ),
]
_Prefetch = Annotated[
    Text, typer.Option(metavar="ORDER", help='"learned", "reverse" or "none". Default: as in the trace.')
]
_LookaheadBytes = Annotated[
    Text, typer.Option(metavar="SIZE", help="How far ahead of backward the store reads. Default: as in the trace.")
]
_DeviceBytes = Annotated[
    Text,
    typer.Option(metavar="SIZE", help="Accelerator memory for saved tensors. Default: as in the trace."),
]
_AcceleratorSpeed = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        help="Simulate an accelerator that computes the step this many times faster than the recording machine. All "
        "saved tensors are in its memory.",
    ),
]
_TrainingCores = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        help="Cores that the training of a rank keeps busy. Default: all cores of the recording machine; 1 if an "
        "accelerator computes.",
    ),
]
_HoursPerDay = Annotated[float, typer.Option(metavar="HOURS", help="Hours of training in a day.", show_default=True)]
_StepsPerDay = Annotated[
    float | None, typer.Option(metavar="NUMBER", help="Steps in a day. Default: as many as fit into --hours-per-day.")
]
_PricePerHour = Annotated[
    float | None,
    typer.Option(
        metavar="PRICE", help="Price of one host for an hour, in any currency. Default: that of the hardware file."
    ),
]
_View = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Draw the simulated step to this HTML file, like `tierstore trace view`. Needs exactly one --hardware.",
    ),
]


# --- the command ------------------------------------------------------------------------------------------------------


def plan(
    trace: _Trace = None,
    hardware: _Hardware = None,
    list_hardware: _ListHardware = False,
    ranks: _Ranks = None,
    hosts: _Hosts = 1,
    config: _Config = None,
    host_bytes: _HostBytes = None,
    staging_bytes: _StagingBytes = None,
    disk_bytes: _DiskBytes = None,
    codec: _Codec = None,
    prefetch: _Prefetch = None,
    lookahead_bytes: _LookaheadBytes = None,
    device_bytes: _DeviceBytes = None,
    accelerator_speed: _AcceleratorSpeed = None,
    training_cores: _TrainingCores = None,
    hours_per_day: _HoursPerDay = 24.0,
    steps_per_day: _StepsPerDay = None,
    price_per_hour: _PricePerHour = None,
    view: _View = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Predict how a recorded step would run on other hardware: time, memory, wear of the drives, price.

    A simulator runs the step in virtual time. It measures nothing on this machine, and stores nothing. It assumes that
    computing takes as long as on the recording machine; --accelerator-speed changes that. A step with tensors on an
    accelerator needs hardware with an accelerator.
    """
    from ..planning import Use, answer, last_whole_step, planned_settings, shipped_machines, warnings_of
    from ..simulator.from_trace import workload_of
    from ..tracing.reader import read_trace
    from .plan_views import asked

    if list_hardware:
        _print_machines(shipped_machines(), as_json)
        return
    if trace is None:
        raise ConfigError("--trace", None, "give the file that tiered_offload(store, trace=FILE) has written")
    hardware, ranks = hardware or [], ranks or [1]
    _check(training_cores, hardware, ranks, view)
    _check_files(trace, config, hardware, view)
    use = Use(hosts, hours_per_day, steps_per_day, price_per_hour)
    recorded = read_trace(trace)
    step = last_whole_step(recorded, str(trace))
    store = _said(host_bytes=host_bytes, staging_bytes=staging_bytes, disk_bytes=disk_bytes, codec=codec)
    offload = _said(prefetch=prefetch, lookahead_bytes=lookahead_bytes, device_bytes=device_bytes)
    settings = planned_settings(recorded, step, config, store, offload)
    workload = workload_of(recorded, step, training_cores=training_cores)
    warnings = warnings_of(recorded, workload)
    if accelerator_speed is not None:
        workload = workload.on_accelerator(accelerator_speed)
    machines = _machines_for(workload, hardware)
    answers = [answer(workload, each, settings, num_ranks=number, use=use) for each in machines for number in ranks]
    if view is not None:
        _draw(view, workload, machines[0], settings, answers[0])
    if as_json:
        _print_json(str(trace), step.number, settings, answers, warnings)
    else:
        question = asked(str(trace), step, settings, accelerator_speed, uses_device=workload.uses_device)
        _print_tables([question, *warnings], answers, use, view)


def _check(training_cores: float | None, hardware: list[str], ranks: list[int], view: Path | None) -> None:
    if training_cores is not None and not 0 < training_cores < inf:
        raise ConfigError("--training-cores", training_cores, "give more than 0")
    if view is not None and (len(hardware) != 1 or len(ranks) != 1):
        raise ConfigError("--view", str(view), "a page shows one step; give one --hardware, and --ranks once at most")


def _check_files(trace: Path, config: str | None, hardware: list[str], view: Path | None) -> None:
    read = {"the trace": trace, "--config": None if config is None else Path(config)}
    check_distinct(read | {f"--hardware {name}": Path(name) for name in hardware}, {"--view": view})


def _said(**options: Text) -> dict[str, str]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _machines_for(workload: Workload, names: Sequence[str]) -> list[Machine]:
    """Those of the names; without any, all that are shipped and can run such steps."""
    from ..planning import find_machine, shipped_machines

    if names:
        return [find_machine(name) for name in names]
    return [each for each in shipped_machines() if each.hardware.accelerators or not workload.uses_device]


def _draw(view: Path, workload: Workload, machine: Machine, settings: Settings, answer: Answer) -> None:
    from ..planning import Misfit, simulated_trace
    from ..tracing.page import drawn_step, page_of
    from ..tracing.steps import steps_of, thread_names_of
    from ..tracing.summary import summarize
    from .plan_views import needs

    if isinstance(answer.outcome, Misfit):
        raise ConfigError("--view", str(view), f"there is no step to draw: it {needs(answer.outcome)}")
    num_ranks = answer.num_ranks
    simulated = simulated_trace(workload, machine, settings, num_ranks=num_ranks)
    steps = steps_of(simulated)
    ranks = "" if num_ranks == 1 else f", the first of {num_ranks} ranks"
    header, step = simulated.header, steps[-1]
    drawn = drawn_step(step, summarize(step, header), header.store, thread_names_of(simulated))
    page = page_of([drawn], len(steps), first=step.number, remark=f", simulated: {machine.name}{ranks}")
    write_file(view, "--view", page.encode())


def _print_machines(machines: Sequence[Machine], as_json: bool) -> None:
    if as_json:
        print_json({"machines": [{"name": each.name, "title": each.title} for each in machines]})
        return
    from rich.console import Console

    from .plan_views import machines_table

    Console(highlight=False).print(machines_table(machines))


def _print_json(
    trace: str, number: int, settings: Settings, answers: Sequence[Answer], warnings: Sequence[str]
) -> None:
    whole = {
        "trace": trace,
        "step": number,
        "settings": asdict(settings),
        "warnings": warnings,
        "answers": [each.as_dict() for each in answers],
    }
    print_json(whole)


def _print_tables(about: Sequence[str], answers: Sequence[Answer], use: Use, view: Path | None) -> None:
    from rich.console import Console

    from .plan_views import copies_table, costs_table, moved_table, remarks, steps_table

    console = Console(highlight=False)
    for line in about:
        console.print(plain(line), markup=False)
    for table in (steps_table(answers), copies_table(answers), moved_table(answers), costs_table(answers)):
        if table.row_count:
            console.print()
            console.print(table)
    console.print()
    for line in remarks(answers, use):
        console.print(plain(line), markup=False)
    if view is not None:
        print(plain(f"wrote {view}"))
