"""`python -m bench.step_memory`: draws the memory of a process during a training step, without and with the store.

The program of README.md, each variant in a process of its own. After two steps to warm up, steps are sampled every two
milliseconds, and the one of median length is drawn. Memory is all that is resident, as in `training_step.py`, with
Python, PyTorch and the model. The allocator keeps what is freed, as it does by default, but returns it before each
step: otherwise the picture would only show what it kept. It has no figures: `training_step.py` measures them by turns.
"""

from __future__ import annotations

import argparse
import json
import resource
import threading
import time
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from tierstore import TierStore, tiered_offload
from tierstore.demo.place import store_directory
from tierstore.returning.allocator import allocator_of_process

from .child import answer_of, command
from .harness import RESULTS
from .machine import describe_machine, describe_versions
from .peers import checkpoint_blocks
from .training_step import HOST_BYTES
from .trainings import Forward, Run, readme_training, timed_step

PLAIN, CHECKPOINT, STORE = "plain", "checkpoint", "tierstore"
WARM_UP_STEPS, STEPS = 2, 5
SAMPLE_SECONDS = 0.002
MOST_POINTS = 300
DRAWN = {
    PLAIN: ("#8a949c", "without the store"),
    CHECKPOINT: ("#b07a2a", "every layer checkpointed"),
    STORE: ("#1f6f9f", "with the store"),
}

Recording = dict[str, Any]


class Sampled(Run):
    """A step during which a thread looks at memory."""

    def __init__(self, forward: Forward) -> None:
        super().__init__(forward)
        self.points: list[tuple[float, float]] = []
        self.turned_seconds = 0.0
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
        while not self._ended.wait(SAMPLE_SECONDS):
            self.points.append((time.perf_counter() - self._began, resident_mib()))


def resident_mib() -> float:
    """All of this process that is resident now, the code of libraries included (proc(5))."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def measure(variant: str, scratch: Path) -> Recording:
    """In a fresh process: what it held through the step of median length after the warm-up."""
    model, loss_of, optimizer = readme_training()
    forward: Forward = nullcontext
    steps = []
    with ExitStack() as stack:
        if variant == CHECKPOINT:
            checkpoint_blocks(model)
        if variant == STORE:
            store = stack.enter_context(TierStore(scratch, host_bytes=HOST_BYTES, return_memory="always"))
            forward = partial(tiered_offload, store)
        for _ in range(WARM_UP_STEPS + STEPS):
            allocator_of_process().release()
            sampled = Sampled(forward)
            try:
                step = timed_step(loss_of, optimizer, sampled)
            finally:
                sampled.end()
            steps.append((step["step_seconds"], sampled))
    seconds, sampled = sorted(steps[WARM_UP_STEPS:], key=lambda each: each[0])[STEPS // 2]
    return {
        "points": thinned(sampled.points, MOST_POINTS),
        "turned_seconds": round(sampled.turned_seconds, 3),
        "ended_seconds": round(seconds, 3),
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
        seconds, mib = zip(*recording["points"], strict=True)
        panel.fill_between(seconds, mib, color=color, alpha=0.2, linewidth=0)
        panel.plot(seconds, mib, color=color, linewidth=1.8, label=label)
        turned = min(range(len(seconds)), key=lambda at: abs(seconds[at] - recording["turned_seconds"]))
        panel.plot(seconds[turned], mib[turned], "o", color=color)
    panel.plot([], [], "o", color="#333333", label="forward ends, backward begins")
    panel.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    panel.set(xlabel="time since the step began (s)", xlim=(0, None), ylim=(0, None))
    panel.set_ylabel("memory of the process (MiB)")
    panel.spines[["top", "right"]].set_visible(False)
    where = f"{found['machine']['cpu']}, {found['machine']['cores']} cores, {found['machine']['disk']}"
    figure.suptitle("A training step of the program in README")
    figure.supxlabel(f"{where}. The store returns freed memory. The losses have the same bits.", fontsize=7)
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
        "settings": {"host_bytes": HOST_BYTES, "return_memory": "always"},
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
