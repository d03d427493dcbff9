"""One region of host memory, mapped once and cut into slots that are used again and again.

Fresh pages cost three times a memcpy, and pinned pages more. So restored bytes go into slots of one region of exact
size (not rounded to a power of two, as a pinning allocator would). For an accelerator the whole region is registered
with the driver, piece by piece, and keeps all its pages. For CPU tensors, free pages are kept only within the allowance
that the owner gives; the kernel gets the rest back. A slot is placed where pages already are, if there is enough room
in a row; otherwise free pages are moved to its place.

Not thread-safe: the store's lock guards it. Tensors that were handed out stay valid after the slab itself is gone."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..base.free_runs import FreeRuns
from ..base.remains import Remains
from ..disk.allocator import round_up
from ..disk.linux import give_back_locked, is_new_memory_locked, move_pages
from .capture import beside_captures
from .layout import in_dtype, mark_as_ours, memory_at
from .pinning import Pinning

_CHUNK_BYTES = 2 * 2**20
"""Pages go back to the kernel in pieces of this size: a huge page of x86-64, and of arm64 with 4 KiB pages."""

_MOST_MOVED = 4096
"""Each chunk whose pages are moved may be a mapping of its own; Linux allows a process 65,530 by default."""

_MOST_SPARE_BYTES = 8 * 2**20
"""Of the slot that is kept: a longer one takes much longer to read than to ask for."""

_PAGE_BYTES = 4096
Buffer = Any
"""An object with the buffer protocol that keeps its memory alive: `collections.abc.Buffer` of Python 3.12."""

_MAP_NORESERVE = 0x4000
"""From Linux, <asm-generic/mman-common.h>; the standard library has the name only from Python 3.13 on."""


def _map(nbytes: int) -> mmap.mmap:
    """Map anonymous private memory and ask for huge pages; no page is touched yet (mmap(2), madvise(2))."""
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without transparent huge pages: the memory is slower to touch, nothing else
    return region


def pooled(size: int) -> tuple[Buffer, int]:
    """Memory from torch's own allocator, and where in it `size` bytes begin at a page.

    Resized, since `torch.empty` may fill it (`use_deterministic_algorithms`), and `torch.UntypedStorage(size)` has
    another allocator. Raises OSError: there is none."""
    tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
    storage = tensor.untyped_storage()
    try:
        storage.resize_(size)
        if storage.data_ptr() % _PAGE_BYTES:  # the caching allocator gives large blocks whole pages
            storage.resize_(size + _PAGE_BYTES)
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error
    return tensor.set_(storage).numpy(), -storage.data_ptr() % _PAGE_BYTES


def _address_of(region: Buffer) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region))


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _forget_cuda_error(device: torch.device) -> None:
    """Clear the error of a failed call, which the runtime would report for the next kernel that is launched."""
    try:
        torch.ones(1, device=device)
    except RuntimeError:
        pass


def _register(address: int, size_bytes: int, device: torch.device) -> str | None:
    with torch.cuda.device(device), beside_captures(device):  # else it may open a context on this thread's own device
        error = int(_cuda_runtime().cudaHostRegister(address, size_bytes, 0))
        if error == 0:
            return None
        _forget_cuda_error(device)
        return f"cudaHostRegister failed with error {error}"


class SlotWatch(Remains[torch.UntypedStorage]):
    """Reports the death of the storage over a slot."""

    __slots__ = ("slot",)

    slot: Slot


class Slot:
    """A range of the slab, or a mapping of its own if the slab has no room for it in one piece.

    Attributes:
        nbytes: size of the data.
        address: address of its first byte.
        memory: the data, uint8, shape [nbytes], writable.
        outstanding: the store does not use it any more, but a tensor over it that was handed out still does.
        returned: the last tensor over it is gone.
    """

    __slots__ = (
        "_offset",
        "_region",
        "address",
        "memory",
        "nbytes",
        "outstanding",
        "returned",
        "size_bytes",
        "start",
        "watch",
    )

    def __init__(self, region: Buffer, start: int | None, offset: int, nbytes: int, size_bytes: int) -> None:
        self._region = region  # keeps the mapping alive
        self._offset = offset
        self.start = start
        self.size_bytes = size_bytes
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(region)) + offset  # no calls: each read has a slot
        self.memory = memory_at(self.address, nbytes, writable=True)
        self.outstanding = False
        self.returned = False
        self.watch: SlotWatch | None = None

    def as_plain_tensor(self) -> torch.Tensor:
        """A uint8 tensor, shape [nbytes], over the slot, for copies that end before the slot is freed."""
        return torch.frombuffer(self._region, dtype=torch.uint8, count=self.nbytes, offset=self._offset)

    def as_tensor(self, on_return: Callable[[SlotWatch], None], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """A tensor over the whole elements of `dtype` in the slot, shape [nbytes // itemsize].

        `on_return` is called with the slot's watch when the last tensor over it dies, even one held by autograd's C++:
        see NOTE [No finalizers] in `remains.py`."""
        if self.nbytes % (itemsize := dtype.itemsize):
            tensor = in_dtype(self.as_plain_tensor(), dtype)
        else:  # without a view: a call of torch's lets go of the interpreter's lock
            tensor = torch.frombuffer(self._region, dtype=dtype, count=self.nbytes // itemsize, offset=self._offset)
        storage = tensor.untyped_storage()  # begins at the offset, and keeps the region alive
        mark_as_ours(storage)
        self.watch = watch = SlotWatch(storage, on_return)
        watch.slot = self
        return tensor


class Slab:
    """Slots in one region.

    Args:
        pools: a slot is memory of torch's allocator, which uses it again for others, unless the slab is pinned.
        size_bytes: size of the region. It is reserved when the first slot is asked for; pages are touched with slots.
        spare_bytes: more addresses behind it, for the room that phases and gaps between slots cost. They take no
            memory. Without them, seven slots of 16 MiB would not fit into 112 MiB. A pinned slab has none.

    Attributes:
        cached_bytes: bytes of pages that are kept without a slot in them.
        pinned_for: the accelerator that the region is pinned for, or is being; None: it is not pinned.
        spare: the slot that was freed last, of the allocator's memory: see NOTE [A spare slot] in `slots.py`.
    """

    def __init__(self, size_bytes: int, spare_bytes: int = 0, *, pools: bool = False) -> None:
        self._pools = pools
        self.size_bytes = round_up(max(size_bytes, 1), _CHUNK_BYTES)
        self._spare_bytes = round_up(spare_bytes, _CHUNK_BYTES)
        self._warm = FreeRuns()  # free runs in chunks that have pages: a slot lies, or lay, in them
        self._cold = FreeRuns()  # free runs of whole chunks without pages
        self._region: mmap.mmap | None = None
        self._first = 0  # where in the region the slots begin: at a chunk's boundary, so that huge pages are not cut
        self._num_slots_in: Counter[int] = Counter()  # by chunk
        self.cached_bytes = 0
        self._cached: dict[int, None] = {}  # chunks that have pages but no slot, oldest first
        self._moved: set[int] = set()  # chunks whose pages came from elsewhere, or went there
        self._can_move = True
        self._can_give_back = True
        self._is_in_pieces: bool | None = None  # each slot is a mapping of its own; None: not known before the first
        self._description = "pageable"
        self.pinned_for: torch.device | None = None  # set from the beginning of pinning on
        self._pinning: Pinning | None = None
        self.spare: Slot | None = None

    def allocate(self, nbytes: int, phase: int = 0) -> Slot:
        """Give out a slot of `nbytes` whose address is `phase` modulo 4096.

        Raises:
            OSError: the system gives the process no more memory, or addresses; no slot is taken.
        """
        size = -(-(nbytes + phase) // _PAGE_BYTES) * _PAGE_BYTES
        if self._pools and self.pinned_for is None:
            spare, self.spare = self.spare, None
            if spare is not None and spare.nbytes == nbytes and spare.address % _PAGE_BYTES == phase:
                return spare
            memory, first = pooled(size)
            return Slot(memory, None, first + phase, nbytes, size)
        if self._is_in_pieces is None:
            self._is_in_pieces = is_new_memory_locked()
        if self._is_in_pieces and self._region is None:  # a region would have all its pages from the beginning
            return Slot(_map(size), None, phase, nbytes, size)
        try:
            region = self._mapped()
        except OSError:  # a limit on addresses (ulimit -v, strict overcommit); most of the region would never be used
            return Slot(_map(size), None, phase, nbytes, size)
        start = self._warm.allocate(size)
        if start is None and self._warm_up(size):
            start = self._warm.allocate(size)
        if start is None:
            return Slot(_map(size), None, phase, nbytes, size)
        for chunk in self._chunks(start, size):
            self._num_slots_in[chunk] += 1
            self._cached.pop(chunk, None)
        self.cached_bytes = len(self._cached) * _CHUNK_BYTES
        return Slot(region, start, self._first + start + phase, nbytes, size)

    def has_room(self, nbytes: int, phase: int = 0) -> bool:
        """Whether a slot would lie in the region."""
        size = round_up(nbytes + phase)
        return self._warm.longest_bytes >= size or self._cold.longest_bytes >= round_up(size, _CHUNK_BYTES)

    def free(self, slot: Slot) -> None:
        """Take a slot back; nobody may use its memory any more."""
        slot.watch = None  # it refers to the slot
        if slot.start is None:
            if self._pools and slot.size_bytes <= _MOST_SPARE_BYTES:
                slot.outstanding = slot.returned = False
                self.spare = slot
            return  # its mapping goes with the last reference
        self._warm.free(slot.start, slot.size_bytes)
        for chunk in self._chunks(slot.start, slot.size_bytes):
            self._num_slots_in[chunk] -= 1
            if not self._num_slots_in[chunk]:
                del self._num_slots_in[chunk]
                self._cached[chunk] = None
        self.cached_bytes = len(self._cached) * _CHUNK_BYTES

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the region in chunks that have or had pages: about its resident size."""
        if self.pinned_for is not None:
            return self.size_bytes
        return (len(self._num_slots_in) + len(self._cached)) * _CHUNK_BYTES

    def trim(self, allowance_bytes: int) -> None:
        """Give pages without slots back to the kernel until no more than `allowance_bytes` of them are held.

        If the process has locked its memory and the kernel is older than 5.18, all pages stay: it takes none back."""
        while self.pinned_for is None and self._can_give_back and self.cached_bytes > allowance_bytes:
            chunk = next(reversed(self._cached))
            self._give_back(chunk * _CHUNK_BYTES)

    def _give_back(self, start: int) -> None:
        region = self._mapped()
        try:
            region.madvise(mmap.MADV_DONTNEED, self._first + start, _CHUNK_BYTES)
        except OSError:  # EINVAL: locked
            try:
                give_back_locked(_address_of(region) + self._first + start, _CHUNK_BYTES)
            except OSError:
                self._can_give_back = False
                return
        del self._cached[start // _CHUNK_BYTES]
        self._cool_down(start)

    @property
    def description(self) -> str:
        """What the slab is made of: "pageable", "pinned", or "pageable" and why it is not pinned."""
        self._note_pinned()
        return self._description

    @property
    def is_being_pinned(self) -> bool:
        self._note_pinned()
        return self._pinning is not None and not self._pinning.is_over

    def is_pinned(self, slot: Slot) -> bool:
        pinning, start = self._pinning, slot.start
        return pinning is not None and start is not None and start + slot.size_bytes <= pinning.pinned_bytes

    def pin(self, device: torch.device) -> None:
        self.begin_to_pin(device)
        self.wait_until_pinned()

    def wait_until_pinned(self) -> None:
        if self._pinning is not None:
            self._pinning.wait()

    def begin_to_pin(self, device: torch.device) -> None:
        """Begin to register the region with the accelerator's driver, once. If it fails, `description` says why.

        CUDA and ROCm register memory that exists (cudaHostRegister), so the region keeps its exact size. A thread of
        its own (`pinning.py`) takes all its pages. Until then, copies to and from pageable memory are correct too, but
        do not overlap with compute.

        A forked child does not get the region (madvise(2), MADV_DONTFORK). Since Linux 5.12 a fork would copy all
        pinned pages at once; before that, the device could go on with pages that the child has got. Memory of a slot
        must not be touched in the child."""
        if self._description != "pageable":
            return
        if device.type != "cuda":
            self._description = f"pageable ({device.type} offers no registration of host memory)"
            return
        try:
            region = self._mapped()
            region.madvise(mmap.MADV_DONTFORK, self._first, self.size_bytes)
        except OSError as error:  # a limit on addresses, as in `allocate`
            self._description = f"pageable ({error.strerror})"
            return
        self.pinned_for = device
        self._description = "pageable (being pinned)"
        address = _address_of(region) + self._first
        self._pinning = Pinning(address, self.size_bytes, device, partial(_register, device=device))

    def _note_pinned(self) -> None:
        pinning = self._pinning
        if pinning is None or not pinning.is_over or self._description != "pageable (being pinned)":
            return
        if pinning.failure is None:
            self._description = "pinned"
        elif pinning.pinned_bytes:
            self._description = f"pageable beyond {pinning.pinned_bytes / 2**30:.1f} GiB ({pinning.failure})"
        else:
            self._mapped().madvise(mmap.MADV_DOFORK, self._first, self.size_bytes)
            self.pinned_for = self._pinning = None
            self._description = f"pageable ({pinning.failure})"

    def unpin(self) -> None:
        """Undo `pin`, before the region is freed; all copies must be over. Blocks for the calls of the driver."""
        if self._pinning is not None:
            self._pinning.end()
            self._note_pinned()
        pinning, self._pinning = self._pinning, None
        device, self.pinned_for = self.pinned_for, None
        if device is not None and pinning is not None:
            with torch.cuda.device(device), beside_captures(device):
                for address in pinning.registered:
                    _cuda_runtime().cudaHostUnregister(address)
            self._description = "pageable (unpinned)"

    def _mapped(self) -> mmap.mmap:
        if self._region is None:
            self._region = _map(self.size_bytes + 2 * _CHUNK_BYTES + self._spare_bytes)
            self._first = -_address_of(self._region) % _CHUNK_BYTES
            self._cold.free(0, self.size_bytes)
        return self._region

    def _warm_up(self, size: int) -> bool:
        """Make cold chunks warm, so that `size` bytes in a row are free in warm ones; False: there is no such place."""
        whole = round_up(size, _CHUNK_BYTES)
        if self._cold.longest_bytes < whole and self._spare_bytes >= whole and self.pinned_for is None:
            self._cold.free(self.size_bytes + _CHUNK_BYTES, self._spare_bytes)  # no slot may cross the registered end
            self._spare_bytes = 0
        if self._cold.longest_bytes < whole:
            return False
        start = self._cold.best_fit(whole)
        before = self._warm.length_before(start)
        missing = round_up(size - before, _CHUNK_BYTES)
        self._cold.take(start, missing)
        lost = self._move_pages_to(start, missing, before)
        if lost is not None:
            self._give_up(lost, start, missing)
            return self._warm_up(size)
        self._warm.free(start, missing)
        return True

    def _move_pages_to(self, start: int, num_bytes: int, before: int) -> int | None:
        """Move pages of cached chunks to chunks at `start`, but none from the `before` bytes before it.

        The other chunks get fresh pages. If a move fails, returns its target, a chunk that nobody may use any more;
        there is one at most. Else None."""
        if self.pinned_for is not None or not self._can_move:
            return None
        kept = self._chunks(start - before, before + num_bytes)
        donors = [chunk for chunk in reversed(self._cached) if chunk not in kept]
        for to, chunk in zip(self._chunks(start, num_bytes), donors, strict=False):
            if len(self._moved) > _MOST_MOVED - 2 and not {chunk, to} <= self._moved:
                return None
            try:
                address = _address_of(self._mapped()) + self._first
                move_pages(address + chunk * _CHUNK_BYTES, address + to * _CHUNK_BYTES, _CHUNK_BYTES)
            except OSError:
                self._can_move = False
                return to
            self._moved |= {chunk, to}
            del self._cached[chunk]
            self._cool_down(chunk * _CHUNK_BYTES)
        return None

    def _give_up(self, lost: int, start: int, num_bytes: int) -> None:
        """Free the chunks that were to become warm: those before the lost one have pages now, the others have not."""
        at = lost * _CHUNK_BYTES
        if at > start:
            self._warm.free(start, at - start)
            self._cached |= dict.fromkeys(self._chunks(start, at - start))
            self.cached_bytes = len(self._cached) * _CHUNK_BYTES
        if start + num_bytes > at + _CHUNK_BYTES:
            self._cold.free(at + _CHUNK_BYTES, start + num_bytes - at - _CHUNK_BYTES)

    def _cool_down(self, start: int) -> None:
        self._warm.take(start, _CHUNK_BYTES)
        self._cold.free(start, _CHUNK_BYTES)
        self.cached_bytes -= _CHUNK_BYTES

    def _chunks(self, start: int, size: int) -> range:
        return range(start // _CHUNK_BYTES, (start + size - 1) // _CHUNK_BYTES + 1)
