"""`torch.func` beside offloading: its transforms of derivatives refuse saved-tensor hooks, so they are taken off."""

from collections.abc import Callable

import pytest
import torch

from tierstore import TierStore, keep_resident, tiered_offload

# Forward-mode differentiation makes torch script its own decompositions, at its first use.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
TRANSFORMS: dict[str, Callable[[torch.Tensor], object]] = {
    "grad": torch.func.grad(lambda x: x.exp().square().sum()),
    "vjp": lambda x: torch.func.vjp(torch.exp, x)[1](x),
    "jacrev": torch.func.jacrev(lambda x: x.exp().square()),
    "hessian": torch.func.hessian(lambda x: x.exp().square().sum()),
}
VALUES = torch.linspace(-1, 1, 12)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform_inside_keep_resident_without_hooks_gives_the_same(store: TierStore, name: str) -> None:
    expected = TRANSFORMS[name](VALUES)
    with tiered_offload(store, min_bytes=0), keep_resident(hooks=False):
        found = TRANSFORMS[name](VALUES)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform_under_a_scope_is_refused_with_advice(store: TierStore, name: str) -> None:
    with pytest.raises(RuntimeError, match="saved tensor hooks") as caught, tiered_offload(store, min_bytes=0):
        TRANSFORMS[name](VALUES)
    assert any("keep_resident(hooks=False)" in note for note in caught.value.__notes__)


def test_scope_inside_a_transform_is_refused_with_advice(store: TierStore) -> None:
    def function(values: torch.Tensor) -> torch.Tensor:
        with tiered_offload(store, min_bytes=0):
            return values.exp().sum()

    with pytest.raises(RuntimeError, match="saved tensor hooks") as caught:
        torch.func.grad(function)(VALUES)
    (note,) = caught.value.__notes__
    assert "Give them the function without it" in note
    with pytest.raises(RuntimeError, match="mine") as caught, tiered_offload(store):
        raise RuntimeError("mine")
    assert not getattr(caught.value, "__notes__", []), "advice is given for a refusal alone"


def test_all_hooks_are_back_where_they_were(store: TierStore) -> None:
    leaf = torch.randn(1000, requires_grad=True)
    seen: list[str] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        seen.append("theirs")
        return tensor.detach()

    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        tiered_offload(store, min_bytes=0),
    ):
        with keep_resident(hooks=False), keep_resident(hooks=False):
            kept = (leaf * 2).exp()
        with pytest.raises(ValueError, match="mine"), keep_resident(hooks=False):
            raise ValueError("mine")
        assert (store.stats().live_handles, seen) == (0, [])
        stored = (leaf * 2).exp()
        assert (store.stats().live_handles, seen) == (1, [])
    (kept + stored).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, (leaf.detach() * 2).exp() * 2 + (leaf.detach() * 2).exp() * 2)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        leaf.exp()
    assert seen
    with keep_resident(hooks=False):  # outside of any scope it changes nothing
        loss = leaf.exp().sum()
    loss.backward()
