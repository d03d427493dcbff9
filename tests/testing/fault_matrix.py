"""Every fault at every stage of a step: which cases there are, and what is promised in each.

A stage is where in a step the fault strikes; its operations are those that can strike there::

    pack      a pack waits for room, and so for a write (staging holds one tensor)
    offload   a saved tensor is copied off the device
    spill     writes go on beside forward; `flush` waits for them
    restore   backward reads
    reload    backward copies back to the device
    release   backward frees what it has used
    close     the store is closed

A case is left out where its fault cannot happen to any operation of the stage (`FITS`), or by `_reason_against`.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from tierstore import CorruptDataError, DaemonUnavailableError, StorageIOError, StoreClosedError, StoreFullError
from tierstore.testing import Bandwidth, Fails, Fault, FaultPlan, Late, Latency, Operation, Rule, Short, Signal, Torn
from tierstore.testing.plan import FITS

STAGES: dict[str, tuple[Operation, ...]] = {
    "pack": ("write", "pwritev", "fallocate"),
    "offload": ("offload",),
    "spill": ("write", "pwritev", "fallocate"),
    "restore": ("read", "preadv"),
    "reload": ("reload",),
    "release": ("discard",),
    "close": ("close",),
}
EVER = 1000
OCCURRENCES: dict[str, tuple[int, ...]] = {"1st": (1,), "3rd": (3,), "every": tuple(range(1, EVER))}
FAULTS: dict[str, Fault] = {
    "latency": Latency(0.002),
    "random latency": Latency(0.002, "exponential"),
    "bandwidth": Bandwidth(100e6),
    "EIO": Fails(errno.EIO),
    "ENOSPC": Fails(errno.ENOSPC),
    "late": Late(3),
    "short": Short(8192),
    "torn": Torn(4096),
}
SYSTEM_CALLS = ("pwritev", "preadv", "fallocate")


class Case(NamedTuple):
    """One cell of the matrix. `occurrence`: which of these operations, from the beginning of the stage on."""

    stage: str
    operation: Operation
    fault: str
    occurrence: str
    codec: str = "none"

    def __str__(self) -> str:
        encoded = "" if self.codec == "none" else f"-{self.codec}"
        return f"{self.stage}-{self.operation}-{self.fault}-{self.occurrence}{encoded}".replace(" ", "_")

    @property
    def plan(self) -> FaultPlan:
        """For the time of the stage."""
        rule = Rule(self.operation, FAULTS[self.fault], OCCURRENCES[self.occurrence])
        return FaultPlan.of(rule, seed=1)

    @property
    def is_of_system_calls(self) -> bool:
        """Whether it strikes where the files are: in the daemon, where there is one."""
        return self.operation in SYSTEM_CALLS

    @property
    def promise(self) -> Promise:
        """What is to come of it."""
        fault = FAULTS[self.fault]
        if isinstance(fault, Fails):
            return _PROMISES[self.stage, fault.number]
        if isinstance(fault, Torn):
            return _TORN
        return RIGHT._replace(ends_the_store=self.stage == "close")


class Promise(NamedTuple):
    """What may be raised of a fault, with that errno at the end of the chain. Gradients that come are always right."""

    errors: tuple[type[Exception], ...] = ()
    must_raise: bool = False
    ends_the_store: bool = False
    cause: int | None = None


RIGHT = Promise()
_TORN = Promise((CorruptDataError,), must_raise=True)
_DOWN = Promise((StorageIOError,), must_raise=True, cause=errno.EIO)
_FULL = Promise((StoreFullError,), cause=errno.ENOSPC)
_COPY = Promise((RuntimeError, StoreClosedError), must_raise=True, ends_the_store=True)
_PROMISES: dict[tuple[str, int], Promise] = {
    ("pack", errno.EIO): _DOWN,
    ("pack", errno.ENOSPC): _FULL,
    ("spill", errno.EIO): _DOWN,
    ("spill", errno.ENOSPC): _FULL,
    ("restore", errno.EIO): Promise((StorageIOError,), cause=errno.EIO),  # what nobody waits for is read again, untold
    ("offload", errno.EIO): _COPY,
    ("reload", errno.EIO): _COPY,
    ("release", errno.EIO): Promise((StoreClosedError,), must_raise=True, ends_the_store=True, cause=errno.EIO),
    ("close", errno.EIO): Promise((StorageIOError,), must_raise=True, ends_the_store=True, cause=errno.EIO),
}


def cases() -> Iterator[Case]:
    """All of them."""
    for stage, operations in STAGES.items():
        for operation in operations:
            for fault in FAULTS:
                if operation not in FITS[type(FAULTS[fault])]:
                    continue
                for occurrence in OCCURRENCES:
                    for codec in ("none", "zstd") if operation in SYSTEM_CALLS else ("none",):
                        case = Case(stage, operation, fault, occurrence, codec)
                        if _reason_against(case) is None:
                            yield case


def cases_of_a_daemon() -> Iterator[Case]:
    """What the daemon's disk tier does where it is embedded is not done again for each codec and occurrence."""
    for case in cases():
        if case.operation == "fallocate":
            continue  # it has reserved its segment when the first client comes
        if case.is_of_system_calls and (case.codec != "none" or case.occurrence == "3rd"):
            continue
        yield case


