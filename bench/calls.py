"""How many calls does a saved tensor make? Their number does not depend on the machine, and their time follows it.

A chain of `sin` saves a fresh tensor in each operation, in the last step of the same graph. "Packs" and "unpacks" are
all calls of Python and of C below the hooks, on the training thread, of a tensor of 1 KiB: kept in host memory, kept on
an accelerator, or leaving it for host memory; or left where it is, as a parameter, a view of one, or for being small.
"In batches" is of tensors that are too large for a group; so staging is so small that those of 1 KiB are.
Those of hooks that do nothing are subtracted. The accelerator is a
simulated one that copies at once, so what the driver's own calls cost is not in it. In the cases that are "late", no
copy is known to be over before the step is, as where the host is far ahead of its device. "Asked" is how often one is
asked for that, in the whole step, for each tensor. "Round trip" is all functions of
tierstore, on all threads, for a tensor that goes to the drive and back, and "training thread" those on that thread;
backward rests between its tensors, so that it waits for none, and no codec shortens their random bits. "Steps" are
all calls on the training thread in a step of a decoder that saves 525 tensors, 427 of them on an accelerator where they
stay: 66 are of its buffers. There is room for two fifths more; "hooks off": for so much that the scope takes its hooks
off, in all steps but one in 64. "A tensor in a decoder" is the CPU time of such a step, the least of some, for each of
them; "of none", by how much a step takes more of the training thread's CPU than one without a scope, the median of
pairs, by turns.

Beside them, what the same calls cost elsewhere: a step of small tensors (`small_tensors`), the get of a record
(`data_plane`); and how many lines of Python there are to be read.
"""

from __future__ import annotations

import cProfile
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from tierstore import TierStore, tiered_offload
from tierstore.tensors.torch_names import top_hooks
from tierstore.testing import SimulatedCopies

from . import data_plane, small_tensors
from .goals import Goal
from .gpu.models import Decoder, DecoderShape
from .harness import Benchmark

FLOOR = "hooks that do nothing"
_DEVICE = torch.device("cpu", 0)
NUM_TENSORS = 400
NUM_STEPS = 8
"""Too few for a scope to do without hooks."""


class Case(NamedTuple):
    """`most_packs`, `most_unpacks`, `most_microseconds` of both: the goals. `saves`: what each operation saves, its
    input or the same tensor each time. `options` of the store. `most_asked`: None: copies are over at once. Else they
    are late, and that is the goal."""

    is_simulated: bool
    device_bytes: int
    most_packs: int
    most_unpacks: int
    most_microseconds: float
    min_bytes: int = 1
    saves: str = "its input"
    options: Mapping[str, Any] = MappingProxyType({})
    most_asked: float | None = None


