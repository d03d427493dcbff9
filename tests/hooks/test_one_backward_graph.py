"""Compiled autograd: whatever the store does with the saved tensors, backward is one graph, and is traced twice."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.conftest import MakeStore
from tierstore import (
    ModifiedInPlaceError,
    StoreClosedError,
    TierStore,
    keep_resident,
    offload_module,
    tiered_offload,
)

pytestmark = [
    pytest.mark.filterwarnings("default"),  # the compiler's own
    pytest.mark.usefixtures("nothing_compiled"),
]

Tensors = list[torch.Tensor]
Loss = Callable[[int], torch.Tensor]


class Graphs:
    def __init__(self, backend: str = "aot_eager") -> None:
        self.number, self._backend = 0, backend

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Inside it, backward is compiled; a graph that breaks is an error."""

        def compiler(graph: torch.fx.GraphModule, inputs: Tensors) -> Callable[..., object]:
            self.number += 1
            run: Callable[..., object] = torch._dynamo.lookup_backend(self._backend)(graph, inputs)
            return run

        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=compiler, fullgraph=True)):
            yield

    def run(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Its backward, compiled."""
        with self.backward():
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def check(self, most: int = 2) -> None:
        """At most that many, none of them a part: the first is for one step, the second for all others."""
        assert not torch._dynamo.utils.counters["graph_break"]
        assert 1 <= self.number <= most


def _weights(number: int) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(64, 64, generator=generator) / 8).requires_grad_() for _ in range(number)]


def _batch(step: int) -> torch.Tensor:
    return torch.randn(128, 64, generator=torch.Generator().manual_seed(step))


def _chain(values: torch.Tensor, weights: Tensors) -> torch.Tensor:
    for weight in weights:
        values = torch.tanh(values @ weight)
    return values.square().mean()


def _taken(leaves: Tensors) -> list[torch.Tensor | None]:
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def _assert_plain(loss: Loss, step: int, leaves: Tensors) -> None:
    """The gradients are those of a step without a store."""
    found = _taken(leaves)
    loss(step).backward()  # type: ignore[no-untyped-call]
    for one, other in zip(_taken(leaves), found, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("forward", "where", "host_bytes"),
    [("eager", "inside the scope", 0), ("eager", "after it", "64MiB"), ("compiled", "after it", 0)],
)
def test_one_graph_and_the_same_bits(make_store: MakeStore, forward: str, where: str, host_bytes: int | str) -> None:
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())))
    run = torch.compile(model, backend="aot_eager") if forward == "compiled" else model
    leaves: Tensors = list(model.parameters())
    store, graphs = make_store(host_bytes=host_bytes, staging_bytes="64KiB"), Graphs()

    def loss_of(step: int) -> torch.Tensor:
        return run(_batch(step)).square().mean()  # type: ignore[no-any-return]

    for step in range(3):
        with tiered_offload(store, min_bytes=0):
            loss = loss_of(step)
            if where == "inside the scope":
                graphs.run(loss)
        if where == "after it":
            graphs.run(loss)
        _assert_plain(loss_of, step, leaves)
    graphs.check()
    del loss
    stats = store.stats()
    assert stats.packed_tensors > 0
    assert (stats.spilled_bytes > 0) == (host_bytes == 0)
    assert stats.live_handles == 0


def test_not_traced_again_where_other_tensors_have_left_memory(make_store: MakeStore) -> None:
    weights, graphs = _weights(4), Graphs()
    for step, host_bytes in enumerate([0, "64MiB", "96KiB", "160KiB", 0]):
        with tiered_offload(make_store(host_bytes=host_bytes, staging_bytes="64KiB"), min_bytes=0):
            loss = _chain(_batch(step), weights)
        graphs.run(loss)
        _assert_plain(lambda step: _chain(_batch(step), weights), step, weights)
    graphs.check()


@pytest.mark.parametrize("min_bytes", [0, "1MiB"], ids=["stored", "small"])
def test_not_traced_again_where_kept_tensors_have_other_versions(make_store: MakeStore, min_bytes: int | str) -> None:
    """As after each step of an optimizer."""
    weights, graphs, store = _weights(3), Graphs(), make_store(host_bytes="64MiB")
    for step in range(5):
        with tiered_offload(store, min_bytes=min_bytes):
            loss = _chain(_batch(step), weights)
        graphs.run(loss)
        _assert_plain(lambda step: _chain(_batch(step), weights), step, weights)
        with torch.no_grad():
            for weight in weights:
                weight.mul_(0.5)
    graphs.check()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_graph_that_uses_memory_again_is_given_copies(store: TierStore) -> None:
    weights, graphs = _weights(4), Graphs("inductor")
    for step in range(3):
        with tiered_offload(store, min_bytes=0):
            loss = _chain(_batch(step), weights)
        graphs.run(loss)
        with Graphs("inductor").backward():
            _assert_plain(lambda step: _chain(_batch(step), weights), step, weights)


def test_not_traced_again_for_graphs_from_before_the_first_trace(make_store: MakeStore) -> None:
    weights, graphs, store = _weights(3), Graphs(), make_store(host_bytes="64MiB")
    losses = []
    for step in range(5):
        with tiered_offload(store, min_bytes=0):
            losses.append(_chain(_batch(step), weights))
    for step, loss in enumerate(losses):
        graphs.run(loss)
        _assert_plain(lambda step: _chain(_batch(step), weights), step, weights)
    graphs.check(most=3)  # gradients that are there, or not, are conditions too


def _lazy(leaf: torch.Tensor) -> torch.Tensor:
    hidden = leaf * 2
    turned = torch.view_as_complex(torch.stack([hidden, hidden.sin()], -1)).conj()
    negative = turned.imag
    assert turned.is_conj()
    assert negative.is_neg()
    return (turned * turned).abs().sum() + (negative * negative.exp()).sum()


def _strided(leaf: torch.Tensor) -> torch.Tensor:
    hidden = leaf * 2
    one, two, three = hidden.chunk(3, -1)
    expanded, sliced, halves = hidden[:, :1].expand(-1, 48), hidden[1:, ::2], hidden.to(torch.bfloat16).t()
    total = (expanded * expanded.exp()).sum() + (sliced * sliced.cos()).sum() + (halves * halves).float().sum()
    return total + (torch.softmax(one @ two.t(), -1) @ three).square().sum()


@pytest.mark.parametrize(
    ("function", "host_bytes"), [(_lazy, 0), pytest.param(_strided, "64MiB", marks=pytest.mark.slow)]
)
def test_one_graph_with_lazy_bits_and_views(
    make_store: MakeStore, function: Callable[[torch.Tensor], torch.Tensor], host_bytes: int | str
) -> None:
    graphs, store = Graphs(), make_store(host_bytes=host_bytes, staging_bytes="64KiB")
    leaf = torch.randn(31, 48, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for step in range(2):
        with tiered_offload(store, min_bytes=0):
            loss = function(leaf)
        graphs.run(loss)
        with Graphs().backward():  # compiled too: that rounds complex products otherwise
            _assert_plain(lambda _: function(leaf), step, [leaf])
    graphs.check(most=3)


def test_one_graph_in_a_traced_scope_an_offloaded_module_and_a_retained_graph(store: TierStore, tmp_path: Path) -> None:
    graphs = Graphs()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    leaves: Tensors = list(model.parameters())
    offload_module(model[1], store=store, min_bytes=0, prefetch="none")

    def loss_of(step: int) -> torch.Tensor:
        with tiered_offload(store, min_bytes=0, prefetch="reverse", trace=tmp_path / "trace"):
            hidden = model[0](_batch(step))
        with keep_resident():
            return model[2](model[1](hidden)).square().mean()  # type: ignore[no-any-return]

    for step in range(2):
        loss = loss_of(step)
        for retain_graph in (True, False):
            graphs.run(loss, retain_graph=retain_graph)
            found = _taken(leaves)
            for leaf, gradient in zip(leaves, found, strict=True):
                leaf.grad = gradient
            _assert_plain(loss_of, step, leaves)
    graphs.check()


def _changed(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


def _case(kind: str, store: TierStore) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, tensor that was saved for it)."""
    weight = torch.randn(100, generator=torch.Generator().manual_seed(0), requires_grad=True)
    if kind == "restored":
        handle = store.put(torch.ones(100))
        store.flush()
        saved = store.get(handle).data  # with a version counter of its own
        with tiered_offload(store, min_bytes=0):
            return (weight * saved).sum(), saved
    if kind == "negative":
        pairs = torch.randn(100, 2)
        with tiered_offload(store):  # kept, for being small
            return (weight * torch.view_as_complex(pairs).conj().imag).sum(), pairs
    with tiered_offload(store, min_bytes="1MiB" if kind == "small" else 0):
        hidden = weight * 2
        loss = (hidden * hidden.exp()).sum()
    return loss, hidden[:3] if kind == "view" else hidden


@pytest.mark.parametrize(
    ("kind", "host_bytes"),
    [("saved", 0), ("saved", "64MiB"), ("view", "64MiB"), ("small", 0), ("restored", 0), ("negative", "64MiB")],
)
def test_changes_in_place_are_found(make_store: MakeStore, kind: str, host_bytes: int | str) -> None:
    """Whether the graph is traced now, or was before."""
    store, graphs = make_store(host_bytes=host_bytes, staging_bytes="64KiB"), Graphs()
    for is_changed in (True, False, True):
        loss, saved = _case(kind, store)
        if not is_changed:
            graphs.run(loss)
            continue
        _changed(saved)
        with pytest.raises(ModifiedInPlaceError, match="modified by an inplace operation"):
            graphs.run(loss)
    graphs.check()


def test_closed_store_is_the_error(make_store: MakeStore) -> None:
    store, weights = make_store(host_bytes="64MiB"), _weights(2)
    with tiered_offload(store, min_bytes=0):
        loss = _chain(_batch(0), weights)
    store.close()
    with pytest.raises(StoreClosedError):
        Graphs().run(loss)
