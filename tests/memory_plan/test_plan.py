"""`plan_memory` and `MemoryPlan`, from end to end."""

from __future__ import annotations

import copy
import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from tests.cgroups import entering, made_cgroup
from tests.conftest import MakeStore
from tests.hooks.programs import all_bits, assert_same_bits, forget_after_error, grads
from tests.memory_plan.blocks import Mlp as SmallMlp
from tests.memory_plan.blocks import arounds, trained
from tests.memory_plan.conftest import Fitting
from tests.memory_plan.planned_model import NUM_BLOCKS, Block, Model, far_above, loss_of, planned, planned_by
from tests.processes import output_of
from tierstore import ConfigError, MemoryPlan, StoreClosedError, TierStore, offload_module, plan_memory
from tierstore.memory_plan import meter
from tierstore.memory_plan.decision import Action, Prices
from tierstore.memory_plan.meter import ResidentMeter
from tierstore.memory_plan.prices import Trials, measure_prices

MIB = 2**20
AGAIN = Action("recompute", stores=True)


def test_what_fits_is_left_alone(fitting: Fitting, store: TierStore) -> None:
    plan, model, before = fitting
    assert all_bits(model.state_dict().values()) == before
    assert not arounds(model)
    assert all_bits(grads(model)) == [None] * len(list(model.parameters()))
    assert not plan.is_needed
    assert plan.num_steps <= 10
    assert "It fits: nothing to do." in str(plan)
    model = copy.deepcopy(model)
    expected = trained(copy.deepcopy(model), loss_of)
    assert_same_bits(trained(plan.apply(model, store=store), loss_of), expected)
    assert store.stats().packed_tensors == 0
    plan.remove(model)


def test_blocks_that_are_never_recomputed_are_listed_by_reason(prices: Prices, store: TierStore) -> None:
    names = "blocks.1", "blocks.4"
    blocks = {name: replace(prices.blocks[name], differs="it has its reasons") for name in names}
    told = " ".join(str(planned_by(prices._replace(blocks={**prices.blocks, **blocks}), store)).split())
    assert told.endswith("Never recomputed, as it has its reasons: blocks.1, blocks.4.")


def test_what_cannot_fit_is_refused(store: TierStore) -> None:
    model = Model()
    with pytest.raises(ConfigError, match=r"it cannot fit: the least is [0-9.]+ ?[GM]iB of resident memory"):
        planned(model, store, "64MiB")
    assert not arounds(model)
    assert store.stats().live_handles == 0


def test_within_a_limit_same_bits(prices: Prices, store: TierStore) -> None:
    """Some blocks have to give way: the margin of a decision alone is 16 MiB."""
    model = Model()
    expected = trained(copy.deepcopy(model), loss_of, 3)
    limit_bytes = resident_with(prices, prices.uniform(Action("keep")).peak_bytes) - MIB
    plan = planned(model, store, limit_bytes)
    assert plan.is_needed
    assert plan.predicted.peak_bytes <= limit_bytes
    assert 8 <= plan.num_steps <= 20
    assert len(plan.blocks) == NUM_BLOCKS
    assert not any(block.differs for block in plan.blocks)
    assert all(len(line) <= 80 for line in str(plan).splitlines())
    assert re.search(r"this plan +\d.* yes", str(plan))
    assert plan.apply(model) is model
    assert_same_bits(trained(model, loss_of, 3), expected)
    told = store.stats().memory_plan
    assert told["limit_bytes"] == limit_bytes
    assert told["measured_step_seconds"] > 0
    plan.remove(model)
    assert not arounds(model)
    assert not store.stats().memory_plan


# --- limits that are hard to keep -------------------------------------------------------------------------------------

VOLUMES = """
import re, sys, torch
from pathlib import Path
from torch import nn
from tierstore import ConfigError, TierStore, plan_memory

def pair(before, after):
    return nn.Sequential(nn.Conv3d(before, after, 3, padding=1), nn.ReLU(), nn.Conv3d(after, after, 3, padding=1))

class Volumes(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.middle, self.up = pair(1, 12), pair(12, 24), pair(36, 12)

    def forward(self, batch):
        skipped = self.down(batch)
        middle = self.middle(nn.functional.max_pool3d(skipped, 2))
        return self.up(torch.cat([skipped, nn.functional.interpolate(middle, scale_factor=2)], 1))

directory, group = map(Path, sys.argv[1:])
model, batch = Volumes(), torch.randn(1, 1, 64, 64, 64)
with TierStore(directory, codec="none") as store:
    resident = int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    limit = resident + 144 * 2**20
    (group / "memory.limit_in_bytes").write_text(str(limit))
    try:
        print(plan_memory(model, lambda: model(batch).square().mean(), store=store, limit=limit).num_steps)
    except ConfigError as error:
        print(error)
"""