CASES = {
    "host": Case(False, 0, 11, 4, 8),
    "stays on the device": Case(True, 2**30, 13, 5, 8),
    "buffer on the device": Case(True, 2**30, 14, 5, 8, saves="buffer"),
    "leaves the device": Case(True, 0, 18, 24, 35),
    "leaves in batches": Case(True, 0, 60, 40, 80, options={"staging_bytes": "15KiB"}),  # seven of them in each
    "leaves the device, late": Case(True, 0, 20, 25, 35, most_asked=0.1),
    "leaves in batches, late": Case(True, 0, 60, 30, 80, options={"staging_bytes": "15KiB"}, most_asked=0.2),
    "leaves alone, late": Case(True, 0, 200, 90, 150, options={"staging_bytes": "3KiB"}, most_asked=0.5),
    "half of them leave, late": Case(True, NUM_TENSORS * 2**9, 28, 20, 35, most_asked=0.1),
    "parameter": Case(False, 0, 3, 3, 4, saves="parameter"),
    "view of a parameter": Case(False, 0, 4, 3, 4, saves="view of a parameter"),
    "small": Case(False, 0, 8, 3, 4, min_bytes=2**20),
}
MOST_AT_THE_END = 3
DECODER = "decoder on the device"
WHOLE_DECODER = "decoder on the device, hooks off"
DECODER_SHAPE = DecoderShape(layers=16, width=64, tokens=16, vocabulary=100, head_width=32)
MOST_OF_THE_DECODER = 9200
MOST_OF_THE_WHOLE_DECODER = 0
MOST_OF_NONE = 1.05
MOST_MICROSECONDS_OF_THE_DECODER = 19.3
"""A third of the 58 that hooks took there before packs went without the lock."""
_NUM_SAVED_BY_THE_DECODER = 525
_BYTES_OF_THE_DECODER = 1_879_044
_NUM_STEPS_OF_THE_DECODER = 50
_NUM_PAIRS = 160
DRIVE = {
    "4 MiB": (2**22, 32, 160, 100, 0.01),
    "2 MiB": (2**21, 64, 160, 100, 0.005),
    "256 KiB": (2**18, 1024, 50, 40, 0.0),
    "128 KiB": (2**17, 2048, 45, 30, 0.0),
}
"""Bytes of a tensor, how many there are, the goals on all threads and on the one that trains, and seconds of rest."""
HOST_BYTES_OF_DRIVE = "16MiB"
MOST_FILES = {"down": 40, "up": 30}
SMALL_KIB = (128, 96, 64)
SIZES = (small_tensors.LARGE, *(f"{kib} KiB" for kib in SMALL_KIB))
GETS = ("1 MiB", f"1 MiB{data_plane.NATIVE}")
LINES = {
    "heart": (9500, "hooks", "tierstore/ledger", "tierstore/residency", "tierstore/store", "tierstore/tensors"),
    "product": (30_000, "tierstore", "hooks", "daemon"),
    "bench": (6000, "bench"),
    "tests": (40_000, "tests"),
}
"""The most that there should be, in which folders. The heart is what a saved tensor passes through on its way."""
_SLOW = "the same calls take longer in slow hours"
_RECORD = "a record for each tensor"
_STATES = "one for each thing that has a state of its own"
_LOCK = "the interpreter's lock goes from thread to thread"
_GET_CPU = "get_beyond_floor_cpu_microseconds"

BENCHMARK = Benchmark(
    name="calls",
    question="Calls of one saved tensor",
    variants=tuple(dict.fromkeys((FLOOR, *CASES, DECODER, WHOLE_DECODER, *DRIVE, *SIZES, *GETS, *LINES))),
    processes={
        "packs": (FLOOR, *CASES, DECODER, WHOLE_DECODER),
        **{name: (name,) for name in DRIVE},
        "sizes": SIZES,
        "lines": tuple(LINES),
    },
    plotted=("packs", "unpacks", "round_trip"),
    goals=(
        *(Goal(f"{name}: pack", "packs", name, at_most=case.most_packs, beyond=FLOOR) for name, case in CASES.items()),
        *(
            Goal(f"{name}: unpack", "unpacks", name, at_most=case.most_unpacks, beyond=FLOOR)
            for name, case in CASES.items()
        ),
        *(
            Goal(f"{name}: at the end of the scope", "ends", name, at_most=MOST_AT_THE_END, beyond=FLOOR)
            for name in CASES
            if "leave" not in name  # what leaves has to leave by then
        ),
        *(
            Goal(f"{name}: asks whether copies are over", "asked", name, at_most=case.most_asked)
            for name, case in CASES.items()
            if case.most_asked is not None
        ),
        *(
            Goal(f"{name}: time of both", "microseconds", name, at_most=case.most_microseconds, if_missed=_SLOW)
            for name, case in CASES.items()
        ),
        Goal(f"{DECODER}: a step", "steps", DECODER, at_most=MOST_OF_THE_DECODER, beyond=FLOOR),
        Goal(f"{WHOLE_DECODER}: a step", "steps", WHOLE_DECODER, at_most=MOST_OF_THE_WHOLE_DECODER, beyond=FLOOR),
        Goal(
            f"{WHOLE_DECODER}: CPU of a step, of none", "of_none", WHOLE_DECODER, at_most=MOST_OF_NONE, if_missed=_SLOW
        ),
        Goal(
            f"{DECODER}: time of a tensor",
            "in_a_decoder_microseconds",
            DECODER,
            at_most=MOST_MICROSECONDS_OF_THE_DECODER,
            beyond=FLOOR,
            if_missed=_SLOW,
        ),
        *(
            Goal(f"{name}: to the drive and back", "round_trip", name, at_most=most, if_missed=_RECORD)
            for name, (_, _, most, _, _) in DRIVE.items()
        ),
        *(
            Goal(f"{name}: of these on the training thread", "training_thread", name, at_most=most)
            for name, (_, _, _, most, _) in DRIVE.items()
        ),
        *(
            Goal(f"4 MiB: source files on the way {way}", f"files_{way}", "4 MiB", at_most=most, if_missed=_STATES)
            for way, most in MOST_FILES.items()
        ),
        *(small_tensors.OF_LARGE[kib] for kib in SMALL_KIB),
        *(
            goal
            for name in GETS
            for goal in (
                Goal("waits of a get", "get_waits", name, at_most=6, if_missed=_LOCK),
                Goal("CPU beyond bare threads'", _GET_CPU, name, at_most=500, if_missed=_LOCK),
                Goal("get, of the bare threads' throughput", "get_to_floor", name, at_least=0.25, if_missed=_LOCK),
            )
        ),
        *(
            Goal("lines of Python", "lines", name, at_most=most, if_missed="fewer lines would mean fewer features")
            for name, (most, *_) in LINES.items()
        ),
    ),
)


