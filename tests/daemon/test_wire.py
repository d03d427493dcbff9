"""The protocol's messages: what is said arrives, however it is cut; what is not a message is refused, and only that."""

import contextlib
import itertools
import struct
import tracemalloc
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.daemon import wire
from tierstore.errors import ProtocolError

CLIENT_KINDS: tuple[type, ...] = typing.get_args(wire.ClientMessage)
DAEMON_KINDS: tuple[type, ...] = typing.get_args(wire.DaemonMessage)
KINDS = CLIENT_KINDS + DAEMON_KINDS
DOCUMENT = Path(__file__).parents[2] / "docs" / "project" / "internals" / "protocol.md"


def _values(info: Any) -> st.SearchStrategy[Any]:
    """All values of a field, by its type and limits."""
    match info:
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType():
            return st.integers(info.ge, 2**64 - 1 if info.le is None else info.le)
        case msgspec.inspect.FloatType():
            return st.floats(info.ge, info.le)
        case msgspec.inspect.StrType():
            return st.text(max_size=info.max_length)
        case msgspec.inspect.BytesType():
            return st.binary(min_size=info.min_length or 0, max_size=info.max_length)
        case msgspec.inspect.VarTupleType():
            return st.lists(_values(info.item_type), max_size=min(info.max_length, 100)).map(tuple)
        case msgspec.inspect.UnionType():
            return st.one_of(*map(_values, info.types))
        case msgspec.inspect.NoneType():
            return st.none()
    raise TypeError(f"no strategy for {info}")


def _messages(kind: type) -> st.SearchStrategy[Any]:
    fields = msgspec.inspect.type_info(kind).fields  # type: ignore[attr-defined]
    return st.builds(kind, **{field.name: _values(field.type) for field in fields})


def _frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def _read(body: bytes, kinds: object = wire.ClientMessage) -> list[Any]:
    return wire.FrameReader(kinds, "the peer").feed(_frame(body))


def _kinds_for(kind: type) -> object:
    return wire.ClientMessage if kind in CLIENT_KINDS else wire.DaemonMessage


def _some(kind: type) -> Any:
    """A message with the smallest value in each field."""
    smallest = {"BoolType": False, "FloatType": 0.0, "StrType": "", "VarTupleType": (), "UnionType": None}

    def of(info: Any) -> object:
        match info:
            case msgspec.inspect.IntType():
                return info.ge
            case msgspec.inspect.BytesType():
                return bytes(info.min_length or 0)
        return smallest[type(info).__name__]

    return kind(*(of(field.type) for field in msgspec.inspect.type_info(kind).fields))  # type: ignore[attr-defined]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(KINDS).flatmap(_messages))
def test_every_message_comes_back_equal(message: Any) -> None:
    assert wire.FrameReader(_kinds_for(type(message)), "").feed(wire.frame_of([message])) == [[message]]


def test_fields_of_a_later_version_are_ignored() -> None:
    later = msgspec.msgpack.encode([["Hello", [1, 2], "tierstore 9", {"new": [1]}, None]])
    assert _read(later) == [[wire.Hello((1, 2), "tierstore 9")]]


def test_longest_discard_fits_into_a_frame() -> None:
    longest = wire.Discard(2**63 - 1, tuple(range(2**40 - wire.MAX_KEYS, 2**40)))
    assert _read(wire.frame_of([longest])[4:]) == [[longest]]


def test_longest_words_of_a_client_fit_into_its_frame() -> None:
    word, most = "\U0001f600" * wire.MOST_WORD, 2**63 - 1
    for message in (
        wire.Write(most, 2**40 - 1, most, most, most, word, 1024, word),
        wire.Open(word, most, most),
        wire.Hello((most,) * 64, word),
    ):
        assert _read(wire.frame_of([message])[4:]) == [[message]]


def _array(num_items: int) -> bytes:
    return b"\xdd" + struct.pack(">I", num_items)


