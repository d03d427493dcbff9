"""Copies on the links of simulated accelerators: what goes after what, what goes at once, and what is waited for."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from tierstore.simulator import DepthSpeed, Drive, Hardware, Link
from tierstore.simulator.clock import Clock, Process
from tierstore.simulator.copies import Copy
from tierstore.simulator.flows import Flows
from tierstore.simulator.hardware import Activity, Sharing
from tierstore.simulator.link import LinkCopies


def _clock(link: Link, memory_bytes_per_second: float = inf) -> Clock:
    endless = [DepthSpeed(1, inf)]
    hardware = Hardware(
        Drive(endless, endless),
        4,
        cpu_seconds_per_byte=0.1,
        link=link,
        memory_bytes_per_second=memory_bytes_per_second,
    )
    return Clock(Flows(Sharing(hardware, 1.0)))


def _ends(clock: Clock, *copies: Copy) -> list[float]:
    """When each of them was over."""
    ends = [-1.0] * len(copies)

    def note(number: int) -> Callable[[], None]:
        return lambda: ends.__setitem__(number, clock.now_seconds)

    for number, copy in enumerate(copies):
        copy.wait(note(number))
    clock.run()
    return ends


def test_copies_of_one_direction_go_one_after_the_other_beside_those_of_the_other() -> None:
    clock = _clock(Link(10.0, 20.0))
    copies = LinkCopies(clock, 0)
    out, back = [Copy(10), Copy(20)], [Copy(40), Copy(20)]
    for copy in out:
        copies.copy_out(copy)
    for copy in back:
        copies.copy_in(copy)
    assert _ends(clock, *out, *back) == [1.0, 3.0, 2.0, 3.0]


def test_copy_back_begins_when_the_copy_out_of_the_same_bytes_is_over() -> None:
    clock = _clock(Link(10.0, 20.0))
    copies = LinkCopies(clock, 0)
    out = Copy(30)
    back = Copy(20, out)
    copies.copy_out(out)
    copies.copy_in(back)
    assert _ends(clock, out, back) == [3.0, 4.0]


def test_both_directions_of_one_rank_are_slowed_and_those_of_two_ranks_are_not() -> None:
    clock = _clock(Link(10.0, 10.0, both_bytes_per_second=10.0))
    first, second = LinkCopies(clock, 0), LinkCopies(clock, 1)
    out, back = Copy(10), Copy(10)
    first.copy_out(out)
    second.copy_in(back)
    assert _ends(clock, out, back) == [1.0, 1.0]
    out, back = Copy(10), Copy(10)
    first.copy_out(out)
    first.copy_in(back)
    assert _ends(clock, out, back) == [3.0, 3.0]


def test_copies_of_all_ranks_share_what_host_memory_can_move() -> None:
    clock = _clock(Link(10.0, 10.0), memory_bytes_per_second=15.0)
    first, second = LinkCopies(clock, 0), LinkCopies(clock, 1)
    alone = Copy(10)
    first.copy_out(alone)
    assert _ends(clock, alone) == [1.0]
    out, back = Copy(15), Copy(15)
    first.copy_out(out)
    second.copy_in(back)
    assert _ends(clock, out, back) == [3.0, 3.0]


def test_endless_drive_and_work_on_bytes_take_their_share_of_host_memory() -> None:
    clock = _clock(Link(10.0, 10.0), memory_bytes_per_second=20.0)
    ended: list[float] = []

    def written(num_bytes: int) -> Process:
        yield clock.work(Activity.WRITE, num_bytes)
        ended.append(clock.now_seconds)

    def worked(seconds: float) -> Process:
        yield clock.work(Activity.CPU, seconds)
        ended.append(clock.now_seconds)

    clock.begin(written(40))
    clock.run()
    assert ended == [2.0], "no faster than memory"
    for process in (worked(1.0), worked(1.0), worked(1.0)):
        clock.begin(process)
    clock.run()
    assert ended[1:] == [3.5, 3.5, 3.5], "three times ten bytes, where twenty go in a second"


def test_computing_waits_for_all_that_it_has_to_and_for_nothing_else() -> None:
    clock = _clock(Link(10.0, 20.0))
    copies = LinkCopies(clock, 0)
    awaited, unawaited = [Copy(30), Copy(20)], Copy(100)
    copies.copy_out(awaited[0])
    copies.copy_in(awaited[1])
    copies.copy_in(unawaited)
    caught_up: list[float] = []

    def compute() -> Process:
        for copy in awaited:
            copies.wait(copy)
        yield from copies.catch_up()
        caught_up.append(clock.now_seconds)
        yield from copies.catch_up()
        caught_up.append(clock.now_seconds)

    clock.begin(compute())
    clock.run()
    assert caught_up == [3.0, 3.0]
    assert copies.waited_seconds == 3.0
    assert clock.now_seconds == 6.0
