"""Does the memory of the process fall, in the default environment, and what does that cost?

Three compute-light models, each with saved tensors of some hundred MiB, and the transformer with half a batch. The
store has 32 MiB of host memory and a window of 32 MiB; within a limit, as much host memory as that leaves beside what
the model needs (`HOST_BYTES_WITHIN`). Trainings take turns, as in `memory_limit.py`, but for two:
plain training alone tells how much it adds to the loaded model, and the limited ones get a cgroup that leaves `SHARES`
of that. Memory is anonymous and shared memory that is resident, beyond that of the loaded model
(`tierstore.demo.memory`). It is watched in steps that are not timed: a thread that looks 500 times a second takes cores
from the step, and those of trainings that wait for their turn did so, too.

Plain training has the allocator of PyTorch, glibc's. One beside it has the caching allocator of `native/`, as the
stores have it, where that is built. The floor of the limited store trains plainly with it too, while bare threads move
and checksum the bytes that the store moves. It has no limit.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tierstore import TierStore, tiered_offload
from tierstore.demo.memory import PeakHostMemory, resident_bytes
from tierstore.demo.model import ByteTransformer, ModelShape

from .child import command, serve
from .goals import Goal
from .harness import Benchmark
from .memory_limit import with_mover
from .trainings import Figures, Loss, Run, Training, timed_step, turns_of, use_caching_allocator
from .trainings import training as in_cgroup

MIB = 2**20
HOST_BYTES = WINDOW_BYTES = 32 * MIB
SHARES = {"transformer": 0.55, "CNN": 0.55, "GRU": 0.6}  # living blocks of the GRU and the window take 0.54
HOST_BYTES_WITHIN = {"transformer": 160 * MIB, "CNN": 96 * MIB, "GRU": 32 * MIB}
WARM_UP_STEPS, TURNS = 2, 5
WATCHED, WATCHED_TURNS = "watched", 2

PLAIN, CACHED, MOVER = "plain", "plain, caching allocator", "bare threads"
NEVER, AUTO, ALWAYS, LIMITED = "never", "auto", "always", "auto, limited"
WHOLE = (PLAIN, CACHED, MOVER, NEVER, AUTO, ALWAYS, LIMITED)
MODELS = {"transformer": WHOLE, "CNN": WHOLE, "GRU": WHOLE, "transformer, half a batch": (PLAIN, AUTO)}


def of(model: str, variant: str) -> str:
    return f"{model}: {variant}"


def goals() -> Iterator[Goal]:
    for model, variants in MODELS.items():
        if LIMITED in variants:
            within = f"{model} within {SHARES[model]} of what plain adds"
            at_most = 1.25 if model == "GRU" else 1.12
            yield Goal(f"{within}: step, of plain's", "step_of_plain", of(model, LIMITED), at_most=at_most)
            yield Goal(f"{within}: step, of bare threads'", "step_of_bare_threads", of(model, LIMITED), at_most=1.05)
            yield Goal(f"{within}: page faults", "page_faults", of(model, LIMITED), at_most=500)
            yield Goal(f"{within}: killed", "out_of_memory_kills", of(model, LIMITED), at_most=0)
            title = f"{model}, plain with the caching allocator: "
            yield Goal(title + "CPU, of plain's", "cpu_of_plain", of(model, CACHED), at_most=0.95)
            yield Goal(title + "added, of plain's", "added_of_plain", of(model, CACHED), at_most=0.8)
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
    timeout_seconds=900,
    plotted=("added_of_plain", "step_of_plain"),
    goals=tuple(goals()),
)


def measure(model: str, scratch: Path) -> dict[str, Figures]:
    with started(model, PLAIN, scratch, 0) as alone:
        for _ in range(WARM_UP_STEPS + TURNS):
            alone.step()
        added_bytes = max(alone.step(WATCHED)["added_bytes"] for _ in range(WATCHED_TURNS))
    with ExitStack() as stack:
        left_bytes = int(SHARES.get(model, 1) * added_bytes)
        moved = moved_bytes(model, scratch, left_bytes) if MOVER in MODELS[model] else (0, 0)
        trainings = {
            each: stack.enter_context(started(model, each, scratch, left_bytes, *moved)) for each in MODELS[model]
        }
        turns = turns_of(trainings, WARM_UP_STEPS + TURNS)[WARM_UP_STEPS:]
        watched = turns_of(trainings, WATCHED_TURNS, lambda each: each.step(WATCHED))
        return {of(model, variant): figures_of(variant, each, turns, watched) for variant, each in trainings.items()}


def moved_bytes(model: str, scratch: Path, left_bytes: int) -> tuple[int, int]:
    """What a step of the limited store writes and reads."""
    with started(model, LIMITED, scratch, left_bytes) as probe:
        steps = [probe.step() for _ in range(WARM_UP_STEPS + 1)]
    if not steps[-1]:
        return 0, 0
    written, read = (int(steps[-1][name] - steps[-2][name]) for name in ("spilled_bytes", "restored_bytes"))
    return written, read


@contextmanager
def started(
    model: str, variant: str, scratch: Path, left_bytes: int, written_bytes: int = 0, read_bytes: int = 0
) -> Iterator[Training]:
    """One with its model loaded; the limited one may add `left_bytes` to that."""
    words = command(__name__, "train", model, variant, scratch, written_bytes, read_bytes)
    with in_cgroup(variant, words) as training:
        training.step()  # the model is loaded
        if variant == LIMITED:
            training.cgroup.limit(training.cgroup.used_bytes + left_bytes)
        yield training


def figures_of(
    variant: str, training: Training, turns: list[dict[str, Figures]], watched: list[dict[str, Figures]]
) -> Figures:
    steps = [turn[variant] for turn in turns]
    figures: Figures = {"out_of_memory_kills": training.cgroup.num_oom_kills}
    if not all(turn[variant] for turn in (*turns, *watched)):
        return figures
    plain, added = (max(turn[each]["added_bytes"] for turn in watched) for each in (PLAIN, variant))
    for other in (PLAIN, CACHED, MOVER, NEVER):
        if other in turns[0]:
            figures[f"step_of_{other.replace(',', '').replace(' ', '_')}"] = statistics.median(
                turn[variant]["step_seconds"] / turn[other]["step_seconds"] for turn in turns
            )
    figures["cpu_of_plain"] = statistics.median(cpu_of(turn[variant]) / cpu_of(turn[PLAIN]) for turn in turns)
    figures |= {
        "step_seconds": statistics.median(step["step_seconds"] for step in steps),
        "page_faults": statistics.median(step["page_faults"] for step in steps),
        "added_bytes": added,
        "added_of_plain": added / plain,
        "beyond_plain_of_window": max(0.0, added - plain) / (HOST_BYTES + steps[-1].get("staging_bytes", WINDOW_BYTES)),
        "last_loss": steps[-1]["last_loss"],
    }
    for name in ("returned_bytes", "return_seconds"):
        if name in steps[-1]:
            figures[f"{name}_a_step"] = (steps[-1][name] - steps[0][name]) / (len(steps) - 1)
    return figures


def cpu_of(step: Figures) -> float:
    return step["user_seconds"] + step["system_seconds"]


# --- in the cgroup ----------------------------------------------------------------------------------------------------


def train(model: str, variant: str, scratch: Path, written_bytes: int, read_bytes: int) -> None:
    """An empty line when the model is loaded, then a line of figures for each step; of memory if it is watched."""
    torch.manual_seed(0)
    name, _, half = model.partition(", ")
    module, loss_of = {"transformer": transformer, "CNN": cnn, "GRU": gru}[name](2 if half else 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    is_loaded = False
    run = Run()
    loaded_bytes = resident_bytes()
    with ExitStack() as stack:
        if variant in (CACHED, MOVER):
            use_caching_allocator()
        if variant == MOVER:
            run = stack.enter_context(with_mover(scratch, written_bytes, read_bytes))
        elif variant not in (PLAIN, CACHED):
            host_bytes = HOST_BYTES_WITHIN[name] if variant == LIMITED else HOST_BYTES
            options = {"host_bytes": host_bytes, "staging_bytes": WINDOW_BYTES}
            run = ReturningRun(
                stack.enter_context(TierStore(scratch, **options, return_memory=variant.partition(",")[0]))
            )

        def step(how: str) -> Figures:
            nonlocal is_loaded
            if not is_loaded:
                is_loaded = True
                return {}
            if how != WATCHED:
                return timed_step(loss_of, optimizer, run) | run.figures()
            begun_bytes = resident_bytes()
            with PeakHostMemory() as memory:
                figures = timed_step(loss_of, optimizer, run)
            return figures | {"added_bytes": begun_bytes - loaded_bytes + memory.added_bytes}

        serve(step)


class ReturningRun(Run):
    _TOLD = ("returned_bytes", "return_seconds", "staging_bytes", "spilled_bytes", "restored_bytes")

    def __init__(self, store: TierStore) -> None:
        super().__init__(lambda: tiered_offload(store))
        self._store = store

    def figures(self) -> Figures:
        stats = self._store.stats()
        return {name: getattr(stats, name) for name in self._TOLD}


Made = tuple[nn.Module, Loss]


def transformer(divisor: int) -> Made:
    model = ByteTransformer(ModelShape(layers=8, width=128, heads=2, context=512))
    tokens = torch.randint(256, (16 // divisor, 512))
    return model, lambda: model(tokens, tokens)


def cnn(divisor: int) -> Made:
    def stage(before: int, after: int) -> nn.Sequential:
        pairs = ((before, after), (after, after), (after, after))
        return nn.Sequential(
            *(nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()) for i, o in pairs)
        )

    model = nn.Sequential(
        stage(3, 16), nn.MaxPool2d(2), stage(16, 32), nn.MaxPool2d(2), stage(32, 64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    images = torch.randn(20 // divisor, 3, 160, 160)
    return model, lambda: functional.cross_entropy(model(images), torch.zeros(len(images), dtype=torch.long))


def gru(divisor: int) -> Made:
    parts = {"embed": nn.Embedding(256, 256), "gru": nn.GRU(256, 512, 2, batch_first=True), "head": nn.Linear(512, 256)}
    model = nn.ModuleDict(parts)
    tokens = torch.randint(256, (256 // divisor, 32))

    def loss() -> Tensor:
        hidden, _ = model["gru"](model["embed"](tokens))
        return functional.cross_entropy(model["head"](hidden).flatten(0, 1), tokens.flatten())

    return model, loss
