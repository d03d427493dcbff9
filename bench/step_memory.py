"""`python -m bench.step_memory`: draws the memory of a process during a training step, without and with the store.

The model of `bench/memory_limit.py`, a byte-level transformer. Each variant trains in a process of its own. Two steps
warm it up, so that the store knows the order of backward; the third is sampled every two milliseconds. Memory is
anonymous and shared memory that is resident, beyond that of the loaded model (`tierstore.demo.memory`).

Both give freed memory back at once: the store by `return_memory="always"`, plain training by its sampler, which has the
allocator do it every 20 ms. As a rule an allocator keeps it, and then the picture would show the allocator.

The picture is of memory alone. Its axis is the share of each step, since two steps are too few to compare their times;
`bench/memory_limit.py` does that.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from tierstore import TierStore, tiered_offload
from tierstore.demo.memory import resident_bytes
from tierstore.demo.model import ByteTransformer, random_batch
from tierstore.demo.place import store_directory
from tierstore.demo.text import load_text
from tierstore.demo.vector_math import choose_vector_kernels
from tierstore.returning.allocator import allocator_of_process

from .harness import RESULTS
from .machine import describe_machine, describe_versions
from .memory_limit import BATCH, HOST_BYTES, SHAPE

VARIANTS = PLAIN, STORE = "plain", "tierstore"
WARM_UP_STEPS = 2
SAMPLE_SECONDS = 0.002
RETURN_SECONDS = 0.02
MOST_POINTS = 300
MIB = 2**20
COLOURS = {PLAIN: "#8a949c", STORE: "#1f6f9f"}
LABELS = {PLAIN: "without the store", STORE: "with the store"}

Recording = dict[str, Any]


class Sampler:
    """Looks at the memory of the process again and again, in a thread of its own.

    Args:
        level_bytes: what counts as 0.
        give_back: has the allocator return freed memory; called every `RETURN_SECONDS`.
    """

    def __init__(self, level_bytes: int, give_back: Callable[[], object] | None) -> None:
        self.points: list[tuple[float, float]] = []
        self._level_bytes, self._give_back = level_bytes, give_back
        self._began = time.perf_counter()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._began

    def _run(self) -> None:
        returned = 0.0
        while not self._stopped.wait(SAMPLE_SECONDS):
            if self._give_back is not None and self.seconds - returned > RETURN_SECONDS:
                self._give_back()
                returned = self.seconds
            self.points.append((self.seconds, (resident_bytes() - self._level_bytes) / MIB))


def measure(variant: str, scratch: Path) -> Recording:
    """In a fresh process: what it held beyond the loaded model, through the step after the warm-up."""
    choose_vector_kernels()
    torch.manual_seed(0)
    model = ByteTransformer(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    corpus = torch.frombuffer(bytearray(load_text(None, SHAPE.context + 1)), dtype=torch.uint8)
    batch = random_batch(corpus, BATCH, SHAPE.context, torch.Generator().manual_seed(0))
    give_back = allocator_of_process().release if variant == PLAIN else None
    level_bytes = resident_bytes()
    with opened(variant, scratch) as forward:
        for _ in range(WARM_UP_STEPS + 1):
            with Sampler(level_bytes, give_back) as sampler:
                with forward():
                    loss = model(*batch)
                turned_seconds = sampler.seconds
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                ended_seconds = sampler.seconds
    return {
        "points": thinned(sampler.points, MOST_POINTS),
        "turned_seconds": round(turned_seconds, 3),
        "ended_seconds": round(ended_seconds, 3),
        "last_loss": loss.item(),
    }


@contextmanager
def opened(variant: str, scratch: Path) -> Iterator[Callable[[], AbstractContextManager[object]]]:
    """What is around forward."""
    if variant == PLAIN:
        yield nullcontext
        return
    with TierStore(scratch, host_bytes=HOST_BYTES, return_memory="always") as store:
        yield lambda: tiered_offload(store)


def thinned(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most so many points: of each run of neighbours the highest, so that the peak stays."""
    length = -(-len(points) // most)
    runs = [points[start : start + length] for start in range(0, len(points), length)]
    return [(round(seconds, 3), round(mib, 1)) for seconds, mib in (max(run, key=lambda each: each[1]) for run in runs)]


def peak_mib(recording: Recording) -> float:
    """The most that a variant added."""
    return max(mib for _, mib in recording["points"])


def title_of(recordings: dict[str, Recording]) -> str:
    """The finding."""
    ours, plain = peak_mib(recordings[STORE]), peak_mib(recordings[PLAIN])
    return f"The same training step adds {ours:.0f} MiB of memory with the store, {plain:.0f} MiB without it"


def draw(found: dict[str, Any], file: Path) -> None:
    """A curve for each variant; forward ends where the mark is."""
    import matplotlib

    matplotlib.use("Agg")  # a file, never a window
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.9), layout="constrained")
    panel = figure.subplots()
    recordings = found["variants"]
    for variant, recording in recordings.items():
        points = [(100 * seconds / recording["ended_seconds"], mib) for seconds, mib in recording["points"]]
        turned = 100 * recording["turned_seconds"] / recording["ended_seconds"]
        panel.fill_between(*zip(*points, strict=True), color=COLOURS[variant], alpha=0.25, linewidth=0)
        panel.plot(*zip(*points, strict=True), color=COLOURS[variant], linewidth=1.8)
        height = min(points, key=lambda point: abs(point[0] - turned))[1]
        panel.plot(turned, height, "o", color=COLOURS[variant], markersize=6)
        top = max(points, key=lambda point: point[1])
        panel.annotate(
            f"{LABELS[variant]}: {top[1]:.0f} MiB", top, (0, 6), textcoords="offset points", ha="center", fontsize=10,
            color=COLOURS[variant], fontweight="bold",
        )  # fmt: skip
    panel.plot([], [], "o", color="#333333", markersize=6, label="forward ends, backward begins")
    panel.legend(frameon=False, fontsize=8, loc="upper right")
    panel.set_xlabel("time, of the step (%)", fontsize=9)
    panel.set_ylabel("memory added to the loaded model (MiB)", fontsize=9)
    panel.set_xlim(0, 100)
    panel.set_ylim(0, 1.15 * max(map(peak_mib, recordings.values())))
    panel.tick_params(labelsize=8)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    machine, settings = found["machine"], found["settings"]
    shape, batch = settings["model"], settings["batch"]
    model = f"Transformer of {shape['layers']} layers, {batch} x {shape['context']} bytes of text"
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['disk']}"
    words = f"{model}; freed memory is returned in both. {where}. The losses have the same bits."
    figure.suptitle(textwrap.fill(title_of(recordings), 82), fontsize=12, fontweight="bold")
    figure.text(0.99, 0.005, words, fontsize=7, color="#666666", ha="right", va="bottom")
    figure.get_layout_engine().set(rect=(0, 0.04, 1, 0.96))
    figure.savefig(file, dpi=120, facecolor="white", metadata={"Software": None})


