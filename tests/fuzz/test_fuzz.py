"""Every target over what is kept for it and over what Hypothesis makes of that: `python -m tests.fuzz` goes further."""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import repeat

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.target import Target, TooMuchError, bounded, check, seeds_and_kept, warm
from tests.fuzz.targets import TARGETS
from tierstore.disk.allocator import round_up


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


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_kept_and_damaged_inputs_raise_only_what_is_documented_within_bounds(target: Target) -> None:
    warm(target)
    inputs = seeds_and_kept(target)
    for data in inputs:
        check(target, data)

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(st.one_of(st.binary(max_size=100), damaged([data for data in inputs if len(data) < 5000])))
    def run(data: bytes) -> None:
        check(target, data)

    run()


IN_LITTLE_MEMORY = """
import resource
from tests.fuzz.target import seeds_and_kept, warm
from tests.fuzz.targets import TARGETS
targets = [TARGETS["client_frames"], TARGETS["encoded_values"]]
inputs = [(target, data) for target in targets for data in seeds_and_kept(target)]
for target in targets:
    warm(target)
used_bytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit_bytes = used_bytes + 24 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
for target, data in inputs:
    target.run(data)
print(len(inputs), "inputs")
"""


def test_kept_inputs_fit_into_little_memory_of_any_kind() -> None:
    """Native code's too, which is not seen by `tracemalloc`: a frame of zstd's may ask for gigabytes."""
    run = subprocess.run(
        [sys.executable, "-c", IN_LITTLE_MEMORY],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("inputs\n")


TOO_MUCH: dict[str, Callable[[], object]] = {
    "bytes of memory": lambda: bytearray(2**21),
    "lines of the package": lambda: [round_up(1) for _ in range(200)],
    "100 lines": lambda: [round_up(1) for _ in repeat(0)],
}


@pytest.mark.parametrize("words", TOO_MUCH)
def test_bounds_beyond_them_raise_even_without_end(words: str) -> None:
    with pytest.raises(TooMuchError, match=words), bounded(100, 2**20):
        TOO_MUCH[words]()
