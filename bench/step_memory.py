"""`python -m bench.step_memory`: draws the memory of a process during a training step, without and with the store.

The model of `memory_limit.py`, each variant in a process of its own. Two steps warm it up; the third is sampled every
two milliseconds. Memory is anonymous and shared memory that is resident, beyond that of the loaded model. Both give
freed memory back at once: the store by `return_memory="always"`, plain training by its sampler. As a rule an allocator
keeps it, and then the picture would show the allocator. Its axis is the share of each step: two steps are too few to
compare their times.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from tierstore import TierStore, tiered_offload
from tierstore.demo.memory import resident_bytes
from tierstore.demo.place import store_directory
from tierstore.returning.allocator import allocator_of_process

from .child import answer_of, command
from .harness import RESULTS
from .machine import describe_machine, describe_versions
from .memory_limit import BATCH, HOST_BYTES, SHAPE
from .trainings import Forward, Run, text_training, timed_step

PLAIN, STORE = "plain", "tierstore"
WARM_UP_STEPS = 2
SAMPLE_SECONDS = 0.002
RETURN_SECONDS = 0.02
MOST_POINTS = 300
DRAWN = {PLAIN: ("#8a949c", "without the store"), STORE: ("#1f6f9f", "with the store")}

Recording = dict[str, Any]


class Sampled(Run):
    """A step during which a thread looks at memory; `give_back` has the allocator return what is freed."""

    def __init__(self, forward: Forward, level_bytes: int, give_back: Callable[[], object] | None) -> None:
        super().__init__(forward)
        self.points: list[tuple[float, float]] = []
        self.turned_seconds = 0.0
        self._level_bytes, self._give_back = level_bytes, give_back
        self._began = time.perf_counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def between(self) -> None:
        self.turned_seconds = time.perf_counter() - self._began

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        returned = 0.0
        while not self._ended.wait(SAMPLE_SECONDS):
            seconds = time.perf_counter() - self._began
            if self._give_back is not None and seconds - returned > RETURN_SECONDS:
                self._give_back()
                returned = seconds
            self.points.append((seconds, (resident_bytes() - self._level_bytes) / 2**20))


def measure(variant: str, scratch: Path) -> Recording:
    """In a fresh process: what it held beyond the loaded model, through the step after the warm-up."""
    _, loss_of, optimizer = text_training(SHAPE, BATCH)
    level_bytes, give_back, forward = resident_bytes(), allocator_of_process().release, nullcontext
    with ExitStack() as stack:
        if variant == STORE:
            store = stack.enter_context(TierStore(scratch, host_bytes=HOST_BYTES, return_memory="always"))
            give_back, forward = None, partial(tiered_offload, store)
        for _ in range(WARM_UP_STEPS + 1):
            sampled = Sampled(forward, level_bytes, give_back)
            try:
                step = timed_step(loss_of, optimizer, sampled)
            finally:
                sampled.end()
    return {
        "points": thinned(sampled.points, MOST_POINTS),
        "turned_seconds": round(sampled.turned_seconds, 3),
        "ended_seconds": round(step["step_seconds"], 3),
        "last_loss": step["last_loss"],
    }


def thinned(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most so many points: of each run of neighbours the highest, so that the peak stays."""
    length = -(-len(points) // most)
    runs = [points[start : start + length] for start in range(0, len(points), length)]
    return [(round(seconds, 3), round(mib, 1)) for seconds, mib in (max(run, key=lambda each: each[1]) for run in runs)]


def draw(found: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # a file, never a window
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.9), layout="constrained")
    panel = figure.subplots()
    for variant, recording in found["variants"].items():
        color, label = DRAWN[variant]
        ended = recording["ended_seconds"]
        shares, mib = zip(*((100 * seconds / ended, each) for seconds, each in recording["points"]), strict=True)
        panel.fill_between(shares, mib, color=color, alpha=0.25, linewidth=0)
        panel.plot(shares, mib, color=color, linewidth=1.8, label=f"{label}: at most {max(mib):.0f} MiB")
        turned = min(range(len(shares)), key=lambda at: abs(shares[at] - 100 * recording["turned_seconds"] / ended))
        panel.plot(shares[turned], mib[turned], "o", color=color)
    panel.plot([], [], "o", color="#333333", label="forward ends, backward begins")
    panel.legend(frameon=False, fontsize=8, loc="upper right")
    panel.set(xlabel="time, of the step (%)", xlim=(0, 100), ylim=(0, None))
    panel.set_ylabel("memory added to the loaded model (MiB)")
    panel.spines[["top", "right"]].set_visible(False)
    shape, batch = found["settings"]["model"], found["settings"]["batch"]
    where = f"{found['machine']['cpu']}, {found['machine']['cores']} cores, {found['machine']['disk']}"
    figure.suptitle(f"A step of a transformer of {shape['layers']} layers, {batch} x {shape['context']} bytes of text")
    figure.supxlabel(f"{where}. Freed memory is returned in both. The losses have the same bits.", fontsize=7)
    figure.savefig(file, dpi=120, facecolor="white", metadata={"Software": None})


def record(path: str | None, results: Path) -> dict[str, Any]:
    """Train each variant in a process of its own; write what was seen to `results/step_memory.json`. Raises
    RuntimeError: a training failed, or the losses differ."""
    place = store_directory(path)
    recordings = {}
    for variant in DRAWN:
        recordings[variant], failure = answer_of(command("bench.step_memory", "measure", variant, place), 600)
        if failure is not None:
            raise RuntimeError(f"{variant}: {failure}")
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
    arguments = parser.parse_args()
    results: Path = arguments.results
    if arguments.plot:
        found = json.loads((results / "step_memory.json").read_text(encoding="utf-8"))
    else:
        found = record(arguments.path, results)
    draw(found, results / "step_memory.png")


if __name__ == "__main__":
    main()
