"""What a handle keeps of what it has handed out, once the bytes have left memory."""

import torch

from tests.store.records import made_handle
from tierstore.residency.handle import Handle
from tierstore.residency.outstanding import OutstandingViews, in_use
from tierstore.tensors.layout import layout_of


def _hand_out(handle: Handle) -> torch.Tensor:
    view = handle.source.view(2, 5)
    handle.keep_view(layout_of(view), view)
    return view


def test_in_use_is_what_python_or_autograd_refers_to() -> None:
    tensors = [torch.ones(3) for _ in range(4)]
    assert in_use(tensors) == ()
    held, saved = tensors[1], torch.ones(3, requires_grad=True) * tensors[3]
    assert [id(tensor) for tensor in in_use(tensors)] == [id(held), id(tensors[3])]
    del held, saved
    assert in_use(tensors) == ()


def test_let_go_keeps_what_is_in_use_until_it_is_not() -> None:
    handle, outstanding_views = made_handle(torch.empty(10)), OutstandingViews()
    used = _hand_out(handle)
    outstanding_views.drop_unused(handle.record)
    assert [id(tensor) for tensor in handle.outstanding] == [id(used)]
    assert not handle.views
    outstanding_views.take_back()
    assert len(handle.outstanding) == 1
    del used
    outstanding_views.take_back()
    assert handle.outstanding == ()


def test_closed_store_keeps_nothing() -> None:
    handle, outstanding_views = made_handle(torch.empty(10)), OutstandingViews()
    used = _hand_out(handle)
    outstanding_views.drop_unused(handle.record)
    outstanding_views.drop_all()
    assert handle.outstanding == ()
    assert used.shape == (2, 5)