def test_kernel_does_not_end_planning_that_cannot_fit(tmp_path: Path) -> None:
    """What is joined in front of the last pair takes 36 MiB, its gradient as much, and convolutions copy both."""
    with made_cgroup("memory") as group:
        assert "it cannot fit: the least is" in output_of(VOLUMES, tmp_path, group, before=entering(group))


def test_block_too_large_to_be_computed_again_within_the_limit_is_not(store: TierStore) -> None:
    model = Model()
    trials = Trials(model, lambda: loss_of(model, rows=64), store, ResidentMeter(), 1)
    trials.guards_memory = False
    prices, _ = measure_prices(trials)
    assert {block.differs for block in prices.blocks.values()} == {"that takes more memory than the limit"}
    assert {*prices.uniform(Action("recompute")).actions.values()} == {Action("store")}


def resident_with(prices: Prices, nbytes: int) -> int:
    """What `nbytes` at a moment of a step, which was measured some time ago, would be now."""
    meter = ResidentMeter()
    meter.tidy()
    return meter.level() + nbytes - prices.moments[0].bytes


def test_within_the_tightest_limits_the_store_moves_less_at_a_time(
    prices: Prices, make_store: MakeStore, tmp_path: Path
) -> None:
    store, model = make_store(staging_bytes="64MiB"), Model()
    expected = trained(copy.deepcopy(model), loss_of)
    limits = store._core.residency.window_limits
    decision = prices.narrow().uniform(Action("store"))
    plan = planned_by(prices, store, decision=decision)
    assert plan.staging_bytes == 32 * MIB
    assert "The store moves at most 32 MiB at a time meanwhile." in str(plan)
    plan.apply(model)
    assert store._core.residency.window_limits == (0, 32 * MIB)
    assert_same_bits(trained(model, loss_of), expected)
    plan.remove(model)
    assert store._core.residency.window_limits == limits
    plan.save(tmp_path / "plan.toml")
    MemoryPlan.load(tmp_path / "plan.toml").apply(model, store=store)
    assert store._core.residency.window_limits == (0, 32 * MIB)


# --- what an existing plan does ---------------------------------------------------------------------------------------


