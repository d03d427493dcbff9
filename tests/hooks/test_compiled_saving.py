"""`offload_backend`: what a compiled forward saves goes to a store, inside of one graph."""

import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as PyTorch's documentation has it
from torch.utils.checkpoint import checkpoint

from tests.census import Census
from tests.conftest import MakeStore
from tests.hooks.compiled_cases import CASES
from tierstore import (
    ConfigError,
    ConfigTypeError,
    StoreClosedError,
    TierStore,
    TierStoreWarning,
    UnsupportedTorchError,
    keep_resident,
    offload_backend,
    tiered_offload,
)
from tierstore.tensors.compiler_names import compiler_names

pytestmark = [
    pytest.mark.filterwarnings("default"),  # the compiler's own
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="the backend needs torch 2.13"),
]

needs_cpp = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=needs_cpp)]
_STAYS = {
    "bernoulli",
    "clone of an input",
    "detached output",
    "gradient that is a saved result",
    "gradient that is a saved tensor",
    "noise",
    "other dtype of the same bytes",
    "output that is a clone of what is saved",
    "output that is a view of what is saved",
    "output that is saved",
    "output without gradient",
    "outputs that share memory",
    "padded by nothing",
    "power of one",
    "rrelu",
    "split and joined",
    "the same output twice",
    "unfolded",
}
"""Cases in which no saved tensor certainly has memory of the graph's own; with others a part of them may."""
_ALSO_WITH_INDUCTOR = {
    "linear with bias",
    "buffer changed to what is saved",
    "output that is saved",
    "gradient that is a saved tensor",
    "attention",
    "bfloat16, read where it is computed",
}
"""The others are slow: each compiles some C++."""


def _leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for each in tree for leaf in _leaves(each)]


