"""Trainings of `MODELS` with a way to save memory, each in a process and a memory cgroup of its own.

All use SGD and the default environment. A process takes a step for each line that it is given, and answers with a line
of figures.

* *checkpoint*: every block by `torch.utils.checkpoint`; *every other*: every second one.
* *offload*: `tiered_offload(TierStore(directory))`, with default options.
* *budget*: `torch.compile` with the backend "aot_eager_decomp_partition" and an `activation_memory_budget` of 0;
  *plain, compiled* is plain training by the same backend.
* *plan*: `plan_memory(..., limit=)`, which is told the limit and nothing else, then `apply`. *plan from a file* applies
  the plan that such a process with the same scratch folder has saved.
"""

from __future__ import annotations

import gc
import json
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .cgroup import memory_cgroup
from .memory_limit import Figures, Training
from .plan_models import MODELS, blocks_of_model

if TYPE_CHECKING:
    from tierstore import MemoryPlan, TierStore

__all__ = ["COMPILED", "LOADED_PLAN", "PLAIN", "PLAN", "REFUSED", "SINGLE", "plain_peak", "training_within"]

PLAIN, COMPILED = "plain", "plain, compiled"
SINGLE = ("checkpoint", "every other", "offload", "budget")
PLAN, LOADED_PLAN = "plan", "plan from a file"
REFUSED = 3
"""The exit code of a planning that says it cannot fit."""


def plain_peak(model: str, scratch: Path) -> int:
    """The most memory in three plain steps."""
    with training_within(model, PLAIN, None, scratch) as training:
        return int(max(training.step()["peak_bytes"] for _ in range(3)))


@contextmanager
def training_within(model: str, strategy: str, limit_bytes: int | None, scratch: Path) -> Iterator[Training]:
    """One of `MODELS` in a process of its own, with a strategy, in a memory cgroup with that limit, if there is one."""
    request = json.dumps([model, strategy, limit_bytes, str(scratch)])
    with memory_cgroup() as cgroup:
        if limit_bytes is not None:
            cgroup.limit(limit_bytes)
        command = cgroup.command([sys.executable, "-m", "bench.plan_trainings", request])
        with (
            suppress(BrokenPipeError),  # it was killed before it read its last line
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
        ):
            yield Training(strategy, process, cgroup)


# --- in the cgroup ----------------------------------------------------------------------------------------------------

Loss = Callable[[], torch.Tensor]


def train(name: str, strategy: str, limit_bytes: int | None, scratch: str) -> None:
    """One step for each line of standard input, a line of figures for each step."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses: list[float] = []
    with ExitStack() as stack:
        loss_of, figures_of = _prepared(strategy, model, batch, limit_bytes, Path(scratch), stack)
        torch.manual_seed(1)
        for _ in sys.stdin:
            Path("/proc/self/clear_refs").write_text("5")
            used, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            loss = loss_of()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds, now = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
            figures = {"step_seconds": seconds, "peak_bytes": _peak_bytes(), "last_loss": loss.item()}
            figures["user_seconds"] = now.ru_utime - used.ru_utime
            figures["system_seconds"] = now.ru_stime - used.ru_stime
            figures["num_page_faults"] = now.ru_minflt - used.ru_minflt
            losses.append(loss.item())
            figures["fourth_loss"] = losses[min(3, len(losses) - 1)]
            del loss
            gc.collect()
            print(json.dumps(figures | figures_of()), flush=True)


def _prepared(
    strategy: str,
    model: nn.Module,
    batch: tuple[Any, ...],
    limit_bytes: int | None,
    scratch: Path,
    stack: ExitStack,
) -> tuple[Loss, Callable[[], Figures]]:
    """What computes the loss, and what else is told of a step."""
    from tierstore import MemoryPlan, TierStore, tiered_offload

    loss_of: Loss = lambda: model(*batch)  # noqa: E731 - what follows wraps it
    if strategy in ("checkpoint", "every other"):
        for block in blocks_of_model(model)[:: 1 if strategy == "checkpoint" else 2]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    elif strategy in ("budget", COMPILED):
        if strategy == "budget":
            torch._functorch.config.activation_memory_budget = 0.0
        compiled = torch.compile(model, backend="aot_eager_decomp_partition")
        return lambda: compiled(*batch), dict
    elif strategy == "offload":
        return tiered_offload(stack.enter_context(TierStore(scratch)))(loss_of), dict
    elif strategy in (PLAN, LOADED_PLAN):
        store, file = stack.enter_context(TierStore(scratch)), scratch / "plan.toml"
        if strategy == LOADED_PLAN:
            MemoryPlan.load(file).apply(model, store=store)
            return loss_of, partial(_promised, store)
        plan, figures = _planned(model, loss_of, store, limit_bytes)
        plan.save(file)
        plan.apply(model)
        return loss_of, lambda: figures | _promised(store)
    return loss_of, dict


def _planned(model: nn.Module, loss_of: Loss, store: TierStore, limit_bytes: int | None) -> tuple[MemoryPlan, Figures]:
    from tierstore import ConfigError, plan_memory

    began = time.perf_counter()
    try:
        plan = plan_memory(model, loss_of, store=store, limit=limit_bytes)
    except ConfigError as error:
        if error.option != "limit":
            raise
        print(error, file=sys.stderr)
        sys.exit(REFUSED)
    print(plan, file=sys.stderr)
    return plan, {"planning_seconds": time.perf_counter() - began, "decision_seconds": plan.decision_seconds}


def _promised(store: TierStore) -> Figures:
    told = store.stats().memory_plan
    return {
        "predicted_bytes": told["predicted_peak_bytes"],
        "predicted_seconds": told["predicted_step_seconds"],
        "corrections": told["num_corrections"],
    }


def _peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    train(*json.loads(sys.argv[1]))
