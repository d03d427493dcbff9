"""The `codec` option at work: what is learned from jobs and from the machine changes what is ordered next."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest

from tierstore.disk.codec.choice import CodecChooser
from tierstore.disk.codec.codec import NO_CODEC, Codec
from tierstore.disk.codec.figures import Sample
from tierstore.disk.codec.load import Readings
from tierstore.disk.codec.policy import CodecPolicy
from tierstore.disk.location import Location
from tierstore.disk.orders import ReadReport, WriteOrder, Written
from tierstore.disk.tier import Kind

KIND = Kind("float32", 4, "ReluBackward0", "many zeros")
FAST = Codec("zstd", -3)
RECORD = 16 * 2**20
RAW_CPU = 0.1e-9
"""Seconds per byte, like all that follow."""


class Machine:
    """Clocks that the test turns: four cores, none of them idle unless told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.idle = 0.0
        self.process = 0.0

    def pass_time(self, seconds: float, *, idle_cores: float) -> None:
        self.now += seconds
        self.idle += idle_cores * seconds
        self.process += (4 - idle_cores) * seconds

    def read(self) -> Readings:
        return Readings(self.now, self.idle, self.process)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    for module in ("policy", "load"):
        monkeypatch.setattr(f"tierstore.disk.codec.{module}.time", SimpleNamespace(perf_counter=lambda: made.now))
    monkeypatch.setattr("tierstore.disk.codec.policy.read_machine", made.read)
    monkeypatch.setattr("tierstore.disk.codec.policy.available_cores", lambda: 4.0)
    return made


def ordered(policy: CodecPolicy) -> WriteOrder:
    return policy.order(KIND, RECORD, None, is_space_short=False)


def written(
    codec: Codec = NO_CODEC, ratio: float = 1.0, cpu: float = RAW_CPU, samples: tuple[Sample, ...] = ()
) -> Written:
    return Written(codec, int(ratio * RECORD), 0, None, None, cpu * RECORD, 0.001, samples)


def location(codec: Codec, ratio: float) -> Location:
    return Location(0, 0, RECORD, int(ratio * RECORD), RECORD, codec.family, codec.level, 4, 0, None)


SIXTH = Sample(FAST, 1000, 160, 0.6e-6, 0.25e-6)


def move_raw(
    policy: CodecPolicy, machine: Machine, *, times: int = 4, idle_cores: float, sample: Sample = SIXTH
) -> None:
    """Records on their way down and up, unencoded, at 2 GB/s each way; the codec has been probed."""
    order = WriteOrder(NO_CODEC, 4, None, probe=False)
    for key in range(times):
        with policy.clock.timed("write", RECORD):
            machine.pass_time(RECORD / 2e9, idle_cores=idle_cores)
        policy.learn_written(key, KIND, RECORD, order, written(samples=(sample,)))
        with policy.clock.timed("read", RECORD):
            machine.pass_time(RECORD / 2e9, idle_cores=idle_cores)
        policy.learn_read(key, location(NO_CODEC, 1.0), ReadReport(0.001, RAW_CPU * RECORD))


def a_while(policy: CodecPolicy, machine: Machine, *, idle_cores: float) -> Codec:
    """What is ordered after some seconds in which the disk is busy and so many cores are idle."""
    for _ in range(40):
        move_raw(policy, machine, idle_cores=idle_cores)
        order = ordered(policy)
    return order.codec


def test_auto_follows_the_load_of_the_cores(machine: Machine) -> None:
    policy = CodecPolicy(None, 8)
    assert ordered(policy).codec == NO_CODEC
    assert a_while(policy, machine, idle_cores=4.0) == FAST
    assert a_while(policy, machine, idle_cores=0.0) == NO_CODEC
    assert a_while(policy, machine, idle_cores=4.0) == FAST


def test_auto_follows_the_load_of_the_disk(machine: Machine) -> None:
    """The same cores, half of one to spare: relieving a busy disk pays, an idle one not."""
    policy = CodecPolicy(None, 8)
    assert a_while(policy, machine, idle_cores=1.4) == FAST
    for _ in range(20):
        machine.pass_time(0.3, idle_cores=1.4)
        order = ordered(policy)
    assert order.codec == NO_CODEC


def test_what_a_record_took_to_write_overrules_the_probe(machine: Machine) -> None:
    policy = CodecPolicy(None, 8)
    assert a_while(policy, machine, idle_cores=4.0) == FAST
    for key in range(100, 120):
        policy.learn_written(key, KIND, RECORD, WriteOrder(FAST, 4, None, probe=False), written(FAST, 0.9, 5e-9))
    assert ordered(policy).codec == NO_CODEC


def test_what_a_record_took_to_read_overrules_the_probe(machine: Machine) -> None:
    policy = CodecPolicy(None, 8)
    assert a_while(policy, machine, idle_cores=4.0) == FAST
    policy.learn_written(100, KIND, RECORD, WriteOrder(FAST, 4, None, probe=False), written(FAST, 0.16, 0.6e-9))
    for _ in range(20):
        policy.learn_read(100, location(FAST, 0.16), ReadReport(0.001, 10e-9 * RECORD))
    assert ordered(policy).codec == NO_CODEC
    policy.forget(100)
    policy.learn_read(100, location(FAST, 0.16), ReadReport(0.001, 10e-9 * RECORD))  # its kind is not known any more


