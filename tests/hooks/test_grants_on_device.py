"""Packs without the lock on an accelerator: NOTE [Grants] in `tierstore/ledger/grants.py`."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
import torch

from tests.conftest import MakeStore
from tests.device.fake import SeenDevice, name_of
from tests.hooks.granted import (
    GROUP,
    NBYTES,
    SIDE,
    SaveThree,
    assert_right,
    new_leaf,
    scope_with,
    sines,
)
from tests.hooks.programs import forget_after_error, in_threads
from tests.inspect_store import inspect
from tierstore import ModifiedInPlaceError, TierStore
from tierstore.ledger.state import State

pytestmark = pytest.mark.usefixtures("validated")

_PLACES = pytest.mark.parametrize("device_bytes", ["64MiB", 0], ids=["stays", "leaves"])


@pytest.fixture
def store(make_store: MakeStore, copies: SeenDevice) -> TierStore:
    """On an accelerator."""
    return make_store(host_bytes="64MiB", staging_bytes=4 * GROUP * NBYTES, copies=copies)


@pytest.mark.parametrize("acts", ["flush", "stats", None])
@pytest.mark.parametrize("num_staying", [0, 1, 5, 37])
def test_window_fills_in_the_middle_of_a_grant_no_more_than_a_group_beyond_it(
    store: TierStore, num_staying: int, acts: str | None
) -> None:
    """Then the log follows a plan: what is packed first leaves, and the rest stays."""
    window, num_out = inspect(store).device_window, []
    for step in range(4):
        leaf = new_leaf()
        with scope_with(store, num_staying * NBYTES):
            hidden = leaf * 2
            for number in range(60):
                hidden = hidden.sin()
                if acts is not None and number % 3 == 0:
                    getattr(store, acts)()
                most = window.resident.limit_bytes + window.group_bytes + NBYTES
                assert window.resident.used_bytes + window.resident.granted_bytes <= most
        if acts is None and step:
            num_registered = sum(record.num_members for record in inspect(store).records)
            assert num_registered == 60 - num_staying, "what the plan leaves there has no record"
        before = store.stats().offloaded_bytes
        hidden.sum().backward()
        assert_right(leaf, 60)
        num_out.append(before)
        del hidden
    if acts is None:
        left = {later - earlier for earlier, later in pairwise(num_out)}
        assert left == {(60 - num_staying) * NBYTES}, "as many leave in each step"


def test_known_graph_only_what_the_plan_sends_away_has_a_record(store: TierStore) -> None:
    """Whichever pack is the last of a grant."""
    for num_staying in range(30, 45):
        for step in range(2):
            with scope_with(store, num_staying * NBYTES):
                loss = sines(60, new_leaf() * 2).sum()
            num_registered = sum(record.num_members for record in inspect(store).records)
            assert num_registered == 60 - num_staying or not step
            loss.backward()
            del loss
            store.flush()


def test_what_others_have_let_go_leaves_with_the_next_pack_whatever_was_granted(store: TierStore) -> None:
    for step in range(3):
        with scope_with(store, 40 * NBYTES):
            held = [sines(5, new_leaf() * 2)]
            hidden = sines(65, held[0])  # more than leave
            waiting = [record for record in inspect(store).records if record.state is State.PENDING]
            hidden = sines(2, hidden)  # the first one takes the lock, and would leave a grant
            held.clear()
            hidden = sines(1, hidden)
            if step:
                assert len(waiting) == 1
                assert waiting[0].state is not State.PENDING
            loss = sines(27, hidden).sum()
        loss.backward()
        del loss, hidden


def test_plan_that_the_graph_leaves_in_the_middle_of_a_grant_same_bits(store: TierStore) -> None:
    """Other sizes, or nothing more, from somewhere on. The plan is dropped when the grant ends."""
    for number, narrow in [(60, 60), (60, 60), (60, 33), (60, 33), (40, 40), (60, 20), (60, 60)]:
        leaf = new_leaf()
        with scope_with(store, 20 * NBYTES):
            hidden = sines(narrow, leaf * 2)
            loss = sines(number - narrow, hidden[:, : SIDE // 2].clone()).sum() if narrow < number else hidden.sum()
        loss.backward()
        expected = new_leaf()
        hidden = sines(narrow, expected * 2)
        (sines(number - narrow, hidden[:, : SIDE // 2].clone()) if narrow < number else hidden).sum().backward()
        assert torch.equal(leaf.grad, expected.grad)
        del loss, hidden
        window = inspect(store).device_window
        assert (window.resident.used_bytes, window.resident.granted_bytes) == (0, 0)


@_PLACES
def test_stream_changed_between_packs_each_is_copied_from_its_own(
    store: TierStore, copies: SeenDevice, device_bytes: int | str
) -> None:
    leaf = new_leaf()
    with scope_with(store, device_bytes):
        hidden = sines(21, leaf * 2)
        copies.now = 1
        loss = sines(20, hidden).sum()
        copies.now = 2
        del hidden
    if device_bytes:
        assert {name_of(tracked.stream) for tracked in inspect(store).tracked} == {(0, 0), (0, 1)}
    inspect(store).residency.keep_on_device(0)  # all leaves
    store.flush()
    assert copies.copied_from == {(0, 0): 21 * NBYTES, (0, 1): 20 * NBYTES}
    loss.backward()
    assert_right(leaf, 41)


@_PLACES
def test_two_devices_in_one_graph_each_tensor_is_on_its_own(store: TierStore, device_bytes: int | str) -> None:
    def loss_of(leaf: torch.Tensor) -> torch.Tensor:
        wide = narrow = leaf * 2
        narrow = narrow.reshape(-1, 1).clone()
        for _ in range(5):
            wide, narrow = sines(4, wide), sines(3, narrow)
        return wide.sum() + narrow.sum()

    leaf, expected = new_leaf(), new_leaf()
    for _ in range(3):  # the last one follows a plan
        leaf.grad = expected.grad = None
        with scope_with(store, device_bytes):
            loss = loss_of(leaf)
        if device_bytes:
            assert Counter(tracked.device.index for tracked in inspect(store).tracked) == {0: 20, 1: 15}
            assert all(name_of(tracked.stream) == (tracked.device.index, 0) for tracked in inspect(store).tracked)
        store.flush()
        assert {record.device.index for record in inspect(store).records} <= {0, 1}
        loss.backward()
        loss_of(expected).backward()
        assert torch.equal(leaf.grad, expected.grad)
        del loss


@_PLACES
def test_tensors_in_host_memory_beside_those_of_a_device_stay_there(store: TierStore, device_bytes: int | str) -> None:
    """Neither goes by the other's grant."""

    def loss_of(leaf: torch.Tensor) -> torch.Tensor:
        wide = leaf * 2
        narrow = wide.reshape(-1, 2).clone()
        for _ in range(5):
            wide, narrow = sines(4, wide), sines(3, narrow)
        return wide.sum() + narrow.sum()

    leaf, expected = new_leaf(), new_leaf()
    for _ in range(3):
        leaf.grad = expected.grad = None
        with scope_with(store, device_bytes):
            loss = loss_of(leaf)
            on_host = [tracked for tracked in inspect(store).tracked if tracked.device is None]
            registered = [record.num_members for record in inspect(store).records if record.device is None]
            assert len(on_host) + sum(registered) == 15
            assert inspect(store).tracked_bytes == len(on_host) * NBYTES
            assert all(tracked.stream is None for tracked in on_host)
        loss.backward()
        loss_of(expected).backward()
        assert torch.equal(leaf.grad, expected.grad)
        del loss, on_host


