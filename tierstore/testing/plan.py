"""Plans of faults: what goes wrong, and when. Plain data, which can be sent as JSON to a daemon in another process."""

from __future__ import annotations

import errno
import os
import signal
from typing import Literal, get_args

import msgspec

from ..errors import ConfigError

DiskOperation = Literal["write", "read", "discard", "close"]
CopyOperation = Literal["offload", "reload"]
SystemCall = Literal["pwritev", "preadv", "fallocate"]
Operation = DiskOperation | CopyOperation | SystemCall

_ALL = frozenset(get_args(DiskOperation) + get_args(CopyOperation) + get_args(SystemCall))
_SYSTEM_CALLS = frozenset(get_args(SystemCall))
_WITH_BYTES = _ALL - {"discard", "close", "fallocate"}


class Latency(msgspec.Struct, frozen=True, tag=True):
    """The operation begins later, by `seconds` in the mean. `spread`: "fixed": always the mean; "exponential": mostly
    less, sometimes much more, drawn from the plan's seed."""

    seconds: float
    spread: Literal["fixed", "exponential"] = "fixed"


class Bandwidth(msgspec.Struct, frozen=True, tag=True):
    """All operations of the rule together are limited to one speed. Each begins at once, and is reported done only when
    its last byte would have come, as on a slower drive."""

    bytes_per_second: float


class Fails(msgspec.Struct, frozen=True, tag=True):
    """The operation is not done. A read leaves garbage in its destination; a tier's close is done before it fails.
    `number`, one of `errno`: a system call raises it as OSError, the disk tier as its contract's error, the copy engine
    as RuntimeError."""

    number: int = errno.EIO


class Late(msgspec.Struct, frozen=True, tag=True):
    """The operation is done, but reported only after `num_others` others. The disk tier reports it earlier if no other
    operation runs. A copy's event also comes if somebody waits for it."""

    num_others: int = 1


class Short(msgspec.Struct, frozen=True, tag=True):
    """The call moves at most `max_bytes` and reports that. Files with O_DIRECT: at least a block of 4096 bytes."""

    max_bytes: int = 4096


class Torn(msgspec.Struct, frozen=True, tag=True):
    """The call writes only the first `num_bytes` and reports that it wrote all. Files with O_DIRECT: whole blocks."""

    num_bytes: int = 0


class Signal(msgspec.Struct, frozen=True, tag=True):
    """A process is sent a signal first: a daemon is killed at this point."""

    pid: int
    number: int = signal.SIGKILL


Fault = Latency | Bandwidth | Fails | Late | Short | Torn | Signal

FITS: dict[type, frozenset[str]] = {
    Latency: _ALL,
    Bandwidth: _WITH_BYTES,
    Fails: _ALL,
    Late: frozenset({"write", "read", "discard", "offload", "reload"}),
    Short: frozenset({"pwritev", "preadv"}),
    Torn: frozenset({"pwritev"}),
    Signal: _ALL,
}
"""The operations that each fault can happen to."""


class Rule(msgspec.Struct, frozen=True):
    """One fault, and when it happens.

    Attributes:
        operations: the operation, or several operations, that it happens to. Several share one bandwidth.
        fault: what happens.
        occurrences: which calls of each operation, counted from 1 since the plan was set; None: any.
        probability: the chance that it happens to such a call; drawn from the plan's seed.
        under: only calls on files under this directory, for one of several drives; system calls only. None: any.

    Raises:
        ConfigError: the fault cannot happen to that operation, or a figure makes no sense.
    """

    operations: Operation | tuple[Operation, ...]
    fault: Fault
    occurrences: tuple[int, ...] | None = None
    probability: float = 1.0
    under: str | None = None

    def __post_init__(self) -> None:
        for operation in self.names:
            if operation not in FITS[type(self.fault)]:
                allowed = f"{type(self.fault).__name__} happens to {', '.join(sorted(FITS[type(self.fault)]))}"
                raise ConfigError("operations", operation, allowed)
        if self.under is not None and not _SYSTEM_CALLS.issuperset(self.names):
            allowed = f"only {', '.join(sorted(_SYSTEM_CALLS))} have a file"
            raise ConfigError("under", self.under, allowed)
        if not 0 <= self.probability <= 1:
            raise ConfigError("probability", self.probability, "give 0 to 1")
        _check_figures(self.fault)

    @property
    def names(self) -> tuple[Operation, ...]:
        return (self.operations,) if isinstance(self.operations, str) else self.operations


class FaultPlan(msgspec.Struct, frozen=True):
    """All rules of a run, and the seed for random draws. `FaultPlan.of(rule, ...)` is shorter. Several rules may apply
    to one operation: latencies add up, the slowest bandwidth counts, and the first error."""

    rules: tuple[Rule, ...] = ()
    seed: int = 0

    @classmethod
    def of(cls, *rules: Rule, seed: int = 0) -> FaultPlan:
        return cls(rules, seed)

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> FaultPlan:
        """Read a plan that `to_json` wrote. Raises ConfigError: the text is no plan."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError("plan", text, str(error)) from error


def _check_figures(fault: Fault) -> None:
    for name in fault.__struct_fields__:
        value = getattr(fault, name)
        if isinstance(value, (int, float)) and not value >= 0:
            raise ConfigError(name, value, "give 0 or more")
    if isinstance(fault, Bandwidth) and not fault.bytes_per_second > 0:
        raise ConfigError("bytes_per_second", fault.bytes_per_second, "give more than 0")
    if isinstance(fault, Fails) and os.strerror(fault.number).startswith("Unknown"):
        raise ConfigError("number", fault.number, "give a number that errno has")
