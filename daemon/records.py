"""Carries out requests on a session's records: takes the message, calls the disk tier, returns the answer."""

from __future__ import annotations

from tierstore.disk.drives import LocalTier
from tierstore.disk.tier import Kind
from tierstore.errors import CorruptDataError, ProtocolError, QuotaExceededError, StorageIOError, StoreFullError
from tierstore.sidecar import messages

from .sessions import KeptRecord, Session

_DISCARD_AT_ONCE = 4096


class Records:
    """The records of all sessions, on one disk tier: takes a message, returns the answer to the client. Lives on the
    daemon's loop; does not block it."""

    def __init__(self, disk: LocalTier) -> None:
        self.disk = disk

    async def write(
        self, session: Session, message: messages.Write, memory: memoryview
    ) -> messages.Stored | messages.Full | messages.Failed:
        """Store the bytes in `memory`, unless that was done before."""
        try:
            record = session.records.get(message.key)  # rule 5 of messages.py: it may be sent twice
            if record is None:
                record = await self._store(session, message, memory)
            return messages.Stored(message.request, record.stored_bytes, record.codec, record.kind, record.checksum)
        except StoreFullError as error:
            session.totals["full"] += 1
            is_quota = isinstance(error, QuotaExceededError)
            figures = (error.disk_bytes, error.disk_budget_bytes)
            return messages.Full(message.request, is_quota, *figures, messages.fitting(error.reason))
        except StorageIOError as error:
            session.totals["io_errors"] += 1
            return _failed(message.request, error)

    async def read(
        self, session: Session, message: messages.Read, memory: memoryview
    ) -> messages.Loaded | messages.Bad | messages.Failed:
        """Fill `memory` with a record. ProtocolError: it was never stored."""
        record = session.records.get(message.key)
        if record is None and session.was_taken_up:  # it was stored: its entry was dropped as damaged, or was cleared
            session.totals["corrupt_records"] += 1
            return messages.Bad(message.request, "the index", f"a record of {message.num_bytes} bytes", "none")
        if record is None or record.num_bytes != message.num_bytes:
            raise ProtocolError(
                session.peer,
                f"it asks for {message.num_bytes} bytes of record {message.key}, which it has not stored",
            )
        try:
            loaded = await self.disk.read(session.disk_key(message.key), memory)
            session.totals["restored_bytes"] += message.num_bytes
            session.totals["read_bytes"] += loaded.read_bytes
            return messages.Loaded(message.request, loaded.read_bytes)
        except CorruptDataError as error:
            session.totals["corrupt_records"] += 1
            words = (messages.fitting(each) for each in (error.place, error.expected, error.found))
            return messages.Bad(message.request, *words)
        except StorageIOError as error:
            session.totals["io_errors"] += 1
            return _failed(message.request, error)

    async def free(self, session: Session, keys: tuple[int, ...]) -> None:
        """Free records of a session; keys that it does not have are no error."""
        for first in range(0, len(keys), _DISCARD_AT_ONCE):
            some = [key for key in dict.fromkeys(keys[first : first + _DISCARD_AT_ONCE]) if key in session.records]
            if not some:
                continue
            for key in some:
                session.disk_bytes -= session.records.pop(key).stored_bytes
            await self.disk.discard([session.disk_key(key) for key in some])
            session.totals["discarded_records"] += len(some)

    async def _store(self, session: Session, message: messages.Write, memory: memoryview) -> KeptRecord:
        num_bytes = message.num_bytes
        session.reserve(num_bytes)
        taken_bytes = 0
        try:
            kind = Kind(message.dtype, message.itemsize_bytes, message.origin)
            stored = await self.disk.write(session.disk_key(message.key), memory, kind)
            taken_bytes = stored.stored_bytes
        finally:
            session.settle(num_bytes, taken_bytes)
        record = KeptRecord(num_bytes, stored.stored_bytes, stored.codec, stored.kind, stored.checksum)
        session.records[message.key] = record
        session.totals["spilled_bytes"] += num_bytes
        session.totals["written_bytes"] += taken_bytes
        return record


def _failed(request: int, error: StorageIOError) -> messages.Failed:
    return messages.Failed(
        request, messages.fitting_word(error.operation), messages.fitting(error.place), messages.fitting(error.reason)
    )
