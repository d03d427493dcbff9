"""An index that reads well and cannot be changed: the daemon ends and says so, and the next one starts clean."""

import os
from pathlib import Path

import pytest
import torch

from tests.daemon.conftest import StartDaemon
from tierstore import CorruptDataError, TierStore
from tierstore.disk.home import FOLDER_NAME

PAGE_BYTES, NUM_META_PAGES = 4096, 2
LEAF_FLAGS = b"\x02\0"  # P_LEAF; at byte 10 of a page (struct MDB_page of lmdb's mdb.c), which begins with its number


def misnumber_pages(index: Path) -> None:
    """Give every leaf another number than its place: LMDB believes it when it frees the page, not before."""
    with index.open("r+b", buffering=0) as file:
        for page in range(NUM_META_PAGES * PAGE_BYTES, os.fstat(file.fileno()).st_size, PAGE_BYTES):
            head = os.pread(file.fileno(), 12, page)
            if head[10:] == LEAF_FLAGS:
                os.pwrite(file.fileno(), bytes([head[5] ^ 0x40]), page + 5)


def test_record_whose_entry_is_dropped_is_told_as_damaged_and_the_session_goes_on(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(codec="none")
    with TierStore.connect(daemon.socket, host_bytes=0, reconnect_seconds=2) as store:
        contents, handles = [torch.full((1 << 17,), float(number)) for number in range(2)], []
        for content in contents:
            handles.append(store.put(content.clone()))
            store.flush()
        daemon.kill()
        (segment,) = (daemon.path / FOLDER_NAME).glob("segment-*")
        os.truncate(segment, contents[0].nbytes)  # the second one lies beyond
        daemon = start_daemon(daemon.path, daemon.socket, codec="none")
        daemon.wait_until_open()
        assert "taken up: 1 records; 1 damaged ones were dropped" in daemon.log
        assert torch.equal(store.get(handles[0]), contents[0])
        with pytest.raises(CorruptDataError, match="the index: expected a record of 524288 bytes, found none") as told:
            store.get(handles[1])
        assert told.value.key == handles[1].record.key
        handles[1] = store.put(contents[1].clone())
        store.flush()
        assert all(torch.equal(store.get(handle), content) for handle, content in zip(handles, contents, strict=True))
