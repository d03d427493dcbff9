"""`torch.compile` and compiled autograd beside offloading: compile inside, offload outside."""

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.conftest import MakeStore
from tierstore import TierStore, TierStoreWarning, keep_resident, offload_module, tiered_offload

pytestmark = [
    pytest.mark.filterwarnings("default"),  # the compiler's own
    pytest.mark.usefixtures("nothing_compiled"),
]


def _assert_same(expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


def _empty(store: TierStore) -> bool:
    stats = store.stats()
    return (stats.live_handles, stats.disk_bytes) == (0, 0)


def _warnings_of(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught if issubclass(warning.category, TierStoreWarning)]


def _blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)) for _ in range(3)]


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_blocks_compiled_inside_offloaded_outside_same_bits(store: TierStore) -> None:
    def gradients(offload: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
        torch._dynamo.reset()
        blocks, found = _blocks(), []
        parameters = [parameter for block in blocks for parameter in block.parameters()]
        run = [offload(torch.compile(block)) for block in blocks]  # type: ignore[arg-type]
        for step in range(3):
            hidden = torch.randn(128, 64, generator=torch.Generator().manual_seed(step))
            for block in run:
                hidden = block(hidden)
            store.flush()  # else backward of so small a graph may come before any write has begun
            found += torch.autograd.grad(hidden.square().mean(), parameters)
        return found

    plain = gradients(lambda block: block)
    _assert_same(plain, gradients(lambda block: offload_module(block, store=store, min_bytes=0)))
    assert store.stats().spilled_bytes > 0
    assert _empty(store)


@pytest.mark.parametrize("how", ["the model", "the blocks", "the blocks in place"])
def test_offloaded_blocks_compiled_from_outside_are_compiled_inside_and_store(make_store: MakeStore, how: str) -> None:
    """The first and the last block are not offloaded, and are compiled all the same."""

    class Block(nn.Module):  # Dynamo does not begin at frames of torch.nn, such as those of `nn.Sequential`
        def __init__(self, layers: nn.Module) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return batch + self.layers(batch)  # type: ignore[no-any-return]

    values = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))

    def gradients(store: TierStore | None) -> list[torch.Tensor]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = nn.Sequential(*map(Block, _blocks()))
        if store is not None:
            offload_module(model[1], store=store, min_bytes=0)
        if how == "the model":
            run: nn.Module = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
        elif how == "the blocks":
            run = nn.Sequential(*(torch.compile(block, backend="aot_eager") for block in model))
        else:
            run = model
            for block in model:
                block.compile(backend="aot_eager")
        for _ in range(2):
            model.zero_grad()
            run(values).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    plain = gradients(None)
    store, found = make_store(staging_bytes="384KiB"), []  # a group takes in no matrix; one region fits
    assert _warnings_of(lambda: found.extend(gradients(store))) == []
    _assert_same(plain, found)
    assert torch._dynamo.utils.counters["stats"]["calls_captured"] >= 2 * 5
    stats = store.stats()
    assert 0 < stats.packed_bytes <= 2 * (2 * 128 * 256 + 2 * 128 * 64 + 1024) * 4  # of one block in two steps
    assert _empty(store)


@pytest.mark.parametrize(("host_bytes", "warned"), [("64KiB", True), ("64MiB", False)])
def test_region_that_asks_for_more_than_the_budget_at_once_is_warned_of_once(
    make_store: MakeStore, host_bytes: str, warned: bool
) -> None:
    store = make_store(host_bytes=host_bytes)
    model = nn.Sequential(*_blocks())
    compiled = torch.compile(model, backend="aot_eager")

    def step() -> None:
        with tiered_offload(store, min_bytes=0):
            loss = compiled(torch.randn(128, 64)).square().mean()
        loss.backward()

    messages = _warnings_of(step)
    assert len(messages) == warned
    for message in messages:
        assert "compiled region asks for" in message
        assert "offload_module(torch.compile(block), store=store)" in message


def test_large_node_that_was_not_compiled_is_not_warned_of(make_store: MakeStore) -> None:
    store = make_store(host_bytes="1KiB")

    def step() -> None:
        with tiered_offload(store, min_bytes=0):
            hidden = torch.randn(128, 64, requires_grad=True) * 1
            loss = (hidden * hidden.exp()).sum()
        loss.backward()

    assert _warnings_of(step) == []


def test_scope_entered_inside_a_compiled_function_is_warned_of_and_right(store: TierStore) -> None:
    plain = nn.Sequential(*_blocks())

    def forward(values: torch.Tensor) -> torch.Tensor:
        with tiered_offload(store, min_bytes=0):
            hidden: torch.Tensor = plain(values)
        with keep_resident():
            return hidden.square().mean()

    values = torch.randn(128, 64)
    with keep_resident():
        plain(values).square().mean().backward()
    expected = [parameter.grad for parameter in plain.parameters()]
    plain.zero_grad()
    losses: list[torch.Tensor] = []
    messages = _warnings_of(lambda: losses.append(torch.compile(forward, backend="aot_eager")(values)))
    assert any(message.startswith("tiered_offload is entered inside torch.compile") for message in messages)
    assert store.stats().live_handles > 0
    losses.pop().backward()
    found = [parameter.grad for parameter in plain.parameters()]
    _assert_same(expected, found)
    assert _empty(store)


def test_store_used_by_hand_inside_a_compiled_function_is_not_traced(store: TierStore) -> None:
    @torch.compile(backend="eager")
    def there_and_back(values: torch.Tensor) -> torch.Tensor:
        handle = store.put(values * 2)
        store.flush()
        return store.get(handle) + 1

    values = torch.randn(1000)
    assert torch.equal(there_and_back(values), values * 2 + 1)
    assert store.stats().spilled_bytes > 0
    assert torch._dynamo.utils.counters["frames"]["total"] <= 5, "the store's own functions are compiled"


def _peak_of(backward: Callable[[], None]) -> int:
    """Bytes by which the process grows while `backward` runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: see proc(5)

    def kilobytes(field: str) -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return int(line.split()[1])

    before = kilobytes("VmRSS:")
    backward()
    return (kilobytes("VmHWM:") - before) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak counter")
def test_compiled_autograd_restores_little_by_little(make_store: MakeStore) -> None:
    """What is handed out at once, eager and compiled: a small part of what was saved."""
    number, width, rows = 16, 16, 544 * 1024  # tensors of 34 MiB: glibc gives back at once what is above 32
    saved_bytes = (number + 1) * rows * width * 4
    store = make_store(staging_bytes="72MiB")
    weights = [(torch.randn(width, width) / 4).requires_grad_() for _ in range(number)]
    values = torch.randn(rows, width)

    def step(compiled: bool) -> int:
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        with tiered_offload(store, min_bytes=0):
            hidden = values
            for weight in weights:
                hidden = torch.tanh(hidden @ weight)
            loss = hidden.square().mean()
        del hidden
        store.flush()
        if not compiled:
            return _peak_of(loss.backward)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
            return _peak_of(loss.backward)

    step(compiled=False)  # the memory of the store itself is there from the first step on
    step(compiled=True)
    step(compiled=True)
    for compiled in (False, True):
        assert step(compiled=compiled) < saved_bytes / 2  # gradients on their way included
