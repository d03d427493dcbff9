"""Ctrl-C while a scope is entered or left, at each moment: its hooks do not stay on the thread."""

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.moments import MOST_MOMENTS, Moment, interrupt
from tierstore import StoreClosedError, TierStore, keep_resident, tiered_offload


def interrupted_step(store: TierStore, function: Any, number: int) -> Moment:
    weight = torch.ones(1000, requires_grad=True)
    with Moment(function, number, interrupt) as moment:
        try:
            with tiered_offload(store, min_bytes=0):
                (weight * weight).exp()
        except KeyboardInterrupt:
            pass
    return moment


@pytest.mark.usefixtures("unvalidated")
@pytest.mark.parametrize(
    ("function", "first"),
    # When leaving begins nothing of ours has run yet: no Python code can do anything about that moment.
    [(tiered_offload.__enter__, 1), (tiered_offload.__exit__, 2)],
    ids=["entered", "left"],
)
def test_scope_interrupted_at_any_moment_leaves_no_hooks(make_store: Any, function: Any, first: int) -> None:
    store = make_store(host_bytes=0)
    interrupted_step(store, function, MOST_MOMENTS)  # what is done once (caches of typing) would shift the moments
    for number in range(first, MOST_MOMENTS):
        moment = interrupted_step(store, function, number)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, f"moment {number}"
        if not moment.has_come:
            break
        try:
            store.flush()
        except StoreClosedError:
            store = make_store(host_bytes=0)
    assert first + 5 < number < MOST_MOMENTS - 1


def hooks_of_thread() -> list[Any]:
    """The innermost first."""
    found = []
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        found.append(hooks)
    for hooks in reversed(found):
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
    return found


@pytest.mark.usefixtures("unvalidated")
@pytest.mark.parametrize("has_hooks", [True, False])
@pytest.mark.parametrize(("name", "first"), [("__enter__", 1), ("__exit__", 2)], ids=["entered", "left"])
def test_keep_resident_interrupted_at_any_moment_leaves_the_hooks_around_it(
    make_store: Any, name: str, first: int, has_hooks: bool
) -> None:
    with tiered_offload(make_store()), saved_tensors_hooks(abs, abs), saved_tensors_hooks(abs, abs):
        around = hooks_of_thread()
        for number in range(first, MOST_MOMENTS):
            with Moment(getattr(keep_resident, name), number, interrupt) as moment:
                try:
                    with keep_resident(hooks=has_hooks):
                        pass
                except KeyboardInterrupt:
                    pass
            assert hooks_of_thread() == around, f"moment {number}"
            if not moment.has_come:
                break
    assert hooks_of_thread() == []
    assert first + 3 < number < MOST_MOMENTS - 1
