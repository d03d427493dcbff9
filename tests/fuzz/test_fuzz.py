"""Every target over what is kept for it and over what Hypothesis makes of that: `python -m tests.fuzz` goes further."""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import repeat

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.bounds import TooMuchError, bounded, counted_lines
from tests.fuzz.target import Target, check, kept_inputs, kept_inputs_as_text, warm
from tests.fuzz.targets import TARGETS

EACH = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


@pytest.fixture(autouse=True)
def _warm(request: pytest.FixtureRequest) -> None:
    """What a target makes once does not count for its first input."""
    if "target" in request.fixturenames:
        warm(request.getfixturevalue("target"))


@EACH
def test_kept_inputs_raise_only_what_is_documented_within_bounds(target: Target) -> None:
    for data in [*target.seeds(), *kept_inputs(target)]:
        check(target, data)


def damaged(inputs: list[bytes]) -> st.SearchStrategy[bytes]:
    """One of them with some bytes replaced, inserted or cut, or two in a row."""

    def change(data: bytes, other: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
        for place, num_bytes, new in edits:
            at = place % (len(data) + 1)
            data = data[:at] + new + data[at + num_bytes :]
        return data + other

    some = st.sampled_from(inputs)
    edit = st.tuples(st.integers(0, 2**16), st.sampled_from([0, 1, 2, 8, 2**16]), st.binary(max_size=4))
    return st.builds(change, some, st.one_of(st.just(b""), some), st.lists(edit, max_size=3))


@EACH
def test_damaged_inputs_raise_only_what_is_documented_within_bounds(target: Target) -> None:
    inputs = [data for data in (*target.seeds(), *kept_inputs(target)) if len(data) < 5000]

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(st.one_of(st.binary(max_size=100), damaged(inputs)))
    def run(data: bytes) -> None:
        check(target, data)

    run()


IN_LITTLE_MEMORY = """
import resource, sys
from tests.fuzz.target import kept_inputs, warm
from tests.fuzz.targets import TARGETS
target = TARGETS[sys.argv[1]]
inputs = [*target.seeds(), *kept_inputs(target)]
warm(target)
used_bytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit_bytes = used_bytes + 24 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
for data in inputs:
    target.run(data)
print(len(inputs), "inputs")
"""


@pytest.mark.parametrize("name", ["client_frames", "encoded_values"])
def test_kept_inputs_fit_into_little_memory_of_any_kind(name: str) -> None:
    """Native code's too, which is not seen by `tracemalloc`: a frame of zstd's may ask for gigabytes."""
    run = subprocess.run(
        [sys.executable, "-c", IN_LITTLE_MEMORY, name],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("inputs\n")


def test_bounds_memory_beyond_them_raises() -> None:
    with pytest.raises(TooMuchError, match="bytes of memory"), bounded(10**6, 2**20):
        bytearray(2**21)


@pytest.mark.parametrize("forever", [False, True])
def test_bounds_lines_beyond_them_raise_even_without_end(forever: bool) -> None:
    from tierstore.disk.allocator import round_up

    calls: Callable[[], object] = lambda: [round_up(1) for _ in (repeat(0) if forever else range(200))]  # noqa: E731
    with pytest.raises(TooMuchError, match="lines of the package"), bounded(100, 2**20):
        calls()
    with counted_lines() as seen:
        round_up(1)
    assert len(seen) == 1


@pytest.mark.parametrize("error", [ValueError("x"), RecursionError(), MemoryError()])
def test_check_undocumented_error_is_a_finding(error: Exception) -> None:
    def run(data: bytes) -> None:
        raise error

    with pytest.raises(type(error)):
        check(Target("any", run, list, ()), b"")


def test_kept_inputs_come_back_from_their_file() -> None:
    from ast import literal_eval

    inputs = [b"", b"\n\x00'\"\\", bytes(range(256))]
    assert [literal_eval(line) for line in kept_inputs_as_text(inputs).splitlines()] == inputs