@pytest.mark.parametrize("way", ["write", "read"])
def test_how_long_records_were_on_their_way_overrules_the_probe(machine: Machine, way: str) -> None:
    policy = CodecPolicy(None, 4)
    halved, order = Sample(FAST, 1000, 500, 1e-6, 1e-6), WriteOrder(FAST, 4, None, probe=False)
    device_seconds, lane_seconds = RECORD / 4e9, 4 * RECORD / 1.2e9
    write_lane, read_lane = {"write": (lane_seconds, None), "read": (None, lane_seconds)}[way]
    for _ in range(10):
        move_raw(policy, machine, idle_cores=4.0, sample=halved)
        ordered(policy)
    assert ordered(policy).codec == FAST
    for key in range(100, 120):
        done = written(FAST, 0.5, 1e-9)._replace(write_seconds=device_seconds, lane_seconds=write_lane)
        policy.learn_written(key, KIND, RECORD, order, done)
        policy.learn_read(key, location(FAST, 0.5), ReadReport(device_seconds, 1e-9 * RECORD, read_lane))
    assert ordered(policy).codec == NO_CODEC


def test_name_of_a_kind_is_of_bounded_length() -> None:
    """A client of the daemon may call its tensors what it likes; all their names stand in one report."""
    policy = CodecPolicy(NO_CODEC, 8)
    order = WriteOrder(NO_CODEC, 4, None, probe=False)
    name = policy.learn_written(1, Kind("a" * 256, 4, "b" * 256), RECORD, order, written())
    assert name == "a" * 128
    honest = Kind("bfloat16", 2, "ScaledDotProductCudnnAttentionBackward0", "many zeros")
    whole = "bfloat16 ScaledDotProductCudnnAttentionBackward0, many zeros"
    assert policy.learn_written(2, honest, RECORD, order, written()) == whole
    assert set(policy.choices()) == {name, whole}


@pytest.mark.parametrize("codec", [NO_CODEC, FAST], ids=["as it is", "encoded"])
def test_values_of_the_index_say_nothing_of_transfers(monkeypatch: pytest.MonkeyPatch, codec: Codec) -> None:
    """No transfer is in their CPU time, and none is timed: else encoding seems dear, and the disk beyond measure."""
    policy, learned = CodecPolicy(None, 8), []
    for name in ("learn_written", "learn_read", "learn_write_speed", "learn_read_speed"):
        monkeypatch.setattr(CodecChooser, name, lambda *_, name=name, **__: learned.append(name))
    order, value = WriteOrder(codec, 4, None, probe=False), written(codec, 0.5)._replace(value=b"", write_seconds=0.0)
    policy.learn_written(1, KIND, RECORD, order, value)
    policy.learn_read(1, msgspec.structs.replace(location(codec, 0.5), segment=None), ReadReport(0.0, 0.01))
    assert learned == ([] if codec == NO_CODEC else ["learn_written", "learn_read"])
    learned.clear()
    policy.learn_written(1, KIND, RECORD, order, written(codec, 0.5))
    policy.learn_read(1, location(codec, 0.5), ReadReport(0.001, 0.01))
    of_transfers = [] if codec == NO_CODEC else ["learn_write_speed", "learn_read_speed"]  # of others, by the clock
    assert sorted(learned) == sorted(["learn_written", "learn_read", *of_transfers])


def test_a_transfer_that_fails_says_nothing_of_the_disk(machine: Machine) -> None:
    policy = CodecPolicy(None, 8)
    order = WriteOrder(NO_CODEC, 4, None, probe=False)

    def fail() -> None:
        machine.pass_time(1000.0, idle_cores=4.0)
        raise OSError("it broke")

    for _ in range(8):
        with pytest.raises(OSError, match="it broke"), policy.clock.timed("write", RECORD):
            fail()
    policy.learn_written(1, KIND, RECORD, order, written(samples=(SIXTH,)))
    assert ordered(policy).codec == NO_CODEC


def test_choices_are_named_by_dtype_origin_and_content() -> None:
    policy = CodecPolicy(None, 8)
    order = WriteOrder(NO_CODEC, 4, None, probe=False)
    for key, kind in enumerate((KIND, Kind("bfloat16", 2), Kind("bool", 1, content="all zeros"), Kind())):
        policy.learn_written(key, kind, RECORD, order, written())
    assert policy.choices() == {
        "float32 ReluBackward0, many zeros": {"none": 1},
        "bfloat16": {"none": 1},
        "bool, all zeros": {"none": 1},
        "unknown": {"none": 1},
    }


def test_a_fixed_codec_measures_nothing(machine: Machine) -> None:
    policy = CodecPolicy(Codec("zstd", 1), 8)
    assert policy.clock is None
    for key in range(20):
        policy.learn_written(key, KIND, RECORD, ordered(policy), written())
        machine.pass_time(0.3, idle_cores=4.0)
        assert ordered(policy).codec == Codec("zstd", 1)
    assert policy.kind_of(Kind("float32", 4), memoryview(bytes(2**20))).content == ""
