"""Why a thread waited, told from made-up events; and what the summary and the drawings make of it."""

import pytest

from tests.store.test_trace_file import HEADER
from tierstore.ledger.counters import STALL_CAUSES
from tierstore.tracing.causes import explain
from tierstore.tracing.events import Event, Gone, Levels, Pack, Restore, Scope, ScopeEnd, Spill, Stall, Unpack
from tierstore.tracing.page import page_of
from tierstore.tracing.reader import RecordedTrace
from tierstore.tracing.steps import Step, choose_step, longest_waits, steps_of
from tierstore.tracing.summary import StepSummary, summarize

MS = 1_000_000
FOR_ROOM, FOR_BYTES = STALL_CAUSES
THREAD = 7


def scope(prefetch: str = "learned") -> Scope:
    return Scope(0, THREAD, "main", 1, 0, 0, prefetch, 0 if prefetch == "none" else 2**20, False)


def pack(index: int, at_ms: int) -> Pack:
    numbers = (THREAD, 1, 0, index, index + 1, None, index, 0, 0)
    return Pack(at_ms * MS, at_ms * MS + 1, *numbers, 2**20, 2**20, "float32", "cpu", (2**18,))


def spill(began: int, ended: int, *, codec: str = "none", at_drive_ms: float | None = None, lane: int = 0) -> Spill:
    drive = (ended - began if at_drive_ms is None else at_drive_ms) / 1e3
    times = (began * MS, began * MS, ended * MS)
    return Spill(1, 2**20, 2**20, codec, "float32", lane, *times, drive, 0.0, None)


def restore(began: int, ended: int, *, demanded: bool = False, at_drive_ms: float | None = None) -> Restore:
    drive = (ended - began if at_drive_ms is None else at_drive_ms) / 1e3
    times = (began * MS, began * MS, ended * MS)
    return Restore(1, 2**20, 2**20, 0, demanded, True, *times, drive, 0.0, None)


def stall(began: int, ended: int, cause: str) -> Stall:
    return Stall(began * MS, ended * MS, THREAD, cause, None if cause == FOR_ROOM else 1)


def step_of(*events: Event, prefetch: str = "learned") -> Step:
    """A step of a second: half of it forward, then backward."""
    ends = (ScopeEnd(500 * MS, THREAD, 1, False), Unpack(500 * MS, 501 * MS, THREAD, 0, 0), Gone(1000 * MS, 0))
    (step,) = steps_of(RecordedTrace(HEADER, [scope(prefetch), pack(0, 1), *events, *ends], True))
    return step


WRITES = [spill(at, at + 100) for at in range(10, 400, 100)]
ENCODED = [spill(at, at + 100, codec="zstd:19", at_drive_ms=5) for at in range(10, 400, 100)]
READS = [restore(at, at + 100) for at in range(500, 900, 100)]
DECODED = [spill(10, 20, codec="zstd:3"), *(restore(at, at + 100, at_drive_ms=1) for at in range(500, 900, 100))]
DEMANDED = [
    *(restore(510, 520, demanded=True), stall(510, 520, FOR_BYTES)),
    *(restore(700, 720, demanded=True), stall(700, 720, FOR_BYTES)),
]


@pytest.mark.parametrize(
    ("events", "prefetch", "expected"),
    [
        pytest.param(
            [*WRITES, stall(60, 110, FOR_ROOM), stall(160, 210, FOR_ROOM)],
            *("learned", ["drive", "drive"]),
            id="a pack, while writes never rest",
        ),
        pytest.param([*ENCODED, stall(60, 110, FOR_ROOM)], "learned", ["codec"], id="a pack, while encoders work"),
        pytest.param(
            [spill(10, 20), stall(11, 20, FOR_ROOM), spill(200, 220), stall(200, 220, FOR_ROOM)],
            *("learned", ["drive", "room"]),
            id="a pack, for a write that began only then",
        ),
        pytest.param(DEMANDED, "learned", ["drive", "room"], id="an unpack, for a read that began only then"),
        pytest.param(DEMANDED, "none", ["drive", "prefetch off"], id="the same for want of prefetch"),
        pytest.param(
            [*READS, stall(550, 600, FOR_BYTES), stall(650, 700, FOR_BYTES)],
            *("learned", ["drive", "drive"]),
            id="an unpack, for a read ahead that is late",
        ),
        pytest.param(
            [restore(500, 520), stall(600, 610, FOR_BYTES)], "learned", ["store"], id="an unpack, while nothing moves"
        ),
        pytest.param([*DECODED, stall(650, 700, FOR_BYTES)], "learned", ["codec"], id="an unpack, while decoders work"),
    ],
)
def test_wait_has_its_cause(events: list[Event], prefetch: str, expected: list[str]) -> None:
    assert [each.cause for each in explain(step_of(*events, prefetch=prefetch))] == expected


