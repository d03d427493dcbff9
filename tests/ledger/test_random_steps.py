"""Steps of a store whose jobs end when they are told to, in any order: bytes come back, nothing is left, and some rules
of what is decided.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tests.hooks.programs import one_thread_per_operation
from tests.ledger.scripts import Decision, Device, Script
from tests.ledger.stepped_store import decisions_of
from tests.ledger.steps import Action, EndScope, LetGo, Pack, Release, Saved, Settings, Unpack, Workload
from tierstore.ledger import windows as host

_UNIT = 64 * 2**10
_NUM_STEPS = 3
_NO_DEVICE = Device()


@pytest.fixture(scope="module", autouse=True)
def _validated_on_one_thread_for_torch() -> Iterator[None]:
    with one_thread_per_operation(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIERSTORE_VALIDATE", "1")
        yield


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Forward packs, in part views and tensors that others hold; backward asks in some order."""
    num = draw(st.integers(1, 24))
    saved: list[Saved] = []
    forward: list[Action] = []
    held: list[int] = []
    node = 0
    for index in range(num):
        record = draw(st.sampled_from([None, None, *held]))  # a view needs its base
        nbytes = saved[record].nbytes if record is not None else _UNIT * draw(st.integers(1, 3))
        is_shared = record is None and draw(st.integers(0, 5)) == 0
        node += draw(st.sampled_from([0, 1, 1, 1]))
        saved.append(Saved(nbytes, node, record, is_shared=is_shared))
        forward.append(Pack(index))
        if record is None and not is_shared and draw(st.booleans()):
            held.append(index)
        elif held and draw(st.booleans()):
            forward.append(LetGo(held.pop(0)))
    forward += map(LetGo, held)
    order = list(reversed(range(num))) if draw(st.booleans()) else draw(st.permutations(range(num)))
    backward: list[Action] = []
    for index in order:
        backward += [Unpack(index)] * draw(st.sampled_from([0, 1, 1, 1, 1, 2]))
        backward += [Release(index)] * draw(st.sampled_from([0, 1, 1, 1]))
    return Workload(saved, [*forward, EndScope(), *backward])


def _units(least: int, most: int) -> st.SearchStrategy[int]:
    return st.integers(least, most).map(lambda units: units * _UNIT)


_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "host_bytes": _units(0, 10) | _units(12, 24),
    "staging_bytes": _units(1, 12),
    "disk_bytes": st.none() | _units(0, 40),
    "prefetch": st.sampled_from(["learned", "learned", "reverse", "none"]),
    "lookahead_bytes": st.none() | _units(0, 10),
    "staging_grows": st.booleans(),
}
options = st.builds(Settings, **_OPTIONS)
small_options = st.builds(Settings, **(_OPTIONS | {"host_bytes": _units(0, 2) | _OPTIONS["host_bytes"]}))
devices = st.builds(
    Device,
    saved=st.frozensets(st.integers(0, 23), min_size=16),
    device_bytes=_units(0, 12),
    flight_bytes=_units(0, 8),
    reload_bytes=_units(0, 8),
)
_FOR_GROUPS = {"host_bytes": st.just(0) | _units(16, 40), "staging_bytes": _units(32, 64)}
group_options = st.builds(Settings, **(_OPTIONS | _FOR_GROUPS))
group_devices = st.builds(
    Device,
    saved=st.frozensets(st.integers(0, 23), min_size=16),
    device_bytes=st.just(0) | _units(16, 32),
    flight_bytes=_units(16, 64),
    reload_bytes=_units(0, 16),
)
scripts = st.builds(
    Script,
    after_action=st.lists(st.integers(0, 3), max_size=100),
    choices=st.lists(st.integers(0, 11), min_size=1, max_size=20),
)


def _check(workload: Workload, how: Settings, script: Script, device: Device = _NO_DEVICE) -> None:
    with TemporaryDirectory() as place:
        decisions_of(Path(place), workload, how, script, _NUM_STEPS, device)


def _chain(*units: int, first: Sequence[int] = ()) -> Workload:
    """Backward asks in reverse, but for the `first`, and lets go of each tensor as soon as it has it."""
    order = [*first, *(index for index in reversed(range(len(units))) if index not in first)]
    forward: list[Action] = [Pack(index) for index in range(len(units))]
    saved = [Saved(num * _UNIT, index) for index, num in enumerate(units)]
    backward = [act for index in order for act in (Unpack(index), Release(index))]
    return Workload(saved, [*forward, EndScope(), *backward])


def _step(units: Sequence[int], *actions: Action, nodes: Sequence[int] = (), views: Sequence[int] = ()) -> Workload:
    """Tensors of so many units, each of a node and a storage of its own, unless it says otherwise."""
    saved = [
        Saved(num * _UNIT, nodes[index] if nodes else index, 0 if index in views else None)
        for index, num in enumerate(units)
    ]
    return Workload(saved, actions)