def test_apply_lets_go_of_code_that_rests(easy: MemoryPlan) -> None:
    start = re.search(r"^([0-9a-f]+)-\S+ r-xp .*/libtorch_cpu\.so$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    assert start is not None
    ctypes.string_at(int(start[1], 16), 32 * MIB)  # as if all of it had run
    before = file_bytes()
    model = Model()
    easy.apply(model)
    assert file_bytes() < before - 24 * MIB
    assert len(trained(model, loss_of)) > 0


def file_bytes() -> int:
    """Resident pages of files."""
    found = re.search(r"RssFile:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.parametrize("action", ["keep", "store", "recompute"])
def test_saved_and_loaded_it_says_and_does_the_same(
    easy: MemoryPlan, store: TierStore, tmp_path: Path, action: str
) -> None:
    model, path = Model(), tmp_path / "plan.toml"
    expected = trained(copy.deepcopy(model), loss_of)
    easy.save(path)
    same = MemoryPlan.load(path)
    assert (str(same), same._contents) == (str(easy), easy._contents)
    path.write_text(path.read_text().replace('action = "keep"', f'action = "{action}"'))
    loaded = MemoryPlan.load(path)
    assert {block.action for block in loaded.blocks} == {action}
    assert all(len(line) <= 80 for line in str(loaded).splitlines())
    num_packed = store.stats().packed_tensors
    assert_same_bits(trained(loaded.apply(model, store=store), loss_of), expected)
    assert (store.stats().packed_tensors > num_packed) == (action == "store")
    loaded.remove(model)
    if action == "store":
        with pytest.raises(ConfigError, match=r"store=None.*give an open TierStore"):
            loaded.apply(model)
    with pytest.raises(ConfigError, match="has no prices"):
        loaded.plot()
    path.write_text(path.read_text().replace("format = 2", "format = 1"))
    with pytest.raises(ConfigError, match="this release reads format 2"):
        MemoryPlan.load(path)


def test_plot(easy: MemoryPlan, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = easy.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000
    (axes,) = figure.axes
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["plan, by its limit", *easy.strategies, "this plan", "limit"]


class Other(Block):
    pass


def test_what_cannot_be_planned_or_followed_is_refused(
    easy: MemoryPlan, store: TierStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model, one that is offloaded, a second one; and planning where peaks cannot be measured."""
    shorter, other = Model(), Model()
    del shorter.blocks[-1]
    other.blocks[2] = Other()
    for model, message in ((shorter, r"blocks\.5.*a Block of that name"), (other, r"blocks\.2.*not a Other")):
        with pytest.raises(ConfigError, match=message):
            easy.apply(model)
        assert not arounds(model)
    with pytest.raises(ConfigError, match=r"give a torch\.nn\.Module"):
        easy.apply(3)  # type: ignore[arg-type]
    for place in ("", "blocks.1"):
        model = Model()
        offload_module(model.get_submodule(place), store=store)
        with pytest.raises(ConfigError, match="offloaded or planned already"):
            easy.apply(model)
        assert len(arounds(model)) == 1
        with pytest.raises(ConfigError, match="offloaded or planned already"):
            planned(model, store, far_above())
    model = easy.apply(Model())
    for again in (model, Model()):
        with pytest.raises(ConfigError, match="applied already"):
            easy.apply(again)
    easy.save(tmp_path / "plan.toml")
    with pytest.raises(ConfigError, match="offloaded or planned already"):
        MemoryPlan.load(tmp_path / "plan.toml").apply(model)
    easy.remove(model)
    easy.remove(model)
    easy.apply(model)
    monkeypatch.setattr(meter, "_CLEAR_REFS", "/proc/self/no_such_file")
    with pytest.raises(ConfigError, match=r"limit=.*: the peak of the resident memory of the process cannot be meas"):
        planned(Model(), store, far_above())


def test_store_closed_apply_refuses_and_remove_works(prices: Prices, make_store: MakeStore) -> None:
    store, model = make_store(), Model()
    plan = planned_by(prices, store)
    plan.apply(model)
    store.close()
    trained(model, loss_of)
    plan.remove(model)
    with pytest.raises(StoreClosedError):
        plan.apply(model)
    assert not arounds(model)
    with pytest.raises(StoreClosedError):
        planned(model, store, far_above())


def test_error_in_the_middle_of_planning_leaves_all_as_found(store: TierStore) -> None:
    """Also an interrupt: with all stored, in forward alone, in a step with moments, and in one that is timed."""
    for at in (1, 2, 4, 8):
        model = Model()
        before = all_bits(model.state_dict().values())
        num_calls = 0

        def run(model: nn.Module = model, at: int = at) -> torch.Tensor:
            nonlocal num_calls
            num_calls += 1
            loss = loss_of(model, rows=64)
            if num_calls == at:
                raise KeyboardInterrupt
            return loss

        with pytest.raises(KeyboardInterrupt):
            plan_memory(model, run, store=store, limit=far_above())
        forget_after_error()
        assert all_bits(model.state_dict().values()) == before
        assert not any(parameter.grad is not None for parameter in model.parameters())
        assert not arounds(model)
        assert model.training
        assert not store._core.plans.limits_process


def test_two_plans_on_one_store_the_least_limits_hold(prices: Prices, store: TierStore) -> None:
    models = Model(), Model()
    limits = far_above(), far_above() + 2**30
    plans = [planned_by(prices, store, limit) for limit in limits]

    def followed() -> tuple[int | None, float | None]:
        return store._core.returner._limit_bytes, store.stats().memory_plan.get("limit_bytes")

    for plan, model in zip(plans, models, strict=True):
        plan.apply(model)
    assert followed() == (limits[0], limits[1]), "the figures are those of the newest"
    plans[1].remove(models[1])
    assert followed() == (limits[0], limits[0])
    with Trials(models[1], lambda: loss_of(models[1]), store, ResidentMeter(), limits[0] - MIB):
        assert followed() == (limits[0] - MIB, limits[0])
    assert followed() == (limits[0], limits[0])
    plans[1].apply(models[1])
    plans[0].remove(models[0])
    assert followed() == (limits[1], limits[1])
    plans[1].remove(models[1])
    assert followed() == (None, None)


def test_model_that_saves_nothing_refused(store: TierStore) -> None:
    weight = torch.randn(4, requires_grad=True)
    with pytest.raises(ConfigError, match="save no tensors"):
        plan_memory(SmallMlp(), lambda: weight.square().sum(), store=store, limit="1GiB")


ARGUMENTS = [
    ({"model": 3}, "model"),
    ({"run": 3}, "run"),
    ({"store": None}, "store"),
    ({"limit": "much"}, "limit"),
    ({"reserve": -1}, "reserve"),
]


@pytest.mark.parametrize(("change", "option"), ARGUMENTS, ids=str)
def test_argument_that_cannot_be_used_one_config_error(store: TierStore, change: dict[str, Any], option: str) -> None:
    given: dict[str, Any] = {"model": SmallMlp(), "run": lambda: None, "store": store, "limit": "1GiB", "reserve": 0}
    given |= change
    with pytest.raises(ConfigError) as caught:
        plan_memory(given.pop("model"), given.pop("run"), **given)
    assert caught.value.option == option