def test_wait_that_was_woken_in_between_is_one() -> None:
    parts = [Stall(at, at + 9_000, THREAD, FOR_ROOM, None) for at in range(10 * MS, 10 * MS + 100_000, 10_000)]
    (wait,) = step_of(*parts).waits
    assert (wait.began_ns, wait.end_ns) == (10 * MS, 10 * MS + 99_000)


def test_summary_headline_names_the_phase_its_share_and_the_cause() -> None:
    slow = summarize(step_of(*READS, stall(550, 700, FOR_BYTES)), HEADER)
    assert slow.headline == [
        "Backward waited for the drive for 30% of its time. The drive was busy for 80% of backward: "
        "4 MiB restored at 10 MiB/s."
    ]
    assert slow.wait_seconds["backward"]["drive"] == pytest.approx(0.15)
    assert (slow.seconds, slow.forward_seconds, slow.backward_seconds) == (1.0, 0.5, 0.5)
    quick = summarize(step_of(), HEADER)
    assert quick.headline == ["This step is not slow because of the store: threads waited 0.0% of its time."]


def test_choose_step_none_given_is_the_one_that_waited_longest() -> None:
    packs = [first_pack_of(graph) for graph in range(3)]
    trace = RecordedTrace(
        HEADER, [*packs, stall(1100, 1150, FOR_ROOM), *(Gone(g * 1000 * MS + 900 * MS, g) for g in range(3))], True
    )
    steps = steps_of(trace)
    assert [step.number for step in steps] == [1, 2, 3]
    assert choose_step(steps, None).number == 2
    assert choose_step(steps, 3).number == 3
    assert [step.number for step in longest_waits(steps, steps[0], 2, 1000)] == [1, 2]
    assert [step.number for step in longest_waits(steps, steps[0], 3, 0)] == [1], "the other has an event"


def first_pack_of(graph: int) -> Pack:
    at = graph * 1000 * MS
    return Pack(at, at + 1, THREAD, graph, graph, 0, graph, None, 0, 0, 0, 1, 1, "float32", "cpu", (1,))


def test_page_needs_nothing_from_elsewhere_and_no_text_ends_its_script() -> None:
    levels = [Levels(at * MS, 0, 0, at, 2, 0, 3) for at in range(0, 1000, 100)]
    events = (spill(10, 400, codec="zstd:1", at_drive_ms=100), stall(20, 400, FOR_ROOM), restore(500, 600), *levels)
    step = step_of(*events)
    summary = summarize(step, HEADER)
    page = page_of([step], HEADER, {THREAD: "</script><b>main"}, 3, first=summary.number)
    assert "</script><b>" not in page
    assert page.count("</script>") == 2
    assert "://" not in page
    assert "default-src 'none'" in page
    assert "<!--" not in page.replace("<!doctype", "")
    assert summary.headline[0].split(":")[0] in page
    assert '"waited":0.38,' in page
    assert '"numSteps":3,' in page


def memory_of(away_bytes: int, free_bytes: int | None) -> StepSummary:
    """A step at whose end of forward so much was on disk, and so much freed memory was kept."""
    end = ScopeEnd(500 * MS, THREAD, 1, False, 2**31, free_bytes)
    levels = [Levels(at * MS, 0, 0, 0, 0, 0, away_bytes if at == 400 else 0) for at in (100, 400, 600)]
    (step,) = steps_of(RecordedTrace(HEADER, [scope(), pack(0, 1), *levels, end, Gone(1000 * MS, 0)], True))
    return summarize(step, HEADER)


def test_verdict_on_memory_only_where_it_did_not_fall() -> None:
    verdict = memory_of(2**30, 2**29).why_memory_stays
    assert verdict is not None
    assert verdict.startswith(
        "1.00 GiB of saved tensors were on disk by then, but the memory of the process did not fall"
    )
    assert memory_of(2**30, 2**29 - 1).why_memory_stays is None
    assert memory_of(2**30, None).why_memory_stays is None, "the allocator does not tell"
    assert memory_of(2**20, 2**30).why_memory_stays is None, "too little to speak of"
