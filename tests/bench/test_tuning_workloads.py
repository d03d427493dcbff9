"""What prefetching is tuned on: steps that are the same each time, with a store too, and save what is said."""

import pytest

from bench.tuning_workloads import SAVED_BYTES, WORKLOADS, Workload, make_workload
from tests.conftest import MakeStore
from tests.hooks.programs import Bits, all_bits, assert_same_bits, grads
from tierstore import tiered_offload


def gradients(workload: Workload) -> list[Bits]:
    found = all_bits(grads(workload.model))
    assert None not in found, "a parameter that nothing depends on"
    return found


def test_every_workload_says_what_it_saves() -> None:
    assert SAVED_BYTES.keys() == WORKLOADS.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if number else ()) for number, name in enumerate(WORKLOADS)]
)
def test_step_of_a_workload_with_everything_on_disk_same_bits_and_saved_bytes_as_told(
    name: str, make_store: MakeStore
) -> None:
    plain, again = make_workload(name), make_workload(name)
    plain.step()
    expected = gradients(plain)
    with make_store(host_bytes=0, codec="none") as store:
        again.step(lambda: tiered_offload(store), store.flush)
        assert_same_bits(gradients(again), expected)
        assert store.stats().spilled_bytes == SAVED_BYTES[name]
