"""Trainings that are measured: one step, and processes that take steps by turns, each in a memory cgroup of its own."""

from __future__ import annotations

import json
import resource
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from tierstore.demo.model import ByteTransformer, ModelShape, choose_vector_kernels, random_batch
from tierstore.demo.settings import load_text
from tierstore.returning.caching import caching_allocator

from .cgroup import MemoryCgroup, memory_cgroup
from .child import conversation

Forward = Callable[[], AbstractContextManager[object]]
Loss = Callable[[], Tensor]
Figures = dict[str, float]


class Run:
    """What a variant does around the parts of a step; by itself nothing."""

    def __init__(self, forward: Forward = nullcontext) -> None:
        self.forward = forward

    def between(self) -> None:
        pass

    def after(self) -> None:
        pass

    def figures(self) -> Figures:
        return {}


def timed_step(loss_of: Loss, optimizer: torch.optim.Optimizer, run: Run) -> Figures:
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    with run.forward():
        loss = loss_of()
    run.between()
    loss.backward()
    run.after()
    optimizer.step()
    optimizer.zero_grad()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "step_seconds": seconds,
        "last_loss": loss.item(),
        "page_faults": after.ru_minflt - before.ru_minflt,
        "user_seconds": after.ru_utime - before.ru_utime,
        "system_seconds": after.ru_stime - before.ru_stime,
    }


def use_caching_allocator() -> None:
    """As a store has it, but without one. Raises RuntimeError: it is not built here."""
    found = caching_allocator(torch.__version__, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    if isinstance(found, str):
        raise RuntimeError(f"no caching allocator: {found}")


def text_training(shape: ModelShape, batch: int) -> tuple[Loss, torch.optim.Optimizer]:
    """The loss of a byte-level transformer over the next batch of a text, and AdamW; the same bits each time."""
    choose_vector_kernels()
    torch.manual_seed(0)
    model = ByteTransformer(shape)
    corpus = torch.frombuffer(bytearray(load_text(None, shape.context + 1)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return lambda: model(*random_batch(corpus, batch, shape.context, generator)), optimizer


def readme_training() -> tuple[nn.Sequential, Loss, torch.optim.Optimizer]:
    """The model, the batch and the loss of the program in README.md, seeded, and an optimizer without a state."""
    choose_vector_kernels()
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    layers = [nn.TransformerEncoderLayer(256, 4, 1024, **options) for _ in range(12)]
    model, batch = nn.Sequential(*layers), torch.randn(16, 512, 256)
    return model, lambda: model(batch).square().mean(), torch.optim.SGD(model.parameters(), lr=1e-3)


class Training:
    """One training in a process and a cgroup of its own, which takes a step when it is told to."""

    def __init__(self, variant: str, process: subprocess.Popen[str], cgroup: MemoryCgroup) -> None:
        self.variant = variant
        self.is_running = True
        self.cgroup = cgroup
        self._process = process

    def step(self, how: str = "step") -> Figures:
        """Have it take one step, in the way that the command knows as `how`; returns that step's figures, none if the
        kernel ended it for want of memory. Raises RuntimeError: it ended in any other way."""
        if not self.is_running:
            return {}
        try:
            print(how, file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        self.is_running = False
        if self._process.wait() != -signal.SIGKILL or not self.cgroup.num_oom_kills:
            raise RuntimeError(f"{self.variant}: exit code {self._process.returncode}")
        return {}

    def figures(self, steps: list[Figures]) -> Figures:
        steps = [step for step in steps if step]
        names = dict.fromkeys(name for step in steps for name in step)
        seen = {"peak_memory_bytes": self.cgroup.peak_bytes, "out_of_memory_kills": self.cgroup.num_oom_kills}
        medians = {name: statistics.median(step[name] for step in steps) for name in names}
        return medians | ({"last_loss": steps[-1]["last_loss"]} if names else {}) | seen


@contextmanager
def training(
    variant: str, words: list[str], limit_bytes: int | None = None, *, with_swap: bool = False
) -> Iterator[Training]:
    """Start a command that takes a step for each line of input, in a memory cgroup with that limit, if there is one.
    Raises CgroupError: there can be no memory cgroup."""
    with memory_cgroup() as cgroup:
        if limit_bytes is not None:
            cgroup.limit(limit_bytes, with_swap=with_swap)
        with conversation(cgroup.command(words)) as process:
            yield Training(variant, process, cgroup)


def turns_of(
    trainings: dict[str, Training], num_turns: int, step: Callable[[Training], Figures] = Training.step
) -> list[dict[str, Figures]]:
    """So many steps of each, by turns: who goes first in one turn goes last in the next."""
    names = list(trainings)
    orders = (names if turn % 2 else names[::-1] for turn in range(num_turns))
    return [{name: step(trainings[name]) for name in order} for order in orders]
