"""Runs the demo's two trainings, each in a fresh process, and compares them. Needs no torch itself."""

from __future__ import annotations

import os
import platform
import signal
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from ..base.config import SizeLike, format_bytes, parse_size
from ..base.system_words import ending_of
from ..errors import TierStoreError
from ..returning.caching import why_none
from .place import file_system_of, is_in_memory, store_directory
from .settings import DEFAULT_TEXT, DemoSettings, load_text

HOST_SHARE = 8
"""By default `host_bytes` is the memory that plain training added, divided by this."""
_CAPTION = (
    "Below the line: totals of all steps, except host memory.\n"
    "The ratio of step times depends on the drive, on idle cores (the store needs CPU time beside training), and on "
    "--host-bytes: with more of it, less is moved."
)
_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # torch.use_deterministic_algorithms requires it on CUDA
    "MKL_CBWR": "AUTO,STRICT",  # without it Intel does not promise the same bits from run to run
}
"""Environment variables of both runs, unless the user has set them."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class RunReport:
    """The measurements of one run: seconds, loss (nats per byte) and digests of each step, the latter by parameter;
    memory added since before the first step (NOTE [What is counted] in `memory.py`), and on an accelerator, if there is
    one; and the store's statistics, if there is one."""

    device: str
    torch_version: str
    step_seconds: Sequence[float]
    losses: Sequence[float]
    digests: Sequence[Mapping[str, str]]
    peak_host_bytes: int
    peak_device_bytes: int | None
    stats: Mapping[str, Any] | None

    @property
    def peak_bytes(self) -> int:
        return self.peak_host_bytes if self.peak_device_bytes is None else self.peak_device_bytes

    @property
    def typical_step_seconds(self) -> float:
        """The median of `step_seconds` without the first step, which warms up allocators and the store's forecast."""
        return statistics.median(self.step_seconds[1:] or self.step_seconds)

    def figures(self) -> dict[str, Any]:
        return {
            "peak_bytes": self.peak_bytes,
            "peak_host_bytes": self.peak_host_bytes,
            "peak_device_bytes": self.peak_device_bytes,
            "step_seconds": self.typical_step_seconds,
            "step_seconds_each": list(self.step_seconds),
            "loss": self.losses[-1],
            "loss_each": list(self.losses),
        }


@dataclass(frozen=True)
class DemoResult:
    """The results of both runs: `plain` without a store, `stored` with one whose budget is `host_bytes`."""

    settings: DemoSettings
    host_bytes: int
    plain: RunReport
    stored: RunReport

    @property
    def difference(self) -> tuple[int, str] | None:
        """The first one: the step, counted from 1, and "loss" or the name of the parameter."""
        return first_difference(self.plain.digests, self.stored.digests)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON. Programs may rely on the keys."""
        difference = self.difference
        return {
            "gradients_identical": difference is None,
            "first_difference": None if difference is None else dict(zip(("step", "name"), difference, strict=True)),
            "host_bytes": self.host_bytes,
            "plain": self.plain.figures(),
            "tierstore": self.stored.figures() | {"stats": self.stored.stats},
            "settings": asdict(self.settings),
            "device": self.plain.device,
            "versions": {"python": platform.python_version(), "torch": self.plain.torch_version},
        }

    def verdict(self) -> str:
        if (difference := self.difference) is None:
            return "gradients bitwise identical: yes"
        step, name = difference
        what = "the loss" if name == "loss" else f"the gradient of {name}"
        return f"gradients bitwise identical: no (first at step {step}: {what})"

    def why_nothing_moved(self) -> str | None:
        """What to change if the store wrote nothing to disk, so that the run shows little; None: it did."""
        if (self.stored.stats or {}).get("spilled_bytes"):
            return None
        return (
            "The store wrote nothing to disk: all that was saved fits into its memory. A longer --context, a larger "
            "--batch or more --layers show more."
        )

    def table(self) -> RenderableType:
        table = Table("", title=f"{self.settings.steps} training steps on {self.plain.device}", title_justify="left")
        table.caption, table.caption_justify = _CAPTION, "left"
        for name in ("plain", "tierstore", "ratio"):
            table.add_column(name, justify="right")
        for name, of_run, text in _COMPARED:
            one, other = of_run(self.plain), of_run(self.stored)
            if one is not None and other is not None:
                table.add_row(name, text(one), text(other), f"{other / one:.2f}" if one else "")
        table.add_section()
        stats = self.stored.stats or {}
        sizes = {
            "host memory: budget": self.host_bytes,
            "host memory: most held at once": stats["host_bytes_peak"],
            "saved tensors: left in place, each save": sum(stats["kept_bytes"].values()),
            "saved tensors: handed to the store": stats["packed_bytes"],
            "spilled to disk": stats["spilled_bytes"],
            "written on disk for that": stats["written_bytes"],
            "restored": stats["restored_bytes"],
        }
        for name, num_bytes in sizes.items():
            table.add_row(name, "", format_bytes(num_bytes))
        prefetched = (str(stats[f"prefetch_{how}"]) for how in ("hits", "late", "misses"))
        table.add_row("prefetch: in time / late / missed", "", " / ".join(prefetched))
        for cause, seconds in stats["stall_seconds"].items():
            table.add_row(f"stall: {cause}", "", f"{seconds:.2f} s")
        return table


_COMPARED: Sequence[tuple[str, Callable[[RunReport], float | None], Callable[[Any], str]]] = (
    ("peak accelerator memory added", lambda run: run.peak_device_bytes, format_bytes),
    ("peak host memory added", lambda run: run.peak_host_bytes, format_bytes),
    ("step time (median)", lambda run: run.typical_step_seconds, "{:.3f} s".format),
    ("loss at the last step", lambda run: run.losses[-1], "{:.6f}".format),
)


def first_difference(one: Sequence[Mapping[str, str]], other: Sequence[Mapping[str, str]]) -> tuple[int, str] | None:
    """Compare two runs' digests, step by step. A step or name that only one run has is a difference."""
    for step in range(1, max(len(one), len(other)) + 1):
        left, right = (dict(run[step - 1]) if step <= len(run) else {} for run in (one, other))
        for name in left | right:
            if left.get(name) != right.get(name):
                return step, name
    return None


