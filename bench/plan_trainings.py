"""Trainings of `MODELS` with a way to save memory, each in a process and a memory cgroup of its own.

All use SGD and the default environment. A process takes a step for each line that it is given, and answers with a line
of figures.

* *checkpoint*: every block by `torch.utils.checkpoint`; *every other*: every second one.
* *offload*: `tiered_offload(TierStore(directory))`, with default options.
* *budget*: `torch.compile` with the backend "aot_eager_decomp_partition" and an `activation_memory_budget` of 0;
  *plain, compiled* is plain training by the same backend.
* *plan*: `plan_memory(..., limit=)`, which is told the limit and nothing else, then `apply`. *plan from a file* applies
  the plan that such a process with the same scratch folder has saved. *plan without the allocator* turns the caching
  allocator off.
"""

from __future__ import annotations

import gc
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tierstore import MemoryPlan, TierStore, plan_memory, tiered_offload
from tierstore.returning.caching import SWITCH

from .child import command, serve
from .peers import checkpoint_blocks
from .plan_models import MODELS, blocks_of_model
from .trainings import Figures, Loss, Run, Training, timed_step, training

PLAIN, COMPILED = "plain", "plain, compiled"
SINGLE = ("checkpoint", "every other", "offload", "budget")
PLAN, LOADED_PLAN, PLAN_WITHOUT_ALLOCATOR = "plan", "plan from a file", "plan without the allocator"


def plain_peak(model: str, scratch: Path) -> int:
    """The most memory in three plain steps."""
    with training_within(model, PLAIN, None, scratch) as training:
        return int(max(training.step()["peak_bytes"] for _ in range(3)))


@contextmanager
def training_within(model: str, strategy: str, limit_bytes: int | None, scratch: Path) -> Iterator[Training]:
    """One of `MODELS` in a process of its own, with a strategy, in a memory cgroup with that limit, if there is one."""
    words = command(__name__, "train", model, strategy, limit_bytes, scratch)
    if strategy == PLAN_WITHOUT_ALLOCATOR:
        words = ["env", f"{SWITCH}=0", *words]
    with training(strategy, words, limit_bytes) as started:
        yield started


# --- in the cgroup ----------------------------------------------------------------------------------------------------


def train(name: str, strategy: str, limit_bytes: int | None, scratch: Path) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses: list[float] = []
    with ExitStack() as stack:
        loss_of, figures_of = _prepared(strategy, model, batch, limit_bytes, scratch, stack)
        torch.manual_seed(1)

        def step(_: str) -> Figures:
            Path("/proc/self/clear_refs").write_text("5")
            used = resource.getrusage(resource.RUSAGE_SELF)
            figures = timed_step(loss_of, optimizer, Run())
            now = resource.getrusage(resource.RUSAGE_SELF)
            figures |= {
                "peak_bytes": _peak_bytes(),
                "user_seconds": now.ru_utime - used.ru_utime,
                "system_seconds": now.ru_stime - used.ru_stime,
                "num_page_faults": now.ru_minflt - used.ru_minflt,
            }
            losses.append(figures["last_loss"])
            gc.collect()
            return figures | {"fourth_loss": losses[min(3, len(losses) - 1)]} | figures_of()

        serve(step)


def _prepared(
    strategy: str, model: nn.Module, batch: tuple[Any, ...], limit_bytes: int | None, scratch: Path, stack: ExitStack
) -> tuple[Loss, Callable[[], Figures]]:
    loss_of: Loss = lambda: model(*batch)  # noqa: E731 - what follows wraps it
    figures: Figures = {}
    if strategy in ("checkpoint", "every other"):
        checkpoint_blocks(blocks_of_model(model)[:: 1 if strategy == "checkpoint" else 2])
    elif strategy in ("budget", COMPILED):
        if strategy == "budget":
            torch._functorch.config.activation_memory_budget = 0.0
        compiled = torch.compile(model, backend="aot_eager_decomp_partition")
        return lambda: compiled(*batch), dict
    elif strategy == "offload":
        return tiered_offload(stack.enter_context(TierStore(scratch)))(loss_of), dict
    elif strategy in (PLAN, LOADED_PLAN, PLAN_WITHOUT_ALLOCATOR):
        store, file = stack.enter_context(TierStore(scratch)), scratch / "plan.toml"
        if strategy == LOADED_PLAN:
            MemoryPlan.load(file).apply(model, store=store)
        else:
            began = time.perf_counter()
            plan = plan_memory(model, loss_of, store=store, limit=limit_bytes)
            figures |= {"planning_seconds": time.perf_counter() - began, "decision_seconds": plan.decision_seconds}
            print(plan, file=sys.stderr)
            plan.save(file)
            plan.apply(model)
        return loss_of, lambda: figures | _promised(store)
    return loss_of, dict


def _promised(store: TierStore) -> Figures:
    told = store.stats().memory_plan
    return {
        "predicted_bytes": told["predicted_peak_bytes"],
        "predicted_seconds": told["predicted_step_seconds"],
    }


def _peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0
