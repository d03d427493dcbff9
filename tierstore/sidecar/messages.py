"""The messages between a store and the sidecar daemon, and which of them a client may send when. No I/O.

`frames.py` turns messages into bytes and back. Payload never travels with them: a message names a range of a *slab*,
memory that client and daemon share. `docs/project/internals/protocol.md` says what each field means.

Phases of a connection, and what a client may say in each::

    GREETING ── Hello ──► LOBBY ── Open | Resume ──► SESSION ── Close ──► (the daemon ends the session)
                            └ Inspect                  └ Slab, Unmap, Write, Read, Discard, Inspect

Six rules keep bytes right through dropped connections and killed daemons:

1. `Stored` only after the index has committed.
2. An extent is used again only after its deletion has committed.
3. A slot named in an unanswered request belongs to the daemon until the answer or `Resumed`, even if its handle is
   released.
4. `Resumed` only after every job of the previous connection has ended.
5. `Write` is idempotent by key; keys are never used again.
6. `Discard` waits for that key's job. The extents of a lease are freed only after its jobs have ended."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ..errors import ProtocolError
from ..plain_text import unicode_text

VERSION = 2
"""The version of the protocol. Raised with every change that an older peer would misunderstand."""

MAX_KEYS = 1024
"""Limit of keys in one `Discard`."""

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Key = Annotated[int, msgspec.Meta(ge=0, le=2**40 - 1)]
_Hash = Annotated[int, msgspec.Meta(ge=0)]  # of 64 bits: msgpack has no larger integers
MOST_WORD, _MOST_TEXT = 256, 4096
_Word = Annotated[str, msgspec.Meta(max_length=MOST_WORD)]
_Text = Annotated[str, msgspec.Meta(max_length=_MOST_TEXT)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Token = Annotated[bytes, msgspec.Meta(min_length=16, max_length=64)]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


# --- what a client says -----------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """The first message, the same in every version. `program`: who it is, for people."""

    versions: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=64)]
    program: _Word


class Open(_Message, frozen=True):
    """Begin a session: a lease on what this client is going to store. The fields are for people and for metrics."""

    name: _Word
    rank: _Number | None
    pid: _Number


class Resume(_Message, frozen=True):
    """Go on with a session after the connection was lost; `session` and `token` are as `Opened` gave them."""

    session: _Number
    token: _Token


class Slab(_Message, frozen=True):
    """Share memory under a number of the client's; the descriptor of a sealed memfd comes with the frame."""

    slab: _Number
    num_bytes: _Size


class Unmap(_Message, frozen=True):
    """Stop sharing a slab, which no unanswered request names. There is no answer."""

    slab: _Number


class Write(_Message, frozen=True):
    """Store a range of a slab, which must not change until the answer: `Stored`, `Full` or `Failed`."""

    request: _Number
    key: _Key
    slab: _Number
    offset: _Size
    num_bytes: _Size
    dtype: _Word
    itemsize_bytes: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    origin: _Word


class Read(_Message, frozen=True):
    """Fill a range of a slab with a record that is `Stored`. Answer: `Loaded`, `Bad` or `Failed`."""

    request: _Number
    key: _Key
    slab: _Number
    offset: _Size
    num_bytes: _Size


class Discard(_Message, frozen=True):
    """Free records; those that are not there are no error. Answer: `Gone`."""

    request: _Number
    keys: Annotated[tuple[_Key, ...], msgspec.Meta(max_length=MAX_KEYS)]


class Close(_Message, frozen=True):
    """End the session and free all it stored. Answer: `Closed`, and the connection ends."""


class Inspect(_Message, frozen=True):
    """Ask what the daemon holds. Answer: `Report`."""


# --- what the daemon says ---------------------------------------------------------------------------------------------


class Welcome(_Message, frozen=True):
    """The answer to `Hello`. `max_slab_bytes`: of all slabs of a session."""

    version: _Number
    program: _Word
    max_slab_bytes: _Size
    grace_seconds: _Seconds


