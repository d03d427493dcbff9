"""Slots of the slab: aligned, apart from one another, used again only when nobody looks at them."""

import ctypes
import gc
import os
import resource
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.tensors.slab import Slab, Slot, SlotWatch

CHUNK = 2 * 2**20
_MCL_FUTURE = 2  # asm-generic/mman.h
_libc = ctypes.CDLL(None, use_errno=True)


def _range(slot: Slot) -> tuple[int, int]:
    return slot.address, slot.address + slot.nbytes


@pytest.mark.parametrize("phase", [0, 1, 64, 512, 4032, 4095])
def test_allocate_gives_the_phase_and_the_length(phase: int) -> None:
    slab = Slab(4 * CHUNK)
    sizes = [1, 63, 4096, 100_000, 5 * CHUNK] * 3
    slots = [slab.allocate(nbytes, phase) for nbytes in sizes]
    for nbytes, slot in zip(sizes, slots, strict=True):
        assert slot.address % 4096 == phase
        assert (slot.nbytes, len(slot.memory), slot.memory.format) == (nbytes, nbytes, "B")
        slot.memory[0] = slot.memory[-1] = 7
        assert slot.as_plain_tensor().data_ptr() == slot.address
        assert slot.as_plain_tensor().shape == (nbytes,)


def test_allocate_beyond_the_slab_gives_a_mapping_of_its_own() -> None:
    slab = Slab(CHUNK)
    slot = slab.allocate(CHUNK + 1, 100)
    assert slot.start is None
    assert slot.address % 4096 == 100
    slot.memory[:] = b"x" * (CHUNK + 1)
    slab.free(slot)
    assert slab.allocate(CHUNK).start is not None


@pytest.mark.parametrize("phase", [0, 64, 4032])
def test_slots_of_any_phase_that_fill_the_budget_are_all_in_the_region(phase: int) -> None:
    """And so in the same pages, step after step."""
    slab = Slab(7 * 8 * CHUNK, spare_bytes=64 * CHUNK)
    seen = set()
    for _ in range(3):
        slots = [slab.allocate(8 * CHUNK, phase) for _ in range(7)]
        seen.add(frozenset(slot.start for slot in slots))
        for slot in slots:
            slab.free(slot)
    (starts,) = seen
    assert None not in starts


def test_free_pages_are_moved_to_where_a_slot_goes_that_fits_nowhere_between() -> None:
    slab = Slab(16 * CHUNK)
    slots = [_filled(slab, 2 * CHUNK) for _ in range(6)]
    contents = [bytes(slot.memory) for slot in slots]
    for number in (0, 2, 4):
        slab.free(slots[number])
    slot = slab.allocate(4 * CHUNK)
    assert slot.start == 12 * CHUNK
    assert slab.cached_bytes == 2 * CHUNK
    assert bytes(slot.memory) == contents[0] * 2, "a fresh page is all zeros"
    for number in (1, 3, 5):
        assert bytes(slots[number].memory) == contents[number]
    slots = [_filled(slab, CHUNK) for _ in range(6)]  # where the pages came from there are new ones
    assert {slot.start for slot in slots} == {chunk * CHUNK for chunk in (0, 1, 4, 5, 8, 9)}