_STAYS_TRACKED = Workload(
    [Saved(_UNIT, index) for index in range(6)],
    [*map(Pack, range(6)), EndScope(), *(act for index in range(6) for act in (Unpack(index), Release(index)))],
)
_GIVEN_BACK_LETS_OTHERS_GO_ON = _step(
    (1, 1, 2, 1, 3, 3, 1, 2, 2, 1, 2, 3),
    *map(Pack, range(12)), LetGo(9), EndScope(), Unpack(5), Unpack(3),
)  # fmt: skip
_TRACKED_VIEW_HOLDS_STORAGE = _step(
    (2, 2, 3, 1, 3, 1),
    Pack(0), Pack(1), LetGo(0), Pack(2), Pack(3), Pack(4), Pack(5), EndScope(),
    nodes=(0, 1, 1, 1, 1, 2), views=(1,),
)  # fmt: skip
_RECORD_WITHOUT_ROOM_IN_BACKWARD = _chain(*[1] * 12), Settings(0, 9 * _UNIT), Script([*[0] * 13, 2, 1, 1, 1], [0])
"""As backward begins six records are being written, three are queued, and there is no room for the last."""

_READS_TAKE_LONG = (
    _chain(*[1] * 16),
    Settings(8 * _UNIT, 2 * _UNIT),
    Script([*[2] * 17, *[0] * 14, *[6] * 18] * 3, [0]),
)
"""What is fetched ahead arrives in time, but after backward has asked for seven units more; staging holds two."""

_ASKED_AGAIN_AFTER_IT_WAS_DROPPED = Workload(
    [Saved(_UNIT, index) for index in range(4)],
    [*map(Pack, range(4)), EndScope(), *(Unpack(index) for index in (3, 2, 1, 0, 3, 2, 1, 0))],
)


# A run is three steps: what Hypothesis finds is printed as it is, and not made smaller.
_random_steps = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.explicit, Phase.generate]
)


@settings(_random_steps, max_examples=20, derandomize=True)
@given(workloads(), options, scripts)
@example(_chain(*[1] * 6), Settings(2 * _UNIT, 2 * _UNIT), Script([1] * 30, [0]))
@example(
    _chain(*[1] * 20, first=(19, 5, 4)),
    Settings(0, 30 * _UNIT, prefetch="reverse"),
    Script([20] * 21, [0]),
)
@example(_GIVEN_BACK_LETS_OTHERS_GO_ON, Settings(5 * _UNIT, 5 * _UNIT), Script([], [5]))
@example(*_READS_TAKE_LONG)
@example(_TRACKED_VIEW_HOLDS_STORAGE, Settings(2 * _UNIT, 12 * _UNIT), Script([], [0]))
def test_random_steps_end_with_their_bytes_and_leave_nothing(workload: Workload, how: Settings, script: Script) -> None:
    _check(workload, how, script)


