"""Scopes of every kind: entered twice, nested in each other and in those of PyTorch, on several threads."""

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.conftest import MakeStore
from tests.hooks.programs import (
    SIDE,
    Around,
    Mlp,
    Results,
    Settle,
    all_bits,
    assert_same_bits,
    assert_same_gradients,
    grads,
    in_threads,
    program_of,
    run_plain,
)
from tierstore import ConfigError, TierStore, keep_resident, tiered_offload


def test_decorator_each_call_is_a_scope_and_keeps_name_arguments_and_result(store: TierStore) -> None:
    def program(around: Around, settle: Settle) -> Results:
        model, scope = Mlp(), around()

        def named(batch: Tensor, *, factor: int) -> Tensor:
            """Doc."""
            return model(batch * factor)

        forward = scope(named) if isinstance(scope, tiered_offload) else named
        assert (forward.__name__, forward.__doc__) == ("named", "Doc.")
        for _ in range(2):
            loss = forward(torch.randn(SIDE, SIDE), factor=2)
            settle()
            loss.backward()
        return grads(model)

    assert_same_gradients(program, store)


async def _coroutine() -> None: ...


def _generator() -> Iterator[int]:
    yield 1


async def _async_generator() -> AsyncIterator[int]:
    yield 1


class _AsyncWhenCalled:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (_coroutine, "an async function"),
        (_generator, "a generator function"),
        (_async_generator, "an async generator function"),
        (partial(_coroutine), "an async function"),
        (_AsyncWhenCalled(), "an async function"),
        (partial(_AsyncWhenCalled()), "an async function"),
        (_AsyncWhenCalled().__call__, "an async function"),
    ],
)
def test_decorator_of_what_runs_after_its_call_refused(
    store: TierStore, function: Callable[[], object], kind: str
) -> None:
    with pytest.raises(ConfigError, match=f"is {kind}: .*Enter the scope inside it"):
        tiered_offload(store)(function)
    assert isinstance(tiered_offload(store)(_AsyncWhenCalled)(), _AsyncWhenCalled)  # to make one awaits nothing
    assert tiered_offload(store)(partial(max, 3))(2) == 3


def test_one_scope_entered_twice_at_once_same_bits(store: TierStore) -> None:
    scope = tiered_offload(store, min_bytes=0)

    def program(around: Around, settle: Settle) -> Results:
        def loss(weight: Tensor) -> Tensor:
            first = weight.exp()
            with nullcontext() if around is nullcontext else scope:
                second = first.tanh()
            return second.sigmoid().sum()

        return list(program_of(loss)(around if around is nullcontext else lambda: scope, settle))

    assert_same_gradients(program, store)


def test_nested_scopes_innermost_store_saves(make_store: MakeStore) -> None:
    """The tensor that both saved is stored by both."""
    outer, inner = make_store(), make_store()

    def program(around: Around, settle: Settle) -> Results:
        def loss(weight: Tensor) -> Tensor:
            hidden = weight * 2
            left = hidden.sin()
            with nullcontext() if around is nullcontext else tiered_offload(inner, min_bytes=0):
                right = hidden.cos()
            return (left + right).exp().sum()

        return list(program_of(loss)(around, lambda: (settle(), inner.flush())))

    assert_same_gradients(program, outer)
    for store, num_tensors in ((outer, 2), (inner, 1)):
        stats = store.stats()
        assert stats.packed_tensors == num_tensors
        assert stats.restored_bytes == num_tensors * SIDE * SIDE * 4
        assert stats.live_handles == 0


@pytest.mark.parametrize("is_inside", [True, False], ids=["inside", "around"])
@pytest.mark.parametrize(
    "others",
    [save_on_cpu, lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor), keep_resident],
    ids=["save_on_cpu", "identity hooks", "keep_resident"],
)
def test_other_hooks_inside_the_scope_or_around_it_same_bits(
    store: TierStore, others: Callable[[], AbstractContextManager[object]], is_inside: bool
) -> None:
    def program(around: Around, settle: Settle) -> Results:
        outer, inner = (around, others) if is_inside else (others, around)

        def loss(weight: Tensor) -> Tensor:
            first = weight.exp()
            with inner():
                second = first.tanh().sin()
            return second.exp().sum()

        return list(program_of(loss)(outer, settle))

    assert_same_gradients(program, store)
    assert is_inside or store.stats().restored_bytes > 0


