"""How far ahead of backward is fetched. Numbers alone; with a store: `tests/hooks/test_reach.py`."""

import pytest

from tierstore.rules.reach import Reach, Reaches
from tierstore.rules.windows import HostWindows

STAGING = 100


def _reach(*, asked_during_read: int, waits: bool = False) -> Reach:
    """Of a backward that asked for so many bytes while a read was under way, and for many more when none was."""
    reach = Reach()
    reach.asked_for(1000)
    reach.read_began(1)
    reach.asked_for(asked_during_read)
    if waits:
        reach.wait()
    reach.read_ended(1)
    reach.asked_for(1000)
    return reach


def test_graph_that_is_not_known_is_fetched_from_afar() -> None:
    assert Reach().is_far
    assert not Reaches().is_near(1)


@pytest.mark.parametrize(("asked_during_read", "is_near"), [(0, True), (STAGING, True), (STAGING + 1, False)])
def test_near_is_enough_if_staging_holds_what_is_asked_for_during_a_read(
    asked_during_read: int, *, is_near: bool
) -> None:
    reaches = Reaches()
    reaches.note(1, _reach(asked_during_read=asked_during_read), STAGING)
    assert reaches.is_near(1) is is_near


def test_what_is_asked_for_counts_from_the_beginning_of_each_read_to_its_end() -> None:
    reach = Reach()
    for key, before, meanwhile in ((1, 0, 30), (2, 500, 70), (3, 500, 20)):
        reach.asked_for(before)
        reach.read_began(key)
        reach.asked_for(meanwhile)
        reach.read_ended(key)
    assert reach.most_bytes == 70
    reach.read_ended(4)  # somebody else's
    assert reach.most_bytes == 70


def test_graph_that_waited_is_fetched_from_afar_at_once_and_the_next_time() -> None:
    reaches = Reaches()
    reaches.note(1, _reach(asked_during_read=0), STAGING)
    reach = _reach(asked_during_read=0, waits=True)
    assert reach.is_far
    reaches.note(1, reach, STAGING)
    assert not reaches.is_near(1)


def test_graphs_are_known_apart_and_the_oldest_is_forgotten() -> None:
    reaches = Reaches()
    for signature in range(65):
        reaches.note(signature, _reach(asked_during_read=0), STAGING)
    assert [signature for signature in range(66) if reaches.is_near(signature)] == list(range(1, 65))


def test_what_does_not_fit_into_staging_is_put_elsewhere_only_from_afar() -> None:
    books = HostWindows(host_bytes=10, staging_bytes=4)
    for is_far in (True, False):
        assert books.window_for_prefetch(4, is_far=is_far) is books.staging
    assert books.window_for_prefetch(5, is_far=True) is books.host
    assert books.window_for_prefetch(5, is_far=False) is None
