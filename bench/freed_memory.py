"""Does the memory of the process fall, in the default environment, and what does that cost?

Three compute-light models, each with saved tensors of some hundred MiB, and the transformer with half a batch. The
store has 32 MiB of host memory and a window of 32 MiB. Trainings take turns, a step each, in processes and memory
cgroups of their own, as in `bench/memory_limit.py`. Two of them take no turns: plain training alone tells how much it
adds to the loaded model, and the limited one gets a cgroup that leaves `SHARE` of that.

The window is what the store may hold in memory: `host_bytes` and `staging_bytes`, as `stats()` tells them. Memory is
anonymous and shared memory that is resident, beyond that of the loaded model (`tierstore.demo.memory`).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tierstore.demo.memory import PeakHostMemory
from tierstore.demo.model import ByteTransformer, ModelShape

from .cgroup import memory_cgroup
from .goals import Goal
from .harness import Benchmark, main_of_one_variant
from .memory_limit import Run, StoreRun, Training

MIB = 2**20
HOST_BYTES = WINDOW_BYTES = 32 * MIB
SHARE = 0.55
WARM_UP_STEPS, TURNS = 1, 3

PLAIN, NEVER, AUTO, ALWAYS, LIMITED = "plain", "never", "auto", "always", "auto, limited"
MODES = {NEVER: "never", AUTO: "auto", ALWAYS: "always", LIMITED: "auto"}
WHOLE = (PLAIN, NEVER, AUTO, ALWAYS, LIMITED)
MODELS = {"transformer": WHOLE, "CNN": WHOLE, "GRU": WHOLE, "transformer, half a batch": (PLAIN, AUTO)}

Loss = Callable[[], Tensor]
Figures = dict[str, float]


def of(model: str, variant: str) -> str:
    return f"{model}: {variant}"


def goals() -> Iterator[Goal]:
    """What is asked of each model's variants."""
    for model, variants in MODELS.items():
        if LIMITED in variants:
            title = f"{model} within {SHARE} of what plain adds: step, of plain's"
            yield Goal(title, "step_of_plain", of(model, LIMITED), at_most=1.3)
            yield Goal(f"{model}, always: added, of plain's", "added_of_plain", of(model, ALWAYS), at_most=0.6)
            yield Goal(f"{model}, ample: step with auto, of never", "step_of_never", of(model, AUTO), at_most=1.03)
        title = f"{model}, auto: added beyond plain, of the window"
        yield Goal(title, "beyond_plain_of_window", of(model, AUTO), at_most=1)
        for variant in variants[1:]:
            title = f"{model}, {variant}: last loss, bit for bit"
            yield Goal(title, "last_loss", of(model, variant), equals=1, of=(of(model, PLAIN),))


BENCHMARK = Benchmark(
    name="freed_memory",
    question="Memory that the process adds, and its step, as freed memory is returned never, when short, always",
    variants=tuple(of(model, variant) for model, variants in MODELS.items() for variant in variants),
    processes={model: tuple(of(model, variant) for variant in variants) for model, variants in MODELS.items()},
    rounds=1,
    compare="none",
    settings={"host_bytes": HOST_BYTES, "staging_bytes": WINDOW_BYTES, "share": SHARE, "turns": TURNS},
    timeout_seconds=600,
    plotted=("added_of_plain", "step_of_plain"),
    goals=tuple(goals()),
)


def measure(model: str, scratch: Path) -> dict[str, Figures]:
    """All variants of one model, by turns."""
    variants = MODELS[model]
    with training(model, PLAIN, scratch) as alone:
        added_bytes = [alone.step()["added_bytes"] for _ in range(WARM_UP_STEPS + TURNS)][-1]
    with ExitStack() as stack:
        trainings = {
            each: stack.enter_context(training(model, each, scratch, int(SHARE * added_bytes))) for each in variants
        }
        for _ in range(WARM_UP_STEPS):
            for each in trainings.values():
                each.step()
        turns = []
        for turn in range(TURNS):
            order = list(trainings.items())[:: 1 if turn % 2 else -1]
            turns.append({variant: each.step() for variant, each in order})
        return {of(model, variant): figures_of(variant, each, turns) for variant, each in trainings.items()}


