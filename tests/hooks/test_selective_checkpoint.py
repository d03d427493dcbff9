"""Selective checkpointing: what a policy keeps or wants offloaded, under our contexts and under torch's."""

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as PyTorch's documentation has it
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.conftest import MakeStore
from tests.hooks.programs import SIDE, Around, Settle, assert_same_bits, assert_same_gradients, bits, run_plain
from tierstore import ModifiedInPlaceError, TierStore, keep_resident, selective_checkpoint_contexts, tiered_offload
from tierstore.hooks.below import HOOKS_ARE_CALLED_BELOW

NBYTES = SIDE * SIDE * 4
SAVE, OFFLOAD = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_CPU_OFFLOAD
POLICIES = list(CheckpointPolicy)
num_products = 0
Results = Iterable[torch.Tensor | None]


@torch.library.custom_op("tierstore_tests::product", mutates_args=())
def product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A matrix product that counts how often it is computed."""
    global num_products
    num_products += 1
    return one @ other


def _save_inputs(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    one, other = ctx.saved_tensors
    return gradient @ other.T, one.T @ gradient


product.register_fake(lambda one, other: one.new_empty(one.shape[0], other.shape[1]))
product.register_autograd(_gradients, setup_context=_save_inputs)
PRODUCT = torch.ops.tierstore_tests.product.default

needs_hooks_below = pytest.mark.skipif(
    not HOOKS_ARE_CALLED_BELOW, reason="torch 2.15 added checkpoint(respect_saved_tensors_hooks=)"
)


@pytest.fixture(autouse=True)
def _count_from_zero() -> None:
    global num_products
    num_products = 0


def policy_of(decision: object) -> Callable[..., Any]:
    def policy(context: object, operator: object, *args: object, **kwargs: object) -> object:
        return decision if operator is PRODUCT else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIDE, SIDE) / 8)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.tanh(product(batch.sin(), self.weight)).cos()


Region = Callable[[Callable[..., torch.Tensor], torch.Tensor], torch.Tensor]


def ours(decision: object) -> Region:
    contexts = functools.partial(selective_checkpoint_contexts, policy_of(decision))
    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)


def respecting() -> Region:
    """torch's own contexts, which hand what they save to the hooks around."""
    contexts = functools.partial(create_selective_checkpoint_contexts, policy_of(SAVE))
    return functools.partial(checkpoint, use_reentrant=False, context_fn=contexts, respect_saved_tensors_hooks=True)


REGIONS = [
    pytest.param(functools.partial(ours, OFFLOAD), id="ours, offloaded"),
    pytest.param(functools.partial(ours, SAVE), id="ours, kept"),
    pytest.param(respecting, id="torch's, hooks respected", marks=needs_hooks_below),
]
STORED = [REGIONS[0], REGIONS[2]]


