"""`offload_module` where checkpoints are: the inputs of a region are stored, and nothing that the checkpoint drops."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.conftest import MakeStore
from tests.hooks.programs import SIDE, DispatchMode, all_bits, bits, grads
from tierstore import TierStore, offload_module, tiered_offload

MATRIX_BYTES = SIDE * SIDE * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(SIDE, 4 * SIDE), nn.Tanh(), nn.Linear(4 * SIDE, SIDE))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch.sin())  # type: ignore[no-any-return]


def run(model: nn.Module, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> list[Any]:
    model.zero_grad()
    source = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = call(model, source * 2).square().sum()
    loss.backward()
    return [bits(source.grad), *all_bits(grads(model))]


REGIONS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "the module is the region": lambda model, batch: checkpoint(model, batch, use_reentrant=False),
    "inside a region": lambda model, batch: checkpoint(lambda x: model(x.cos()) + 1, batch, use_reentrant=False),
    "twice in a region": lambda model, batch: checkpoint(lambda x: model(model(x)), batch, use_reentrant=False),
    "in a region of a region": lambda model, batch: checkpoint(
        lambda x: checkpoint(model, x.cos(), use_reentrant=False), batch, use_reentrant=False
    ),
}


@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS.keys())
def test_callers_checkpoint_its_inputs_are_stored_and_nothing_else(
    make_store: MakeStore, region: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> None:
    torch.manual_seed(0)
    model = Block()
    expected = run(model, region)
    store = make_store(host_bytes=0, staging_bytes="64KiB")
    offload_module(model, store=store, min_bytes=0)
    assert run(model, region) == expected
    stats = store.stats()
    assert (stats.packed_bytes, stats.packed_tensors) == (MATRIX_BYTES, 1)


def test_callers_reentrant_checkpoint_nothing_of_the_region_is_stored(store: TierStore) -> None:
    torch.manual_seed(0)
    model = Block()
    region = partial(checkpoint, use_reentrant=True)
    expected = run(model, region)
    offload_module(model, store=store, min_bytes=0)
    assert run(model, region) == expected
    assert store.stats().packed_tensors == 0


def test_checkpoint_within_a_scope_its_inputs_are_stored_once(store: TierStore) -> None:
    """The scope has the inputs already, so the module has nothing to add."""
    torch.manual_seed(0)
    model = Block()
    expected = run(model, partial(checkpoint, use_reentrant=False))
    offload_module(model.layers[0], store=store, min_bytes=0)

    def call(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with tiered_offload(store, min_bytes=0, select=lambda tensor: tensor.shape == (SIDE, SIDE)):
            return checkpoint(model, batch, use_reentrant=False)  # type: ignore[no-any-return]

    assert run(model, call) == expected
    assert store.stats().packed_tensors == 1
    assert store.stats().packed_bytes == MATRIX_BYTES


@pytest.mark.parametrize("is_before", [True, False], ids=["before the module", "after it"])
def test_checkpoints_input_changed_in_place_raises_as_without_offload(store: TierStore, is_before: bool) -> None:
    model, raised = Block(), []
    for _ in range(2):
        batch = torch.randn(SIDE, SIDE, requires_grad=True) * 2
        with pytest.raises(RuntimeError, match=r"in.?place") as caught:  # noqa: PT012 - where it raises is torch's
            region = (lambda each: model(each.mul_(2))) if is_before else model
            output = checkpoint(region, batch, use_reentrant=False)
            if not is_before:
                batch.mul_(2)
            output.sum().backward()
        raised.append(type(caught.value))
        offload_module(model, store=store, min_bytes=0)
    assert not is_before or raised[0] is raised[1]


class Scaled(torch.Tensor):
    """Its cosine is another one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 3 if func is torch.Tensor.cos else result


def _with_attribute(batch: torch.Tensor) -> torch.Tensor:
    batch.scale = 3.0  # type: ignore[attr-defined]
    return batch


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "change", [lambda batch: batch.as_subclass(Scaled), _with_attribute], ids=["class", "attribute"]
)
def test_input_of_a_class_or_with_attributes_stays_as_the_region_computes_with_them(
    store: TierStore, change: Callable[[torch.Tensor], torch.Tensor], frozen: bool
) -> None:
    torch.manual_seed(0)
    model = Block()

    def region(batch: torch.Tensor) -> torch.Tensor:
        return model(batch.cos().as_subclass(torch.Tensor) * getattr(batch, "scale", 1.0))  # type: ignore[no-any-return]

    def call(_: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        output = checkpoint(region, change(batch.detach() if frozen else batch * 1), use_reentrant=False)
        store.flush()
        return output + batch  # type: ignore[no-any-return]

    expected = run(model, call)
    offload_module(model, store=store, min_bytes=0)
    assert run(model, call) == expected


def test_modes_of_the_region_see_the_same_operators(store: TierStore) -> None:
    """A mode of `context_fn` that counts them would not find in backward what it has seen in forward."""

    seen: list[list[object]] = []
    model = Block()
    for _ in range(2):
        seen.append([])
        modes = DispatchMode(seen[-1].append), contextlib.nullcontext()
        run(model, partial(checkpoint, use_reentrant=False, context_fn=lambda modes=modes: modes))
        offload_module(model, store=store, min_bytes=0)
    assert store.stats().packed_tensors == 1
    assert seen[1] == seen[0]


def _llama(*, reentrant: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=64, num_hidden_layers=3, use_cache=False, **sizes)
    )
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()


def _llama_step(model: Any) -> list[Any]:
    model.zero_grad()
    model.enable_input_require_grads()
    tokens = torch.arange(64).view(2, 32)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return all_bits(parameter.grad for parameter in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_checkpoint_themselves_store_their_inputs(store: TierStore, reentrant: bool) -> None:
    model = _llama(reentrant=reentrant)
    expected = _llama_step(model)
    for layer in model.model.layers:
        offload_module(layer, store=store, min_bytes=0, select=lambda tensor: tensor.dtype == torch.float32)
    assert _llama_step(model) == expected
    stats = store.stats()
    hidden_bytes = 2 * 32 * 64 * 4
    # Each layer's hidden states; beside them the cosines and sines of positions, which all layers share.
    assert 3 * hidden_bytes <= stats.packed_bytes <= 4 * hidden_bytes