def usual_first(several: Sequence[Case]) -> list[object]:
    """Parameters (case). By default those run that have each fault at each operation of each stage, and all other
    pairs, and one in which an error's traceback kept a tensor; the rest when asked for."""
    usual = {*map(str, _covering(several)), "offload-offload-EIO-3rd"}
    return [pytest.param(case, id=str(case), marks=() if str(case) in usual else pytest.mark.slow) for case in several]


def _covering(several: Sequence[Case]) -> set[Case]:
    """Few cases that have every pair of stage and operation, fault, occurrence and codec which any case has."""

    def pairs_of(case: Case) -> set[object]:
        traits = ((case.stage, case.operation), case.fault, case.occurrence, case.codec)
        return set(itertools.combinations(enumerate(traits), 2))

    left: set[object] = set().union(*map(pairs_of, several))
    chosen: set[Case] = set()
    while left:
        best = max(several, key=lambda case: len(left & pairs_of(case)))
        chosen.add(best)
        left -= pairs_of(best)
    return chosen


def _reason_against(case: Case) -> str | None:
    if case.fault == "ENOSPC" and case.stage not in ("pack", "spill"):
        return "only what writes needs space"
    if case.stage == "close" and case.occurrence == "3rd":
        return "a tier is closed once"
    if case.operation == "discard" and case.occurrence == "3rd":
        return "what is freed meanwhile is discarded together: there may be two only"
    if case.operation == "fallocate" and case.occurrence == "3rd":
        return "a step takes one segment; where that fails, two sizes are tried"
    if case.operation == "fallocate" and case.codec != "none":
        return "a segment is reserved before anything is encoded"
    return None


def lost_daemon(operation: Operation, pid: int, occurrence: int) -> FaultPlan:
    """The daemon is killed as that operation begins."""
    return FaultPlan.of(Rule(operation, Signal(pid), (occurrence,)))


LOST = [
    (stage, operation, occurrence)
    for stage, operations in STAGES.items()
    for operation in operations
    if operation in ("write", "read", "discard", "close")
    for occurrence in (1, 3)
    if occurrence == 1 or operation in ("write", "read")
]


GONE = Promise((DaemonUnavailableError,), must_raise=True)


def chain_of(error: BaseException | None) -> list[BaseException]:
    """The error, its causes, and the members of groups among them."""
    if error is None:
        return []
    members = [link for member in getattr(error, "exceptions", ()) for link in chain_of(member)]
    return [error, *members, *chain_of(error.__cause__)]


def has_cause(error: BaseException, number: int, *, is_told: bool) -> bool:
    """Whether the system's own error is among the causes; where another process had it (`is_told`): its words."""
    if is_told and os.strerror(number) in str(error):
        return True
    return any(isinstance(link, OSError) and link.errno == number for link in chain_of(error))
