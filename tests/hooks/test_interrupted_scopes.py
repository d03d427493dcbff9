"""Ctrl-C while a scope of `keep_resident` is entered or left, at each moment: the hooks around it are as they were."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.moments import interrupt, moments
from tierstore import keep_resident, tiered_offload


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
        for moment in moments(getattr(keep_resident, name), interrupt, first=first, least=first + 3):
            with suppress(KeyboardInterrupt), moment, keep_resident(hooks=has_hooks):
                pass
            assert hooks_of_thread() == around, f"moment {moment.number}"
    assert hooks_of_thread() == []
