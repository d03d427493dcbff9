"""Costs of a plan: wear of the drives, and money. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..hardware import Hardware
from .prediction import Prediction

__all__ = ["Costs", "Use", "costs_of"]

_HOUR_SECONDS = 3600.0
_YEAR_DAYS = 365.0


@dataclass(frozen=True)
class Use:
    """How much a fleet of equal hosts trains. All hosts do each step together; networks are not considered.

    Attributes:
        num_hosts: hosts in the fleet.
        hours_per_day: hours of training in a day.
        steps_per_day: steps in a day; None: as many as fit in those hours.
        price_per_hour: of a host, in any currency; None: the price in the hardware file.

    Raises:
        ConfigError: a number is out of range.
    """

    num_hosts: int = 1
    hours_per_day: float = 24.0
    steps_per_day: float | None = None
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        if self.num_hosts < 1:
            raise ConfigError("hosts", self.num_hosts, "give at least 1")
        if not 0 < self.hours_per_day <= 24:
            raise ConfigError("hours_per_day", self.hours_per_day, "give more than 0, and 24 at most")
        if self.steps_per_day is not None and not 0 < self.steps_per_day < float("inf"):
            raise ConfigError("steps_per_day", self.steps_per_day, "give more than 0")
        if self.price_per_hour is not None and not 0 <= self.price_per_hour < float("inf"):
            raise ConfigError("price_per_hour", self.price_per_hour, "give 0 or more")


@dataclass(frozen=True)
class Costs:
    """Wear and money.

    Attributes:
        steps_per_day: of the fleet; fewer than `Use` asks for if the day is too short.
        written_bytes_per_year: to the drives of one host.
        drive_writes_per_day: how often their whole capacity is written; None: the capacity is 0.
        years_to_rating: years until the drives have been written as much as they are rated for; None: no rating is
            known, or nothing is written.
        worn_drives_per_year: drives of the fleet that reach their rating in a year; None: no rating is known.
        price_per_step: of the fleet; None: no price is known.
    """

    steps_per_day: float
    written_bytes_per_year: float
    drive_writes_per_day: float | None
    years_to_rating: float | None
    worn_drives_per_year: float | None
    price_per_step: float | None


def costs_of(prediction: Prediction, hardware: Hardware, use: Use) -> Costs:
    """The costs of using the machines in this way. A year is 365 such days."""
    seconds = max(prediction.seconds, 1e-9)  # no division by zero if nothing is computed
    steps_per_day = use.hours_per_day * _HOUR_SECONDS / seconds
    if use.steps_per_day is not None:
        steps_per_day = min(steps_per_day, use.steps_per_day)
    day_bytes = steps_per_day * prediction.written_bytes
    year_bytes = day_bytes * _YEAR_DAYS
    drives = hardware.drive.as_one()
    rated_bytes, price = drives.rated_written_bytes, use.price_per_hour
    if price is None:
        price = hardware.host.price_per_hour
    worn_hosts = None if rated_bytes is None else year_bytes / rated_bytes
    return Costs(
        steps_per_day=steps_per_day,
        written_bytes_per_year=year_bytes,
        drive_writes_per_day=day_bytes / drives.capacity_bytes if drives.capacity_bytes else None,
        years_to_rating=1 / worn_hosts if worn_hosts else None,
        worn_drives_per_year=None if worn_hosts is None else worn_hosts * hardware.drive.num_drives * use.num_hosts,
        price_per_step=None if price is None else price * use.num_hosts * prediction.seconds / _HOUR_SECONDS,
    )
