"""The `codec` option at work: what is learned from jobs and from the machine changes what is ordered next."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tierstore.disk.codec.choice import Sample, WriteOrder
from tierstore.disk.codec.codec import NO_CODEC, Codec
from tierstore.disk.codec.load import Readings
from tierstore.disk.codec.policy import CodecPolicy
from tierstore.disk.location import Written
from tierstore.disk.tier import Kind, Loaded

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


SIXTH = Sample(FAST, 1000, 160, 0.6e-6, 0.25e-6)


def move_raw(
    policy: CodecPolicy, machine: Machine, *, times: int = 4, idle_cores: float, sample: Sample = SIXTH
) -> None:
    """Records on their way down and up, unencoded, at 2 GB/s each way; the codec has been probed."""
    order = WriteOrder(NO_CODEC, 4, None, probe=False)
    for _ in range(times):
        with policy.clock.timed("write", RECORD):
            machine.pass_time(RECORD / 2e9, idle_cores=idle_cores)
        policy.learn_written(KIND, RECORD, order, written(samples=(sample,)), "none")
        with policy.clock.timed("read", RECORD):
            machine.pass_time(RECORD / 2e9, idle_cores=idle_cores)
        policy.learn_read(RECORD, Loaded(RECORD, 0.001, RAW_CPU * RECORD))


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


def test_name_of_a_kind_is_of_bounded_length() -> None:
    """A client of the daemon may call its tensors what it likes; all their names stand in one report."""
    policy = CodecPolicy(NO_CODEC, 8)
    order = WriteOrder(NO_CODEC, 4, None, probe=False)
    name = policy.learn_written(Kind("a" * 256, 4, "b" * 256), RECORD, order, written(), "none")
    assert name == "a" * 128
    honest = Kind("bfloat16", 2, "ScaledDotProductCudnnAttentionBackward0", "many zeros")
    whole = "bfloat16 ScaledDotProductCudnnAttentionBackward0, many zeros"
    assert policy.learn_written(honest, RECORD, order, written(), "none") == whole
    assert set(policy.choices()) == {name, whole}