def record(path: str | None, results: Path) -> dict[str, Any]:
    """Train each variant in a process of its own; write what was seen to `results/step_memory.json`.

    Raises:
        RuntimeError: the losses differ.
        subprocess.CalledProcessError: a training failed.
    """
    place = store_directory(path)
    recordings = {}
    for variant in VARIANTS:
        command = [sys.executable, "-m", "bench.step_memory", "--variant", variant, "--path", str(place)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        recordings[variant] = json.loads(done.stdout.splitlines()[-1])
    found = {
        "machine": describe_machine(place),
        "versions": describe_versions(),
        "settings": {"model": vars(SHAPE), "batch": BATCH, "host_bytes": HOST_BYTES, "return_memory": "always"},
        "variants": recordings,
    }
    if len({recording["last_loss"] for recording in recordings.values()}) != 1:
        raise RuntimeError("the last losses differ")
    results.mkdir(exist_ok=True)
    (results / "step_memory.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.step_memory", description=__doc__.splitlines()[0])
    parser.add_argument("--path", help="a directory on the drive; a temporary one by default")
    parser.add_argument("--plot", action="store_true", help="train nothing: draw what was recorded")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where recording and picture go")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        print(json.dumps(measure(arguments.variant, Path(arguments.path))))
        return
    results: Path = arguments.results
    if arguments.plot:
        found = json.loads((results / "step_memory.json").read_text(encoding="utf-8"))
    else:
        found = record(arguments.path, results)
    draw(found, results / "step_memory.png")
    print(title_of(found["variants"]))


if __name__ == "__main__":
    main()
