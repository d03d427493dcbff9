"""A scope takes its hooks off once all that the graph saves is known to stay: NOTE [Hooks off] in
`tierstore/ledger/whole_graphs.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.conftest import MakeStore
from tests.device.fake import SeenDevice
from tests.device.timed import TimedDevice, forward_through, narrow_windows
from tests.hooks.granted import NBYTES, new_leaf, sines
from tests.hooks.programs import bits, in_threads
from tests.hooks.test_interrupted_scopes import hooks_of_thread
from tests.inspect_store import inspect
from tests.moments import interrupt, moments
from tierstore import StoreClosedError, TierStore, keep_resident, selective_checkpoint_contexts, tiered_offload
from tierstore.hooks.scope import OffloadScope

_NUM = 100
_STAYS = "64MiB"
_NUM_STEPS = 8
_NUM_OFF = 63
_LAYER_BYTES = 2**16
_SECONDS = 0.01


@pytest.fixture
def store(make_store: MakeStore, copies: SeenDevice) -> TierStore:
    return make_store(host_bytes="64MiB", copies=copies)


def _scope(store: TierStore, device_bytes: int | str = _STAYS, **options: Any) -> tiered_offload:
    return tiered_offload(store, min_bytes=0, device_bytes=device_bytes, **options)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _are_on() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _step(
    scope: tiered_offload, number: int = _NUM, forward: Callable[[int, Any], Any] = sines, rows: int = 32
) -> bool:
    """Whether the hooks were on when forward was over. The gradient is right."""
    leaf, expected = (torch.full((rows, 32), 0.5, requires_grad=True) for _ in range(2))
    with scope:
        loss = forward(number, leaf * 2).sum()
        are_on = _are_on()
    assert not _are_on()
    loss.backward()
    forward(number, expected * 2).sum().backward()
    assert bits(leaf.grad) == bits(expected.grad)
    return are_on


def _coarse(number: int, x: Any) -> Any:
    """Another graph than that of `sines`, though it begins like that, with as many saved tensors."""
    x = sines(10, x)
    for _ in range(number - 10):
        x = (x + 1).sin()
    return x


def _know(scope: tiered_offload, **options: Any) -> None:
    assert [_step(scope, **options) for _ in range(_NUM_STEPS + 1)] == [True] * _NUM_STEPS + [False]


def test_graph_that_has_stayed_for_some_steps_needs_no_hooks(store: TierStore) -> None:
    _know(_scope(store))
    assert store.stats().device_bytes == 0


def test_without_hooks_as_much_is_charged_and_counted(store: TierStore) -> None:
    figures = []
    for _ in range(_NUM_STEPS + 2):
        before = store.stats()
        with _scope(store):
            loss = sines(_NUM, new_leaf() * 2).sum()
        held_bytes = store.stats().device_bytes
        loss.backward()
        del loss
        after = store.stats()
        packed = after.packed_tensors - before.packed_tensors, after.packed_bytes - before.packed_bytes
        figures.append((held_bytes, *packed, after.device_bytes))
    assert figures == [(_NUM * NBYTES, _NUM, _NUM * NBYTES, 0)] * (_NUM_STEPS + 2)


def test_one_step_in_many_is_looked_at(store: TierStore) -> None:
    scope = _scope(store)
    _know(scope)
    seen = [_step(scope) for _ in range(2 * _NUM_OFF + 2)]
    assert [index for index, are_on in enumerate(seen) if are_on] == [_NUM_OFF - 1, 2 * _NUM_OFF]


def test_longer_graph_is_noticed_and_the_hooks_stay_on_for_longer_each_time(store: TierStore) -> None:
    scope = _scope(store)
    _know(scope)
    assert not _step(scope, 3 * _NUM), "it begins like the known one"
    for num_steps in (4 * _NUM_STEPS, 16 * _NUM_STEPS):
        assert [_step(scope) for _ in range(num_steps + 1)] == [True] * num_steps + [False]
        assert not _step(scope, 3 * _NUM)


def test_shorter_graph_is_noticed(store: TierStore) -> None:
    scope = _scope(store)
    _know(scope)
    assert not _step(scope, _NUM - 20)
    assert _step(scope)


def test_several_graphs_in_one_scope(store: TierStore) -> None:
    """The second stays too, the first time; it is noticed when the scope ends."""
    scope = _scope(store)
    _know(scope)
    leaf = new_leaf()
    with scope:
        for _ in range(3):
            sines(_NUM, leaf * 2).sum().backward()
    assert _step(scope)
    for _ in range(5 * _NUM_STEPS):
        with scope:
            for _ in range(3):
                sines(_NUM, leaf * 2).sum().backward()
                assert _are_on(), "two graphs are not known as one"


def test_other_sizes_of_the_same_nodes(store: TierStore) -> None:
    scope = _scope(store, 2**22)
    _know(scope)
    assert not _step(scope, rows=64)
    assert not _step(scope, rows=16)
    assert _step(scope, rows=256), "it takes 3.3 MB, and half as much again has no room"


def test_graph_without_room_for_half_as_much_again_keeps_its_hooks(store: TierStore) -> None:
    scope = _scope(store, _NUM * NBYTES * 3 // 2 - NBYTES)
    assert all(_step(scope) for _ in range(_NUM_STEPS + 2))


def test_something_left_the_hooks_stay_on(store: TierStore) -> None:
    scope = _scope(store, _NUM * NBYTES // 2)
    assert all(_step(scope) for _ in range(_NUM_STEPS + 2))


def test_something_left_after_the_scope_the_hooks_stay_on(store: TierStore) -> None:
    """All stayed when the scope ended, but another graph needed room before backward began."""
    scope = _scope(store, 2 * _NUM * NBYTES)
    for _ in range(_NUM_STEPS + 2):
        losses = []
        for _ in range(2):
            with scope:
                losses.append(sines(_NUM * 3 // 2, new_leaf() * 2).sum())
                assert _are_on()
            scope = _scope(store, 2 * _NUM * NBYTES)
        for loss in losses:
            loss.backward()


def test_scope_around_a_part_of_the_graph_keeps_its_hooks(store: TierStore) -> None:
    """What its own part takes tells nothing of the whole."""
    scope = _scope(store)
    for _ in range(_NUM_STEPS + 2):
        leaf = new_leaf()
        hidden = leaf * 2
        for _ in range(3):
            with scope:
                hidden = sines(_NUM, hidden)
                assert _are_on()
        hidden.sum().backward()
        del hidden


@pytest.mark.parametrize("options", [{"select": lambda _: True}, {"prefetch": "none", "trace": True}])
def test_scope_that_is_to_see_each_tensor_keeps_its_hooks(
    store: TierStore, options: dict[str, Any], tmp_path: Any
) -> None:
    scope = _scope(store, **options | ({"trace": tmp_path / "trace"} if "trace" in options else {}))
    assert all(_step(scope) for _ in range(_NUM_STEPS + 2))


@pytest.mark.parametrize("around", ["hooks", "a scope"])
def test_hooks_around_the_scope_get_nothing(store: TierStore, around: str) -> None:
    scope, packed = _scope(store), list[torch.Tensor]()
    for _ in range(_NUM_STEPS + 2):
        outer = saved_tensors_hooks(packed.append, abs) if around == "hooks" else _scope(store, 0)
        with outer:
            hooks = hooks_of_thread()
            with scope:
                loss = sines(_NUM, new_leaf() * 2).sum()
                assert len(hooks_of_thread()) == 2
            assert hooks_of_thread() == hooks
        loss.backward()
    assert not packed
    assert store.stats().offloaded_bytes == 0


def test_what_is_entered_while_they_are_off(store: TierStore) -> None:
    def forward(number: int, x: Any) -> Any:
        x = sines(number, x)
        with keep_resident():
            x = x.sin().cos()
        with keep_resident(hooks=False):
            x = x.sin().cos()
        with saved_tensors_hooks(_same, _same):
            x = x.sin().cos()
        x = checkpoint(lambda t: t.sin().cos(), x, use_reentrant=False)
        x = checkpoint(lambda t: t.sin().cos(), x, use_reentrant=True)
        policy = [torch.ops.aten.sin.default]
        return checkpoint(
            lambda t: t.sin().cos(),
            x,
            use_reentrant=False,
            context_fn=lambda: selective_checkpoint_contexts(policy),
        )

    _know(_scope(store), forward=forward)


def test_backward_in_the_scope_leaves_the_hooks_as_they_were(store: TierStore) -> None:
    """Autograd gives its thread the hooks with which backward began, and then those of before again. The leaf is kept,
    so the first that the scope packs is what backward computes again."""
    scope, leaf, long = _scope(store), new_leaf(), 4 * _NUM
    _know(scope, number=long)
    with scope:
        checkpoint(lambda x: sines(long, x * 2), leaf, use_reentrant=True).sum().backward()
    assert not hooks_of_thread()
    expected = new_leaf()
    sines(long, expected * 2).sum().backward()
    assert bits(leaf.grad) == bits(expected.grad)


def test_second_graph_of_a_scope_keeps_its_hooks(store: TierStore) -> None:
    """A known one: the end of the scope would not tell how many nodes it had."""
    scope, long = _scope(store), 4 * _NUM
    _know(scope, number=long)
    with scope:
        sines(3, new_leaf() * 2).sum().backward()
        loss = sines(long, new_leaf() * 2).sum()
        assert _are_on()
    assert store.stats().device_bytes == long * NBYTES
    loss.backward()


def test_sizes_that_the_first_packs_do_not_tell_keep_the_hooks_on(store: TierStore) -> None:
    def step(rows: int) -> bool:
        leaf = new_leaf()
        with _scope(store):
            loss = sines(_NUM, torch.full((rows, 32), 0.5) * sines(_NUM, leaf * 2).sum()).sum()
            are_on = _are_on()
        loss.backward()
        return are_on

    assert all(step(rows) for _ in range(_NUM_STEPS) for rows in (32, 32, 128))


def test_steps_in_which_something_leaves_in_between(store: TierStore) -> None:
    """Those in which all stays are not in a row then."""
    scope = _scope(store, "4MiB", prefetch="none")

    def step(rows: int) -> bool:
        leaf = new_leaf()
        with scope:
            loss = sines(_NUM, torch.full((rows, 32), 0.5) * sines(40, leaf * 2).sum()).sum()
            are_on = _are_on()
        loss.backward()
        return are_on

    assert all(step(rows) for _ in range(2 * _NUM_STEPS) for rows in (32, 32, 32, 1024))
    assert store.stats().offloaded_bytes


def test_two_graphs_at_once_have_room_for_one(store: TierStore) -> None:
    long = 4 * _NUM
    most_bytes = long * NBYTES * 17 // 10
    scope, losses, are_over = _scope(store, most_bytes), list[torch.Tensor](), threading.Barrier(2)
    were_on: list[bool] = []
    _know(scope, number=long)

    def forward() -> None:
        with scope:
            losses.append(sines(long, new_leaf() * 2).sum())
            were_on.append(_are_on())
            are_over.wait(60)

    in_threads(forward, forward)
    assert sorted(were_on) == [False, True]
    assert store.stats().device_bytes <= most_bytes
    for loss in losses:
        loss.backward()


def test_graph_whose_figures_were_asked_for_is_as_large(store: TierStore) -> None:
    """Then its tensors have records."""
    held = []
    for _ in range(_NUM_STEPS + 2):
        with _scope(store):
            loss = sines(_NUM, new_leaf() * 2).sum()
            store.stats()
            are_on = _are_on()
        held.append(store.stats().device_bytes)
        loss.backward()
    assert not are_on
    assert held == [_NUM * NBYTES] * (_NUM_STEPS + 2)


def _stays_for(store: TierStore, forward: Callable[[Any], Any], device_bytes: int | str = _STAYS) -> int:
    """One step of another graph: what is charged for it before its backward. The gradient is right."""
    leaf, expected = new_leaf(), new_leaf()
    with _scope(store, device_bytes):
        loss = forward(leaf * 2).sum()
        assert _are_on()
    charged = store.stats().device_bytes
    loss.backward()
    forward(expected * 2).sum().backward()
    assert bits(leaf.grad) == bits(expected.grad)
    return charged


@pytest.mark.parametrize("num_alike", [1, 5, 15])
@pytest.mark.parametrize("num_after", [0, 1, 50])
def test_another_graph_than_the_expected_goes_on_in_a_log(store: TierStore, num_alike: int, num_after: int) -> None:
    """What was taken for the expected one stays, and is charged: nothing is packed twice, or lost."""
    _know(_scope(store))
    before = store.stats().packed_tensors

    def other(x: torch.Tensor) -> torch.Tensor:
        x = (sines(num_alike, x) + 1) + 1
        return sines(num_after, x)

    assert _stays_for(store, other) == (num_alike + num_after) * NBYTES
    after = store.stats()
    assert after.packed_tensors - before == num_alike + num_after
    assert after.device_bytes == 0


def test_what_follows_another_graph_than_the_expected_leaves_as_ever(make_store: MakeStore, copies: SeenDevice) -> None:
    staying_bytes = []
    for is_expected in (False, True):
        store = make_store(host_bytes="64MiB", copies=copies)
        if is_expected:
            _know(_scope(store))
        with _scope(store, NBYTES * 10):
            loss = sines(_NUM, (sines(5, new_leaf() * 2) + 1) + 1).sum()
        staying_bytes.append(store.stats().device_bytes)
        loss.backward()
    assert staying_bytes[1] <= staying_bytes[0]


def test_two_graphs_by_turns_are_each_expected_in_their_turn(store: TierStore) -> None:
    """Of one all stays. The other never has room: nothing of it is kept for being taken for the first."""
    small, large = _scope(store), _scope(store, NBYTES)
    were_on = []
    for _ in range(2 * _NUM_STEPS):
        were_on.append(_step(small))
        before = store.stats().offloaded_bytes
        assert _step(large, _NUM, _coarse)
        assert store.stats().offloaded_bytes - before >= (_NUM - 2) * NBYTES
    assert were_on == [True] * _NUM_STEPS + [False] * _NUM_STEPS


def test_graphs_in_no_order_keep_their_hooks(store: TierStore) -> None:
    """Which graph comes next cannot be told, so nothing of a large one is kept for being taken for a small one."""
    small, large = _scope(store), _scope(store, NBYTES)
    order = [number % 3 == 0 or number % 5 == 0 for number in range(6 * _NUM_STEPS)]
    for is_small in order:
        assert _step(small) if is_small else _step(large, _NUM, _coarse)


def test_scope_that_ends_before_the_graph_is_told(store: TierStore) -> None:
    scope = _scope(store)
    _know(scope)
    leaf = new_leaf()
    with scope:
        part = sines(4, leaf * 2).sum()
    assert store.stats().device_bytes == 4 * NBYTES
    with scope:
        loss = sines(_NUM, leaf * 2).sum()
        assert _are_on(), "this is not what came after the graph before it"
    assert store.stats().device_bytes == (4 + _NUM) * NBYTES
    (part + loss).backward()
    del part, loss
    assert store.stats().device_bytes == 0


def test_backward_while_a_graph_is_expected(store: TierStore) -> None:
    """Of what the scope has kept so far. It is dead then, and nothing is charged for it."""
    scope = _scope(store)
    _know(scope)
    leaf = new_leaf()
    with scope:
        sines(3, leaf * 2).sum().backward()
        loss = sines(_NUM, new_leaf() * 2).sum()
    assert store.stats().device_bytes == _NUM * NBYTES
    loss.backward()
    expected = new_leaf()
    sines(3, expected * 2).sum().backward()
    assert bits(leaf.grad) == bits(expected.grad)


def test_change_in_place_of_what_was_kept_is_found(store: TierStore) -> None:
    scope = _scope(store)
    _know(scope)
    leaf = new_leaf()
    with scope:
        first = leaf * 2
        loss = sines(_NUM, first).sum()
        assert not _are_on()
    first.add_(1)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def test_scope_that_saves_nothing_does_not_come_between(store: TierStore) -> None:
    scope = _scope(store)
    _know(scope)
    with scope, torch.no_grad():
        sines(_NUM, new_leaf() * 2)
    assert not _step(scope)


def test_graph_that_is_dropped_or_kept_or_used_twice(store: TierStore) -> None:
    scope = _scope(store)
    _know(scope)
    leaf = new_leaf()
    with scope:
        sines(_NUM, leaf * 2).sum()
        dropped_in_the_scope = not _are_on()
    with scope:
        loss = sines(_NUM, leaf * 2).sum()
    loss.backward(retain_graph=True)
    once = leaf.grad
    leaf.grad = None
    loss.backward()
    assert dropped_in_the_scope
    assert once is not None
    assert bits(once) == bits(leaf.grad)
    del loss
    assert store.stats().device_bytes == 0


def test_error_of_forward_is_not_taken_for_another_graph(store: TierStore) -> None:
    scope = _scope(store)
    _know(scope)
    with suppress(ZeroDivisionError), scope:
        sines(_NUM // 2, new_leaf() * 2)
        assert not _are_on()
        raise ZeroDivisionError
    assert not _step(scope)


def test_device_memory_that_is_exhausted_is_explained_and_the_hooks_stay_on(store: TierStore) -> None:
    scope = _scope(store)
    _know(scope)

    def run_out() -> None:
        with scope:
            sines(_NUM // 2, new_leaf() * 2)
            raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError) as caught:
        run_out()
    assert "In the next steps it does" in "".join(caught.value.__notes__)
    assert _step(scope)


def test_store_that_is_closed_meanwhile(make_store: MakeStore, copies: SeenDevice) -> None:
    """What autograd keeps by itself is still there."""
    store = make_store(host_bytes="64MiB", copies=copies)
    scope = _scope(store)
    _know(scope)
    leaf, expected = new_leaf(), new_leaf()
    with scope:
        hidden = sines(_NUM, leaf * 2)
        middle = hidden.detach().requires_grad_()
        loss = middle.sin().sum()
    store.close()
    loss.backward()
    expected_middle = sines(_NUM, expected * 2).detach().requires_grad_()
    expected_middle.sin().sum().backward()
    assert bits(middle.grad) == bits(expected_middle.grad)


@pytest.mark.usefixtures("unvalidated")
@pytest.mark.parametrize(("name", "owner"), [("pack", OffloadScope), ("__exit__", tiered_offload)])
@pytest.mark.parametrize("has_outer", [False, True])
def test_interrupted_at_any_moment_leaves_the_hooks_as_they_were(
    make_store: MakeStore, copies: SeenDevice, name: str, owner: type, has_outer: bool
) -> None:
    def known() -> tiered_offload:
        scope = _scope(make_store(host_bytes="64MiB", copies=copies))
        _know(scope)
        return scope

    scope = known()
    first = 2 if name == "__exit__" else 1
    with ExitStack() as stack:
        if has_outer:
            stack.enter_context(saved_tensors_hooks(_same, _same))
        around = hooks_of_thread()
        for moment in moments(getattr(owner, name), interrupt, first=first, least=20):
            try:
                with moment, scope:
                    sines(_NUM, new_leaf() * 2)
            except KeyboardInterrupt:
                pass
            except StoreClosedError:  # the interrupt came in the middle of a change
                with keep_resident(hooks=False):
                    scope = known()
            assert hooks_of_thread() == around, f"moment {moment.number}"


@contextmanager
def _slow_link(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, spare: int | None) -> Iterator[Any]:
    """A link that carries next to nothing while forward runs: in the end, all has to stay."""
    narrow_windows(monkeypatch, _LAYER_BYTES * 4)
    engine = TimedDevice(_LAYER_BYTES / _SECONDS / 50, spare)
    store = make_store(host_bytes="1GiB", copies=engine)

    def forward(number: int, x: torch.Tensor) -> Any:
        engine.synchronize()
        return forward_through(engine, [_SECONDS] * number, x)

    yield store, forward


@pytest.mark.parametrize(
    ("spare", "are_on"), [(2 * _NUM * _LAYER_BYTES, False), (_NUM * _LAYER_BYTES // 2, True), (None, True)]
)
def test_auto_only_with_memory_for_such_a_graph_once_more(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, spare: int | None, are_on: bool
) -> None:
    with _slow_link(make_store, monkeypatch, spare) as (store, forward):
        rows = _LAYER_BYTES // 128
        steps = [_step(_scope(store, "auto"), forward=forward, rows=rows) for _ in range(30)]
        assert steps[:3] == [True] * 3
        assert steps[-1] is are_on


def test_nothing_is_learned_of_a_graph_whose_hooks_went_off(store: TierStore) -> None:
    """What was packed before the hooks went stays, too, if another scope wants nothing to stay. Nothing is learned."""
    scope = _scope(store)
    _know(scope)
    with scope:
        loss = sines(_NUM, new_leaf() * 2).sum()
    with _scope(store, 0):
        pass
    assert store.stats().offloaded_bytes == 0
    loss.backward()
    del loss
    store.stats()
    assert inspect(store).num_known_graphs == 0


@pytest.mark.parametrize("goes", ["by its backward", "dropped after the hooks went"])
def test_rest_stays_charged_when_the_first_part_of_the_graph_has_gone(store: TierStore, goes: str) -> None:
    scope = _scope(store)
    for number in range(_NUM_STEPS + 2):
        leaf = new_leaf()
        with scope:
            first = sines(2, leaf * 2).sum()
            rest = sines(_NUM, leaf * 2).sum()
        if goes == "by its backward":
            first.backward()
        del first
        if number > _NUM_STEPS:
            assert store.stats().device_bytes >= _NUM * NBYTES
        rest.backward()
        del rest
    assert store.stats().device_bytes == 0


def test_first_tensor_that_dies_at_once_does_not_keep_the_hooks_on(store: TierStore) -> None:
    """A metric that is computed before the rest, and dropped."""
    scope, on = _scope(store), []
    for _ in range(2 * _NUM_STEPS):
        leaf = new_leaf()
        with scope:
            (leaf * 2).sin().sum().item()
            rest = sines(_NUM, leaf * 2).sum()
            on.append(_are_on())
        rest.backward()
    assert not all(on)


def test_first_tensor_that_died_the_others_of_another_graph_are_charged(store: TierStore) -> None:
    scope = _scope(store)
    _know(scope)
    x, hidden = new_leaf() * 2, new_leaf() * 2
    with scope:
        first = x.sin()
        rest = sines(10, hidden)
        del first
        rest = (rest + 1) + 1
        rest = rest.sin()
    assert store.stats().device_bytes >= 10 * NBYTES


@pytest.mark.parametrize("factor", [2, 4])
def test_auto_for_a_graph_that_is_larger_from_now_on(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, factor: int
) -> None:
    narrow_windows(monkeypatch, _LAYER_BYTES * 4)
    engine = TimedDevice(_LAYER_BYTES / _SECONDS / 50, 100 * _NUM * _LAYER_BYTES)
    store = make_store(host_bytes="1GiB", copies=engine)

    def on(rows: int) -> bool:
        leaf = torch.full((rows, 32), 0.5, requires_grad=True)
        with _scope(store, "auto"):
            engine.synchronize()
            loss = forward_through(engine, [_SECONDS] * _NUM, leaf * 2).sum()
            are_on = _are_on()
        loss.backward()
        return are_on

    rows = _LAYER_BYTES // 128
    assert not [on(rows) for _ in range(40)][-1]
    larger = [on(rows * factor) for _ in range(40)]
    assert not all(larger)


def test_graph_that_is_too_large_from_now_on_is_learned(store: TierStore) -> None:
    """It has no room, so its order is to be learned."""
    scope = _scope(store, 700 * 1024)
    _know(scope)
    for _ in range(30):
        leaf = torch.full((1024, 32), 0.5, requires_grad=True)
        with scope:
            loss = sines(_NUM, leaf * 2).sum()
        loss.backward()
        del loss
    store.stats()
    assert inspect(store).num_known_graphs > 0


def test_interrupt_that_is_caught_inside_the_scope(make_store: MakeStore, copies: SeenDevice) -> None:
    """As another graph is noticed: what follows is in a log."""
    store = None
    for moment in moments(OffloadScope._begin_unexpected, interrupt):
        if store is None or store._core.residency.guard.closed is not None:
            store = make_store(host_bytes="64MiB", copies=copies)
            scope = _scope(store)
            _know(scope)
        with scope:
            y = (sines(5, new_leaf() * 2) + 1) + 1
            with suppress(KeyboardInterrupt), moment:
                y.sin()
            if store._core.residency.guard.closed is None:
                sines(_NUM, y).sum().backward()
        if store._core.residency.guard.closed is None:
            for _ in range(_NUM_STEPS):  # so that it is expected again
                _step(scope)


def test_storage_that_is_saved_twice_is_charged_once(store: TierStore) -> None:
    scope = _scope(store)

    def begin(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + x.cos() + x.sin()

    for _ in range(_NUM_STEPS + 1):
        with scope:
            loss = sines(_NUM, begin(new_leaf() * 2)).sum()
            are_on = _are_on()
        loss.backward()
    assert not are_on
    with scope:
        y = (begin(new_leaf() * 2) + 1) + 1
        y = y.sin()
    assert store.stats().device_bytes == 2 * NBYTES


def test_first_tensors_on_two_devices(store: TierStore) -> None:
    scope, on = _scope(store), []
    for _ in range(2 * _NUM_STEPS):
        with scope:
            x = sines(4, new_leaf() * 2)
            y = sines(4, x.sum().reshape(1, 1).expand(1024, 1).contiguous())
            z = sines(_NUM, y.sum() * x)
            on.append(_are_on())
        z.sum().backward()
        del x, y, z
    assert not all(on)


def test_scope_inside_with_other_options_is_another_graph(store: TierStore) -> None:
    """It ends before the outer one, and is not the graph that comes before that."""
    outer, inner, on = _scope(store), _scope(store, 2**24), []
    for _ in range(3 * _NUM_STEPS):
        with outer:
            y = sines(5, new_leaf() * 2)
            with inner:
                y = sines(20, y)
            y = sines(80, y)
            on.append(_are_on())
        y.sum().backward()
        del y
    assert not all(on)


def test_scope_inside_with_the_same_options_charges_once(store: TierStore) -> None:
    scope = _scope(store)
    for _ in range(_NUM_STEPS):
        with scope:
            with scope:
                y = sines(20, new_leaf() * 2)
            y = sines(80, y)
        y.sum().backward()
        del y
    with scope:  # the hooks go here
        with scope:
            y = sines(20, new_leaf() * 2)
        y = sines(80, y)
    assert store.stats().device_bytes == 100 * NBYTES


def test_scopes_around_a_gradient_that_is_differentiated_again(store: TierStore) -> None:
    """The second and the third save more of the graph of the first, before its backward is over."""
    scope, were_on = _scope(store), []
    for _ in range(3 * _NUM_STEPS):
        leaf = new_leaf()
        with scope:
            loss = sines(_NUM, leaf * 2).sum()
            were_on.append(_are_on())
        with scope:
            (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        with scope:
            penalty = gradient.square().sum()
        penalty.backward()
        expected = new_leaf()
        (gradient,) = torch.autograd.grad(sines(_NUM, expected * 2).sum(), expected, create_graph=True)
        gradient.square().sum().backward()
        assert bits(leaf.grad) == bits(expected.grad)
        del loss, gradient, penalty
    assert were_on[-_NUM_STEPS:] == [False] * _NUM_STEPS
    assert store.stats().device_bytes == 0


def test_graph_is_expected_but_the_store_is_closed(store: TierStore) -> None:
    scope = _scope(store)
    _know(scope)
    store.close()
    with pytest.raises(StoreClosedError), scope:
        sines(1, new_leaf() * 2)
