"""What `tierstore plan` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from ..base.config import format_bytes
from ..plain_text import plain
from ..planning import Answer, Costs, Machine, Misfit, Prediction, Use
from ..simulator import Settings
from ..tracing.steps import Step

__all__ = [
    "asked",
    "copies_table",
    "costs_table",
    "machines_table",
    "moved_table",
    "needs",
    "remarks",
    "steps_table",
]

_DAYS = 365.0
_MOST_YEARS = 100.0
_SHORT_SECONDS = 0.1
_TWO_PLACES_BELOW = 9.995  # what is more is rounded to 10
_MOST_WITH_PLACES = 99.995
_MOST_IN_FULL = 9999.5
_TIERS = {"accelerator": "on an accelerator", "disk": "on disk", "host memory": "of host memory"}
_CPU, _LINK = "CPU: the store's own work", "link: copies from and to the accelerator"


def machines_table(machines: Sequence[Machine]) -> Table:
    """A row for each machine that comes with the package."""
    table = _table("hardware")
    table.add_column("what it is")
    for machine in machines:
        table.add_row(machine.name, machine.title)
    return table


def asked(trace: str, step: Step, settings: Settings, speed: float | None, *, uses_device: bool) -> str:
    """The question, in a sentence. `speed`: of the accelerator that is imagined; None: none is."""
    imagined = "" if speed is None else f" as if an accelerator computed it, {speed:g} times as fast"
    on_device = f', device_bytes="{format_bytes(settings.device_bytes)}"' if uses_device else ""
    return (
        f'Step {step.number} of {trace}{imagined}; each rank has host_bytes="{format_bytes(settings.host_bytes)}", '
        f'staging_bytes="{format_bytes(settings.staging_bytes)}", codec="{settings.codec}", '
        f'prefetch="{settings.prefetch}"{on_device}.'
    )


def steps_table(answers: Sequence[Answer]) -> Table:
    """How long a step takes: a row for each answer."""
    table = _table("hardware", "ranks", "step", "compute", "slower", "waits")
    table.add_column("bound by", no_wrap=True)
    for each in answers:
        table.add_row(Text(plain(each.machine)), str(each.num_ranks), *_times(each.outcome))
    return table


def moved_table(answers: Sequence[Answer]) -> Table:
    """What a step moves, and the most that it holds in the tiers of a host: a row for each answer that fits."""
    table = _table("hardware", "ranks", "written", "read", "memory", "disk")
    for each in answers:
        if isinstance(each.outcome, Prediction):
            table.add_row(Text(plain(each.machine)), str(each.num_ranks), *_moved(each.outcome))
    return table


def costs_table(answers: Sequence[Answer]) -> Table:
    """What it costs: a row for each answer that fits."""
    has_price = any(each.costs is not None and each.costs.price_per_step is not None for each in answers)
    table = _table("hardware", "ranks", "TB a year", "worn out in", "drives/year", *(["price"] if has_price else []))
    for each in answers:
        if each.costs is not None:
            price = [_figure(each.costs.price_per_step)] if has_price else []
            table.add_row(Text(plain(each.machine)), str(each.num_ranks), *_spent(each.costs), *price)
    return table


def copies_table(answers: Sequence[Answer]) -> Table:
    """What the accelerator of a rank holds and waits for: a row for each answer that keeps anything on one."""
    table = _table("hardware", "ranks", "on device", "copied out", "copied back", "link waits")
    for each in answers:
        outcome = each.outcome
        if isinstance(outcome, Prediction) and outcome.device_bytes_peak:
            sizes = (outcome.device_bytes_peak, outcome.offloaded_bytes, outcome.reloaded_bytes)
            waits = _seconds(outcome.link_wait_seconds)
            table.add_row(Text(plain(each.machine)), str(each.num_ranks), *map(format_bytes, sizes), waits)
    return table


def remarks(answers: Sequence[Answer], use: Use) -> Iterator[str]:
    """What the tables have no room for: what they are about, and how much better a step would be without its bound."""
    if any(each.costs is not None for each in answers):
        yield (
            "Written, read, memory and disk: one step of all ranks of a host. TB a year: written to the drives of a "
            f"host that trains {use.hours_per_day:g} hours a day. Drives/year and price: of "
            f"{_count(use.num_hosts, 'host')}; the price is that of one step."
        )
    if any(isinstance(each.outcome, Prediction) and each.outcome.device_bytes_peak for each in answers):
        yield (
            "On device: the peak on the accelerator of one rank, for saved tensors that only the store holds; the "
            "model and all other tensors need their memory too. Copied: one step of all ranks. Link waits: how long "
            "the accelerator of the slowest rank waits for copies, beside the waits in the first table."
        )
    for each in answers:
        outcome = each.outcome
        if isinstance(outcome, Misfit):
            yield f"{_name(each)} does not fit: {needs(outcome)}."
        elif not outcome.written_bytes:
            kept = "on the accelerator" if outcome.device_bytes_peak and not outcome.offloaded_bytes else "in memory"
            yield f"{_name(each)} writes nothing: all saved tensors stay {kept}."
        if each.costs is not None and use.steps_per_day is not None and each.costs.steps_per_day < use.steps_per_day:
            yield f"{_name(each)} can run {each.costs.steps_per_day:,.0f} steps a day at most."
    better = [line for each in answers if isinstance(each.outcome, Prediction) for line in _better(each, each.outcome)]
    if better:
        on_device = any(isinstance(each.outcome, Prediction) and each.outcome.device_bytes_peak for each in answers)
        what = f"{_CPU}; {_LINK}" if on_device else _CPU
        yield f"Step time if the limiting resource took no time ({what}):"
        yield from better


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _times(outcome: Prediction | Misfit) -> list[str]:
    if isinstance(outcome, Misfit):
        return [*["-"] * 4, "does not fit"]
    waited_seconds = sum(outcome.stall_seconds.values())
    step, compute, waits = (_seconds(each) for each in (outcome.seconds, outcome.compute_seconds, waited_seconds))
    return [step, compute, _times_over(outcome.slowdown), waits, outcome.limit]


def _moved(prediction: Prediction) -> list[str]:
    memory_bytes = prediction.host_bytes_peak + prediction.staging_bytes_peak
    sizes = (prediction.written_bytes, prediction.read_bytes, memory_bytes, prediction.disk_bytes_peak)
    return [format_bytes(nbytes) for nbytes in sizes]


def _spent(costs: Costs) -> list[str]:
    year = f"{costs.written_bytes_per_year / 1e12:,.0f}"
    return [year, _lifetime(costs.years_to_rating), _figure(costs.worn_drives_per_year)]


def _seconds(seconds: float) -> str:
    """In seven places, up to hours."""
    if 0 < seconds < _SHORT_SECONDS:
        milliseconds = 1000 * seconds
        return f"{milliseconds:.2f} ms" if milliseconds < _TWO_PLACES_BELOW else f"{milliseconds:.1f} ms"
    return f"{seconds:#.3g}".removesuffix(".") + " s" if seconds < 1000 else f"{seconds:,.0f} s"


def _times_over(ratio: float) -> str:
    if ratio >= _MOST_IN_FULL:
        return f"x{ratio:.0e}"
    return f"x{ratio:.2f}" if ratio < _MOST_WITH_PLACES else f"x{ratio:,.0f}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _lifetime(years: float | None) -> str:
    if years is None:
        return "-"
    if years > _MOST_YEARS:
        return f"> {_MOST_YEARS:.0f} years"
    return f"{years:.1f} years" if years >= 1 else f"{years * _DAYS:.0f} days"


def needs(misfit: Misfit) -> str:
    """What the tier lacks, in words."""
    needed, available = format_bytes(misfit.needed_bytes), format_bytes(misfit.available_bytes)
    return f"needs {needed} {_TIERS[misfit.tier]}, has {available}"


def _better(answer: Answer, prediction: Prediction) -> Iterator[str]:
    if prediction.limit == "several":
        yield f"  {_name(answer)}: no single resource limits the step"
    elif prediction.limit != "nothing":
        seconds = _seconds(prediction.seconds_without[prediction.limit])
        yield f"  {_name(answer)}: {seconds} instead of {_seconds(prediction.seconds)} ({prediction.limit})"


def _name(answer: Answer) -> str:
    return f"{answer.machine} ({_count(answer.num_ranks, 'rank')})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