def _steps(case: Callable[..., Any], backend: Any, num_steps: int = 2) -> list[Tensor]:
    """Outputs, the changed buffer, and gradients of some steps of a function, compiled as one graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    compiled, found = torch.compile(case, backend=backend, fullgraph=True), []
    b = torch.randn(16)
    for _ in range(num_steps):
        x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
        outputs = _leaves(compiled(x, w, b))
        found += [each.detach().clone() for each in outputs]
        losses = [each.sin().sum() for each in outputs if each.requires_grad]
        torch.stack(losses).sum().backward()
        found += [b.clone(), *(torch.zeros(()) if each.grad is None else each.grad for each in (x, w))]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    return found


def _assert_same(expected: list[Tensor], found: list[Tensor]) -> None:
    assert len(expected) == len(found)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert one.dtype == other.dtype
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7)), number


def _check(name: str, backend: str, store: TierStore, census: Census) -> None:
    expected = _steps(CASES[name], backend)
    _assert_same(expected, _steps(CASES[name], offload_backend(store, backend=backend, min_bytes=1)))  # type: ignore[arg-type]
    stats = store.stats()
    assert (stats.live_handles, stats.disk_bytes) == (0, 0)
    census.count(f"functions compiled by {backend}", "bitwise the same")
    if not stats.packed_tensors:
        census.count(f"functions compiled by {backend}", "of which nothing is packed")
    if backend == "aot_eager":
        assert (stats.packed_tensors > 0) == (name not in _STAYS)


@pytest.mark.parametrize("name", CASES)
def test_function_compiled_with_a_store_gives_the_same_bits(name: str, store: TierStore, census: Census) -> None:
    _check(name, "aot_eager", store, census)


@needs_cpp
@pytest.mark.parametrize(
    "name", [name if name in _ALSO_WITH_INDUCTOR else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_function_compiled_by_inductor_gives_the_same_bits(name: str, store: TierStore, census: Census) -> None:
    _check(name, "inductor", store, census)


# --- a model -------------------------------------------------------------------------------------------------------

_WIDTH, _LENGTH, _NUM_LAYERS = 64, 128, 4


class _Layer(nn.Module):
    """A decoder layer as Llama has it: RMS norm, rotary positions, causal attention, a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(_WIDTH) for _ in range(2)])
        self.projections = nn.ModuleList([nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(4)])
        self.gate, self.up = (nn.Linear(_WIDTH, 3 * _WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * _WIDTH, _WIDTH, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norms[0](hidden)
        q, k, v = (each(normed).view(2, -1, 4, _WIDTH // 4).transpose(1, 2) for each in self.projections[:3])
        attended = F.scaled_dot_product_attention(_rotated(q, cos, sin), _rotated(k, cos, sin), v, is_causal=True)
        hidden = hidden + self.projections[3](attended.transpose(1, 2).reshape(hidden.shape))
        normed = self.norms[1](hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))  # type: ignore[no-any-return]


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat((-second, first), -1) * sin


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([_Layer() for _ in range(_NUM_LAYERS)])

    def forward(self, hidden: Tensor) -> Tensor:
        length = hidden.shape[1]
        angles = torch.arange(length)[:, None] * torch.logspace(0, -4, _WIDTH // 8).repeat(2)
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return hidden


def _bytes_in_graph(output: Tensor, model: nn.Module) -> int:
    """Of the storages that autograd saves for a compiled region, apart from parameters."""
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    node: Any = output.grad_fn
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in node.saved_tensors}
    return sum(nbytes for address, nbytes in storages.items() if address not in own)


@pytest.mark.parametrize("backend", BACKENDS)
def test_llama_like_stack_as_one_graph_holds_two_fifths_of_what_it_saves(backend: str, make_store: MakeStore) -> None:
    values = torch.randn(2, _LENGTH, _WIDTH)

    def train(used: Any) -> tuple[list[Tensor], int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = _Decoder()
        compiled, found, in_graph = torch.compile(model, backend=used, fullgraph=True), [], 0
        for _ in range(3):
            model.zero_grad()
            output = compiled(values)
            in_graph = max(in_graph, _bytes_in_graph(output, model))
            output.square().mean().backward()
            found += [output.detach(), *(each.grad.clone() for each in model.parameters())]  # type: ignore[union-attr]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert not torch._dynamo.utils.counters["graph_break"]
        return found, in_graph

    expected, all_bytes = train(backend)
    window_bytes = all_bytes // 10
    store = make_store(host_bytes=f"{window_bytes}B", staging_bytes=f"{window_bytes}B")
    found, left_bytes = train(offload_backend(store, backend=backend, min_bytes="4KiB"))  # type: ignore[arg-type]
    _assert_same(expected, found)
    stats = store.stats()
    assert stats.spilled_bytes >= 3 * 0.5 * all_bytes
    # Besides what the store holds, what is on its way fills at most the staging window.
    assert left_bytes + stats.host_bytes_peak + window_bytes <= 0.4 * all_bytes


# --- a graph's life ------------------------------------------------------------------------------------------------


def _layers(values: Tensor, weights: Tensor) -> Tensor:
    for _ in range(4):
        values = torch.tanh(values @ weights)
    return values


def _given() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 32, generator=generator), torch.randn(32, 32, generator=generator).requires_grad_()


def _compiled(store: TierStore, function: Callable[..., Any] = _layers, **options: Any) -> Callable[..., Any]:
    options = {"backend": "aot_eager", "min_bytes": 1} | options
    return torch.compile(function, backend=offload_backend(store, **options), fullgraph=True)  # type: ignore[arg-type]


def _expected() -> Tensor:
    values, weights = _given()
    torch.compile(_layers, backend="aot_eager")(values, weights).sum().backward()
    assert weights.grad is not None
    return weights.grad


@pytest.mark.parametrize("host_bytes", [0, "4KiB", "20KiB", "64MiB"])
def test_any_budget_gives_the_same_gradient(host_bytes: int | str, make_store: MakeStore) -> None:
    expected, store = _expected(), make_store(host_bytes=host_bytes)
    compiled = _compiled(store)
    for _ in range(3):
        values, weights = _given()
        result = compiled(values, weights)
        store.flush()
        result.sum().backward()
        assert torch.equal(weights.grad, expected)  # type: ignore[arg-type]
    stats = store.stats()
    assert (stats.spilled_bytes > 0) == (host_bytes != "64MiB")
    assert (stats.live_handles, stats.disk_bytes, stats.host_bytes) == (0, 0, 0)


@pytest.mark.parametrize("host_bytes", [0, "64MiB"])
def test_retained_graph_gives_the_same_gradient_each_time(host_bytes: int | str, make_store: MakeStore) -> None:
    expected, store = _expected(), make_store(host_bytes=host_bytes)
    values, weights = _given()
    loss = _compiled(store)(values, weights).sum()
    for retain in (True, True, False):
        (found,) = torch.autograd.grad(loss, weights, retain_graph=retain)
        assert torch.equal(found, expected)
        found.fill_(7)  # what was handed out is the caller's
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    assert store.stats().live_handles == 0


def test_second_backward_after_one_that_failed_says_what_is_gone(store: TierStore) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Tensor) -> Tensor:
            return values.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            raise ZeroDivisionError

    values, weights = _given()
    loss = _compiled(store)(Failing.apply(values.requires_grad_()), weights).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    with pytest.raises(RuntimeError, match=r"backward through the graph a second time|saved in a store is gone"):
        loss.backward()


def test_several_calls_before_backward_each_keep_their_own(store: TierStore) -> None:
    compiled, plain = _compiled(store), torch.compile(_layers, backend="aot_eager")
    _, weights = _given()
    values = [torch.randn(64, 32) for _ in range(3)]
    results = [compiled(each, weights).sum() for each in values]
    for result, each in reversed(list(zip(results, values, strict=True))):
        (expected,) = torch.autograd.grad(plain(each, weights).sum(), weights)
        assert torch.equal(torch.autograd.grad(result, weights)[0], expected)
    assert store.stats().live_handles == 0


def test_graph_that_is_dropped_before_backward_leaves_nothing(store: TierStore) -> None:
    result = _compiled(store)(*_given())
    store.flush()
    assert store.stats().disk_bytes > 0
    del result
    stats = store.stats()
    assert (stats.live_handles, stats.disk_bytes) == (0, 0)


def test_store_that_was_closed_before_backward_raises(store: TierStore) -> None:
    loss = _compiled(store)(*_given()).sum()
    store.close()
    with pytest.raises(StoreClosedError):
        loss.backward()


def test_forward_without_gradients_packs_nothing(store: TierStore) -> None:
    with torch.no_grad():
        _compiled(store)(*_given())
    assert store.stats().packed_tensors == 0


def test_resident_call_packs_nothing_and_has_the_same_gradient(store: TierStore) -> None:
    values, weights = _given()
    with keep_resident():
        loss = _compiled(store)(values, weights).sum()
    loss.backward()
    assert torch.equal(weights.grad, _expected())  # type: ignore[arg-type]
    assert store.stats().packed_tensors == 0


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_call_stores_nothing_and_has_the_same_gradient(store: TierStore, use_reentrant: bool) -> None:
    values, weights = _given()
    compiled = _compiled(store)
    checkpoint(compiled, values.requires_grad_(), weights, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(weights.grad, _expected())  # type: ignore[arg-type]
    assert store.stats().packed_tensors == 0


def test_call_inside_a_scope_stores_in_both(store: TierStore) -> None:
    values, weights = _given()
    compiled = _compiled(store)
    with tiered_offload(store, min_bytes=1):
        loss = (compiled(values * 1, weights) * 2).sum() / 2
    loss.backward()
    assert torch.equal(weights.grad, _expected())  # type: ignore[arg-type]
    assert store.stats().live_handles == 0


def test_hooks_that_copy_a_placeholder_are_told_of(store: TierStore) -> None:
    compiled = _compiled(store)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        loss = compiled(*_given()).sum()
    with pytest.raises(RuntimeError, match="replaced its placeholder by a copy"):
        loss.backward()


def test_selected_out_tensors_stay(store: TierStore) -> None:
    values, weights = _given()
    _compiled(store, select=lambda tensor: False)(values, weights).sum().backward()
    assert torch.equal(weights.grad, _expected())  # type: ignore[arg-type]
    stats = store.stats()
    assert stats.packed_tensors == 0
    assert stats.kept_bytes["selected out"] == 3 * 64 * 32 * 4  # the fourth is the output


@pytest.mark.parametrize("min_bytes", ["8KiB", "9KiB"])
def test_min_bytes_decides_as_the_graph_is_compiled(store: TierStore, min_bytes: str) -> None:
    _compiled(store, min_bytes=min_bytes)(*_given()).sum().backward()
    assert (store.stats().packed_tensors > 0) == (min_bytes == "8KiB")


def test_tensors_larger_than_the_budget_are_no_region_that_asks_for_all_at_once(make_store: MakeStore) -> None:
    store = make_store(host_bytes="4KiB")
    with warnings.catch_warnings():
        warnings.simplefilter("error", TierStoreWarning)
        _compiled(store)(*_given()).sum().backward()
    assert store.stats().packed_bytes > 4 * 2**10


def test_graph_that_stores_nothing_is_told_as_the_store_closes(store: TierStore) -> None:
    _compiled(store, min_bytes="1MiB")(*_given()).sum().backward()
    with pytest.warns(TierStoreWarning, match="no graph that was compiled with offload_backend saved anything"):
        store.close()


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, needs_cpp])])
def test_dynamic_sizes_are_compiled_no_more_often_than_without_a_store(store: TierStore, backend: str) -> None:
    found: list[list[Tensor]] = []
    num_graphs = []
    for used in (backend, offload_backend(store, backend=backend, min_bytes=1)):  # type: ignore[arg-type]
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(_with_views, backend=used, fullgraph=True)
        gradients = []
        for rows in (8, 20, 12, 64):
            values, weights = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows)), _given()[1]
            torch._dynamo.mark_dynamic(values, 0)
            compiled(values, weights).sum().backward()
            gradients.append(weights.grad)
        num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        found.append(gradients)  # type: ignore[arg-type]
    _assert_same(*found)
    assert num_graphs[0] == num_graphs[1]
    stats = store.stats()
    assert stats.packed_tensors >= 2 * 4
    assert stats.live_handles == 0


