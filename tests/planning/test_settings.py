"""Where the settings of a plan come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from tierstore.errors import ConfigError
from tierstore.planning import last_whole_step, planned_settings
from tierstore.simulator import Settings
from tierstore.tracing.events import Event, Gone, Header, Machine, Pack, Release, Scope, ScopeEnd, StoreSettings, Unpack
from tierstore.tracing.reader import RecordedTrace

_HOST, _STAGING = 1000, 100
_THREAD = 7


def _step(graph: int, *, is_whole: bool = True, lookahead_bytes: int, prefetch: str, device_bytes: int) -> list[Event]:
    at, name = 100 * graph, (graph, 0)
    pack = Pack(
        began_ns=at + 1, end_ns=at + 2, thread=_THREAD, scope=graph, graph=graph, index=0, key=graph, record=None,
        node=0, storage=graph, version=0, storage_bytes=8, view_bytes=8, dtype="float32", device="cpu", shape=(2,),
    )  # fmt: skip
    forward = [
        Scope(at, _THREAD, "main", graph, 0, device_bytes, prefetch, lookahead_bytes, False),
        pack,
        ScopeEnd(at + 3, _THREAD, graph, False),
    ]
    backward = [Unpack(at + 4, at + 5, _THREAD, *name), Release(at + 6, *name), Gone(at + 7, graph)]
    return [*forward, *(backward if is_whole else [])]


def _trace(
    *,
    num_whole: int = 1,
    codec: str | None = "zstd:1",
    lookahead_bytes: int = _HOST + _STAGING,
    prefetch: str = "learned",
    device_bytes: int = 0,
    io_depth: int | None = None,
) -> RecordedTrace:
    """Some whole steps, and one that is not."""
    recorded = StoreSettings("/x", codec is None, _HOST, _STAGING, 5000, codec, 0, True, 3, 5, "buffered", io_depth)
    header = Header("tierstore trace", 1, 0, 0.0, 1, recorded, Machine("x", 4, 0, {}))
    events: list[Event] = []
    for graph in range(num_whole + 1):
        is_whole = graph < num_whole
        events += _step(
            graph,
            is_whole=is_whole,
            lookahead_bytes=lookahead_bytes,
            prefetch=prefetch,
            device_bytes=device_bytes,
        )
    return RecordedTrace(header, events, is_complete=False)


def _settings(trace: RecordedTrace, **options: object) -> Settings:
    return planned_settings(trace, last_whole_step(trace, "x"), **options)  # type: ignore[arg-type]


def test_last_whole_step_is_not_the_one_that_was_cut_off() -> None:
    assert last_whole_step(_trace(num_whole=3), "x").number == 3


def test_last_whole_step_of_none_is_refused_by_file() -> None:
    with pytest.raises(ConfigError) as caught:
        last_whole_step(_trace(num_whole=0), "step.jsonl")
    assert caught.value.given == "step.jsonl"


def test_settings_are_those_of_the_trace_but_for_the_size_of_its_drive() -> None:
    expected = Settings(_HOST, _STAGING, None, "zstd:1", "learned", None, num_spill_lanes=3, num_restore_lanes=5)
    assert _settings(_trace()) == expected


def test_settings_of_a_client_have_the_codec_that_daemons_have_by_default() -> None:
    assert _settings(_trace(codec=None)).codec == "auto"


@pytest.mark.parametrize(
    ("lookahead_bytes", "prefetch", "planned"),
    [(_HOST + _STAGING, "learned", None), (50, "learned", 50), (0, "none", None), (0, "reverse", 0)],
)
def test_settings_have_the_lookahead_that_was_chosen_or_an_automatic_one(
    lookahead_bytes: int, prefetch: str, planned: int | None
) -> None:
    settings = _settings(_trace(lookahead_bytes=lookahead_bytes, prefetch=prefetch))
    assert (settings.lookahead_bytes, settings.prefetch) == (planned, prefetch)


_FILE = """
[store]
path = "/nowhere"
host_bytes = "2KiB"
disk_bytes = "1MiB"
codec = "none"
checksum = true
[offload]
prefetch = "reverse"
lookahead_bytes = 300
min_bytes = 1
"""


def test_settings_of_a_file_come_before_the_trace_and_after_the_caller(tmp_path: Path) -> None:
    file = tmp_path / "tierstore.toml"
    file.write_text(_FILE)
    found = _settings(_trace(), config=file)
    assert found == Settings(2048, _STAGING, 2**20, "none", "reverse", 300, num_spill_lanes=3, num_restore_lanes=5)
    said = {"store": {"host_bytes": "3KiB", "codec": "auto"}, "offload": {"lookahead_bytes": "1KiB"}}
    found = _settings(_trace(), config=file, **said)
    assert (found.host_bytes, found.codec, found.prefetch, found.lookahead_bytes) == (3072, "auto", "reverse", 1024)


def test_settings_have_the_depth_of_the_trace_if_it_tells() -> None:
    assert _settings(_trace(io_depth=9)).num_turns == 9
    assert _settings(_trace()).num_turns == 4


def test_settings_with_a_depth_have_its_turns_and_lanes() -> None:
    found = _settings(_trace(), store={"io_depth": 9})
    assert (found.num_turns, found.num_spill_lanes, found.num_restore_lanes) == (9, 12, 12)
    with pytest.raises(ConfigError, match="io_depth"):
        _settings(_trace(), store={"io_depth": 0})


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ('"2KiB"', '"much"', "store.host_bytes"),
        ('codec = "none"', 'codec = "zip"', "store.codec"),
        ('"reverse"', '"sideways"', "offload.prefetch"),
        ("lookahead_bytes = 300", "lookahead_bytes = -1", "offload.lookahead_bytes"),
        ("min_bytes", "most_bytes", "offload.most_bytes"),
        ('path = "/nowhere"', "", "store"),
    ],
)
def test_settings_of_a_file_that_are_wrong_are_refused_by_file_and_key(
    old: str, new: str, place: str, tmp_path: Path
) -> None:
    file = tmp_path / "tierstore.toml"
    assert old in _FILE
    file.write_text(_FILE.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        _settings(_trace(), config=file)
    assert caught.value.option == f"{file}: {place}"


def test_what_stays_on_an_accelerator_is_the_trace_s_unless_somebody_says_a_size() -> None:
    """A trace has the bytes that "auto" had found; to find others takes a run."""
    trace = _trace(device_bytes=300)
    assert _settings(trace).device_bytes == 300
    assert _settings(trace, offload={"device_bytes": "1KiB"}).device_bytes == 1024
    file = {"store": {"path": "/nowhere"}, "offload": {"device_bytes": "auto"}}
    assert _settings(trace, config=file, offload={"device_bytes": 7}).device_bytes == 7
    with pytest.raises(ConfigError, match="in the trace it was 300 bytes") as caught:
        _settings(trace, config=file)
    assert caught.value.option.endswith("offload.device_bytes")


def test_settings_of_a_damaged_trace_are_refused_by_name() -> None:
    trace = _trace()
    store = structs.replace(trace.header.store, host_bytes=-1)
    with pytest.raises(ConfigError) as caught:
        _settings(replace(trace, header=structs.replace(trace.header, store=store)))
    assert caught.value.option == "host_bytes"


def test_settings_of_the_caller_that_are_wrong_are_refused_by_name() -> None:
    for said, option in (({"host_bytes": "much"}, "host_bytes"), ({"codec": "zip"}, "codec")):
        with pytest.raises(ConfigError) as caught:
            _settings(_trace(), store=said)
        assert caught.value.option == option
