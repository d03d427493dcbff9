"""A store that is used otherwise than it was meant says so, once; one that is only looked at does not."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import MakeStore
from tests.processes import python
from tierstore import TierStore, TierStoreWarning, tiered_offload

PUT_INSIDE = "put forward and the loss inside"
NUM_STEPS = 50


def forward() -> torch.Tensor:
    return nn.Linear(64, 64)(torch.ones(64, 64)).tanh().square().sum()  # type: ignore[no-any-return]


def without_scope(store: TierStore) -> None:
    forward().backward()


def scope_not_entered(store: TierStore) -> None:
    tiered_offload(store)
    forward().backward()


def around_backward(store: TierStore) -> None:
    loss = forward()
    with tiered_offload(store, min_bytes=0):
        loss.backward()


def without_gradients(store: TierStore) -> None:
    with tiered_offload(store, min_bytes=0), torch.no_grad():
        forward()


@pytest.mark.parametrize(
    ("train", "why"),
    [
        (without_scope, "it has no scope"),
        (scope_not_entered, "never entered"),
        (around_backward, "inside its scopes"),
        (without_gradients, "inside its scopes"),
    ],
)
def test_forgotten_scope_is_told_as_the_store_closes(
    store_directory: Path, train: Callable[[TierStore], None], why: str
) -> None:
    store = TierStore(store_directory, host_bytes="1MiB")
    train(store)
    with pytest.warns(TierStoreWarning, match=f"{why}; {PUT_INSIDE}") as told:
        store.close()
    assert [Path(each.filename).name for each in told] == [Path(__file__).name]
    assert "no saved tensor was seen" in store.stats().summary()
    store.close()  # it is told once


FORGOTTEN = """
import contextlib, torch
from tierstore import TierStore
store = TierStore(".", host_bytes="1MiB")
torch.nn.Linear(8, 8)(torch.ones(8)).sum().backward()
"""
ERROR_INSIDE = """
with contextlib.suppress(ZeroDivisionError), store:
    1 / 0
"""


@pytest.mark.parametrize(
    ("more", "times"),
    [
        pytest.param("", 1, id="as the program ends"),
        pytest.param("store.close()", 1, id="as it is closed"),
        pytest.param(ERROR_INSIDE, 0, id="an error tells more"),
    ],
)
def test_forgotten_scope_of_a_store_that_lives_until_the_program_ends_is_told_once(
    store_directory: Path, more: str, times: int
) -> None:
    done = python("-c", FORGOTTEN + more, cwd=store_directory)
    assert (done.returncode, done.stderr.count("it has no scope")) == (0, times), done.stderr


def looked_at(store: TierStore) -> None:
    store.stats()


def put_by_hand(store: TierStore) -> None:
    store.get(store.put(torch.ones(4)))


def kept_as_small(store: TierStore) -> None:
    with tiered_offload(store):
        loss = forward()
    loss.backward()


@pytest.mark.parametrize("use", [looked_at, put_by_hand, kept_as_small])
def test_store_that_saw_something_or_was_only_looked_at_says_nothing(
    store_directory: Path, use: Callable[[TierStore], None]
) -> None:
    with warnings.catch_warnings(), TierStore(store_directory, host_bytes="1MiB") as store:
        warnings.simplefilter("error")
        use(store)


def step(store: TierStore) -> torch.Tensor:
    with tiered_offload(store, min_bytes=0):
        return forward()


def test_new_store_in_each_step_is_told(store_directory: Path) -> None:
    def steps(count: int) -> None:
        for _ in range(count):
            with TierStore(store_directory, host_bytes="1MiB") as store:
                step(store).backward()

    steps(8)
    with pytest.warns(TierStoreWarning, match="Open one before the loop") as told:
        steps(4)
    assert len(told) == 1


def test_stores_of_several_steps_may_come_one_after_another(store_directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            with TierStore(store_directory, host_bytes="1MiB") as store:
                for _ in range(2):
                    step(store).backward()


@pytest.mark.parametrize("retained", [True, False])
def test_graphs_that_stay_alive_are_told_once(make_store: MakeStore, retained: bool) -> None:
    store, losses = make_store(host_bytes="64MiB"), []

    def steps() -> None:
        for _ in range(NUM_STEPS):
            loss = step(store)
            loss.backward(retain_graph=retained)
            losses.append(loss)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        steps()
    texts: list[Any] = [str(each.message) for each in told]
    assert ["are all alive" in text for text in texts] == [True] * retained