def test_pages_that_the_system_refuses_to_move_leave_no_hole_behind() -> None:
    """mremap takes the destination away before it is refused for a limit on addresses: the kernel is a real one."""
    slab = Slab(16 * CHUNK)
    slots = [_filled(slab, 2 * CHUNK) for _ in range(6)]
    contents = [bytes(slot.memory) for slot in slots]
    for number in (0, 2, 4):
        slab.free(slots[number])
    usual = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_mapped_bytes() - 4 * CHUNK, usual[1]))
    try:
        with pytest.raises(OSError, match="Cannot allocate memory"):
            slab.allocate(4 * CHUNK)  # and no room for a mapping of its own
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)
    for number in (1, 3, 5):
        assert bytes(slots[number].memory) == contents[number]
    later = [_filled(slab, nbytes * CHUNK) for nbytes in (4, 1, 1, 1, 1, 1, 1, 1, 1, 1)]
    for slot in later:
        assert bytes(slot.memory) == bytes([slot.nbytes // CHUNK]) * slot.nbytes
    for slot in later + slots[1::2]:
        slab.free(slot)
    assert slab.cached_bytes == 15 * CHUNK, "all but the chunk that was lost"
    slab.trim(0)
    assert slab.cached_bytes == 0


def test_pages_that_are_locked_go_back_all_the_same() -> None:
    slab = Slab(16 * CHUNK)
    slots = [_filled(slab, 2 * CHUNK) for _ in range(4)]
    region = slab._mapped()
    _lock_or_skip(lambda: _libc.mlock(_address(slots[0]), len(region) - 2 * CHUNK))
    before = _resident_bytes()
    slab.free(slots[0])
    slab.free(slots[1])
    slab.trim(CHUNK)
    assert slab.cached_bytes == CHUNK
    assert before - _resident_bytes() > 2 * CHUNK
    slot = _filled(slab, 4 * CHUNK)
    assert bytes(slot.memory) == bytes([4]) * 4 * CHUNK
    assert bytes(slots[2].memory) == bytes([2]) * 2 * CHUNK


def test_slab_of_a_process_that_locks_what_it_maps_takes_no_more_than_its_slots() -> None:
    """As after mlockall(MCL_FUTURE): a region would have all its pages at once, spare addresses included."""
    slab = Slab(16 * CHUNK, spare_bytes=64 * CHUNK)
    _lock_or_skip(lambda: _libc.mlockall(_MCL_FUTURE))
    try:
        before = _resident_bytes()
        slots = [_filled(slab, 2 * CHUNK) for _ in range(2)]
        assert _resident_bytes() - before < 8 * CHUNK
        for slot in slots:
            slab.free(slot)
        slab.trim(0)
        assert slab.cached_bytes == 0
        del slots, slot
        assert _resident_bytes() - before < 2 * CHUNK
    finally:
        _libc.munlockall()


def _filled(slab: Slab, nbytes: int) -> Slot:
    slot = slab.allocate(nbytes)
    slot.memory[:] = bytes([nbytes // CHUNK]) * nbytes
    return slot


def _address(slot: Slot) -> ctypes.c_void_p:
    return ctypes.c_void_p(slot.address)


def _lock_or_skip(lock: Callable[[], int]) -> None:
    if lock() != 0:
        pytest.skip(f"memory cannot be locked here: {os.strerror(ctypes.get_errno())}")


def _mapped_bytes() -> int:
    return _pages(0) * resource.getpagesize()


def _resident_bytes() -> int:
    return _pages(1) * resource.getpagesize()


def _pages(field: int) -> int:
    with open("/proc/self/statm", encoding="utf-8") as line:
        return int(line.read().split()[field])


def test_return_is_called_once_with_the_last_tensor() -> None:
    slab = Slab(CHUNK)
    slot = slab.allocate(4000)
    returned: list[SlotWatch] = []
    tensor = slot.as_tensor(returned.append)
    view = tensor.view(torch.float32)[10:20]
    del tensor
    gc.collect()
    assert not returned
    other = torch.empty(0)
    other.data = view
    del view
    assert not returned
    del other
    assert [watch.slot for watch in returned] == [slot]


def test_trim_gives_the_pages_back_to_the_kernel() -> None:
    slab = Slab(64 * CHUNK)
    before = _resident_bytes()
    slots = [slab.allocate(CHUNK) for _ in range(64)]
    for slot in slots:
        slot.memory[:] = b"z" * CHUNK
    assert _resident_bytes() - before > 60 * CHUNK
    for slot in slots:
        slab.free(slot)
    slab.trim(0)
    assert _resident_bytes() - before < 8 * CHUNK


@pytest.mark.parametrize(
    ("size_bytes", "spare_bytes", "longest_bytes"),
    [(0, 0, 10_000), (CHUNK, 0, 400_000), (8 * CHUNK, 4 * CHUNK, 3 * CHUNK)],
)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 4095), st.integers(0, 9)), max_size=40))
def test_any_sequence_never_overlaps_nor_changes_what_is_held(
    size_bytes: int, spare_bytes: int, longest_bytes: int, actions: list[tuple[float, int, int]]
) -> None:
    slab = Slab(size_bytes, spare_bytes)
    held: list[tuple[Slot, bytes]] = []
    for number, (length, phase, action) in enumerate(actions):
        if action < 5 and held:
            slot, _ = held.pop(action % len(held))
            slab.free(slot)
            slab.trim(action * CHUNK)
            assert slab.cached_bytes <= action * CHUNK
        nbytes = 1 + int(length * longest_bytes)
        slot = slab.allocate(nbytes, phase)
        content = bytes([number % 251]) * nbytes
        slot.memory[:] = content
        held.append((slot, content))
    ranges = sorted(_range(slot) for slot, _ in held)
    for (_, end), (start, _) in pairwise(ranges):
        assert end <= start
    for slot, content in held:
        assert bytes(slot.memory) == content
    for slot, _ in held:
        slab.free(slot)
    slab.trim(0)
    assert slab.cached_bytes == 0