class _AtOnce(SimulatedCopies):
    """Copies are made by the thread that queues them, so that none is waited for or found unfinished. What it is asked
    for takes as little time as it may."""

    num_asked = 0
    _over = cached_property(lambda self: self.mark(None))

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        return _DEVICE

    def current_stream(self, device: torch.device) -> str:
        return "compute"

    def wait(self, stream: Any, marker: Any) -> None:
        """The stream waits, not the host."""

    def _copy(self, way: str, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], *_: Any) -> Any:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        return self._over

    def end_step(self) -> None:
        """The device has caught up."""


class _Late(_AtOnce):
    """Copies are made at once all the same. Which are known to be over changes as a step ends, or who waits for one."""

    num_copies = num_over = num_known = 0

    def _copy(self, *queued: Any) -> Any:
        super()._copy(*queued)
        self.num_copies += 1
        return _LateEnd(self, self.num_copies)

    def end_step(self) -> None:
        self.num_over = self.num_copies


class _LateEnd:
    """Of a copy. A `Marker`."""

    __slots__ = ("_copies", "_number")

    def __init__(self, copies: _Late, number: int) -> None:
        self._copies, self._number = copies, number

    def query(self) -> bool:
        """As the engine of a real accelerator: a copy that is over tells of those before it."""
        copies = self._copies
        if self._number > copies.num_known:
            copies.num_asked += 1
            copies.num_known = max(copies.num_known, min(self._number, copies.num_over))
        return self._number <= copies.num_known

    def synchronize(self) -> None:
        self._copies.num_over = max(self._copies.num_over, self._number)


def measure(process: str, scratch: Path) -> dict[str, Any]:
    if process == "packs":
        return packs(scratch)
    if process == "sizes":
        return small_tensors.by_turns(scratch, SIZES)
    if process in GETS:
        return data_plane.measure(process, scratch)
    if process == "lines":
        return {name: {"lines": num_lines(folders)} for name, (_, *folders) in LINES.items()}
    torch.set_num_threads(1)
    nbytes, num_tensors, _, _, rest_seconds = DRIVE[process]
    return {process: round_trip(scratch, nbytes, num_tensors, rest_seconds)}


def num_lines(folders: Sequence[str]) -> float:
    root = Path(__file__).parents[1]
    files = (file for folder in folders for file in (root / folder).rglob("*.py"))
    return float(sum(len(file.read_text().splitlines()) for file in files))


