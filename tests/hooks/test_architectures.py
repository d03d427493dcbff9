"""Architectures of transformers train to the same bits under a store as without it, and leave nothing in the store.

By default each architecture runs in each mode once, and the ways of a step take turns; the rest of the products is
marked `slow`.
"""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers

from tests.census import Census
from tests.hooks.architectures import ARCHITECTURES, MODES, Step, Surroundings, Training, add_adapters, build
from tests.hooks.programs import Bits
from tierstore import TierStore, tiered_offload

pytestmark = [
    # The older name of `activation_checkpointing_enable`, the only one that all releases since 5.0 know.
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
]

ALL = sorted(ARCHITECTURES)
SUITE = "architectures of transformers"


def in_turns(*choices: object) -> list[Any]:
    """(architecture, mode, choice): one choice for each pair by default, the others marked `slow`."""
    return [
        pytest.param(name, mode, choice, marks=() if (row + column) % len(choices) == turn else pytest.mark.slow)
        for row, name in enumerate(ALL)
        for column, mode in enumerate(MODES)
        for turn, choice in enumerate(choices)
    ]


Prepare = Callable[[transformers.PreTrainedModel], None]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierStore]:
    """Keeps nothing in memory; forward waits for its writes and backward is read ahead piece by piece."""
    directory = tmp_path_factory.mktemp("drive")
    with TierStore(directory, host_bytes=0, staging_bytes="256KiB", disk_bytes="1GiB", codec="shuffle-zstd") as store:
        yield store
    assert list(directory.iterdir()) == []


def assert_empty(store: TierStore) -> None:
    gc.collect()
    store.flush()  # a write that ran when its graph ended is over now
    stats = store.stats()
    held = (stats.live_handles, stats.host_bytes, stats.disk_bytes, stats.lent_bytes, stats.staging_used_bytes)
    assert held == (0, 0, 0, 0, 0)


def run(
    name: str, mode: str, step: Step, surroundings: Surroundings, prepare: Prepare, **options: str
) -> dict[str, Bits]:
    torch.manual_seed(0)
    model = build(name, **options)
    prepare(model)
    return Training(model, name, mode, surroundings).run(step)


def assert_same_training(
    store: TierStore,
    census: Census,
    name: str,
    step: Step,
    mode: str = "plain",
    prepare: Prepare = lambda model: None,
    **options: str,
) -> None:
    """Losses, gradients and the final state are the same, each step left the store empty, and it had work to do."""
    before = store.stats()
    offloading = Surroundings(
        around=lambda: tiered_offload(store=store, min_bytes=0),
        settle=store.flush,
        end_step=lambda: assert_empty(store),
    )
    found = run(name, mode, step, offloading, prepare, **options)
    after = store.stats()
    expected = run(name, mode, step, Surroundings(), prepare, **options)
    assert found.keys() == expected.keys()
    assert [key for key in found if found[key] != expected[key]] == []
    assert store.stats() == after, "the plain run met the store"
    assert after.spilled_bytes > before.spilled_bytes
    assert after.restored_bytes > before.restored_bytes
    census.count(SUITE, "bitwise the same")


def backward_outside(training: Training, number: int) -> None:
    with training.surroundings.around():
        loss = training.forward(f"step {number}")
    training.settle(number)
    loss.backward()


def backward_inside(training: Training, number: int) -> None:
    with training.surroundings.around():
        loss = training.forward(f"step {number}")
        training.settle(number)
        loss.backward()


def two_micro_batches(training: Training, number: int) -> None:
    """Both forwards before any backward; the first's comes last in every other step."""
    losses = []
    for part in ("first", "second"):
        with training.surroundings.around():
            losses.append(training.forward(f"step {number}, {part}") / 2)
    training.settle(number)
    while losses:
        losses.pop(number % 2 - 1).backward()


def evaluation_around_training(training: Training, number: int) -> None:
    """Without gradients, before the forward that is trained on and between it and its backward."""
    with training.surroundings.around():
        evaluate(training, f"step {number}, before")
        loss = training.forward(f"step {number}")
        evaluate(training, f"step {number}, between")
    training.settle(number)
    loss.backward()


def evaluate(training: Training, label: str) -> None:
    training.model.eval()
    with torch.no_grad():
        training.forward(label)
    training.model.train()


@pytest.mark.parametrize(("name", "mode", "step"), in_turns(backward_outside, backward_inside, two_micro_batches))
def test_architecture_trained_same_bits(store: TierStore, census: Census, name: str, mode: str, step: Step) -> None:
    assert_same_training(store, census, name, step, mode)


@pytest.mark.parametrize("mode", MODES)
def test_frozen_llama_with_trained_adapters_same_bits(store: TierStore, census: Census, mode: str) -> None:
    assert_same_training(store, census, "llama", backward_outside, mode, add_adapters)


@pytest.mark.parametrize("name", ALL)
def test_evaluation_between_training_same_bits(store: TierStore, census: Census, name: str) -> None:
    assert_same_training(store, census, name, evaluation_around_training)


@pytest.mark.parametrize("attention", ["eager", pytest.param("sdpa", marks=pytest.mark.slow)])  # as a rule it is sdpa
@pytest.mark.parametrize("name", [name for name in ALL if ARCHITECTURES[name].attention])
def test_attention_implementation_same_bits(store: TierStore, census: Census, name: str, attention: str) -> None:
    assert_same_training(store, census, name, backward_outside, attn_implementation=attention)


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_experts_implementation_same_bits(store: TierStore, census: Census, experts: str) -> None:
    assert_same_training(store, census, "mixtral", backward_outside, experts_implementation=experts)


@pytest.mark.parametrize("mode", ["checkpoint", "reentrant checkpoint"])
@pytest.mark.parametrize("name", ALL)
def test_checkpointed_blocks_hand_fewer_bytes_to_the_store(store: TierStore, name: str, mode: str) -> None:
    """So what is trained above with checkpointing does checkpoint."""
    packed_bytes = []
    for each in (mode, "plain"):
        training = Training(build(name), name, each, Surroundings())
        before = store.stats().packed_bytes
        with tiered_offload(store=store, min_bytes=0):
            training.forward("one")
        packed_bytes.append(store.stats().packed_bytes - before)
        assert_empty(store)  # the graph went without a backward
    assert packed_bytes[0] < packed_bytes[1]