@settings(_random_steps, max_examples=10, derandomize=True)
@given(workloads(), small_options, scripts)
@example(_STAYS_TRACKED, Settings(0, 16 * _UNIT), Script([], [0]))
def test_random_steps_of_small_tensors_end_with_their_bytes_and_leave_nothing(
    workload: Workload, how: Settings, script: Script
) -> None:
    """See NOTE [Small tensors] in `tierstore/ledger/windows.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "SMALL_BYTES", 2 * _UNIT)  # but no record is held back by the engine
        _check(workload, how, script)


@pytest.mark.many
@pytest.mark.timeout(600)
@settings(_random_steps, max_examples=150)
@given(workloads(), options, scripts)
def test_many_random_steps_end_with_their_bytes_and_leave_nothing(
    workload: Workload, how: Settings, script: Script
) -> None:
    _check(workload, how, script)


_ROOMY = Device(frozenset(range(24)), 0, 8 * _UNIT, 8 * _UNIT)


@settings(_random_steps, max_examples=20, derandomize=True)
@given(workloads(), options, scripts, devices)
@example(_ASKED_AGAIN_AFTER_IT_WAS_DROPPED, Settings(0, _UNIT), Script([1] * 40, [0]), _ROOMY)
@example(
    _ASKED_AGAIN_AFTER_IT_WAS_DROPPED,
    Settings(8 * _UNIT, _UNIT, lookahead_bytes=_UNIT),
    Script([1] * 40, [0]),
    _ROOMY,
)
def test_random_steps_on_an_accelerator_end_with_their_bytes_and_leave_nothing(
    workload: Workload, how: Settings, script: Script, device: Device
) -> None:
    _check(workload, how, script, device)


@settings(_random_steps, max_examples=20, derandomize=True)
@given(workloads(), group_options, scripts, group_devices)
def test_random_steps_of_groups_on_an_accelerator_end_with_their_bytes_and_leave_nothing(
    workload: Workload, how: Settings, script: Script, device: Device
) -> None:
    """See NOTE [Groups] in `tierstore/residency/groups.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "SMALL_BYTES", 2 * _UNIT)
        _check(workload, how, script, device)


def test_restores_record_without_room_in_backward_are_not_repeated(tmp_path: Path) -> None:
    """The last record is blocked when backward begins; 60 jobs may end while backward computes with it."""
    workload, how = _chain(64, 1, 1, 64), Settings(0, 59 * _UNIT)
    script = Script([2, 2, 2, 0, 0, 60], [0])
    real, _ = decisions_of(tmp_path, workload, how, script, num_steps=1)
    assert sum(1 for decision in real if decision.what == "restored") <= len(workload.saved)


def test_spills_that_backward_cancelled_are_not_queued_again(tmp_path: Path) -> None:
    decisions, _ = decisions_of(tmp_path, *_RECORD_WITHOUT_ROOM_IN_BACKWARD, num_steps=1)
    cancelled: set[int] = set()
    for decision in decisions:
        if decision.what == "spill cancelled":
            cancelled.add(decision.record)
        assert decision.what != "spill queued" or decision.record not in cancelled
    assert cancelled


def _on_a_device(num: int, *backward: Action, nodes: Sequence[int] = ()) -> Workload:
    """Tensors of one unit each; backward follows when all are packed."""
    saved = [Saved(_UNIT, nodes[index] if nodes else index) for index in range(num)]
    return Workload(saved, [*map(Pack, range(num)), EndScope(), *backward])


def _copies_back(decisions: Sequence[Decision]) -> list[tuple[str, int]]:
    names = {"reload queued": "copied", "computing waits for reload": "asked for"}
    return [(names[each.what], each.record) for each in decisions if each.what in names]


def test_device_is_left_by_all_that_has_to_as_room_is_freed(tmp_path: Path) -> None:
    """All four are saved by one node, staging has room for one, and nobody packs after them."""
    workload = _on_a_device(4, nodes=(0, 0, 0, 0))
    real, _ = decisions_of(tmp_path, workload, Settings(0, _UNIT), Script([*[0] * 4, 20], [0]), 1, _ROOMY)
    assert [each.record for each in real if each.what == "offload queued"] == [0, 1, 2, 3]


def test_copies_back_ahead_begin_while_the_copy_out_still_runs(tmp_path: Path) -> None:
    """No copy ends at all; the window of copies out makes computing wait for the first three."""
    workload = _on_a_device(4, *map(Unpack, (3, 2, 1, 0)))
    device = _ROOMY._replace(flight_bytes=_UNIT)
    real, _ = decisions_of(tmp_path, workload, Settings(8 * _UNIT, _UNIT), Script([], [0]), 1, device)
    ahead = [("copied", 2), ("copied", 1), ("copied", 0)]
    assert _copies_back(real) == [*ahead, ("asked for", 2), ("asked for", 1), ("asked for", 0)]


def test_copies_back_ahead_pass_over_what_the_graph_has_let_go_of(tmp_path: Path) -> None:
    workload = _on_a_device(4, Release(2), *map(Unpack, (3, 1, 0)))
    device = _ROOMY
    real, _ = decisions_of(tmp_path, workload, Settings(8 * _UNIT, _UNIT), Script([9] * 6, [0]), 1, device)
    ahead = [("copied", 3), ("asked for", 3), ("copied", 1), ("copied", 0)]
    assert _copies_back(real) == [*ahead, ("asked for", 1), ("asked for", 0)]


def test_copies_back_ahead_go_on_from_what_was_asked_for(tmp_path: Path) -> None:
    """Backward takes the second before its turn: when there is room again, what follows it comes first."""
    actions = [act for index in (7, 2, 6, 5, 4, 3, 1, 0) for act in (Unpack(index), Release(index))]
    device = _ROOMY._replace(reload_bytes=3 * _UNIT)
    how = Settings(8 * _UNIT, _UNIT)
    real, _ = decisions_of(tmp_path, _on_a_device(8, *actions), how, Script([9] * 10, [0]), 1, device)
    copies_back = _copies_back(real)
    assert copies_back[copies_back.index(("asked for", 6)) + 1] == ("copied", 1)


def test_what_is_asked_for_is_read_before_what_lies_ahead_of_it(tmp_path: Path) -> None:
    """Everything is on disk when backward begins."""
    how = Settings(0, 4 * _UNIT, prefetch="reverse", lookahead_bytes=_UNIT)
    real, counters = decisions_of(tmp_path, _chain(*[1] * 8), how, Script([8] * 40, [0]), num_steps=1)
    reads = [decision for decision in real if decision.what in ("demand queued", "prefetch queued")]
    assert reads[:2] == [Decision("demand queued", 7), Decision("prefetch queued", 6)]
    num_demanded = sum(1 for decision in reads if decision.what == "demand queued")
    assert (counters.prefetch_misses, counters.prefetch_late) == (num_demanded, 0), "counted as it was found"