BOMBS = {
    "nested arrays": b"\x91" * 500_000,
    "nested arrays behind the last field": b"\x91\x92\xa5Close" + b"\x91" * 500_000 + b"\x01",
    "an array of 2**28 in a field": b"\x91\x93\xa5Hello" + _array(2**28),
    "bytes of 2**32 - 1": b"\x91\x92\xa6Resume\xc6\xff\xff\xff\xff",
    "a million keys": b"\x91\x93\xa7Discard\x01" + _array(1_000_000) + b"\x01" * 1_000_000,
    "a field that is no text": b"\x91\x94\xa4Open\xa2\xff\xff\x01\x01",
    "a lone surrogate": b"\x91\x94\xa4Open\xa3\xed\xb2\x80\x01\x01",
    "a message by field names": msgspec.msgpack.encode([{"type": "Unmap", "slab": 1}]),
    "nothing": b"",
    "a number for true": msgspec.msgpack.encode([["Unmap", True]]),
    "a missing field": msgspec.msgpack.encode([["Unmap"]]),
    "an unknown message": msgspec.msgpack.encode([["_Message"]]),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_refused_in_bounded_memory(bomb: str) -> None:
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        _read(BOMBS[bomb])
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 16 * wire.MAX_FRAME_BYTES


@pytest.mark.parametrize(
    ("kinds", "most"),
    [(wire.ClientMessage, wire.MAX_CLIENT_FRAME_BYTES), (wire.DaemonMessage, wire.MAX_FRAME_BYTES)],
)
def test_giant_frame_is_refused_by_its_length_alone(kinds: object, most: int) -> None:
    assert wire.FrameReader(kinds, "the peer").feed(struct.pack("<I", most)) == []
    for num_bytes in (most + 1, 2**32 - 1):
        reader = wire.FrameReader(kinds, "the peer")
        with pytest.raises(ProtocolError, match=f"{num_bytes} bytes; at most {most}"):
            reader.feed(struct.pack("<I", num_bytes))


def test_message_of_the_wrong_direction_is_refused() -> None:
    for kind in KINDS:
        other = wire.DaemonMessage if kind in CLIENT_KINDS else wire.ClientMessage
        with pytest.raises(ProtocolError, match=kind.__name__):
            wire.FrameReader(other, "").feed(wire.frame_of([_some(kind)]))


def test_every_integer_text_and_list_has_limits() -> None:
    """So that the cases above are all there are; a checksum's upper one is what msgpack can carry."""
    for kind in KINDS:
        for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]
            for info in getattr(field.type, "types", (field.type,)):
                if isinstance(info, msgspec.inspect.IntType | msgspec.inspect.FloatType):
                    assert info.ge is not None, f"{kind.__name__}.{field.name}"
                if isinstance(info, msgspec.inspect.StrType | msgspec.inspect.VarTupleType):
                    assert info.max_length is not None, f"{kind.__name__}.{field.name}"


def test_message_out_of_its_phase_is_refused() -> None:
    spoken = {
        "greeting": {"Hello"},
        "lobby": {"Open", "Resume", "Inspect"},
        "session": {"Slab", "Unmap", "Write", "Read", "Discard", "Close", "Inspect"},
    }
    for phase, kind in itertools.product(wire.ALLOWED, CLIENT_KINDS):
        words = f"client 7.*{kind.__name__} in the phase '{phase}'"
        is_allowed = kind.__name__ in spoken[phase]
        with contextlib.nullcontext() if is_allowed else pytest.raises(ProtocolError, match=words):
            wire.check_allowed(phase, _some(kind), "client 7")


def test_document_names_every_message_with_its_fields_in_order() -> None:
    """A row of a table for each: the name, and the fields as they stand in the array."""
    rows = {}
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 3 and cells[1].startswith("`"):
            rows[cells[1].strip("`")] = cells[2]
    for kind in KINDS:
        assert kind.__name__ in rows, f"{kind.__name__} has no row"
        named = [field.split(":")[0].strip(" `") for field in rows[kind.__name__].split(";") if field.strip(" -")]
        assert named == list(kind.__struct_fields__), kind.__name__  # type: ignore[attr-defined]


def test_document_states_version_and_limits() -> None:
    text = DOCUMENT.read_text()
    assert f"version {wire.VERSION}" in text
    assert f"{wire.MAX_FRAME_BYTES:,}" in text
    assert f"{wire.MAX_CLIENT_FRAME_BYTES:,}" in text
    assert f"{wire.MAX_KEYS:,}" in text
    for phase in wire.ALLOWED:
        assert f"`{phase}`" in text