@_PLACES
def test_edit_in_place_of_what_was_packed_without_the_lock_is_found(store: TierStore, device_bytes: int | str) -> None:
    with scope_with(store, device_bytes):
        hidden = sines(10, new_leaf() * 2)
        loss = hidden.sin().sum()
        hidden.detach().add_(1)
        del hidden
    with pytest.raises(ModifiedInPlaceError):
        loss.backward()
    forget_after_error()


def test_room_that_is_granted_and_not_used_is_not_reported(store: TierStore) -> None:
    devices = inspect(store).devices
    with scope_with(store, "64MiB"):
        loss = sines(10, new_leaf() * 2).sum()
        inspect(store)  # enters them
        loss = sines(2, loss.expand(SIDE, SIDE) * 2).sum()
        assert devices.window.resident.granted_bytes > 2**20
        assert devices.held_bytes <= 12 * NBYTES
    assert store.stats().device_bytes == 12 * NBYTES


def test_view_of_what_has_a_record_shares_that_whatever_is_granted(store: TierStore) -> None:
    with scope_with(store, "64MiB"):
        hidden = sines(3, new_leaf() * 2)
        loss = hidden.sin().sum() + sines(2, new_leaf() * 2).sum()
        store.stats()  # registers what is settled
        loss = loss + sines(5, new_leaf() * 2).sum()  # with a grant
        num_tracked = len(inspect(store).tracked)
        loss = loss + sines(3, new_leaf() * 2).sum()  # with another
        loss = loss + hidden.cos().sum()
        assert len(inspect(store).tracked) == num_tracked + 3
        del hidden
    loss.backward()


def test_large_tensor_that_is_to_leave_leaves_alone_whatever_is_granted(store: TierStore) -> None:
    """More than half of a batch is at once a record of its own."""
    for _ in range(5):  # the store's own thread ends a grant when it comes in between
        leaf = torch.full((5 * NBYTES // 4,), 0.5, requires_grad=True)  # a batch holds six of them, a group three
        with scope_with(store, 0):
            hidden = sines(2, leaf * 2)  # the first is registered, the second leaves a grant of the rest of a batch
            large = torch.cat([hidden] * 4).sin()
            assert len(inspect(store).records) == 2
            loss = large.sum() + hidden.sum()
        loss.backward()
        del loss, hidden, large
        store.flush()


def test_three_threads_with_grants_of_one_device_no_more_stays_than_may(store: TierStore) -> None:
    window, limit_bytes = inspect(store).device_window, 100 * NBYTES
    together = threading.Barrier(3)
    leaves = [new_leaf() for _ in range(3)]

    def pack(leaf: torch.Tensor) -> None:
        with scope_with(store, limit_bytes):
            together.wait(60)
            hidden = sines(3, leaf * 2)
            together.wait(60)
            hidden = sines(40, hidden)
            together.wait(60)
            inspect(store)  # enters them
            assert window.resident.used_bytes + window.resident.granted_bytes <= limit_bytes + window.group_bytes
            together.wait(60)
        hidden.sum().backward()

    in_threads(*(partial(pack, leaf) for leaf in leaves))
    for leaf in leaves:
        assert_right(leaf, 43)


def test_what_the_newest_node_packed_does_not_leave(store: TierStore) -> None:
    with scope_with(store, "64MiB"):
        loss = SaveThree.apply(SaveThree.apply(sines(5, new_leaf() * 2)))
        inspect(store).residency.keep_on_device(0)
        assert len(inspect(store).tracked) == 3
        hidden = sines(1, loss)
        assert inspect(store).tracked == []
    hidden.sum().backward()
