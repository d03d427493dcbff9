"""Frames and messages of the sidecar's protocol, in any split of the stream."""

import struct
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, get_args

import msgspec

from tests.daemon import wire
from tests.fuzz.target import Target, raises
from tierstore.errors import ProtocolError

__all__ = ["TARGETS"]

_MOST_REASON = 1000  # a peer's garbage does not fill our log
_FRAMED = 0x80
_CLIENT_SAMPLES = (
    wire.Hello((1, 2), "tierstore 0.1.0"),
    wire.Open("trainer", None, 12),
    wire.Open("trainer", 3, 12),
    wire.Resume(7, bytes(32)),
    wire.Slab(0, 2**20),
    wire.Unmap(0),
    wire.Write(1, 2, 0, 4096, 512, "float32", 4, "relu"),
    wire.Read(2, 2, 0, 0, 512),
    wire.Discard(3, (1, 2, 2**40 - 1)),
    wire.Close(),
    wire.Inspect(),
)
_DAEMON_SAMPLES = (
    wire.Welcome(1, "tierstore 0.1.0", 2**34, 60.0),
    wire.Opened(1, bytes(32), 2**64 - 1, 1 << 40, 2**40, "O_DIRECT"),
    wire.Resumed(),
    wire.Stored(1, 4096, "zstd:1", "float32", None),
    wire.Stored(1, 4096, "none", "float32", 2**64 - 1),
    wire.Full(2, True, 1, 2, "the session's quota is used up"),
    wire.Failed(3, "write", "segment 1", "Input/output error"),
    wire.Bad(4, "segment 1", "checksum 0", "1"),
    wire.Loaded(5, 4096),
    wire.Gone(6),
    wire.Closed(),
    wire.Report(b"{}"),
    wire.Refused("another version", False),
)


def _split(data: bytes) -> tuple[bytes, list[int]]:
    """The stream, and where to cut it: the first byte says whether the rest is one frame, and how many cuts follow."""
    flags, rest = (data[0], data[1:]) if data else (0, b"")
    num_cuts = flags & 0x07
    places, stream = rest[: 2 * num_cuts], rest[2 * num_cuts :]
    if flags & _FRAMED:
        stream = struct.pack("<I", len(stream)) + stream
    cuts = [int.from_bytes(places[at : at + 2], "little") % (len(stream) + 1) for at in range(0, len(places), 2)]
    return stream, sorted(cuts)


def _run(kinds: object, data: bytes) -> None:
    stream, cuts = _split(data)
    whole, refusal = _read(kinds, [stream])
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    found, other = _read(kinds, pieces)
    assert (refusal is None) == (other is None), "it depends on the cuts whether it is refused"
    if refusal is None:
        assert found == whole, "the messages depend on the cuts"
    else:
        assert str(other) == str(refusal)
        assert len(str(refusal)) < _MOST_REASON, f"a refusal of {len(str(refusal))} characters"
    for messages in found:
        _check_messages(kinds, messages)


def _read(kinds: object, pieces: Iterable[bytes]) -> tuple[list[list[Any]], Exception | None]:
    """All frames before the first that is refused, if any is, and why."""
    reader = wire.FrameReader(kinds, "the peer")
    frames: list[list[Any]] = []
    for piece in pieces:
        refusal = raises(ProtocolError, lambda piece=piece: frames.extend(reader.feed(memoryview(piece))))
        if refusal is not None:
            assert not reader.is_inside_frame, "what was refused is still held"
            return frames, refusal
        assert len(reader._buffer) < 4 + wire.MAX_FRAME_BYTES
    return frames, None


def _check_messages(kinds: object, messages: Sequence[Any]) -> None:
    """They are of the right kinds, in their phases, and go through the wire again."""
    assert all(isinstance(message, get_args(kinds)) for message in messages)
    assert wire.FrameReader(kinds, "").feed(wire.frame_of(messages)) == [list(messages)]
    if kinds is wire.ClientMessage:
        for phase in wire.ALLOWED:
            for message in messages[:4]:
                refusal = raises(ProtocolError, partial(wire.check_allowed, phase, message, "the peer"))
                assert (refusal is None) == isinstance(message, wire.ALLOWED[phase])


def _seeds(samples: Sequence[Any]) -> list[bytes]:
    alone = [bytes([_FRAMED]) + wire.frame_of([sample])[4:] for sample in samples]
    all_in_one = wire.frame_of(samples)
    many = b"".join(wire.frame_of([sample]) for sample in samples)
    long_word = bytes([_FRAMED]) + msgspec.msgpack.encode([["x" * 3000, 1]])
    return [*alone, long_word, b"\0" + all_in_one, b"\x03\x01\0\x02\0\x40\0" + many, b"\0" + many[:-1], b""]


def _words(kinds: object) -> tuple[bytes, ...]:
    names = [kind.__name__.encode() for kind in get_args(kinds)]
    return (*(bytes([0xA0 + len(name)]) + name for name in names), b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff")


TARGETS = (
    Target(
        "client_frames",
        partial(_run, wire.ClientMessage),
        lambda: _seeds(_CLIENT_SAMPLES),
        _words(wire.ClientMessage),
    ),
    Target(
        "daemon_frames",
        partial(_run, wire.DaemonMessage),
        lambda: _seeds(_DAEMON_SAMPLES),
        _words(wire.DaemonMessage),
    ),
)
