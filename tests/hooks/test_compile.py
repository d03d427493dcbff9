"""`torch.compile` and compiled autograd beside offloading: compile inside, offload outside."""

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.census import Census
from tests.conftest import MakeStore
from tierstore import TierStore, TierStoreWarning, keep_resident, offload_module, tiered_offload

pytestmark = pytest.mark.filterwarnings("default")  # the compiler's own
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
BACKENDS = [
    "aot_eager",
    pytest.param("eager", marks=pytest.mark.slow),  # the other backends take different code through the same hooks
    pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow]),
]
MIB = 2**20


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


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


# --- regions ------------------------------------------------------------------------------------------------------


def _blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)) for _ in range(3)]


def _gradients(backend: str, store: TierStore | None) -> list[torch.Tensor]:
    blocks = _blocks()
    parameters = [parameter for block in blocks for parameter in block.parameters()]
    run: list[nn.Module] = [torch.compile(block, backend=backend) for block in blocks]  # type: ignore[misc]
    if store is not None:
        run = [offload_module(block, store=store, min_bytes=0) for block in run]
    found = []
    for step in range(3):
        hidden = torch.randn(128, 64, generator=torch.Generator().manual_seed(step))
        for parameter in parameters:
            parameter.grad = None
        for block in run:
            hidden = block(hidden)
        hidden.square().mean().backward()
        found += [parameter.grad.clone() for parameter in parameters]
    return found


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_blocks_compiled_inside_offloaded_outside_same_bits(make_store: MakeStore, backend: str) -> None:
    plain = _gradients(backend, None)
    torch._dynamo.reset()
    store = make_store()
    _assert_same(plain, _gradients(backend, store))
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
    store, found = make_store(), []
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


# --- scopes and stores inside of what is compiled ---------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_scope_entered_inside_a_compiled_function_is_warned_of_and_right(make_store: MakeStore, backend: str) -> None:
    store = make_store()
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
    messages = _warnings_of(lambda: losses.append(torch.compile(forward, backend=backend)(values)))
    assert any(message.startswith("tiered_offload is entered inside torch.compile") for message in messages)
    assert store.stats().live_handles > 0
    losses.pop().backward()
    found = [parameter.grad for parameter in plain.parameters()]
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)  # inductor rounds otherwise than eager
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


# --- compiled autograd ------------------------------------------------------------------------------------------------


def _compiled_backward(loss: torch.Tensor, backend: str, **options: bool) -> None:
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        loss.backward(**options)  # type: ignore[no-untyped-call]


def _chain(values: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        values = torch.tanh(values @ weight)
    return values.square().mean()


def _weights(number: int, width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(width, width, generator=generator) / width**0.5).requires_grad_() for _ in range(number)]


@pytest.mark.slow  # by "aot_eager", which test_one_backward_graph.py runs, it is the same
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=needs_compiler)])
def test_compiled_autograd_same_bits_in_one_graph(make_store: MakeStore, backend: str) -> None:
    weights = _weights(4, 32)

    def train(store: TierStore | None) -> list[torch.Tensor]:
        torch._dynamo.reset()
        found = []
        for step in range(4):
            values = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
            for weight in weights:
                weight.grad = None
            if store is None:
                loss = _chain(values, weights)
            else:
                with tiered_offload(store, min_bytes=0):
                    loss = _chain(values, weights)
            _compiled_backward(loss, backend)
            found += [weight.grad for weight in weights]
        return found

    plain = train(None)
    torch._dynamo.utils.counters.clear()
    store = make_store()
    _assert_same(plain, train(store))
    assert store.stats().spilled_bytes > 0
    assert _empty(store)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # the second one takes any step's saved tensors


@pytest.mark.parametrize("width", [7, 64])
def test_compiled_autograd_with_every_layout(store: TierStore, width: int) -> None:
    def model(leaf: torch.Tensor) -> torch.Tensor:
        hidden = leaf * 2
        expanded = hidden[:, :1].expand(-1, width)
        sliced = hidden[1:, ::2]
        turned = torch.view_as_complex(torch.stack([hidden, hidden.sin()], -1)).conj()
        halves = hidden.to(torch.bfloat16).t()
        total = (expanded * expanded.exp()).sum() + (sliced * sliced.cos()).sum() + (turned * turned).abs().sum()
        return total + (halves * halves).float().sum() + hidden.prod(0).sum()

    leaf = torch.randn(9, width, requires_grad=True)
    _compiled_backward(model(leaf), "aot_eager")
    expected, leaf.grad = leaf.grad, None
    with tiered_offload(store, min_bytes=0):
        loss = model(leaf)
    _compiled_backward(loss, "aot_eager")
    assert expected is not None
    assert leaf.grad is not None
    assert torch.equal(expected, leaf.grad)
    del loss
    assert _empty(store)


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
@pytest.mark.parametrize("host_bytes", [0, "2GiB"])
def test_compiled_autograd_restores_little_by_little(
    make_store: MakeStore, census: Census, host_bytes: int | str
) -> None:
    """What is handed out at once, eager and compiled: a small part of what was saved."""
    number, width, rows = 16, 16, 544 * 1024  # tensors of 34 MiB: glibc gives back at once what is above 32
    saved_bytes = (number + 1) * rows * width * 4
    store = make_store(staging_bytes="72MiB", host_bytes=host_bytes)
    weights = _weights(number, width)
    values = torch.randn(rows, width)

    def step(compiled: bool) -> int:
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        with tiered_offload(store, min_bytes=0):
            loss = _chain(values, weights)
        store.flush()
        return _peak_of(lambda: _compiled_backward(loss, "aot_eager") if compiled else loss.backward())

    step(compiled=False)  # the memory of the store itself is there from the first step on
    step(compiled=True)
    step(compiled=True)
    eager, compiled = step(compiled=False), step(compiled=True)
    assert eager < saved_bytes / 2  # gradients on their way included
    assert compiled < saved_bytes / 2
    suite = f"compiled autograd, a chain of 17 tensors, host_bytes={host_bytes}"
    census.count(suite, "MiB saved", saved_bytes // MIB)
    census.count(suite, "MiB held at once by eager backward", eager // MIB)
    census.count(suite, "MiB held at once by compiled backward", compiled // MIB)
