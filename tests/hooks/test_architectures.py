"""Training of well-known architectures, with everything that backward needs on disk: the same bits, step by step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

from tests.census import Census
from tests.conftest import MakeStore
from tests.hooks.architectures import ARCHITECTURES, checkpoint_blocks, make_batch
from tests.hooks.programs import Bits, all_bits, bits
from tierstore import TierStore, tiered_offload

pytestmark = [
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
    # CPU autocast of what has no low-precision kernel, and transformers' own use of older names.
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
]

SUITE = "architectures"
STEPS = 3
MODES = ("plain", "autocast", "checkpoint", "reentrant checkpoint")
Step = Callable[[nn.Module, int], torch.Tensor]
Around = Callable[[], AbstractContextManager[object]]


@pytest.fixture
def store(make_store: MakeStore) -> TierStore:
    """Sends everything to disk; what is above 4 KiB to extents."""
    return make_store(inline_bytes="4KiB")


def _empty(store: TierStore) -> bool:
    gc.collect()
    store.flush()
    stats = store.stats()
    return (stats.live_handles, stats.host_bytes, stats.lent_bytes, stats.disk_bytes) == (0, 0, 0, 0)


def _train(
    make: Callable[[], nn.Module], store: TierStore | None, step: Callable[[nn.Module, int, Around], torch.Tensor]
) -> Iterator[list[Bits]]:
    """After each step, the bits of loss, gradients and parameters; the store is empty then."""
    torch.manual_seed(0)
    model = make().train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for number in range(STEPS):
        torch.manual_seed(number)  # dropout; the two trainings take turns
        optimizer.zero_grad()
        loss = step(model, number, nullcontext if store is None else lambda: tiered_offload(store, min_bytes=0))
        gradients = [parameter.grad for parameter in trained]
        optimizer.step()
        yield all_bits([loss.detach(), *gradients, *model.state_dict().values()])
        del loss
        assert store is None or _empty(store), f"step {number}"


def _assert_same_training(
    make: Callable[[], nn.Module], store: TierStore, step: Callable[[nn.Module, int, Around], torch.Tensor]
) -> None:
    for number, (expected, found) in enumerate(zip(_train(make, None, step), _train(make, store, step), strict=True)):
        wrong = [index for index, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]]
        assert not wrong, f"step {number}: results {wrong} of {len(expected)} differ"
    assert store.stats().spilled_bytes > 0
    assert store.stats().restored_bytes > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training_same_bits(store: TierStore, name: str, mode: str, census: Census) -> None:
    def make() -> nn.Module:
        model = ARCHITECTURES[name]()
        if "checkpoint" in mode:
            checkpoint_blocks(model, use_reentrant=mode.startswith("reentrant"))
        return model

    def step(model: nn.Module, number: int, around: Around) -> torch.Tensor:
        """Backward runs inside the scope where it recomputes by the reentrant form, so that this is stored too."""
        precision = torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else nullcontext()
        with around():
            with precision:
                loss: torch.Tensor = model(**make_batch(name, number)).loss
            if mode == "reentrant checkpoint":
                loss.backward()
        if mode != "reentrant checkpoint":
            loss.backward()
        return loss

    _assert_same_training(make, store, step)
    census.count(SUITE, f"{mode}: bitwise the same over {STEPS} steps")


class LowRank(nn.Module):
    """A frozen linear layer and a trained correction of low rank beside it."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.frozen(values) + self.up(self.down(values))
        return result


def _llama_with_adapters() -> nn.Module:
    model = ARCHITECTURES["Llama"]().requires_grad_(False)
    for layer in model.get_submodule("model.layers").children():
        attention = layer.get_submodule("self_attn")
        for name in ("q_proj", "v_proj"):
            projection = attention.get_submodule(name)
            assert isinstance(projection, nn.Linear)
            setattr(attention, name, LowRank(projection))
    return model


def test_adapters_on_a_frozen_base_same_bits(store: TierStore, census: Census) -> None:
    def step(model: nn.Module, number: int, around: Around) -> torch.Tensor:
        with around():
            loss: torch.Tensor = model(**make_batch("Llama", number)).loss
        loss.backward()
        return loss

    _assert_same_training(_llama_with_adapters, store, step)
    census.count(SUITE, "low-rank adapters: bitwise the same")


@pytest.mark.parametrize("interleaved", [False, True], ids=["one after the other", "both forwards first"])
def test_accumulated_gradients_same_bits(store: TierStore, interleaved: bool, census: Census) -> None:
    def step(model: nn.Module, number: int, around: Around) -> torch.Tensor:
        losses = []
        for part in range(2):
            with around():
                losses.append(model(**make_batch("GPT-2", 2 * number + part)).loss / 2)
            if not interleaved:
                losses[-1].backward()
        if interleaved:
            for loss in losses:
                loss.backward()
        return torch.stack([loss.detach() for loss in losses]).sum()

    _assert_same_training(ARCHITECTURES["GPT-2"], store, step)
    census.count(SUITE, "accumulated gradients: bitwise the same")


def test_evaluation_between_training_steps_same_bits(store: TierStore, census: Census) -> None:
    """Also inside the scope, where nothing is saved while gradients are off."""
    evaluated: list[Bits] = []

    def step(model: nn.Module, number: int, around: Around) -> torch.Tensor:
        with around():
            loss: torch.Tensor = model(**make_batch("BERT", number)).loss
            model.eval()
            with torch.no_grad():
                evaluated.append(bits(model(**make_batch("BERT", 100 + number)).logits))
            model.train()
        loss.backward()
        return loss

    _assert_same_training(ARCHITECTURES["BERT"], store, step)
    assert evaluated[0::2] == evaluated[1::2]  # plain and offloaded training take turns
    census.count(SUITE, "evaluation between steps: bitwise the same")
