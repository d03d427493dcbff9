"""Frames: messages to bytes, and bytes to messages, in whatever pieces they arrive. No I/O, no clock, no threads.

A frame is its length (four bytes, little-endian, without themselves) and an array of messages in msgpack."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from ..errors import ProtocolError
from .messages import ClientMessage, DaemonMessage, fitting

MAX_FRAME_BYTES = 2**20
"""A longer frame is refused before any of it is kept."""

_LENGTH = struct.Struct("<I")
_MOST_COMPLAINT = 300  # it quotes the peer, who may have sent a frame full

_encoder = msgspec.msgpack.Encoder()


def encoded(message: ClientMessage | DaemonMessage) -> msgspec.Raw:
    """The message as msgpack, which `frame_of` takes too. ValueError: no frame can carry it, because it is too long or
    a text is not Unicode. OverflowError: an integer has more than 64 bits."""
    found = _encoder.encode(message)
    if len(found) >= MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(found)} bytes; a frame has at most {MAX_FRAME_BYTES}")
    return msgspec.Raw(found)


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
        self._peer = peer
        self._buffer = bytearray()

    @property
    def is_inside_frame(self) -> bool:
        return bool(self._buffer)

    def feed(self, data: bytes | memoryview) -> list[list[ClientMessage | DaemonMessage]]:
        """Take in the next bytes; returns the frames that are complete now, each as its messages. ProtocolError: a
        frame is too long, or is not an array of messages that the peer may send; the connection is over."""
        buffer, self._buffer = self._buffer, bytearray()  # nothing is held of what is refused
        buffer += data
        frames, start = [], 0
        while len(buffer) - start >= _LENGTH.size:
            (num_bytes,) = _LENGTH.unpack_from(buffer, start)
            if num_bytes > MAX_FRAME_BYTES:
                raise ProtocolError(self._peer, f"a frame of {num_bytes} bytes; at most {MAX_FRAME_BYTES} are allowed")
            end = start + _LENGTH.size + num_bytes
            if len(buffer) < end:
                break
            frames.append(self._messages_of(bytes(buffer[start + _LENGTH.size : end])))
            start = end
        del buffer[:start]
        self._buffer = buffer
        return frames

    def _messages_of(self, body: bytes) -> list[ClientMessage | DaemonMessage]:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # the last one: deep nesting
            raise ProtocolError(self._peer, f"not a message: {fitting(str(error), _MOST_COMPLAINT)}") from error
