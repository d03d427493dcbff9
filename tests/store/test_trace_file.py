"""The format of a trace: what is written is read again, and what is damaged is refused where it is damaged."""

import typing
from pathlib import Path

import msgspec
import pytest

from tierstore import ConfigError
from tierstore.tracing import events
from tierstore.tracing.events import End, Event, Gone, Header, Machine, StoreSettings
from tierstore.tracing.reader import read_trace
from tierstore.tracing.recorder import TraceFile

SETTINGS = StoreSettings("/nvme", False, 1, 2, 3, "none", 4, True, "O_DIRECT")
HEADER = Header(events.FORMAT, events.VERSION, 0, 0.0, 1, SETTINGS, Machine("a cpu", 4, 2**30, {"python": "3"}))
EVENTS = (Gone(5, 0), Gone(6, 1), End(7, "ended"))


def lines_of(*some: object) -> bytes:
    return b"".join(msgspec.json.encode(each) + b"\n" for each in some)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def refused(file: Path, content: bytes) -> str:
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_trace(file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_read_what_was_written_is_the_same_without_a_line_that_was_not_written_whole(file: Path) -> None:
    file.write_bytes(lines_of(HEADER, *EVENTS))
    trace = read_trace(file)
    assert (trace.header, trace.events, trace.is_complete) == (HEADER, list(EVENTS), True)
    file.write_bytes(lines_of(HEADER, *EVENTS[:2]) + b'{"event":"gone","at_')
    trace = read_trace(file)
    assert (len(trace.events), trace.is_complete) == (2, False)


def test_read_event_that_is_no_longer_recorded_is_taken(file: Path) -> None:
    file.write_bytes(lines_of(HEADER) + b'{"event":"ours","at_ns":5,"graph":0,"index":1}\n' + lines_of(EVENTS[-1]))
    assert read_trace(file).events[0] == events.Ours(5, 0, 1)


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1]",
        b'{"event":"juggle","at_ns":1}',
        b'{"event":"gone"}',
        b'{"event":"gone","at_ns":"x"}',
    ],
)
def test_read_damaged_line_refused_by_its_number(file: Path, damaged: bytes) -> None:
    assert "line 3 " in refused(file, lines_of(HEADER, EVENTS[0]) + damaged + b"\n" + lines_of(EVENTS[1]))


@pytest.mark.parametrize("content", [b"\n", b"hello\n", b"{}\n", lines_of(EVENTS[0]), b"\x00" * 5000 + b"\n"])
def test_read_other_file_refused_at_line_1(file: Path, content: bytes) -> None:
    assert "line 1 " in refused(file, content)


def test_read_other_format_or_version_refused_by_name(file: Path) -> None:
    other = msgspec.structs.replace(HEADER, format="someone else's")
    assert "someone else's" in refused(file, lines_of(other))
    assert "version 99" in refused(file, lines_of(msgspec.structs.replace(HEADER, version=99)))


def test_read_missing_file_or_directory_refused(tmp_path: Path) -> None:
    for place in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_trace(place)


def test_write_to_a_file_that_is_being_written_refused_and_leaves_it(file: Path) -> None:
    first = TraceFile(str(file))
    first.write(b"first")
    with pytest.raises(ConfigError, match="another store"):
        TraceFile(str(file))
    assert file.read_bytes() == b"first"
    first.close()
    TraceFile(str(file), is_continued=True).close()
    assert file.read_bytes() == b"first"
    TraceFile(str(file)).close()
    assert file.read_bytes() == b""


def test_documentation_names_every_event_and_field() -> None:
    text = (
        Path(__file__)
        .parents[2]
        .joinpath("docs", "project", "internals", "trace_format.md")
        .read_text(encoding="utf-8")
    )
    for kind in typing.get_args(Event):
        assert f"`{kind.__struct_config__.tag}`" in text, kind
        for field in kind.__struct_fields__:
            assert f"`{field}`" in text, f"{field} of {kind}"
