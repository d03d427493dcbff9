"""A saved tensor that is changed in place: the same error as plain autograd, exactly where that raises."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that everybody uses

from tests.conftest import MakeStore
from tests.hooks.programs import SIDE, Around, Bits, Program, Results, Settle, all_bits, run_offloaded, run_plain
from tierstore import ModifiedInPlaceError, TierStore, keep_resident, tiered_offload


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


EDITS: dict[str, Callable[[torch.Tensor], object]] = {
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


@pytest.mark.parametrize("settled_first", [True, False])
@pytest.mark.parametrize("min_bytes", [0, "1GiB"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_edit_between_forward_and_backward_same_outcome(
    store: TierStore, edit: Callable[[torch.Tensor], object], min_bytes: object, settled_first: bool
) -> None:
    def program(around: Around, settle: Settle) -> Results:
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            hidden = weight * 2
            loss = hidden.sin().sum()
        if settled_first:
            settle()
        with torch.no_grad():
            edit(hidden)
        if not settled_first:
            settle()
        del hidden
        settle()
        loss.backward()
        return [weight.grad]

    found = assert_same_outcome(program, store, min_bytes=min_bytes)
    assert (found == "modified") == (edit not in (EDITS["through data"], EDITS["not at all"]))


@pytest.mark.parametrize("saved", ["view", "base"])
@pytest.mark.parametrize("edited", ["view", "base", "other view", "disjoint view"])
def test_edit_through_views_same_outcome(store: TierStore, saved: str, edited: str) -> None:
    def program(around: Around, settle: Settle) -> Results:
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            base = weight * 2
            parts = {"base": base, "view": base[:32], "other view": base[16:48], "disjoint view": base[40:]}
            loss = parts[saved].sin().sum()
        with torch.no_grad():
            parts[edited].add_(1)
        del base, parts
        settle()
        loss.backward()
        return [weight.grad]

    assert assert_same_outcome(program, store) == "modified"


@pytest.mark.parametrize("part", [0, 1])
def test_unsafe_chunk_parts_edited_each_counts_for_itself(store: TierStore, part: int) -> None:
    def program(around: Around, settle: Settle) -> Results:
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            parts = (weight * 2).unsafe_chunk(2)
            loss = parts[0].sin().sum()
        with torch.no_grad():
            parts[part].add_(1)
        del parts
        settle()
        loss.backward()
        return [weight.grad]

    assert (assert_same_outcome(program, store) == "modified") == (part == 0)


def test_unsafe_chunk_parts_saved_then_edited_in_turn_same_bits(store: TierStore) -> None:
    """Each part is saved with the bytes it had; an edit of one is no edit of the other."""

    def program(around: Around, settle: Settle) -> Results:
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            left, right = (weight * 2).unsafe_chunk(2)
            right = right.mul_(3)
            first = left.sin()
            right = right.add_(1)
            second = right.cos()
            third = left.exp()
            loss = (first * second * third).sum()
        del left, right, first, second, third
        settle()
        loss.backward()
        return [weight.grad]

    assert assert_same_outcome(program, store) != "modified"


@pytest.mark.parametrize("min_bytes", [0, "1GiB"])
def test_parameter_stepped_between_forward_and_backward_same_outcome(store: TierStore, min_bytes: object) -> None:
    def program(around: Around, settle: Settle) -> Results:
        model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with around():
            loss = model(torch.randn(SIDE, SIDE)).sum()
        settle()
        optimizer.step()
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    assert assert_same_outcome(program, store, min_bytes=min_bytes) == "modified"


def test_frozen_parameter_changed_same_outcome(store: TierStore) -> None:
    def program(around: Around, settle: Settle) -> Results:
        layer = nn.Linear(SIDE, SIDE).requires_grad_(False)
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            loss = layer(weight * 2).sum()
        settle()
        layer.weight.mul_(2)
        loss.backward()
        return [weight.grad]

    assert assert_same_outcome(program, store) == "modified"


def test_input_batch_overwritten_by_the_next_one_same_outcome(store: TierStore) -> None:
    def program(around: Around, settle: Settle) -> Results:
        layer, batch = nn.Linear(SIDE, SIDE), torch.randn(SIDE, SIDE)
        with around():
            loss = layer(batch).sum()
        settle()
        batch.copy_(torch.randn(SIDE, SIDE))
        loss.backward()
        return [layer.weight.grad]

    assert assert_same_outcome(program, store) == "modified"


@pytest.mark.parametrize("resident", [True, False])
def test_edit_of_a_tensor_kept_by_choice_refused(store: TierStore, resident: bool) -> None:
    """By `keep_resident`, and by `select`: it stays where it is, and is guarded there."""
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0, select=lambda tensor: False):
        hidden = weight * 2
        with keep_resident() if resident else nullcontext():
            loss = hidden.sin().sum()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(ModifiedInPlaceError):
        loss.backward()
    assert store.stats().packed_tensors == 0


@pytest.mark.parametrize("min_bytes", [0, "1GiB"])
def test_edits_of_tensors_that_are_not_needed_no_false_alarm(store: TierStore, min_bytes: object) -> None:
    """In-place operations that autograd allows: on outputs, on the way to a saved tensor, on what nobody saved."""

    def program(around: Around, settle: Settle) -> Results:
        weight = torch.randn(4, 8, 6, 6, requires_grad=True)
        norm = nn.BatchNorm2d(8)
        with around():
            hidden = norm(norm(weight * 2).relu_())
            hidden = F.dropout(hidden, 0.3, inplace=True)
            hidden = F.leaky_relu_(hidden + 1).mul(2).sigmoid_()
            hidden = hidden.view(4, -1).clone().add_(1).mul_(2).sqrt_()
            hidden = hidden + (hidden + 1).detach().zero_().sum()
            loss = F.elu_(hidden * 3).sum()
            (hidden * 2).exp().zero_()
        settle()
        loss.backward()
        return [weight.grad, norm.weight.grad, norm.bias.grad]

    assert assert_same_outcome(program, store, min_bytes=min_bytes) != "modified"


def test_batch_norm_in_eval_its_statistics_changed_same_outcome(store: TierStore) -> None:
    def program(around: Around, settle: Settle) -> Results:
        weight, norm = torch.randn(4, 8, 6, 6, requires_grad=True), nn.BatchNorm2d(8).eval()
        with around():
            loss = norm(weight * 2).square().sum()
        settle()
        norm.running_mean.add_(1)  # type: ignore[union-attr]
        loss.backward()
        return [weight.grad]

    assert assert_same_outcome(program, store) == "modified"


@pytest.mark.parametrize("host_bytes", [0, 1, "1GiB"])
@pytest.mark.parametrize("in_place", ["exp_", "tanh_", "sigmoid_", "relu_"])
def test_saved_output_changed_same_outcome(make_store: MakeStore, in_place: str, host_bytes: object) -> None:
    def program(around: Around, settle: Settle) -> Results:
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            output = getattr(weight * 2, in_place)()
            loss = output.sum()
        settle()
        output.mul_(2)
        settle()
        loss.backward()
        return [weight.grad]

    assert assert_same_outcome(program, make_store(host_bytes=host_bytes)) == "modified"


def test_edit_found_again_at_every_backward_and_others_go_on(store: TierStore) -> None:
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        hidden = weight * 2
        loss, other = hidden.sin().sum(), weight.exp().sum()
    with torch.no_grad():
        hidden.add_(1)
    for _ in range(2):
        with pytest.raises(ModifiedInPlaceError):
            loss.backward(retain_graph=True)
    other.backward()
    assert all_bits([weight.grad]) == all_bits([weight.detach().exp()])


def test_parameter_data_replaced_between_forward_and_backward_as_plain(store: TierStore) -> None:
    """As ZeRO-3 does: no version changes, and backward uses the new data."""

    def program(around: Around, settle: Settle) -> Results:
        weight = nn.Parameter(torch.randn(SIDE, SIDE))
        layer = nn.Linear(SIDE, SIDE)
        batch = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            loss = (layer(batch) * weight).sum()
        settle()
        weight.data = torch.ones(SIDE, SIDE)
        layer.weight.data = torch.ones(SIDE, SIDE)
        loss.backward()
        return [batch.grad, layer.weight.grad, weight.grad]

    assert assert_same_outcome(program, store) != "modified"
    assert assert_same_outcome(program, store, min_bytes="1GiB") != "modified"


def test_storage_freed_and_refilled_elsewhere_as_plain(store: TierStore) -> None:
    """As FSDP does: `resize_(0)` and back, no version changes, new memory."""

    def program(around: Around, settle: Settle) -> Results:
        shard = torch.randn(SIDE, SIDE)
        flat = torch.empty(SIDE * SIDE)
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        storage = flat.untyped_storage()

        def gather() -> None:
            storage.resize_(SIDE * SIDE * 4)
            flat.data.copy_(shard.view(-1))

        gather()
        with around():
            hidden = weight @ flat.view(SIDE, SIDE)
            storage.resize_(0)
            loss = hidden.square().sum()
        settle()
        gather()
        loss.backward()
        storage.resize_(0)
        return [weight.grad]

    assert assert_same_outcome(program, store) != "modified"


def test_storage_object_held_and_refilled_as_plain(store: TierStore) -> None:
    """The tensor is gone, but somebody holds its storage and writes to it."""

    def program(around: Around, settle: Settle) -> Results:
        weight = torch.ones(SIDE, requires_grad=True)
        with around():
            hidden = torch.ones(SIDE) * 1
            storage = hidden.untyped_storage()
            loss = (hidden * weight).sum()
        del hidden
        settle()
        torch.empty(0).set_(storage, 0, (SIDE,)).fill_(7)
        loss.backward()
        return [weight.grad]

    assert assert_same_outcome(program, store) != "modified"


@pytest.mark.parametrize("min_bytes", [0, "1GiB"])
def test_detached_in_place_before_backward_computes_as_under_any_hooks(store: TierStore, min_bytes: object) -> None:
    """PyTorch without hooks refuses it, though no byte has changed."""

    def gradient(scope: AbstractContextManager[object]) -> torch.Tensor:
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
