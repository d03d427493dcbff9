"""A program that `tierstore tune` tries: it gets other settings, is recorded, and ends after some steps.

The environment variable `TIERSTORE_TUNE` names a `TrialPlan`, a file of JSON. Where it is not set, a store and a scope
look for it once when they are made, and that is all.

NOTE [End of a trial]
    A program is ended where it enters a scope, by an exception that goes up through its own frames: stores, data
    loaders and temporary folders are closed as they always are. All ranks of a distributed program do the same steps,
    so all of them end before the same one, and none waits for another that is gone.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import msgspec

from .errors import ConfigError

__all__ = ["VARIABLE", "TracedStore", "Trial", "TrialEndedError", "TrialPlan", "announce_trace", "trial_of_process"]

VARIABLE = "TIERSTORE_TUNE"
"""The environment variable."""


class TrialPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file says.

    Attributes:
        folder: an existing one, for traces; each store makes a file of its own there.
        num_graphs: so many are recorded whole; then the program ends.
        store: arguments of `TierStore` that take the place of the program's, by name.
        offload: likewise of `tiered_offload`.
    """

    folder: str
    num_graphs: int
    store: dict[str, Any] = {}
    offload: dict[str, Any] = {}


class TracedStore(msgspec.Struct, frozen=True):
    """A file beside each trace.

    Attributes:
        pid: of the process.
        trace: the file's name.
        num_threads: that torch computes with.
    """

    pid: int
    trace: str
    num_threads: int


class TrialEndedError(SystemExit):
    """Enough steps are recorded: the program ends as if it had called `sys.exit(0)`."""


class Recording(Protocol):
    """The recorder of a trace."""

    num_graphs: int
    """That have begun."""


class Trial:
    """The trial that this process is. For any thread.

    Args:
        plan: of it.

    Attributes:
        store, offload: see `TrialPlan`.
    """

    def __init__(self, plan: TrialPlan) -> None:
        self.store: Mapping[str, Any] = plan.store
        self.offload: Mapping[str, Any] = plan.offload
        self._plan = plan
        self._traces: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()
        self._recordings: list[Recording] = []
        self._numbers = count(1)
        self._lock = threading.Lock()

    def trace_of(self, store: object, num_threads: int) -> str:
        """The file to which this store is traced; tells of it, when it is first asked for. Raises OSError."""
        with self._lock:
            trace = self._traces.get(store)
            if trace is None:
                number = next(self._numbers)
                trace = self._traces[store] = announce_trace(Path(self._plan.folder), number, num_threads)
            return trace

    def enter(self, recording: Recording) -> None:
        """A scope is about to be entered. Raises TrialEndedError when enough is recorded."""
        with self._lock:
            if not any(recording is known for known in self._recordings):
                self._recordings.append(recording)
            num_graphs = sum(known.num_graphs for known in self._recordings)
        if num_graphs > self._plan.num_graphs:  # the last may not be over: the scopes of one forward may be many
            raise TrialEndedError(0)


def announce_trace(folder: Path, number: int, num_threads: int) -> str:
    """The file for the trace of this process's store of that number, which is told of in the folder. Raises OSError."""
    name = f"{os.getpid()}-{number}"
    about = TracedStore(os.getpid(), f"{name}.jsonl", num_threads)
    (folder / f"{name}.json").write_bytes(msgspec.json.encode(about))
    return str(folder / about.trace)


@cache
def trial_of_process() -> Trial | None:
    """The trial that this process is; None: none, as a rule. Blocks for the file, once.

    Raises:
        ConfigError: the variable names no plan.
    """
    place = os.environ.get(VARIABLE)
    if place is None:
        return None
    try:
        return Trial(msgspec.json.decode(Path(place).read_bytes(), type=TrialPlan))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(VARIABLE, place, f"it is no plan of tierstore tune: {error}") from error
