"""What does a training step cost with the disk tier in a daemon, beside an embedded store and beside none?

Two kinds of training, because a store in the same process disturbs them in different ways. One runs Python all the
time, so whoever else needs the interpreter has to wait for it, and it for them. One computes on all cores that it is
given, so it loses what background work takes of them. Most of what either saves goes to disk.

In every variant a plain training, one with an embedded store and one with a daemon take turns, a step each, in
processes of their own. With two trainers each of the three is two processes, which share the daemon.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tierstore.demo.model import ByteTransformer, ModelShape, random_batch
from tierstore.demo.text import load_text
from tierstore.demo.vector_math import choose_vector_kernels

from .goals import Goal
from .harness import Benchmark, main_of_one_variant
from .parties import Daemon, Figures, Party, daemon, party, serve_commands

PLAIN, EMBEDDED, SIDECAR = "plain", "embedded", "sidecar"
KINDS = {"Python-bound": "python", "compute-bound": "compute"}
VARIANTS = {f"{kind}, {count}": (KINDS[kind], num) for kind in KINDS for count, num in (("alone", 1), ("two", 2))}
SHAPE = ModelShape(layers=4, width=256, heads=4, context=512)
BATCH = 12
NUM_THREADS = 2
HOST_BYTES = 64 * 2**20
NUM_SAVED = 256
SAVED_BYTES = 2**20
LOOPS = 20000
WARM_UP_STEPS = 1
TURNS = 3

BENCHMARK = Benchmark(
    name="sidecar_training",
    question="A training step with the disk tier in a daemon, beside an embedded store and a plain step",
    variants=tuple(VARIANTS),
    compare="none",
    rounds=1,
    settings={
        "model": vars(SHAPE),
        "batch": BATCH,
        "num_threads": NUM_THREADS,
        "host_bytes": HOST_BYTES,
        "python_bound_saved": NUM_SAVED,
        "python_bound_saved_bytes": SAVED_BYTES,
        "turns": TURNS,
    },
    plotted=("embedded_step_to_plain", "sidecar_step_to_plain", "embedded_cpu_to_plain", "sidecar_cpu_to_plain"),
    environment={variant: {"MKL_CBWR": "AUTO,STRICT"} for variant in VARIANTS},  # Intel promises the same bits with it
    goals=tuple(Goal("last loss, bit for bit as plain", "same_losses", variant, equals=1) for variant in VARIANTS),
)


def measure(variant: str, scratch: Path) -> Figures:
    """Medians of the steps, and of their ratios to the plain ones of the same turn."""
    kind, num_trainers = VARIANTS[variant]
    with ExitStack() as stack:
        served = stack.enter_context(daemon(scratch))
        parties = [
            stack.enter_context(
                party(name, __spec__.name, [[kind, name, str(scratch), str(served.socket)]] * num_trainers)
            )
            for name in (PLAIN, EMBEDDED, SIDECAR)
        ]
        found = []
        for _ in range(WARM_UP_STEPS + TURNS):
            parties.reverse()
            found.append(one_turn(parties, served))
    return {name: statistics.median(turn[name] for turn in found[WARM_UP_STEPS:]) for name in found[-1]}


def one_turn(parties: list[Party], served: Daemon) -> Figures:
    """A step of each party."""
    figures: Figures = {}
    losses = set()
    for each in parties:
        before = served.cpu_seconds
        steps = each.do("step")
        for name in steps[0]:
            figures[f"{each.name}_{name}"] = statistics.mean(step[name] for step in steps)
        if each.name == SIDECAR:
            figures["daemon_cpu_seconds"] = (served.cpu_seconds - before) / len(steps)
        losses |= {step["last_loss"] for step in steps}
    for name in (EMBEDDED, SIDECAR):
        figures[f"{name}_step_to_plain"] = figures[f"{name}_step_seconds"] / figures[f"{PLAIN}_step_seconds"]
        figures[f"{name}_cpu_to_plain"] = figures[f"{name}_cpu_seconds"] / figures[f"{PLAIN}_cpu_seconds"]
    return figures | {"same_losses": float(len(losses) == 1)}


class SaveOne(torch.autograd.Function):
    """Some Python work each way, and a tensor of 1 MiB saved for backward, of which one element counts there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, noise: Tensor) -> Tensor:
        busy()
        ctx.save_for_backward(noise ^ 1)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        busy()
        (saved,) = ctx.saved_tensors
        return gradient + saved[-1], None


def busy() -> int:
    """About a millisecond of the interpreter, which is never released."""
    return sum(number * number for number in range(LOOPS))


def python_step() -> Callable[[Callable[[], AbstractContextManager[object]]], float]:
    """A training that runs Python; returns what one step does."""
    torch.set_num_threads(1)
    noise = torch.randint(256, (SAVED_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def step(forward: Callable[[], AbstractContextManager[object]]) -> float:
        x = torch.ones(1, requires_grad=True)
        with forward():
            y = x
            for _ in range(NUM_SAVED):
                y = SaveOne.apply(y, noise)
        y.backward()
        return x.grad.item()

    return step


def compute_step() -> Callable[[Callable[[], AbstractContextManager[object]]], float]:
    """A byte-level transformer; returns what one step does."""
    torch.set_num_threads(NUM_THREADS)
    choose_vector_kernels()
    torch.manual_seed(0)
    model = ByteTransformer(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    corpus = torch.frombuffer(bytearray(load_text(None, SHAPE.context + 1)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)

    def step(forward: Callable[[], AbstractContextManager[object]]) -> float:
        batch = random_batch(corpus, BATCH, SHAPE.context, generator)
        with forward():
            loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def work(kind: str, name: str, scratch: Path, address: str) -> None:
    """In a process of a party: a step for each command."""
    from tierstore import TierStore, tiered_offload

    step = {"python": python_step, "compute": compute_step}[kind]()
    with ExitStack() as stack:
        forward: Callable[[], AbstractContextManager[object]] = nullcontext
        if name != PLAIN:
            budget = {"host_bytes": HOST_BYTES}
            store = TierStore.connect(address, **budget) if name == SIDECAR else TierStore(scratch, **budget)
            stack.enter_context(store)
            forward = partial(tiered_offload, store)

        def timed_step(command: str) -> Figures:
            wall, cpu = time.perf_counter(), time.process_time()
            loss = step(forward)
            return {
                "step_seconds": time.perf_counter() - wall,
                "cpu_seconds": time.process_time() - cpu,
                "last_loss": loss,
            }

        serve_commands(timed_step)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        kind, name, scratch, address = json.loads(sys.argv[2])
        work(kind, name, Path(scratch), address)
    else:
        main_of_one_variant(measure)