def _with_views(values: Tensor, weights: Tensor) -> Tensor:
    hidden = (values @ weights).exp()
    heads = (hidden @ weights).view(-1, 4, 8).transpose(0, 1)
    return (heads.tanh() @ heads.transpose(1, 2)).sin() * hidden.sum() + heads[:, 1:, :2].square().mean()


def test_compiled_autograd_gets_copies(store: TierStore) -> None:
    values, weights = _given()
    loss = _compiled(store)(values, weights).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    assert torch.equal(weights.grad, _expected())  # type: ignore[arg-type]


def test_gradient_of_a_gradient_is_refused_as_without_a_store(store: TierStore) -> None:
    values, weights = _given()
    loss = _compiled(store)(values, weights).square().sum()
    (gradient,) = torch.autograd.grad(loss, weights, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"backend": "eager"}, ConfigError),
        ({"backend": None}, ConfigTypeError),
        ({"min_bytes": "many"}, ConfigError),
        ({"minimum": 1}, TypeError),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(
    store: TierStore, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        offload_backend(store, **arguments)


def test_torch_that_is_too_old_is_named(store: TierStore, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_names.cache_clear()
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.12.1"))
    with pytest.raises(UnsupportedTorchError, match=r"offload_backend cannot run with torch 2\.12\.1; .*2\.13"):
        offload_backend(store)


def test_torch_that_lacks_a_name_is_told_which(store: TierStore, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler_names.cache_clear()
    monkeypatch.delattr("torch._functorch.partitioners.min_cut_rematerialization_partition")
    with pytest.raises(UnsupportedTorchError, match=r"has no torch\._functorch\.partitioners\.min_cut"):
        offload_backend(store, backend="aot_eager")
