"""Every access to memory of an accelerator, and to slots, is ordered after those before it: see `happens_before.py`."""

import random

import pytest
import torch

from tests.device.happens_before import BLOCK_BYTES, DEVICE, HOST, ClockedCopies, UnorderedError
from tests.store.records import made_handle
from tierstore.ledger.state import State
from tierstore.ledger.windows import Window
from tierstore.residency.device import DeviceTier
from tierstore.residency.handle import Handle, Record
from tierstore.residency.outstanding import OutstandingViews
from tierstore.residency.ownership import claim
from tierstore.tensors.slab import Slab

STREAMS = ("compute", "side")
OWNERS = (*STREAMS, "elsewhere")  # a stream that computes, but on which nothing is ever packed


class Program:
    """A user of the device tier who keeps to PyTorch's rules for streams, and the books' part of the work.

    Work on one stream that needs what another made waits for it, and a graph is dropped when the stream that its blocks
    belong to has been made to come after all that uses them: that is the user's duty without a store, and with one
    nothing more is asked of them. That the store lets go of blocks earlier is the store's own matter.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.copies = ClockedCopies(lambda _: self.chance.random() < 0.3)
        resident, limits = Window(2 * BLOCK_BYTES), (3 * BLOCK_BYTES, 2 * BLOCK_BYTES)
        self.tier = DeviceTier(self.copies, OutstandingViews(), lambda _: True, resident, *limits)
        self.slab = Slab(64 * 4096)
        self.live: dict[int, Record] = {}
        self.handles: dict[int, Handle] = {}
        self.owners: dict[int, str] = {}
        self.num_records = 0

    def save(self) -> None:
        """A kernel fills a tensor on the stream that owns it, another uses it on the stream that packs it."""
        owner, packer = self.chance.choice(OWNERS), self.chance.choice(STREAMS)
        tensor = self.copies.allocate(owner)
        self.copies.work(owner, "the kernel that computes it", writes=tensor.data_ptr())
        self._use(tensor, owner, packer)
        self.num_records += 1
        number = self.num_records
        handle = made_handle(tensor.detach(), number)
        record = handle.record
        record.device = DEVICE
        claim(record, tensor.untyped_storage())
        self.copies.current = packer
        record.stream = self.tier.streams.note_current(DEVICE)
        self.tier.hold(record)
        self.live[number], self.handles[number] = record, handle
        self.owners[number] = owner

    def _use(self, tensor: torch.Tensor, made_on: str, stream: str) -> None:
        if stream != made_on:
            self.copies.order(stream, after=made_on)
        self.copies.work(stream, "a kernel that uses it", reads=tensor.data_ptr())

    def offload_surplus(self) -> None:
        while (record := self.tier.window.surplus()) is not None:
            record.slot, record.span = self.slab.allocate(BLOCK_BYTES), (0, BLOCK_BYTES)
            self.tier.offload(record)

    def spill(self, record: Record) -> None:
        """To disk, and out of memory."""
        assert record.slot is not None
        assert record.ready is not None
        for state in (State.QUEUED, State.WRITING, State.CLEAN):
            record.move(state)
        record.ready.synchronize()
        self.copies.work(HOST, "the write to disk", reads=record.slot.address)
        self._forget(record)
        record.move(State.DISK)

    def restore(self, record: Record) -> None:
        record.move(State.READING)
        record.slot = self.slab.allocate(BLOCK_BYTES)
        self.copies.work(HOST, "the read from disk", writes=record.slot.address)
        record.move(State.CLEAN)

    def ask(self, record: Record) -> None:
        """Backward, on the stream of the node that saved it or of another that was made to come after that."""
        stream = self.chance.choice(STREAMS)
        self._bring(record)
        assert record.source is not None
        self.copies.current = stream
        self.copies.order(stream, after=repr(record.stream))
        self.tier.hand_over(record)
        self.copies.work(stream, "a kernel of backward", reads=record.source.data_ptr())
        if self.chance.random() < 0.6:
            self.release(record)

    def _bring(self, record: Record) -> None:
        """Have it on the device, for whoever asks later."""
        if record.state is State.DISK:
            self.restore(record)
        if not record.has_device_bytes:
            self.tier.reload(record, must=True)

    def look_ahead(self, record: Record) -> None:
        if self.tier.has_room_to_reload(BLOCK_BYTES):
            self._bring(record)

    def release(self, record: Record) -> None:
        """The graph is dropped: what the user does before, then its handle dies, and the books account for that."""
        del self.live[record.key]
        for stream in STREAMS:
            self.copies.order(self.owners[record.key], after=stream)
        del self.handles[record.key]
        self.tier.remove(record)
        record.claims = None
        self._free_slot(record)

    def _forget(self, record: Record) -> None:
        assert record.source is not None
        self.tier.unload(record)
        record.claims = None
        record.source.data = torch.empty(0, dtype=torch.uint8)
        self._free_slot(record)

    def _free_slot(self, record: Record) -> None:
        slot, record.slot = record.slot, None
        if slot is not None:
            assert record.ready is not None
            self.tier.when_copied(record.ready, lambda: self.slab.free(slot))

    def step(self) -> None:
        action = self.chance.random()
        record = self.live[self.chance.choice(list(self.live))] if self.live else None
        if record is None or action < 0.35:
            self.save()
            self.offload_surplus()
        elif action < 0.6:
            self.ask(record)
        elif action < 0.75:
            self.look_ahead(record)
        elif action < 0.84:
            self.release(record)
        elif action < 0.87:
            self.tier.make_room()
        elif record.state is State.HOST:
            self.spill(record)
        self.tier.poll()


@pytest.mark.parametrize("seed", range(20))
def test_any_program_every_access_is_ordered(seed: int) -> None:
    program = Program(seed)
    with program.copies:
        for _ in range(400):
            program.step()
        for record in list(program.live.values()):
            program.release(record)
        for marker in program.tier.under_way():
            marker.synchronize()
        program.tier.poll()
    assert not program.tier.under_way()
    assert program.tier.held_bytes == 0


@pytest.fixture
def copies() -> ClockedCopies:
    return ClockedCopies(lambda _: False)


def test_checker_read_without_a_wait_for_the_writer_is_found(copies: ClockedCopies) -> None:
    block = copies.allocate("compute")
    copies.work("compute", "a write", writes=block.data_ptr())
    with pytest.raises(UnorderedError, match="a read on side may come before a write on compute"):
        copies.work("side", "a read", reads=block.data_ptr())


@pytest.mark.parametrize("is_shared", [False, True])
def test_checker_freed_block_goes_to_its_stream_at_once_unless_shared(copies: ClockedCopies, is_shared: bool) -> None:
    block = copies.allocate("compute")
    address = block.data_ptr()
    copies.work("side", "a read", reads=address)
    if is_shared:
        copies.share([block], copies.stream("side"))
    del block
    again = copies.allocate("compute")
    assert again.data_ptr() == address
    if is_shared:
        copies.work("compute", "a write", writes=address)
    else:
        with pytest.raises(UnorderedError):
            copies.work("compute", "a write", writes=address)