def run_demo(settings: DemoSettings, *, path: str | None, host_bytes: SizeLike | None, say: Say) -> DemoResult:
    """Train plainly, then with a store, each in a fresh process; blocks until both are done. Nothing is left at `path`.

    `say` is given lines that tell how far it is. Raises ConfigError: an option cannot be used; TierStoreError: a run
    failed."""
    budget = None if host_bytes is None else parse_size(host_bytes, "--host-bytes")
    load_text(settings.text, at_least_bytes=settings.context + 1)
    directory = store_directory(path)
    introduction = [
        f"Training a byte-level transformer ({settings.layers} layers of {settings.width}, "
        f"{settings.batch} x {settings.context} bytes a step) on {settings.text or DEFAULT_TEXT}.",
        "The training runs twice, in a fresh process each time, from the same seed. This takes a minute or two.",
        'The store returns freed memory to the system at once (return_memory="always"). All else is the default.',
        f"Allocator: {_allocator()}.",
        f"The store spills to {directory} ({file_system_of(directory)}).",
    ]
    if is_in_memory(directory):
        introduction.append("That file system is in memory, so spilled tensors still take memory.")

    def introduce(line: str) -> None:
        """Only the fresh process knows whether the device can be used. Until it says so, an error stands alone."""
        while introduction:
            say(introduction.pop(0))
        say(line)

    plain = run_training("plain", settings, introduce)
    if budget is None:
        budget = plain.peak_bytes // HOST_SHARE
    say(f"The store may hold {format_bytes(budget)} of host memory.")
    return DemoResult(settings, budget, plain, run_training("tierstore", settings, say, str(directory), budget))


def _allocator() -> str:
    missing = why_none()
    return "tierstore's, which uses freed memory again" if missing is None else f"PyTorch's own ({missing})"


def run_training(
    variant: str, settings: DemoSettings, say: Say, store_path: str | None = None, host_bytes: int = 0
) -> RunReport:
    """Train in a fresh process, and wait for its report. What the store raised is raised again here. Raises
    TierStoreError: the run ended without a report, in any other way."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(sender, settings, store_path, host_bytes), daemon=True)
    resource_tracker.ensure_running()  # `start` would do so, and let SIGINT through
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the process is started with the same mask
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    sender.close()
    try:
        while not isinstance(told := receiver.recv(), RunReport):
            if isinstance(told, TierStoreError):
                raise told
            say(f"{variant}: {told}")
        return told
    except EOFError:
        process.join()
        raise TierStoreError(f"the {variant} run {ending_of(process.exitcode or 0)}") from None
    finally:
        process.kill()
        process.join()
        receiver.close()


def _train(sender: Connection, settings: DemoSettings, store_path: str | None, host_bytes: int) -> None:
    """In the fresh process. Its parent ends it, so SIGINT has been blocked from its beginning; and standard output is
    the parent's alone."""
    os.dup2(2, 1)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from .training import train

    try:
        sender.send(train(settings, store_path, host_bytes, sender.send))
    except TierStoreError as error:
        sender.send(error)