def packs(scratch: Path, *, is_timed: bool = True) -> dict[str, dict[str, float]]:
    """`is_timed` False: the calls are counted alone, which takes no longer than it must."""
    torch.set_num_threads(1)
    num_steps = _NUM_STEPS_OF_THE_DECODER if is_timed else NUM_STEPS
    figures = {FLOOR: calls_within(saved_tensors_hooks(_same, _same))}
    del figures[FLOOR]["asked"]
    figures[FLOOR] |= steps_of_decoder(saved_tensors_hooks(_same, _same), num_steps)
    for name, case in CASES.items():
        with ExitStack() as stack:
            engine = _AtOnce if case.most_asked is None else _Late
            copies = stack.enter_context(engine()) if case.is_simulated else None
            store = stack.enter_context(TierStore(scratch, host_bytes="1GiB", copies=copies, **case.options))
            scope = tiered_offload(store, min_bytes=case.min_bytes, device_bytes=case.device_bytes)
            figures[name] = calls_within(scope, case.saves, copies)
            if case.most_asked is None:
                del figures[name]["asked"]
    with _AtOnce() as copies, TierStore(scratch, host_bytes="1GiB", copies=copies) as store:
        for name, device_bytes in ((DECODER, _BYTES_OF_THE_DECODER * 7 // 5), (WHOLE_DECODER, 2**30)):
            scope = tiered_offload(store, min_bytes=1, device_bytes=device_bytes)
            figures[name] = steps_of_decoder(scope, num_steps)
        if is_timed:
            figures[WHOLE_DECODER]["of_none"] = cpu_of_none(scope)
    return figures


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def calls_within(scope: Any, saves: str = "its input", copies: _AtOnce | None = None) -> dict[str, float]:
    """Calls for one pack and one unpack inside a scope, which is entered for each step, and at the scope's end for each
    tensor; microseconds of both hooks: the mean over the tensors of the least of some steps; and how often it is asked
    whether a copy is over, for each tensor."""
    profiles = [cProfile.Profile(), cProfile.Profile(), cProfile.Profile()]
    times: list[list[int]] = []
    buffer = torch.full((16, 16), 0.5)

    def timed(hook: Any) -> Any:
        def call(saved: Any) -> Any:
            began = time.perf_counter_ns()
            found = hook(saved)
            times[-1].append(time.perf_counter_ns() - began)
            return found

        return call

    for step in range(NUM_STEPS):
        is_counted = step == NUM_STEPS - 1
        num_asked = 0 if copies is None else copies.num_asked
        times.append([])
        leaf = torch.nn.Parameter(torch.full((16, 16), 0.5))
        saved = {"its input": None, "parameter": leaf, "view of a parameter": leaf.t(), "buffer": buffer}[saves]
        with scope, nullcontext() if is_counted else saved_tensors_hooks(*map(timed, top_hooks(False))):
            hidden = leaf * 1.5
            with profiled(profiles[0], is_counted):
                for _ in range(NUM_TENSORS):
                    if saved is buffer:
                        hidden = hidden.mul(buffer)
                    else:
                        hidden = hidden.sin() if saved is None else hidden + saved.sin()
            if is_counted:
                profiles[2].enable()
        profiles[2].disable()
        loss = hidden.sum()
        del hidden
        with profiled(profiles[1], is_counted):
            loss.backward()
        del loss
        if copies is not None:
            num_asked = copies.num_asked - num_asked
            copies.end_step()
    num_calls = [sum(entry.callcount for entry in profile.getstats()) / NUM_TENSORS for profile in profiles]
    microseconds = sum(map(min, zip(*times[2:-1], strict=True))) / 1000 / NUM_TENSORS
    found = dict(zip(("packs", "unpacks", "ends"), num_calls, strict=True))
    return found | {"microseconds": microseconds, "asked": num_asked / NUM_TENSORS}


def steps_of_decoder(scope: Any, num_steps: int) -> dict[str, float]:
    """Of a step: all calls of this thread, in the last of `NUM_STEPS`, and for each saved tensor the least CPU time of
    some. The scope is entered for each."""
    profile, model = cProfile.Profile(), Decoder(DECODER_SHAPE)
    times = [_step_of(model, scope, profiled(profile, step == NUM_STEPS - 1)) for step in range(num_steps)]
    num_calls = float(sum(entry.callcount for entry in profile.getstats()))
    return {"steps": num_calls, "in_a_decoder_microseconds": min(times) / 1000 / _NUM_SAVED_BY_THE_DECODER}


def cpu_of_none(scope: Any) -> float:
    """CPU time of this thread in a step of the decoder inside the scope, which knows it, as a share of one without."""
    model = Decoder(DECODER_SHAPE)
    pairs = [[_step_of(model, way, nullcontext()) for way in (nullcontext(), scope)] for _ in range(_NUM_PAIRS)]
    return statistics.median(inside / outside for outside, inside in pairs[_NUM_PAIRS // 8 :])


def _step_of(model: Decoder, scope: Any, watched: Any) -> int:
    tokens = torch.arange(DECODER_SHAPE.tokens).unsqueeze(0)
    model.zero_grad()
    began = time.thread_time_ns()
    with watched:
        with scope:
            loss = model(tokens, tokens)
        loss.backward()
    del loss
    return time.thread_time_ns() - began


@contextmanager
def profiled(profile: cProfile.Profile, is_on: bool) -> Iterator[None]:
    if is_on:
        gc.collect()
        gc.disable()
        profile.enable()
    yield
    profile.disable()
    gc.enable()


class _Saving(torch.autograd.Function):
    """Saves a copy of its input. Its backward rests, as if it computed for so long."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, rest_seconds: float) -> torch.Tensor:  # type: ignore[override]
        context.save_for_backward(x.clone())
        context.rest_seconds = rest_seconds
        return x * 1.5

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (saved,) = context.saved_tensors
        if context.rest_seconds:
            time.sleep(context.rest_seconds)
        return gradients[0] * saved.sign(), None


def round_trip(scratch: Path, nbytes: int, num_tensors: int, rest_seconds: float = 0.0) -> dict[str, float]:
    """Functions of tierstore that run for a tensor, in the third step of a graph most of which goes to the drive; and
    the source files that they lie in, in the fourth, whose writes have ended before backward begins."""
    num_calls = num_own = 0
    files: set[str] = set()

    def is_counted(frame: FrameType, event: str) -> bool:
        if event != "call" or not frame.f_globals.get("__name__", "").startswith("tierstore"):
            return False
        files.add(frame.f_code.co_filename)
        return True

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_calls
        num_calls += is_counted(frame, event)

    def count_own(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_own
        num_own += is_counted(frame, event)

    def leaf() -> torch.Tensor:
        return torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.float32).requires_grad_()

    threading.setprofile(count)  # for the threads of the store, which is opened now
    try:
        with TierStore(scratch, host_bytes=HOST_BYTES_OF_DRIVE) as store:
            for step in range(3):
                start, num_calls = leaf(), 0
                sys.setprofile(count_own if step == 2 else None)
                _forward(start, num_tensors, store, rest_seconds).backward()  # type: ignore[no-untyped-call]
                store.flush()
                sys.setprofile(None)
            round_trip, training_thread = (num_calls + num_own) / num_tensors, num_own / num_tensors
            start, num_files = leaf(), list[float]()
            files.clear()
            sys.setprofile(count_own)
            loss = _forward(start, num_tensors, store, rest_seconds)
            store.flush()
            num_files.append(float(len(files)))
            files.clear()
            loss.backward()  # type: ignore[no-untyped-call]
            store.flush()
            sys.setprofile(None)
            num_files.append(float(len(files)))
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]  # typeshed does not know that it may be None
    down, up = num_files
    return {"round_trip": round_trip, "training_thread": training_thread, "files_down": down, "files_up": up}


def _forward(leaf: torch.Tensor, num_tensors: int, store: TierStore, rest_seconds: float) -> torch.Tensor:
    value = leaf
    with tiered_offload(store, min_bytes="1KiB"):
        for _ in range(num_tensors):
            value = _Saving.apply(value, rest_seconds)
    return value.sum()
