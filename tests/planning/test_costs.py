"""Wear and price, by hand."""

from __future__ import annotations

import math

import pytest
from msgspec import structs

from tests.planning.made_up import machine
from tierstore.errors import ConfigError
from tierstore.hardware import Hardware
from tierstore.planning import Prediction, Use, costs_of

_TB = 10**12


def _hardware(price: float | None = None, **drive: int) -> Hardware:
    hardware = machine(capacity_bytes=2 * _TB, **drive).hardware
    return structs.replace(hardware, host=structs.replace(hardware.host, price_per_hour=price))


def _step(seconds: float = 10.0, written_bytes: int = 10**9) -> Prediction:
    moved = (written_bytes, written_bytes, 0, 0)
    return Prediction(seconds, seconds, {}, 0.0, *moved, 0, 0, 0, 0, "nothing", {})


def test_wear_of_a_drive_is_what_a_year_writes_over_what_it_is_rated_for() -> None:
    costs = costs_of(_step(), _hardware(rated_written_bytes=1200 * _TB), Use(hours_per_day=10))
    assert costs.steps_per_day == 3600
    assert costs.written_bytes_per_year == 3600 * 365 * 10**9
    assert costs.drive_writes_per_day == 1.8
    assert costs.years_to_rating == pytest.approx(1200e12 / (3600 * 365 * 1e9))
    assert costs.worn_drives_per_year == pytest.approx(3600 * 365 * 1e9 / 1200e12)
    assert costs.price_per_step is None


def test_wear_of_two_drives_is_shared_and_a_fleet_wears_out_all_of_its_drives() -> None:
    rated = 100 * _TB
    one = costs_of(_step(), _hardware(rated_written_bytes=rated), Use())
    two = costs_of(_step(), _hardware(rated_written_bytes=rated, num_drives=2), Use(num_hosts=5))
    assert one.years_to_rating is not None
    assert one.worn_drives_per_year is not None
    assert two.written_bytes_per_year == one.written_bytes_per_year
    assert two.years_to_rating == pytest.approx(2 * one.years_to_rating)
    assert two.worn_drives_per_year == pytest.approx(5 * one.worn_drives_per_year)
    assert two.drive_writes_per_day == pytest.approx((one.drive_writes_per_day or 0) / 2)


def test_wear_without_a_rating_is_not_known() -> None:
    costs = costs_of(_step(), _hardware(), Use())
    assert (costs.years_to_rating, costs.worn_drives_per_year) == (None, None)


def test_wear_of_nothing_written_is_none() -> None:
    costs = costs_of(_step(written_bytes=0), _hardware(rated_written_bytes=_TB), Use())
    assert (costs.years_to_rating, costs.worn_drives_per_year, costs.written_bytes_per_year) == (None, 0, 0)


def test_price_of_a_step_is_that_of_all_hosts_while_it_lasts() -> None:
    assert costs_of(_step(), _hardware(price=3.6), Use(num_hosts=4)).price_per_step == pytest.approx(0.04)
    assert costs_of(_step(), _hardware(price=3.6), Use(price_per_hour=36.0)).price_per_step == pytest.approx(0.1)
    assert costs_of(_step(), _hardware(), Use(price_per_hour=0.0)).price_per_step == 0


@pytest.mark.parametrize(("wished", "taken"), [(100, 100), (10**6, 8640)])
def test_steps_per_day_are_as_wished_or_as_many_as_fit(wished: float, taken: float) -> None:
    costs = costs_of(_step(), _hardware(), Use(steps_per_day=wished))
    assert costs.steps_per_day == taken
    assert costs.written_bytes_per_year == taken * 365 * 10**9


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("option", ["hours_per_day", "steps_per_day", "price_per_hour"])
def test_use_out_of_range_is_refused_by_name(option: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        Use(**{option: value})  # type: ignore[arg-type]
    assert caught.value.option == option


@pytest.mark.parametrize("wrong", [{"num_hosts": 0}, {"hours_per_day": 24.5}, {"hours_per_day": 0}])
def test_use_beyond_a_day_or_without_hosts_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Use(**wrong)
