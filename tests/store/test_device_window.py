"""What stays on an accelerator, what leaves next, and to whom the room of `device_bytes` is lent; in plain numbers."""

from dataclasses import dataclass

import pytest

from tierstore.ledger.device_window import DeviceWindow
from tierstore.ledger.plan import PlannedTier
from tierstore.ledger.windows import Window


@dataclass
class Saved:
    """As much of a record as the window looks at."""

    key: int
    nbytes: int = 1
    planned: PlannedTier | None = None


def _window(num_resident: int, out_bytes: int, back_bytes: int) -> DeviceWindow[Saved]:
    """Three bytes may stay; copies have one byte each way of their own."""
    window = DeviceWindow[Saved](Window(3), flight_bytes=1, reload_bytes=1)
    for key in range(num_resident):
        assert window.hold(Saved(key))
    window.in_flight.used_bytes += out_bytes
    window.reloaded.used_bytes += back_bytes
    return window


@pytest.mark.parametrize(
    ("resident", "out", "back", "one_has_to_leave", "too_much_flies", "too_much_is_back", "one_more_fits"),
    [
        (0, 1, 0, False, False, False, True),  # within what copies have
        (0, 4, 1, False, False, False, False),  # all of the room is lent to copies out
        (0, 5, 1, False, True, False, False),
        (0, 1, 4, False, False, False, False),  # to copies back
        (0, 1, 5, False, False, True, False),
        (0, 2, 2, False, False, False, True),  # to both
        (0, 3, 2, False, False, False, False),
        (0, 3, 3, False, True, True, False),
        (1, 3, 2, False, True, True, False),  # of what stays nothing has to leave for copies out
        (2, 1, 2, False, False, False, False),
        (2, 1, 3, True, False, True, False),  # for copies back it has to
        (3, 1, 0, False, False, False, True),
        (4, 1, 0, True, False, False, True),  # too much stays: copies keep what they have
        (4, 1, 1, True, False, False, False),
    ],
)
def test_room_of_device_bytes_is_lent_once(
    resident: int,
    out: int,
    back: int,
    one_has_to_leave: bool,
    too_much_flies: bool,
    too_much_is_back: bool,
    one_more_fits: bool,
) -> None:
    window = _window(resident, out, back)
    assert (window.surplus() is not None) is one_has_to_leave
    assert window.flies_too_much() is too_much_flies
    assert window.reloads_too_much() is too_much_is_back
    assert window.fits_reload(1) is one_more_fits


def test_surplus_is_what_was_saved_first_until_the_rest_may_stay() -> None:
    window = _window(5, 0, 0)
    left = []
    while (record := window.surplus()) is not None:
        window.leave(record)
        left.append(record.key)
    assert left == [0, 1]
    assert window.resident.used_bytes == 3


def test_surplus_what_the_plan_sends_away_goes_first_and_once() -> None:
    window = _window(1, 0, 0)
    planned = [
        Saved(10, planned=PlannedTier.HOST),
        Saved(11, planned=PlannedTier.DISK),
        Saved(12, planned=PlannedTier.HOST),
    ]
    assert not any(window.hold(record) for record in planned)
    assert window.surplus() is planned[0]
    window.leave(planned[0])
    planned[1].planned = None  # backward has begun
    assert window.surplus() is planned[2]
    window.leave(planned[2])
    assert window.surplus() is None
    assert window.resident.used_bytes == 2


def test_room_that_was_granted_is_neither_lent_nor_granted_again() -> None:
    """Three bytes may stay, and one is granted."""
    window = _window(1, 1, 1)
    assert (window.fits(2), window.unlent_bytes()) == (True, 2)
    window.resident.granted_bytes = 1
    assert (window.fits(1), window.fits(2), window.unlent_bytes()) == (True, False, 1)
    window.in_flight.used_bytes += 1
    assert (window.flies_too_much(), window.fits_reload(0), window.unlent_bytes()) == (False, True, 0)
    window.in_flight.used_bytes += 1
    assert window.flies_too_much()
