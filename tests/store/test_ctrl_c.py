"""Ctrl-C is held back while the books of a store are half changed, and comes a moment later; the store stays open."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.moments import Moment, ctrl_c, moments, out_of_time
from tests.processes import output_of
from tierstore import TierStore
from tierstore.base.ctrl_c import CTRL_C, CtrlC


@pytest.fixture
def seen() -> Iterator[list[int]]:
    """What the program's own handler of SIGINT has seen; it raises nothing."""
    seen: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    yield seen
    signal.signal(signal.SIGINT, previous)


def test_handler_of_the_program_runs_once_after_the_change_and_is_its_own_again(
    make_store: Any, seen: list[int]
) -> None:
    store = make_store(host_bytes=0)
    own = signal.getsignal(signal.SIGINT)
    was_held: list[bool] = []
    for moment in moments(TierStore.put, lambda: (ctrl_c(), was_held.append(CTRL_C.is_held)), stride=3):
        seen.clear()
        with moment:
            handle = store.put(torch.ones(1000))
        assert signal.getsignal(signal.SIGINT) is own
        assert torch.equal(store.get(handle), torch.ones(1000))
        assert seen == [signal.SIGINT] * moment.has_come
    assert sum(was_held) > 5


def test_ctrl_c_at_any_moment_of_holding_it_back_reaches_the_program(seen: list[int]) -> None:
    """The first time, too, when it is learnt what a handler of Python is."""
    own = signal.getsignal(signal.SIGINT)
    for moment in moments(CtrlC.hold, ctrl_c, least=8):
        seen.clear()
        holding = CtrlC()
        with moment:
            holding.hold()
        holding.let_through()
        assert signal.getsignal(signal.SIGINT) is own
        assert seen == [signal.SIGINT] * moment.has_come, f"moment {moment.number}"


def test_second_ctrl_c_is_not_held_back(seen: list[int]) -> None:
    CTRL_C.hold()
    ctrl_c()
    assert seen == []
    ctrl_c()
    assert seen == [signal.SIGINT]
    assert not CTRL_C.is_held
    ctrl_c()
    assert len(seen) == 2


def test_what_an_exception_of_another_handler_left_held_back_comes_with_the_second(seen: list[int]) -> None:
    """Were `let_through` never called, the first Ctrl-C after it would be lost, and no other."""
    CTRL_C.hold()
    CTRL_C.hold()
    assert CTRL_C.let_through()
    ctrl_c()
    assert seen == [signal.SIGINT]
    CTRL_C.hold()
    CTRL_C.is_held = False  # the exception came before `hold` had said so
    ctrl_c()
    assert len(seen) == 2
    CTRL_C.hold()
    assert CTRL_C.let_through()
    ctrl_c()
    assert len(seen) == 3


OF_A_LOOP = """
import asyncio, os, signal
from tierstore.base.ctrl_c import CTRL_C
async def main():
    seen = []
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: seen.append(CTRL_C.is_held))
    CTRL_C.hold()
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(0)
    CTRL_C.let_through()
    while not seen:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # for a second call, if there is one
    print(seen)
asyncio.run(main())
"""


def test_callback_of_an_event_loop_is_called_once() -> None:
    assert output_of(OF_A_LOOP) in ("[True]\n", "[False]\n")


OF_C = """
import ctypes, signal, torch
from tierstore import TierStore, tiered_offload
libc, came = ctypes.CDLL(None), []
action = ctypes.create_string_buffer(256)
def installed():
    libc.sigaction(signal.SIGINT, None, action)
    return action[:16], action[136:140]  # the rest of the mask is whatever lay there
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(came.append)
{first}
libc.signal.restype = ctypes.c_void_p
libc.signal(signal.SIGINT, handler)
before = installed()
with TierStore("{folder}", host_bytes=0) as store:
    for _ in range(3):
        assert torch.equal(store.get(store.put(torch.ones(1000))), torch.ones(1000))
        assert installed() == before
        signal.raise_signal(signal.SIGINT)
print(came)
"""


@pytest.mark.parametrize(
    "first", ["", "TierStore('{folder}').put(torch.ones(1))", "signal.signal(signal.SIGINT, print)"]
)
def test_handler_that_another_library_has_installed_in_c_stays(store_directory: Any, first: str) -> None:
    first = first.format(folder=store_directory)
    assert output_of(OF_C.format(first=first, folder=store_directory)).split("\n")[-2] == "[2, 2, 2]"


FORKED = """
import os, signal, threading, torch
from tierstore.base.ctrl_c import CTRL_C
signal.signal(signal.SIGINT, lambda *_: os._exit(7))
def fork():
    child = os.fork()
    if not child:
        assert not CTRL_C.is_held
        signal.raise_signal(signal.SIGINT)
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
CTRL_C.hold()
thread = threading.Thread(target=fork)
thread.start()
thread.join()
assert CTRL_C.let_through()
"""


def test_child_that_another_thread_forks_meanwhile_has_the_programs_handler() -> None:
    assert output_of(FORKED) == "7\n"


def test_error_of_another_handler_while_ctrl_c_begins_to_be_held_back_is_raised() -> None:
    """Even an OSError, as TimeoutError is one: it is not taken for a refused system call."""
    before = signal.getsignal(signal.SIGINT)
    num_come = 0
    try:
        for number in range(1, 30):
            held_back, moment = CtrlC(), Moment(CtrlC.hold, number, out_of_time)  # its first time: it learns, too
            try:
                with moment:
                    held_back.hold()
            except TimeoutError:
                assert moment.has_come
            else:
                assert not moment.has_come
            num_come += moment.has_come
            signal.signal(signal.SIGINT, before)
    finally:
        signal.signal(signal.SIGINT, before)
    assert num_come > 5