def chain(region: Region, blocks: Any, batch: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        batch = region(block, batch * 2)
    return batch


def program_of(region: Region) -> Callable[[Around, Settle], Results]:
    def program(around: Around, settle: Settle) -> Results:
        blocks = [Block() for _ in range(3)]
        batch = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            loss = chain(region, blocks, batch).square().mean()
            settle()
        settle()
        loss.backward()
        return [batch.grad, *(block.weight.grad for block in blocks)]

    return program


@pytest.mark.parametrize("host_bytes", [0, "1GiB"])
@pytest.mark.parametrize("make_region", REGIONS)
def test_same_bits(make_store: MakeStore, make_region: Callable[[], Region], host_bytes: object) -> None:
    region = make_region()
    assert_same_gradients(program_of(region), make_store(host_bytes=host_bytes))


@pytest.mark.parametrize("policy", [*POLICIES, True, False], ids=str)
def test_every_policy_same_bits_as_without_checkpointing(store: TierStore, policy: object) -> None:
    plain = run_plain(program_of(lambda function, batch: function(batch)))
    torch.manual_seed(0)
    found = program_of(ours(policy))(lambda: tiered_offload(store, min_bytes=0), store.flush)
    assert_same_bits([bits(tensor) for tensor in found], plain)


@pytest.mark.parametrize("make_region", STORED)
def test_offloaded_outputs_are_stored_and_not_computed_again(
    store: TierStore, make_region: Callable[[], Region]
) -> None:
    batch = torch.randn(SIDE, SIDE, requires_grad=True)
    blocks = [Block() for _ in range(3)]
    with tiered_offload(store, min_bytes=0):
        loss = chain(make_region(), blocks, batch).sum()
    store.flush()
    assert store.stats().spilled_bytes == 6 * NBYTES  # of each region the input and the product
    loss.backward()
    assert num_products == 3
    del loss
    assert store.stats().live_handles == 0


def test_kept_outputs_are_counted(store: TierStore) -> None:
    block, batch = Block(), torch.randn(SIDE, SIDE, requires_grad=True)
    of_a_list = functools.partial(selective_checkpoint_contexts, [PRODUCT])
    with tiered_offload(store, min_bytes=0):
        hidden = chain(ours(SAVE), [block] * 2, batch)
        loss = checkpoint(block, hidden, use_reentrant=False, context_fn=of_a_list).sum()
    assert store.stats().kept_bytes["checkpoint policy"] == 3 * NBYTES
    loss.backward()
    assert num_products == 3
    assert store.stats().kept_bytes["checkpoint policy"] == 3 * NBYTES


@pytest.mark.parametrize("host_bytes", [0, "1GiB"])
@pytest.mark.parametrize("make_region", REGIONS)
@pytest.mark.parametrize("is_resident", [False, pytest.param(True, marks=needs_hooks_below)])
def test_output_changed_in_place_raises(
    make_store: MakeStore, make_region: Callable[[], Region], host_bytes: object, is_resident: bool
) -> None:
    """The detached tensor that is packed below autograd would have a version counter of its own."""
    store, weight = make_store(host_bytes=host_bytes), torch.randn(SIDE, SIDE, requires_grad=True)
    outputs = []

    def forward(batch: torch.Tensor) -> torch.Tensor:
        outputs.append(product(batch, weight))
        return outputs[0].sin()

    with tiered_offload(store, min_bytes=0), keep_resident() if is_resident else nullcontext():
        loss = make_region()(forward, torch.randn(SIDE, SIDE)).sum()
    with torch.no_grad():
        outputs[0].add_(1)
    with pytest.raises(ModifiedInPlaceError):
        loss.backward()


@pytest.mark.parametrize("host_bytes", [0, "1GiB"])
@pytest.mark.parametrize("make_region", REGIONS)
def test_output_that_the_program_holds_keeps_its_history(
    make_store: MakeStore, make_region: Callable[[], Region], host_bytes: object
) -> None:
    """What backward gets in the place of an output gets a history: it must not be the program's own tensor."""
    store, weight = make_store(host_bytes=host_bytes), torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        output = make_region()(lambda batch: product(batch, weight), torch.randn(SIDE, SIDE))
        node, loss = output.grad_fn, output.sin().sum()
    loss.backward()
    assert output.grad_fn is node
    assert not output._is_view()


@pytest.mark.parametrize("make_region", REGIONS[:2])
def test_graph_is_used_again_same_bits(store: TierStore, make_region: Callable[[], Region]) -> None:
    """torch's own contexts refuse."""
    block, batch = Block(), torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        loss = chain(make_region(), [block], batch).sum()
    store.flush()
    first = torch.autograd.grad(loss, [batch, block.weight], retain_graph=True)
    second = torch.autograd.grad(loss, [batch, block.weight])
    assert_same_bits([bits(each) for each in second], [bits(each) for each in first])
    assert num_products == 1


@pytest.mark.parametrize("make_region", REGIONS)
@pytest.mark.parametrize("around", [tiered_offload, keep_resident])
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")  # torch 2.15, of its own contexts
def test_output_that_stays_goes_with_its_graph(
    store: TierStore, make_region: Callable[[], Region], around: Callable[..., Any], no_gc: None
) -> None:
    outputs: list[weakref.ref[torch.Tensor]] = []

    def block(batch: torch.Tensor) -> torch.Tensor:
        output = product(batch, batch)
        outputs.append(weakref.ref(output))
        return output.cos()

    with tiered_offload(store, min_bytes="1GiB"), nullcontext() if around is tiered_offload else keep_resident():
        loss = make_region()(block, torch.randn(SIDE, SIDE, requires_grad=True)).sum()
    del loss
    assert [output() for output in outputs] == [None]


@pytest.mark.parametrize("make_region", REGIONS)
def test_traced_scope_same_bits(store: TierStore, tmp_path: Path, make_region: Callable[[], Region]) -> None:
    assert_same_gradients(program_of(make_region()), store, trace=tmp_path / "trace.jsonl")


def test_no_scope_around_gives_torchs_own_contexts(store: TierStore) -> None:
    def are_torchs() -> bool:
        both = (make(policy_of(SAVE)) for make in (selective_checkpoint_contexts, create_selective_checkpoint_contexts))
        return all(type(one) is type(other) for one, other in zip(*both, strict=True))

    assert are_torchs()
    with tiered_offload(store):
        assert not are_torchs()
        for others in (keep_resident(), torch.autograd.graph.save_on_cpu()):
            with others:
                assert are_torchs()


def test_compiled_region_same_bits(store: TierStore) -> None:
    block, batch = Block(), torch.randn(SIDE, SIDE, requires_grad=True)
    plain = torch.autograd.grad(block(batch).sum(), [batch, block.weight])
    compiled = torch.compile(lambda tensor: ours(SAVE)(block, tensor), backend="aot_eager")
    with tiered_offload(store, min_bytes=0):
        loss = compiled(batch).sum()
    assert_same_bits([bits(each) for each in torch.autograd.grad(loss, [batch, block.weight])], list(map(bits, plain)))


@pytest.mark.parametrize("num_rows", [SIDE, 3], ids=["one call more", "other arguments"])
def test_region_that_runs_otherwise_the_second_time_raises(store: TierStore, num_rows: int) -> None:
    """Another call's output would be taken for this one's."""
    weight, runs = torch.randn(SIDE, SIDE, requires_grad=True), []

    def forward(batch: torch.Tensor) -> torch.Tensor:
        runs.append(None)
        if len(runs) > 1:
            more = product(batch[:num_rows], weight)
            batch = more if num_rows == SIDE else batch
        return product(batch, weight).sin()

    with tiered_offload(store, min_bytes=0):
        loss = ours(OFFLOAD)(forward, torch.randn(SIDE, SIDE)).sum()
    with pytest.raises(RuntimeError, match="must run the same operators"):
        loss.backward()


def test_shared_weight_under_autocast_same_bits(store: TierStore) -> None:
    """Forward casts it once, in the first region; backward casts it in each."""

    def program(around: Around, settle: Settle) -> Results:
        layer, batch = nn.Linear(SIDE, SIDE), torch.randn(SIDE, SIDE, requires_grad=True)
        operators = [torch.ops.aten.addmm.default]
        contexts = functools.partial(selective_checkpoint_contexts, lambda _, each, *args, **kwargs: each in operators)
        region = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
        if isinstance(around(), nullcontext):
            region = lambda function, tensor: function(tensor)  # noqa: E731 - torch's own contexts raise here
        with around(), torch.autocast("cpu", torch.bfloat16):
            loss = region(layer, region(layer, batch).relu()).float().sum()
        settle()
        loss.backward()
        return [batch.grad, layer.weight.grad]

    assert_same_gradients(program, store)


def test_two_backwards_through_a_region_at_once_same_bits(store: TierStore) -> None:
    """From two outputs, on two threads. One goes through the region while the other is in the midst of it."""
    batch, weight = (torch.randn(SIDE, SIDE, requires_grad=True) for _ in range(2))
    ours_begins, other_is_done = threading.Event(), threading.Event()

    def region(batch: torch.Tensor, weight: torch.Tensor, wait: Callable[[], object]) -> Sequence[torch.Tensor]:
        hidden = product(batch, weight).sin()
        wait()
        return [product(hidden * factor, weight) for factor in (1, 2)]

    def wait() -> None:
        if threading.current_thread() is ours:
            ours_begins.set()
            assert other_is_done.wait(30)

    def go(output: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(output.sum(), [batch, weight], retain_graph=True))

    plain = [go(output) for output in region(batch, weight, lambda: None)]
    contexts = functools.partial(selective_checkpoint_contexts, policy_of(OFFLOAD))
    with tiered_offload(store, min_bytes=0), ThreadPoolExecutor(1) as pool:
        ours = pool.submit(threading.current_thread).result()
        outputs = checkpoint(region, batch, weight, wait, use_reentrant=False, context_fn=contexts)
        first = pool.submit(go, outputs[0])
        assert ours_begins.wait(30)
        try:
            second = go(outputs[1])
        finally:
            other_is_done.set()
        assert_same_bits([*map(bits, first.result()), *map(bits, second)], list(map(bits, [*plain[0], *plain[1]])))


_drawn: list[None] = []


@torch.library.custom_op("tierstore_tests::attention", mutates_args=(), tags=torch.Tag.nondeterministic_seeded)
def attention(batch: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Draws random numbers as attention does, on some devices."""
    _drawn.append(None)
    return F.dropout(torch.ones_like(batch), dropout_p)


NOISES: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "an operator that draws": lambda _: torch.rand(SIDE, SIDE),
    "attention with dropout": lambda _: attention(torch.ones(SIDE, SIDE), 0.5),
    "a generator that nobody puts back": lambda generator: torch.rand(SIDE, SIDE, generator=generator),
}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES.keys())
def test_noise_that_a_policy_holds_same_bits(store: TierStore, noise: Callable[..., torch.Tensor]) -> None:
    """What is drawn after it would be other numbers, if backward did not draw it again."""

    def program(around: Around, settle: Settle) -> Results:
        batch, generator = torch.randn(SIDE, SIDE, requires_grad=True), torch.Generator().manual_seed(1)

        def forward(batch: torch.Tensor) -> torch.Tensor:
            return F.dropout((batch * noise(generator)).sin(), 0.5).sin()

        region = forward if isinstance(around(), nullcontext) else functools.partial(holding_all, forward)
        with around():
            loss = region(batch).sum()
        settle()
        loss.backward()
        return [batch.grad]

    assert_same_gradients(program, store)


def test_attention_without_dropout_is_held(store: TierStore) -> None:
    """Its operator could draw random numbers, but does not."""
    _drawn.clear()
    with tiered_offload(store, min_bytes=0):
        batch = torch.randn(SIDE, SIDE, requires_grad=True)
        loss = holding_all(lambda each: each.sin() * attention(each.detach(), 0.0), batch).sum()
    loss.backward()
    assert len(_drawn) == 1


def holding_all(forward: Callable[..., torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    contexts = functools.partial(selective_checkpoint_contexts, lambda *_, **__: OFFLOAD)
    output: torch.Tensor = checkpoint(forward, batch, use_reentrant=False, context_fn=contexts)
    return output