class Opened(_Message, frozen=True):
    """The answer to `Open`. The seed of a record's checksum is `record_seed(seed, key_base + key)`."""

    session: _Number
    token: _Token
    seed: _Hash
    key_base: _Hash
    disk_bytes: _Size
    io_mode: _Text


class Resumed(_Message, frozen=True):
    """The answer to `Resume`: every job of the previous connection has ended, and what was `Stored` is there."""


class Stored(_Message, frozen=True):
    """The record is on disk and in the index. `checksum`: of the bytes in the slab; None: they were encoded."""

    request: _Number
    stored_bytes: _Size
    codec: _Word
    kind: _Text
    checksum: _Hash | None


class Full(_Message, frozen=True):
    """There is no room; nothing was stored. The figures are the session's if `is_quota`, else the daemon's."""

    request: _Number
    is_quota: bool
    disk_bytes: _Size
    budget_bytes: _Size
    reason: _Text


class Failed(_Message, frozen=True):
    """The device failed, as `StorageIOError`; a record that was there still is, one that was to be stored is not."""

    request: _Number
    operation: _Word
    place: _Text
    reason: _Text


class Bad(_Message, frozen=True):
    """The record is damaged, or its entry was lost since an earlier daemon stored it; the range holds garbage."""

    request: _Number
    place: _Text
    expected: _Text
    found: _Text


class Loaded(_Message, frozen=True):
    """The range holds the record; `read_bytes` were read from disk for it."""

    request: _Number
    read_bytes: _Size


class Gone(_Message, frozen=True):
    """The records are freed."""

    request: _Number


class Closed(_Message, frozen=True):
    """The session is over and its bytes are free."""


class Report(_Message, frozen=True):
    """The answer to `Inspect`: what the daemon holds and has done, in JSON, as `tierstore stat --json` prints it."""

    state: bytes


class Refused(_Message, frozen=True):
    """The daemon does not do what was asked for, and ends the connection. `is_final`: trying again is of no use."""

    reason: _Text
    is_final: bool = True


ClientMessage = Hello | Open | Resume | Slab | Unmap | Write | Read | Discard | Close | Inspect
DaemonMessage = Welcome | Opened | Resumed | Stored | Full | Failed | Bad | Loaded | Gone | Closed | Report | Refused


Phase = Literal["greeting", "lobby", "session"]
"""How far a connection has come, as the daemon sees it."""

ALLOWED: dict[Phase, tuple[type, ...]] = {
    "greeting": (Hello,),
    "lobby": (Open, Resume, Inspect),
    "session": (Slab, Unmap, Write, Read, Discard, Close, Inspect),
}


def check_allowed(phase: Phase, message: ClientMessage, peer: str) -> None:
    """Raise ProtocolError if this message may not be sent in this phase."""
    if not isinstance(message, ALLOWED[phase]):
        allowed = ", ".join(kind.__name__ for kind in ALLOWED[phase])
        raise ProtocolError(peer, f"{type(message).__name__} in the phase {phase!r}, which allows {allowed}")


def fitting(text: str, most: int = _MOST_TEXT) -> str:
    """The text as a field can carry it: cut, and with escapes for bytes that are not Unicode (a path may hold some)."""
    return unicode_text(text)[:most]


_ADVICE = "install the same tierstore for the daemon and for its clients, then start both anew"


def other_version(versions: tuple[int, ...], program: str) -> str:
    """Why a client with these versions is refused, and what to do."""
    theirs = ", ".join(map(str, versions)) or "none"
    return f"this daemon speaks version {VERSION} of the protocol, {program} {theirs}: {_ADVICE}"


def with_advice(reason: str) -> str:
    """Why a daemon has refused `Hello`, and what to do: one of an earlier version does not say it."""
    return reason if _ADVICE in reason else f"{reason}: {_ADVICE}"
