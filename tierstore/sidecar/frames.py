"""Frames: messages to bytes, and bytes to messages, in whatever pieces they arrive. No I/O, no clock, no threads.

A frame is its length (four bytes, little-endian, without themselves) and an array of messages in msgpack."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from ..errors import ProtocolError
from .messages import ClientMessage, DaemonMessage, fitting

MAX_FRAME_BYTES = 2**20
"""Limit of a frame of the daemon's. A longer one is refused by its length alone."""

MAX_CLIENT_FRAME_BYTES = 2**14
"""Limit of a frame of a client's: the daemon reads a frame at one go, and holds one from each of its clients."""

_LENGTH = struct.Struct("<I")
_HEADER_BYTES = 5  # of an array, at most
_MOST_COMPLAINT = 300  # it quotes the peer, who may have sent a frame full

_encoder = msgspec.msgpack.Encoder()


def encoded(message: ClientMessage | DaemonMessage, most_bytes: int = MAX_FRAME_BYTES) -> msgspec.Raw:
    """The message as msgpack, which `frame_of` takes too. ValueError: no frame can carry it, because it is too long or
    a text is not Unicode. OverflowError: an integer has more than 64 bits."""
    found = _encoder.encode(message)
    if len(found) >= most_bytes:
        raise ValueError(f"a message of {len(found)} bytes; a frame has at most {most_bytes}")
    return msgspec.Raw(found)


def frames_of(messages: Sequence[msgspec.Raw], most_bytes: int = MAX_FRAME_BYTES) -> list[bytes]:
    """As few frames as the peer accepts, by halves. The messages are from `encoded`, with the same limit."""
    if len(messages) < 2 or sum(map(len, messages)) + _HEADER_BYTES <= most_bytes:
        return [frame_of(messages)]
    half = len(messages) // 2
    return frames_of(messages[:half], most_bytes) + frames_of(messages[half:], most_bytes)


def frame_of(messages: Sequence[ClientMessage | DaemonMessage | msgspec.Raw]) -> bytes:
    """One frame of all the messages. The caller keeps the limits of their fields; the peer refuses longer ones. Raises
    as `encoded`."""
    frame = bytearray(_LENGTH.size)
    _encoder.encode_into(messages, frame, _LENGTH.size)
    num_bytes = len(frame) - _LENGTH.size
    if num_bytes > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {num_bytes} bytes; at most {MAX_FRAME_BYTES} are allowed")
    _LENGTH.pack_into(frame, 0, num_bytes)
    return bytes(frame)


class FrameReader:
    """Makes messages of what arrives, in whatever pieces. `kinds`: what the peer may send, as a union of types."""

    def __init__(self, kinds: object, peer: str) -> None:
        self._decoder = msgspec.msgpack.Decoder(list[kinds])  # type: ignore[valid-type]
        self._most_bytes = MAX_CLIENT_FRAME_BYTES if kinds == ClientMessage else MAX_FRAME_BYTES
        self._peer = peer
        self._buffer = bytearray()

    @property
    def is_inside_frame(self) -> bool:
        return bool(self._buffer)

    @property
    def has_frame(self) -> bool:
        """Whether a whole frame is there, or the length of one that is refused."""
        if len(self._buffer) < _LENGTH.size:
            return False
        num_bytes: int = _LENGTH.unpack_from(self._buffer)[0]
        return num_bytes > self._most_bytes or len(self._buffer) >= _LENGTH.size + num_bytes

    def feed(self, data: bytes | memoryview) -> list[list[ClientMessage | DaemonMessage]]:
        """Take in the next bytes; returns the frames that are complete now, as `take`, which may raise."""
        self.add(data)
        frames = []
        while self.has_frame:
            frames.append(self.take())
        return frames

    def add(self, data: bytes | memoryview) -> None:
        self._buffer += data

    def take(self) -> list[ClientMessage | DaemonMessage]:
        """The messages of the next frame, which is there. ProtocolError: it is too long, or is not an array of messages
        that the peer may send; the connection is over, and nothing is held any more."""
        buffer, self._buffer = self._buffer, bytearray()  # nothing is held of what is refused
        (num_bytes,) = _LENGTH.unpack_from(buffer)
        if num_bytes > self._most_bytes:
            raise ProtocolError(self._peer, f"a frame of {num_bytes} bytes; at most {self._most_bytes} are allowed")
        end = _LENGTH.size + num_bytes
        try:
            messages: list[ClientMessage | DaemonMessage] = self._decoder.decode(buffer[_LENGTH.size : end])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # the last one: deep nesting
            raise ProtocolError(self._peer, f"not a message: {fitting(str(error), _MOST_COMPLAINT)}") from error
        del buffer[:end]
        self._buffer = buffer
        return messages
