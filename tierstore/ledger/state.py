"""The one table of states of a record, and the legal moves between them.

State of a record        the bytes are                          who may move it
---------------------    -----------------------------------    ------------------------------------------
PENDING                  where autograd left them; somebody     sole owner → HOST or DEVICE
                         else holds them too, or may still
                         write to them
DEVICE                   on the accelerator, solely owned       chosen → OFFLOADING; shared again → PENDING
OFFLOADING               on the accelerator, being copied       copied → HOST; chosen as victim → QUEUED
HOST                     in host memory                         chosen as victim → QUEUED; shared again → PENDING
QUEUED                   in host memory, write not begun        asked for → HOST; write begins → WRITING
WRITING                  in host memory, being written          written → CLEAN; full or failed → HOST
CLEAN                    in host memory and on disk             memory needed → DISK
DISK                     on disk                                asked for or prefetched → READING
READING                  on disk, being read                    read → CLEAN; retryable → DISK; damaged → FAILED
FAILED                   nowhere                                every request raises the same cause
DOOMED                   the running job's; the handle is gone  job ends → FREED
FREED                    nowhere; the handle is gone            -
CLOSED                   nowhere; the store is closed           released → FREED

In addition, a record whose handle is gone moves to FREED from any state, or to DOOMED while a job works on it. All
records move to CLOSED when the store is closed."""

from __future__ import annotations

import enum
from collections.abc import Mapping


class State(enum.Enum):
    """Where a record's bytes are; the module's docstring has the table."""

    PENDING = "pending"
    DEVICE = "device"
    OFFLOADING = "offloading"
    HOST = "host"
    QUEUED = "queued"
    WRITING = "writing"
    CLEAN = "clean"
    DISK = "disk"
    READING = "reading"
    FAILED = "failed"
    DOOMED = "doomed"
    FREED = "freed"
    CLOSED = "closed"

    __hash__ = object.__hash__  # Enum's own is a function of Python, and each move asks for two


_END = frozenset({State.FREED, State.CLOSED})
_JOB_END = frozenset({State.DOOMED, State.CLOSED})

MOVES: Mapping[State, frozenset[State]] = {
    State.PENDING: frozenset({State.HOST, State.DEVICE}) | _END,
    State.DEVICE: frozenset({State.OFFLOADING, State.PENDING}) | _END,
    State.OFFLOADING: frozenset({State.HOST, State.QUEUED}) | _END,
    State.HOST: frozenset({State.QUEUED, State.PENDING}) | _END,
    State.QUEUED: frozenset({State.HOST, State.WRITING}) | _END,
    State.WRITING: frozenset({State.CLEAN, State.HOST}) | _JOB_END,
    State.CLEAN: frozenset({State.DISK}) | _END,
    State.DISK: frozenset({State.READING}) | _END,
    State.READING: frozenset({State.CLEAN, State.DISK, State.FAILED, State.FREED}) | _JOB_END,
    State.FAILED: _END,
    State.DOOMED: _END,
    State.FREED: frozenset(),
    State.CLOSED: frozenset({State.FREED}),
}
"""Every legal move. `Record.move` refuses all others."""

IN_MEMORY = frozenset({State.PENDING, State.DEVICE, State.OFFLOADING, State.HOST, State.WRITING, State.CLEAN})
"""States in which the bytes can be handed over at once. From QUEUED too, but then the write has to be cancelled."""
