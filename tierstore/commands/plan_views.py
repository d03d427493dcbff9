"""What `tierstore plan` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from ..config import format_bytes
from ..planning import Answer, Costs, Limit, Machine, Misfit, Prediction, Use
from ..simulator import Settings
from ..tracing.steps import Step

__all__ = ["asked", "costs_table", "machines_table", "remarks", "steps_table"]

_DAYS = 365.0
_MOST_YEARS = 100.0
_LIMITS: Mapping[Limit, str] = {
    "nothing": "nothing",
    "drive writes": "drive writes",
    "drive reads": "drive reads",
    "CPU": "the store's CPU time",
    "several": "several at once",
}
_TIERS = {"disk": "on disk", "host memory": "of host memory"}


def machines_table(machines: Sequence[Machine]) -> Table:
    """A row for each machine that comes with the package."""
    table = _table("hardware")
    table.add_column("what it is")
    for machine in machines:
        table.add_row(machine.name, machine.title)
    return table


def asked(trace: str, step: Step, settings: Settings) -> str:
    """The question, in a sentence."""
    return (
        f"Step {step.number} of {trace}; each rank with host_bytes {format_bytes(settings.host_bytes)}, "
        f'staging_bytes {format_bytes(settings.staging_bytes)}, codec "{settings.codec}", '
        f'prefetch "{settings.prefetch}".'
    )


def steps_table(answers: Sequence[Answer]) -> Table:
    """How long a step takes: a row for each answer."""
    table = _table("hardware", "ranks", "step", "compute", "slower", "waits")
    table.add_column("bound by")
    for each in answers:
        table.add_row(escape(each.machine), str(each.num_ranks), *_times(each.outcome))
    return table


def costs_table(answers: Sequence[Answer]) -> Table:
    """What moves, what the tiers of a host hold at most, and what it costs: a row for each answer that fits."""
    has_price = any(each.costs is not None and each.costs.price_per_step is not None for each in answers)
    names = ["ranks", "written", "read", "memory", "disk", "a year", "worn out in", "worn"]
    table = _table("hardware", *names, *(["price"] if has_price else []))
    for each in answers:
        if isinstance(each.outcome, Prediction) and each.costs is not None:
            price = [_figure(each.costs.price_per_step)] if has_price else []
            table.add_row(escape(each.machine), str(each.num_ranks), *_moved(each.outcome), *_spent(each.costs), *price)
    return table


def remarks(answers: Sequence[Answer], use: Use) -> Iterator[str]:
    """What the tables have no room for: what they are about, and how much better a step would be without its bound."""
    yield (
        "Written, read, memory and disk: of all ranks of a host, in a step. A year: what is written to its drives, "
        f"{use.hours_per_day:g} hours a day. Worn: drives in a year, of {_count(use.num_hosts, 'host')}; "
        "price: of a step, likewise."
    )
    for each in answers:
        if isinstance(each.outcome, Prediction) and each.outcome.limit != "nothing":
            yield f"{_name(each)} is bound by {_bound(each.outcome)}."
        if each.costs is not None and use.steps_per_day is not None and each.costs.steps_per_day < use.steps_per_day:
            yield f"{_name(each)} takes {each.costs.steps_per_day:,.0f} steps a day at most."
    if any(isinstance(each.outcome, Prediction) and each.outcome.limit == "nothing" for each in answers):
        yield 'Bound by "nothing": a step takes hardly longer than its computing does.'


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _times(outcome: Prediction | Misfit) -> list[str]:
    if isinstance(outcome, Misfit):
        return [*["-"] * 4, f"does not fit: {_needs(outcome)}"]
    waited_seconds = sum(outcome.stall_seconds.values())
    times = [f"{seconds:.3g} s" for seconds in (outcome.seconds, outcome.compute_seconds, waited_seconds)]
    bound = _LIMITS[outcome.limit] if outcome.written_bytes else "nothing: all stays in memory"
    return [*times[:2], f"x{outcome.slowdown:.2f}", times[2], bound]


def _moved(prediction: Prediction) -> list[str]:
    memory_bytes = prediction.host_bytes_peak + prediction.staging_bytes_peak
    sizes = (prediction.written_bytes, prediction.read_bytes, memory_bytes, prediction.disk_bytes_peak)
    return [format_bytes(nbytes) for nbytes in sizes]


def _spent(costs: Costs) -> list[str]:
    year = f"{costs.written_bytes_per_year / 1e12:,.0f} TB"
    return [year, _lifetime(costs.years_to_rating), _figure(costs.worn_drives_per_year)]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _lifetime(years: float | None) -> str:
    if years is None:
        return "-"
    if years > _MOST_YEARS:
        return f"> {_MOST_YEARS:.0f} years"
    return f"{years:.1f} years" if years >= 1 else f"{years * _DAYS:.0f} days"


def _needs(misfit: Misfit) -> str:
    needed, available = format_bytes(misfit.needed_bytes), format_bytes(misfit.available_bytes)
    return f"needs {needed} {_TIERS[misfit.tier]}, has {available}"


def _bound(prediction: Prediction) -> str:
    what = _LIMITS[prediction.limit]
    if prediction.limit == "several":
        return f"{what}: no drive and no core alone makes much of a difference to its {prediction.seconds:.3g} s"
    seconds = prediction.seconds_without[prediction.limit]
    return f"{what}: if that took no time, a step would take {seconds:.3g} s instead of {prediction.seconds:.3g} s"


def _name(answer: Answer) -> str:
    return f"{answer.machine} ({_count(answer.num_ranks, 'rank')})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