class Driver:
    """What `Slab` calls of CUDA's runtime, for a machine that has none."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.registered: list[tuple[int, int, int]] = []
        self.unregistered: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        self.registered.append((address, size, flags))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.unregistered.append(address)
        return 0


def _with_driver(monkeypatch: pytest.MonkeyPatch, error: int) -> Driver:
    driver = Driver(error)
    monkeypatch.setattr("tierstore.tensors.slab._cuda_runtime", lambda: driver)
    monkeypatch.setattr("tierstore.tensors.slab._forget_cuda_error", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return driver


def _is_withheld_from_children(address: int) -> bool:
    """Whether the mapping at an address has the flag "dc" (do not copy on fork) of proc_pid_smaps(5)."""
    here = False
    with open("/proc/self/smaps", encoding="ascii") as lines:
        for line in lines:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                first, end = (int(part, 16) for part in words[0].split("-"))
                here = first <= address < end
            elif here and words[0] == "VmFlags:":
                return "dc" in words
    raise AssertionError("no mapping there")


def test_pin_registers_the_exact_size_once_and_withholds_it_from_children(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _with_driver(monkeypatch, 0)
    slab = Slab(3 * CHUNK, spare_bytes=CHUNK)
    slot = slab.allocate(100)
    for _ in range(2):
        slab.pin(torch.device("cuda", 1))
    address = driver.registered[0][0]  # of one piece, or two where pieces happen to meet
    assert sum(size for _, size, _ in driver.registered) == 3 * CHUNK
    assert {flags for _, _, flags in driver.registered} == {0}
    assert address % CHUNK == 0
    assert address <= slot.address < address + 3 * CHUNK
    assert slab.description == "pinned"
    assert _is_withheld_from_children(address)
    slab.unpin()
    slab.unpin()
    assert driver.unregistered == [start for start, _, _ in driver.registered]


def test_pin_refused_by_the_driver_says_so_and_leaves_the_memory_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _with_driver(monkeypatch, 2)
    slab = Slab(3 * CHUNK)
    slab.pin(torch.device("cuda", 0))
    assert slab.description == "pageable (cudaHostRegister failed with error 2)"
    assert not _is_withheld_from_children(driver.registered[0][0])
    slab.unpin()
    assert driver.unregistered == []
    slab.free(slab.allocate(10))
    slab.trim(0)
    assert slab.cached_bytes == 0