def figures_of(variant: str, training: Training, turns: list[dict[str, Figures]]) -> Figures:
    """Of one variant: medians over the turns, and how they stand to others of the same turn. None, if it was killed."""
    steps = [turn[variant] for turn in turns]
    figures: Figures = {"out_of_memory_kills": training.figures(steps)["out_of_memory_kills"]}
    if not all(steps):
        return figures
    plain = turns[-1][PLAIN]["added_bytes"]
    added = steps[-1]["added_bytes"]
    for other, name in ((PLAIN, "step_of_plain"), (NEVER, "step_of_never")):
        if other in turns[0]:
            figures[name] = statistics.median(
                turn[variant]["step_seconds"] / turn[other]["step_seconds"] for turn in turns
            )
    figures |= {
        "step_seconds": statistics.median(step["step_seconds"] for step in steps),
        "added_bytes": added,
        "added_of_plain": added / plain,
        "beyond_plain_of_window": max(0.0, added - plain) / (HOST_BYTES + steps[-1].get("staging_bytes", WINDOW_BYTES)),
        "last_loss": steps[-1]["last_loss"],
    }
    for name in ("returned_bytes", "return_seconds"):
        if name in steps[-1]:
            figures[f"{name}_a_step"] = (steps[-1][name] - steps[0][name]) / (len(steps) - 1)
    return figures


@contextmanager
def training(model: str, variant: str, scratch: Path, left_bytes: int = 0) -> Iterator[Training]:
    """Start one, with its model loaded; the limited one may add `left_bytes` to that.

    Raises:
        CgroupError: there can be no memory cgroup.
    """
    request = json.dumps([model, variant, str(scratch)])
    with memory_cgroup() as cgroup:
        command = cgroup.command([sys.executable, "-m", "bench.freed_memory", "--train", request])
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            process.stdout.readline()  # the model is loaded
            if variant == LIMITED:
                cgroup.limit(cgroup.used_bytes + left_bytes)
            yield Training(variant, process, cgroup)


def train(model: str, variant: str, scratch: Path) -> None:
    """In the cgroup: one step for each line of standard input, a line of figures for each step."""
    torch.manual_seed(0)
    name, _, half = model.partition(", ")
    module, draw = {"transformer": transformer, "CNN": cnn, "GRU": gru}[name](2 if half else 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    print("loaded", flush=True)
    with PeakHostMemory() as memory, opened(variant, scratch) as run:
        for _ in sys.stdin:
            loss_of = draw()
            started = time.perf_counter()
            with run.forward():
                loss = loss_of()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = time.perf_counter() - started
            figures = {"step_seconds": seconds, "last_loss": loss.item(), "added_bytes": memory.added_bytes}
            print(json.dumps(figures | run.figures()), flush=True)


class ReturningRun(StoreRun):
    """With a store: what it returned."""

    def figures(self) -> Figures:
        """See `Run`."""
        stats = self._store.stats()
        returned = {"returned_bytes": stats.returned_bytes, "return_seconds": stats.return_seconds}
        return returned | {"staging_bytes": stats.staging_bytes}


@contextmanager
def opened(variant: str, scratch: Path) -> Iterator[Run]:
    if variant == PLAIN:
        yield Run()
        return
    from tierstore import TierStore, tiered_offload

    options = {"host_bytes": HOST_BYTES, "staging_bytes": WINDOW_BYTES, "return_memory": MODES[variant]}
    with TierStore(scratch, **options) as store:
        yield ReturningRun(store, lambda: tiered_offload(store))


def transformer(divisor: int) -> tuple[nn.Module, Callable[[], Loss]]:
    model, generator = ByteTransformer(ModelShape(layers=8, width=128, heads=2, context=512)), torch.Generator()

    def draw() -> Loss:
        tokens = torch.randint(256, (16 // divisor, 512), generator=generator.manual_seed(0))
        return lambda: model(tokens, tokens)

    return model, draw


def cnn(divisor: int) -> tuple[nn.Module, Callable[[], Loss]]:
    def block(before: int, after: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    widths = (16, 32, 64)
    stages = [
        nn.Sequential(block(before, after), block(after, after), block(after, after))
        for before, after in zip((3, 16, 32), widths, strict=True)
    ]
    model = nn.Sequential(
        stages[0], nn.MaxPool2d(2), stages[1], nn.MaxPool2d(2), stages[2],
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10),
    )  # fmt: skip
    generator = torch.Generator()

    def draw() -> Loss:
        images = torch.randn(20 // divisor, 3, 160, 160, generator=generator.manual_seed(0))
        return lambda: functional.cross_entropy(model(images), torch.zeros(len(images), dtype=torch.long))

    return model, draw


def gru(divisor: int) -> tuple[nn.Module, Callable[[], Loss]]:
    parts = {"embed": nn.Embedding(256, 256), "gru": nn.GRU(256, 512, 2, batch_first=True), "head": nn.Linear(512, 256)}
    model, generator = nn.ModuleDict(parts), torch.Generator()

    def draw() -> Loss:
        tokens = torch.randint(256, (256 // divisor, 32), generator=generator.manual_seed(0))

        def loss() -> Tensor:
            hidden, _ = model["gru"](model["embed"](tokens))
            return functional.cross_entropy(model["head"](hidden).flatten(0, 1), tokens.flatten())

        return loss

    return model, draw


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        model_name, variant_name, folder = json.loads(sys.argv[2])
        train(model_name, variant_name, Path(folder))
    else:
        main_of_one_variant(measure)