def test_scope_left_by_exception_hooks_removed(store: TierStore) -> None:
    scope = tiered_offload(store, min_bytes=0)
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with suppress(ZeroDivisionError), scope, scope:
        weight.exp().sum()
        raise ZeroDivisionError
    packed = store.stats().packed_tensors
    weight.exp().sum().backward()
    assert store.stats().packed_tensors == packed


def test_hooks_disabled_entering_refused_as_by_torch_and_usable_after(store: TierStore) -> None:
    scope = tiered_offload(store, min_bytes=0)
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        scope.__enter__()
    with scope:
        weight.exp().sum().backward()
    assert store.stats().packed_tensors > 0


def test_hooks_of_another_thread_not_in_force(store: TierStore) -> None:
    with tiered_offload(store, min_bytes=0):
        in_threads(lambda: torch.randn(SIDE, requires_grad=True).exp().sum().backward())
    assert store.stats().packed_tensors == 0


@pytest.mark.parametrize("host_bytes", [0, "256KiB"])
def test_scopes_on_several_threads_over_one_store_same_bits(make_store: MakeStore, host_bytes: object) -> None:
    store = make_store(host_bytes=host_bytes, staging_bytes="64KiB")
    scope = tiered_offload(store, min_bytes=0)
    start = threading.Barrier(4)
    found: dict[int, Results] = {}

    def model_of(number: int) -> tuple[Mlp, list[Tensor]]:
        generator = torch.Generator().manual_seed(number)
        model = Mlp().eval()  # no dropout: the global generator is shared by the threads
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
        return model, [torch.randn(SIDE, SIDE, generator=generator) for _ in range(10)]

    def train(number: int) -> None:
        model, batches = model_of(number)
        start.wait()
        for batch in batches:
            with scope:
                loss = model(batch)
            loss.backward()
        found[number] = grads(model)

    in_threads(*(partial(train, number) for number in range(4)))
    for number in range(4):
        model, batches = model_of(number)
        for batch in batches:
            model(batch).backward()
        assert_same_bits(all_bits(found[number]), all_bits(grads(model)))
    assert store.stats().live_handles == 0


def test_store_named_only_in_the_scope_lives_as_long_as_the_graph(store_directory: Path) -> None:
    program = program_of(lambda weight: weight.exp().sin().sum())
    torch.manual_seed(0)
    found = program(
        lambda: tiered_offload(TierStore(store_directory, host_bytes=0, disk_bytes="1GiB"), min_bytes=0), bool
    )
    assert_same_bits(all_bits(found), run_plain(program))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_inside_the_scope_same_bits(store: TierStore, use_reentrant: bool) -> None:
    def program(backward_inside: bool, around: Around, settle: Settle) -> Results:
        blocks = torch.nn.ModuleList(Mlp().layers for _ in range(3))
        batch = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            hidden = batch
            for block in blocks:
                hidden = checkpoint(block, hidden * 2, use_reentrant=use_reentrant)
            loss = hidden.square().mean()
            settle()
            if backward_inside:
                loss.backward()
        del hidden
        settle()
        if not backward_inside:
            loss.backward()
        return [batch.grad, *grads(blocks)]

    for backward_inside in (True, False):
        assert_same_gradients(partial(program, backward_inside), store)


def test_checkpoint_not_reentrant_only_its_inputs_are_stored(store: TierStore) -> None:
    """The hooks that it enters itself are the innermost: what its blocks save never comes here."""
    block = Mlp().layers.requires_grad_(False)
    hidden = torch.randn(SIDE, SIDE, requires_grad=True) * 2
    with tiered_offload(store, min_bytes=SIDE * SIDE):
        for _ in range(3):
            hidden = checkpoint(block, hidden, use_reentrant=False)
        loss = hidden.sum()
    assert store.stats().packed_bytes == 3 * SIDE * SIDE * 4
    loss.backward()
    assert store.stats().packed_bytes == 3 * SIDE * SIDE * 4


def test_autocast_to_bfloat16_same_bits(store: TierStore) -> None:
    def program(outside: bool, cache_enabled: bool, around: Around, settle: Settle) -> Results:
        model = Mlp()
        for _ in range(2):
            cast = torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled)
            outer, inner = (cast, around()) if outside else (around(), cast)
            with outer, inner:
                loss = model(torch.randn(SIDE, SIDE))
                loss = loss + model.layers(torch.randn(SIDE, SIDE)).float().exp().sum()
            settle()
            loss.backward()
        return grads(model)

    for outside, cache_enabled in product((True, False), (True, False)):
        assert_same_gradients(partial(program, outside, cache_enabled), store)
    assert store.stats().restored_bytes > 0
