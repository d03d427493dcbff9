"""A trial of `tierstore tune`: the program runs with other settings, is recorded, and ends after some steps.

The environment variable `TIERSTORE_TUNE` names a JSON file, the `TrialPlan`. If it is not set, this module does nothing
except look for it when a store or a scope is made.

NOTE [End of a trial]
    The program ends where it enters a scope, by an exception that passes up through its own frames, so stores, data
    loaders and temporary folders are closed as usual. All ranks of a distributed program do the same steps, so all end
    before the same step, and none waits for another that is gone.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..tracing.recorder import Recorder

VARIABLE = "TIERSTORE_TUNE"
"""The environment variable."""


class TrialPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file.

    Attributes:
        folder: an existing folder for traces; each store makes its own file there.
        num_graphs: how many graphs are recorded whole before the program ends.
        store, offload: arguments of `TierStore` and of `tiered_offload` that replace the program's, by name.
    """

    folder: str
    num_graphs: int
    store: dict[str, Any] = {}
    offload: dict[str, Any] = {}


class TracedStore(msgspec.Struct, frozen=True):
    """The content of a file beside each trace."""

    pid: int
    trace: str


class TrialEndedError(SystemExit):
    """Ends the program, as `sys.exit(0)` does, because enough steps are recorded."""


class Trial:
    """The trial that this process runs as. For any thread."""

    def __init__(self, plan: TrialPlan) -> None:
        self.store: Mapping[str, Any] = plan.store
        self.offload: Mapping[str, Any] = plan.offload
        self._plan = plan
        self._traces: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
        self._recordings: list[Recorder] = []
        self._numbers = count(1)
        self._lock = threading.RLock()  # a finalizer may train where its thread holds it

    def trace_of(self, store: object) -> str:
        """The path of this store's trace; the first call announces it (`announce_trace`). Raises OSError."""
        with self._lock:
            trace = self._traces.get(store)
            if trace is None:
                number = next(self._numbers)
                trace = self._traces[store] = announce_trace(Path(self._plan.folder), number)
            return trace

    def enter(self, recording: Recorder) -> None:
        with self._lock:
            if not any(recording is known for known in self._recordings):
                self._recordings.append(recording)
            num_graphs = sum(known.num_graphs for known in self._recordings)
        if num_graphs > self._plan.num_graphs:  # the last may not be over: one forward may have many scopes
            raise TrialEndedError(0)


def announce_trace(folder: Path, number: int) -> str:
    """Write a `TracedStore` for store `number` of this process; returns the path for its trace. Raises OSError."""
    name = f"{os.getpid()}-{number}"
    about = TracedStore(os.getpid(), f"{name}.jsonl")
    (folder / f"{name}.json").write_bytes(msgspec.json.encode(about))
    return str(folder / about.trace)


@cache
def trial_of_process() -> Trial | None:
    """The trial that this process runs as; None, as a rule: it is no trial. Reads the file once, which blocks.

    Raises ConfigError: the variable does not name a valid plan."""
    place = os.environ.get(VARIABLE)
    if place is None:
        return None
    try:
        return Trial(msgspec.json.decode(Path(place).read_bytes(), type=TrialPlan))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(VARIABLE, place, f"it is no plan of tierstore tune: {error}") from error
