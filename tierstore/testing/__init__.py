"""Injects faults into a store, a disk tier, a copy engine or a daemon, as a plan says.

::

    from tierstore.testing import Fails, FaultPlan, FaultyStore, Latency, Rule

    plan = FaultPlan.of(Rule("write", Latency(0.01)), Rule("read", Fails(errno.EIO), occurrences=(3,)))
    with FaultyStore("/nvme", plan, host_bytes=0) as store:
        train(store)
        print(store.faults.injected)

A plan is plain data: which operation, when, which fault. There are three groups of operations. Without a plan
everything works as without the wrappers. For tests only: no other part of the package imports it.

- the disk tier's, of a daemon too: "write", "read", "discard", "close";
- the system calls below it: "pwritev", "preadv", "fallocate". Only in a store on a directory, or in a daemon that was
  started by `python -m tierstore.testing.faulty_daemon`;
- the copy engine's: "offload", "reload".
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .faults import Faults
from .faulty_disk import FaultyDisk
from .plan import Bandwidth, Fails, Fault, FaultPlan, Late, Latency, Operation, Rule, Short, Signal, Torn
from .system_calls import FaultyCalls, FaultyExecutor

if TYPE_CHECKING:
    from .copies import FaultyCopies, SimulatedCopies
    from .store import FaultyStore

__all__ = [
    "Bandwidth",
    "Fails",
    "Fault",
    "FaultPlan",
    "Faults",
    "FaultyCalls",
    "FaultyCopies",
    "FaultyDisk",
    "FaultyExecutor",
    "FaultyStore",
    "Late",
    "Latency",
    "Operation",
    "Rule",
    "Short",
    "Signal",
    "SimulatedCopies",
    "Torn",
]

_WITH_TORCH = {"FaultyCopies": ".copies", "FaultyStore": ".store", "SimulatedCopies": ".copies"}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WITH_TORCH[name], __name__), name)
