"""A saved tensor that is changed in place: the same error as plain autograd, exactly where that raises."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name that everybody uses

from tests.conftest import MakeStore
from tests.hooks.programs import SIDE, Around, Bits, Program, Settle, all_bits, program_of, run_offloaded, run_plain
from tierstore import ModifiedInPlaceError, TierStore, keep_resident, tiered_offload

Edit = Callable[[], object]
Make = Callable[[Tensor], tuple[Tensor, Edit]]
"""From a leaf to the loss, and what happens between forward and backward."""


def outcome(run: Callable[[], list[Bits]]) -> list[Bits] | str:
    """The bits, or that it was refused for a change in place."""
    try:
        return run()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return "modified"


def assert_same_outcome(program: Program, store: TierStore, **options: object) -> list[Bits] | str:
    expected = outcome(lambda: run_plain(program))
    found = outcome(lambda: run_offloaded(program, store, **options))
    assert found == expected
    return expected


EDITS: dict[str, Callable[[Tensor], object]] = {
    "itself": lambda hidden: hidden.add_(1),
    "a row": lambda hidden: hidden[3].mul_(2),
    "a transposed view": lambda hidden: hidden.t().zero_(),
    "a detached alias": lambda hidden: hidden.detach().add_(1),
    "a view as another dtype": lambda hidden: hidden.detach().view(torch.int32).add_(1),
    "by index": lambda hidden: hidden.__setitem__((0, 0), 5.0),
    "copied into": lambda hidden: hidden.copy_(torch.ones_like(hidden)),
    "same values again": lambda hidden: hidden.mul_(1),
    "out=": lambda hidden: torch.add(hidden.detach(), 1, out=hidden.detach()),
    "through data": lambda hidden: hidden.data.add_(1),
    "not at all": lambda hidden: hidden + 1,
}


def _input(edit: Callable[[Tensor], object], weight: Tensor) -> tuple[Tensor, Edit]:
    hidden = weight * 2
    return hidden.sin().sum(), lambda: edit(hidden)


def _output(in_place: str, weight: Tensor) -> tuple[Tensor, Edit]:
    output = getattr(weight * 2, in_place)()
    return output.sum(), lambda: output.mul_(2)


def _part(saved: str, edited: str, weight: Tensor) -> tuple[Tensor, Edit]:
    base = weight * 2
    parts = {"base": base, "view": base[:32], "other view": base[16:48], "disjoint view": base[40:]}
    return parts[saved].sin().sum(), lambda: parts[edited].add_(1)


def _unsafe_chunk(part: int, weight: Tensor) -> tuple[Tensor, Edit]:
    parts = (weight * 2).unsafe_chunk(2)
    return parts[0].sin().sum(), lambda: parts[part].add_(1)


def _stepped(weight: Tensor) -> tuple[Tensor, Edit]:
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model(weight).sum(), torch.optim.SGD(model.parameters(), lr=0.1).step


def _frozen(weight: Tensor) -> tuple[Tensor, Edit]:
    layer = nn.Linear(SIDE, SIDE).requires_grad_(False)
    return layer(weight * 2).sum(), lambda: layer.weight.mul_(2)


def _next_batch(weight: Tensor) -> tuple[Tensor, Edit]:
    batch = torch.randn(SIDE, SIDE)
    return (batch @ weight).sum(), lambda: batch.copy_(torch.randn(SIDE, SIDE))


def _statistics(weight: Tensor) -> tuple[Tensor, Edit]:
    norm = nn.BatchNorm1d(SIDE).eval()
    return norm(weight * 2).square().sum(), lambda: norm.running_mean.add_(1)  # type: ignore[union-attr]


def _data_replaced(weight: Tensor) -> tuple[Tensor, Edit]:
    """As ZeRO-3 does: no version changes, and backward uses the new data."""
    layer, factor = nn.Linear(SIDE, SIDE), nn.Parameter(torch.randn(SIDE, SIDE))

    def replace() -> None:
        factor.data = torch.ones(SIDE, SIDE)
        layer.weight.data = torch.ones(SIDE, SIDE)

    return (layer(weight) * factor).sum(), replace


def _storage_held(weight: Tensor) -> tuple[Tensor, Edit]:
    """The tensor is gone, but somebody holds its storage and writes to it."""
    hidden = torch.ones(SIDE, SIDE) * 1
    storage = hidden.untyped_storage()
    return (hidden * weight).sum(), lambda: torch.empty(0).set_(storage, 0, (SIDE, SIDE)).fill_(7)


def _foreign(make: Callable[[np.ndarray], Tensor], weight: Tensor) -> tuple[Tensor, Edit]:
    """The memory is not torch's: plain autograd sees its owner's changes, and takes no offence."""
    workspace = np.ones(SIDE, dtype=np.float32)
    return (weight * make(workspace)).sum(), lambda: workspace.fill(7)


def _shared(weight: Tensor) -> tuple[Tensor, Edit]:
    shared = torch.ones(SIDE).share_memory_()
    numpy = shared.numpy()
    return (weight * shared).sum(), lambda: numpy.fill(7)


def _copied_on_write(weight: Tensor) -> tuple[Tensor, Edit]:
    batch = torch.randn(SIDE)
    loss = (weight * torch._lazy_clone(batch)).sum()
    batch.zero_()
    return loss, lambda: batch.fill_(3)


REFUSED: dict[str, Make] = {
    **{f"input, {name}": partial(_input, edit) for name, edit in EDITS.items() if name not in list(EDITS)[-2:]},
    **{f"output of {name}": partial(_output, name) for name in ("exp_", "tanh_", "sigmoid_", "relu_")},
    **{
        f"{saved}, {edited}": partial(_part, saved, edited)
        for saved, edited in product(("view", "base"), ("view", "base", "other view", "disjoint view"))
    },
    "unsafe chunk": partial(_unsafe_chunk, 0),
    "parameters stepped": _stepped,
    "frozen parameter": _frozen,
    "next batch": _next_batch,
    "statistics": _statistics,
}
ALLOWED: dict[str, Make] = {
    **{f"input, {name}": partial(_input, EDITS[name]) for name in list(EDITS)[-2:]},
    "other unsafe chunk": partial(_unsafe_chunk, 1),
    "data replaced": _data_replaced,
    "storage held": _storage_held,
    "from_numpy": partial(_foreign, torch.from_numpy),
    "frombuffer": partial(_foreign, lambda array: torch.frombuffer(array, dtype=torch.float32)),
    "dlpack": partial(_foreign, torch.from_dlpack),
    "shared memory": _shared,
    "copied on write": _copied_on_write,
}


@pytest.mark.parametrize("name", [*REFUSED, *ALLOWED])
def test_edit_between_forward_and_backward_same_outcome(make_store: MakeStore, name: str) -> None:
    """Stored, only tracked, or kept for being small; edited at once, or when all has settled."""

    def program(make: Make, settles_first: bool, around: Around, settle: Settle) -> list[Tensor | None]:
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            loss, edit = make(weight)
        if settles_first:
            settle()
        with torch.no_grad():
            edit()
        del edit
        settle()
        loss.backward()
        return [weight.grad]

    stores = make_store(), make_store(host_bytes=1), make_store(host_bytes="1GiB")
    for store, min_bytes, settles_first in product(stores, (0, "1GiB"), (False, True)):
        found = assert_same_outcome(
            partial(program, (REFUSED | ALLOWED)[name], settles_first), store, min_bytes=min_bytes
        )
        assert (found == "modified") == (name in REFUSED)


def test_unsafe_chunk_parts_saved_then_edited_in_turn_same_bits(store: TierStore) -> None:
    """Each part is saved with the bytes it had; an edit of one is no edit of the other."""

    def loss(weight: Tensor) -> Tensor:
        left, right = (weight * 2).unsafe_chunk(2)
        right = right.mul_(3)
        first = left.sin()
        right = right.add_(1)
        return (first * right.cos() * left.exp()).sum()

    assert assert_same_outcome(program_of(loss), store) != "modified"


@pytest.mark.parametrize("min_bytes", [0, "1GiB"])
def test_edits_of_tensors_that_are_not_needed_no_false_alarm(store: TierStore, min_bytes: object) -> None:
    """In-place operations that autograd allows: on outputs, on the way to a saved tensor, on what nobody saved."""

    def loss(weight: Tensor) -> Tensor:
        norm = nn.BatchNorm2d(8)
        hidden = norm(norm(weight * 2).relu_())
        hidden = F.dropout(hidden, 0.3, inplace=True)
        hidden = F.leaky_relu_(hidden + 1).mul(2).sigmoid_()
        hidden = hidden.view(4, -1).clone().add_(1).mul_(2).sqrt_()
        hidden = hidden + (hidden + 1).detach().zero_().sum()
        (hidden * 2).exp().zero_()
        return F.elu_(hidden * 3).sum()

    assert assert_same_outcome(program_of(loss, (4, 8, 6, 6)), store, min_bytes=min_bytes) != "modified"


@pytest.mark.parametrize("around", [keep_resident, nullcontext, None], ids=["resident", "selected out", "stored"])
def test_edit_found_again_at_every_backward_and_others_go_on(
    store: TierStore, around: Callable[[], AbstractContextManager[object]] | None
) -> None:
    """What is kept by choice stays where it is, and is guarded there."""
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0, select=lambda tensor: around is None):
        hidden = weight * 2
        with nullcontext() if around is None else around():
            loss, other = hidden.sin().sum(), weight.exp().sum()
    torch.autograd.grad(loss, weight, retain_graph=True)
    with torch.no_grad():
        hidden.add_(1)
    for _ in range(2):
        with pytest.raises(ModifiedInPlaceError):
            loss.backward(retain_graph=True)
    other.backward()
    assert all_bits([weight.grad]) == all_bits([weight.detach().exp()])
    assert (store.stats().packed_tensors == 0) == (around is not None)


@pytest.mark.parametrize("min_bytes", [0, "1GiB"])
def test_detached_in_place_before_backward_computes_as_under_any_hooks(store: TierStore, min_bytes: object) -> None:
    """PyTorch without hooks refuses it, though no byte has changed."""

    def gradient(scope: AbstractContextManager[object]) -> Tensor:
        leaf = torch.arange(float(SIDE * SIDE), requires_grad=True)
        hidden = leaf * 2
        with scope:
            loss = (hidden * hidden).sum()
        hidden.detach_()
        del hidden
        store.flush()
        return torch.autograd.grad(loss, [leaf])[0]

    with pytest.raises(RuntimeError, match="detached in-place"):
        gradient(nullcontext())
    expected = gradient(torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved))
    assert torch.equal(gradient(tiered_offload(store, min_bytes=min_bytes)), expected)
