"""The store where others use it, on a real accelerator: a trainer, memory plans, FSDP2, and a daemon."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import MakeStore
from tests.daemon.conftest import StartDaemon, short_directory, start_daemon
from tests.gpu.device import DEVICE, NEEDS_DEVICE, repeatable
from tests.hooks.programs import SIDE, all_bits, assert_same_bits, grads, run_offloaded, run_plain, training
from tests.memory_plan.blocks import BLOCKS, Chain, recorded, trained, with_action
from tests.memory_plan.blocks import actions_of as actions_of_calls
from tests.memory_plan.planned_model import Block
from tests.memory_plan.test_sharded import PRINTED, printed_by
from tierstore import TierStore, plan_memory

__all__ = ["short_directory", "start_daemon"]

pytestmark = [*NEEDS_DEVICE, pytest.mark.filterwarnings("default")]  # the libraries' own

WIDTH, ROWS, NUM_BLOCKS = 1024, 8192, 8
NAMES = [f"blocks.{number}" for number in range(2)]


@pytest.mark.parametrize("arguments", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}], ids=str)
def test_transformers_trainer_same_losses_and_parameters(
    tmp_path: Path, arguments: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    from tests.integrations import test_transformers as on_the_cpu
    from tierstore.integrations.transformers import offload_trainer

    def ended(*, offloads: bool) -> Any:
        trainer = on_the_cpu.trainer_of(tmp_path, use_cpu=False, **arguments)
        if offloads:
            drive = on_the_cpu.directory(tmp_path)
            offload_trainer(trainer, drive, store_options={"host_bytes": "1GiB"}, min_bytes=0)
        trainer.train()
        assert next(trainer.model.parameters()).device.type == "cuda"
        return trainer

    with repeatable():
        plain, again, offloaded = ended(offloads=False), ended(offloads=False), ended(offloads=True)
    assert on_the_cpu.outcome(again) == on_the_cpu.outcome(plain)
    assert on_the_cpu.outcome(offloaded) == on_the_cpu.outcome(plain)
    assert min(on_the_cpu.logged(offloaded, "tierstore/offloaded_gib")) > 0
    assert "no memory was gained" not in capsys.readouterr().out


class Residual(Block):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch + super().forward(batch)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual(WIDTH) for _ in range(NUM_BLOCKS))).to(DEVICE)


def _loss(model: nn.Module) -> torch.Tensor:
    batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return model(batch.to(DEVICE)).square().mean()  # type: ignore[no-any-return]


def _two_steps(model: nn.Module) -> tuple[list[Any], int]:
    """Gradients and state after each step, and the most memory allocated."""
    torch.manual_seed(3)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    found = []
    for _ in range(2):
        model.zero_grad()
        _loss(model).backward()
        found += all_bits(grads(model))
    torch.cuda.synchronize()
    return [*found, *all_bits(model.state_dict().values())], torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("share", [0.75, 0.5])
def test_memory_plan_keeps_the_limit_with_the_same_bits(make_store: MakeStore, share: float) -> None:
    model = _model()
    plain, plain_peak = _two_steps(copy.deepcopy(model))
    again, _ = _two_steps(copy.deepcopy(model))
    assert_same_bits(again, plain)
    store = make_store(host_bytes="4GiB")
    limit_bytes = int(share * plain_peak)
    plan = plan_memory(model, lambda: _loss(model), store=store, limit=limit_bytes)
    assert {block.action for block in plan.blocks} != {"keep"}
    plan.apply(model)
    planned, peak = _two_steps(model)
    plan.remove(model)
    assert_same_bits(planned, plain)
    assert peak <= limit_bytes
    assert store.stats().live_handles == 0


def _small_step(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(SIDE, SIDE, device=DEVICE)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", BLOCKS)
def test_each_action_on_each_kind_of_block_same_bits(make_store: MakeStore, name: str) -> None:
    store = make_store(host_bytes="1GiB")
    with torch.device(DEVICE), repeatable():
        model = Chain(BLOCKS[name])
        expected = trained(copy.deepcopy(model), _small_step)
        assert_same_bits(trained(copy.deepcopy(model), _small_step), expected)
        calls = recorded(copy.deepcopy(model), NAMES, store, _small_step)
        buffers = sorted({name for call in calls for name in call.buffers})
        for action in actions_of_calls([call for call in calls if call.name == NAMES[0]]):
            mine = copy.deepcopy(model)
            with with_action(mine, NAMES, action, buffers, store):
                assert_same_bits(trained(mine, _small_step), expected)
            assert store.stats().live_handles == 0, action


def test_each_action_around_sharded_blocks_same_bits(store_directory: Path) -> None:
    found, expected = (text.splitlines() for text in (printed_by(store_directory, "cuda"), PRINTED))
    assert [line for line in found if "same bits" in line] == [line for line in expected if "same bits" in line]


@pytest.mark.parametrize("host_bytes", [0, "1GiB"])
def test_daemon_writes_what_leaves_the_device_same_bits(start_daemon: StartDaemon, host_bytes: int | str) -> None:
    with TierStore.connect(start_daemon().socket, host_bytes=host_bytes) as store:
        with torch.device(DEVICE), repeatable():
            program = training("transformer")
            expected = run_plain(program)
            for _ in range(2):
                assert_same_bits(run_offloaded(program, store), expected)
        store.flush()
        stats = store.stats()
    assert stats.offloaded_bytes > 0
    assert (stats.spilled_bytes > 0) == (host_bytes == 0)
    assert (stats.live_handles, stats.device_bytes, stats.host_bytes, stats.disk_bytes) == (0, 0, 0, 0)
