"""Plans that are taken away: from a model that has changed, from copies of it, and not from other models."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.hooks.programs import assert_same_bits
from tests.memory_plan.blocks import Chain, Mlp, arounds, step, trained
from tierstore import ConfigError, MemoryPlan, TierStore, offload_module

NAMES = ["blocks.0", "blocks.1"]
_HEAD = """
format = 2
limit_bytes = 100000000000
min_bytes = 1
tier = "memory"
[predicted]
peak_bytes = 1000
step_seconds = 1.0
[strategies]
"""


@pytest.fixture
def plan(tmp_path: Path) -> MemoryPlan:
    path = tmp_path / "plan.toml"
    blocks = "".join(f"[[blocks]]\nname = '{name}'\nmodule = 'Mlp'\naction = 'store'\n" for name in NAMES)
    path.write_text(_HEAD + blocks)
    return MemoryPlan.load(path)


def stores(model: nn.Module, store: TierStore) -> bool:
    """Whether a step stores something."""
    before = store.stats().packed_tensors
    step(model).backward()  # type: ignore[no-untyped-call]
    return store.stats().packed_tensors > before


def test_other_model_refused_and_the_plan_stays(plan: MemoryPlan, store: TierStore) -> None:
    model, other = plan.apply(Chain(Mlp), store=store), Chain(Mlp)
    offload_module(other.blocks[0], store=store)
    with pytest.raises(ConfigError, match="applied to another model"):
        plan.remove(other)
    assert len(arounds(other)) == 1
    assert stores(model, store)
    plan.remove(model)
    assert not arounds(model)
    assert not stores(model, store)
    plan.remove(other)
    assert len(arounds(other)) == 1, "a plan that is not applied is left, and what others did too"


def test_block_under_another_name_is_undone(plan: MemoryPlan, store: TierStore) -> None:
    model = Chain(Mlp)
    block = model.blocks[1]
    plan.apply(model, store=store)
    model.renamed, model.blocks[1] = model.blocks[0], nn.Identity()
    del model.blocks[0]
    assert plan.remove(model) is model
    assert not arounds(model)
    assert not stores(block, store), "also one that the model has no more"
    assert not store.stats().memory_plan
    model = plan.apply(Chain(Mlp), store=store)
    plan.remove(nn.Sequential(model))
    assert not arounds(model), "also in a wrapper"


def test_copy_computes_plainly_once_the_plan_is_removed(plan: MemoryPlan, store: TierStore) -> None:
    model = Chain(Mlp)
    expected = trained(copy.deepcopy(model))
    copied = copy.deepcopy(plan.apply(model, store=store))
    assert stores(copied, store)
    copied.zero_grad()
    loss = step(copied)
    plan.remove(model)
    loss.backward()  # type: ignore[no-untyped-call]
    assert not stores(copied, store)
    plan.apply(model, store=store)
    assert not stores(copied, store)
    assert len(arounds(copied)) == 2
    plan.remove(copied)
    assert not arounds(copied)
    assert stores(model, store)
    plan.remove(model)
    store.close()
    assert_same_bits(trained(copied), expected)


def test_model_that_is_gone_leaves_the_plan_free(plan: MemoryPlan, store: TierStore) -> None:
    model = plan.apply(Chain(Mlp), store=store)
    alive, copied = weakref.ref(model), copy.deepcopy(model)
    del model
    gc.collect()
    assert alive() is None
    other = plan.apply(Chain(Mlp), store=store)
    assert stores(other, store)
    assert not stores(copied, store)
    with torch.no_grad():
        step(other)
    plan.remove(other)
    assert not arounds(other)
