"""What goes wrong, and when: plain data, which can be written as JSON for a daemon of its own.

::

    fault       what happens                                        to which operations
    ---------   ------------------------------------------------   -----------------------------------------------
    Latency     it begins later                                     all
    Bandwidth   so many bytes per second, over all it is for        those that move bytes
    Fails       it is not done, and an error number says why        all
    Late        it is done, and said to be done after others        write, read, discard, offload, reload
    Short       the call moves less than it was asked to            pwritev, preadv
    Torn        the call writes less than it says                   pwritev
    Signal      first a process is sent a signal, then it is done   all
"""

from __future__ import annotations

import errno
import os
import signal
from typing import Literal, get_args

import msgspec

from ..errors import ConfigError

__all__ = [
    "Bandwidth",
    "Fails",
    "Fault",
    "FaultPlan",
    "Late",
    "Latency",
    "Operation",
    "Rule",
    "Short",
    "Signal",
    "Torn",
]

DiskOperation = Literal["write", "read", "discard", "close"]
CopyOperation = Literal["offload", "reload"]
SystemCall = Literal["pwritev", "preadv", "fallocate"]
Operation = DiskOperation | CopyOperation | SystemCall

_ALL = frozenset(get_args(DiskOperation) + get_args(CopyOperation) + get_args(SystemCall))
_WITH_BYTES = _ALL - {"discard", "close", "fallocate"}


class Latency(msgspec.Struct, frozen=True, tag=True):
    """The operation begins later.

    Attributes:
        seconds: by how much, in the mean.
        spread: "fixed": always so much; "uniform": between 0 and twice as much; "exponential": mostly less, at times
            much more. Drawn by the plan's seed.
    """

    seconds: float
    spread: Literal["fixed", "uniform", "exponential"] = "fixed"


class Bandwidth(msgspec.Struct, frozen=True, tag=True):
    """All operations of the rule together move no more than so much (a token bucket).

    Each begins at once, and is not said to be done before its last token has come: as on a slower drive, whatever the
    real one does meanwhile.

    Attributes:
        bytes_per_second: at which tokens come.
        burst_bytes: so many tokens may be saved up while nothing moves.
    """

    bytes_per_second: float
    burst_bytes: int = 0


class Fails(msgspec.Struct, frozen=True, tag=True):
    """The operation is not done. A read leaves garbage in its destination; a tier's close is done before it fails.

    Attributes:
        number: why, as `errno` has it: a system call raises it as OSError, the disk tier what its contract says for
            that, the copy engine RuntimeError.
    """

    number: int = errno.EIO


class Late(msgspec.Struct, frozen=True, tag=True):
    """The operation is done, but not said to be before others are.

    Of the disk tier: that many others, or as soon as no other runs, what is held back last first. Of the copy engine:
    the copy's event is not there before that many later copies are queued, or somebody waits for it.
    """

    num_others: int = 1


class Short(msgspec.Struct, frozen=True, tag=True):
    """The call moves at most so many bytes (a block, 4096, at least where the file is O_DIRECT), and says so."""

    max_bytes: int = 4096


class Torn(msgspec.Struct, frozen=True, tag=True):
    """The call writes the first so many bytes (whole blocks where the file is O_DIRECT), and says it wrote all."""

    num_bytes: int = 0


class Signal(msgspec.Struct, frozen=True, tag=True):
    """A process is sent a signal first: a daemon is killed at this point.

    Attributes:
        pid: of the process.
        number: of the signal.
    """

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
"""To which operations each fault can happen."""


class Rule(msgspec.Struct, frozen=True):
    """One fault, and when it happens.

    Attributes:
        operations: to which; one, or several that share a bandwidth.
        fault: what.
        occurrences: which of each operation, counted from 1 since the plan was set; None: any.
        probability: of those, how many; drawn by the plan's seed.

    Raises:
        ConfigError: the fault cannot happen to that operation, or a figure makes no sense.
    """

    operations: Operation | tuple[Operation, ...]
    fault: Fault
    occurrences: tuple[int, ...] | None = None
    probability: float = 1.0

    def __post_init__(self) -> None:
        for operation in self.names:
            if operation not in FITS[type(self.fault)]:
                allowed = f"{type(self.fault).__name__} happens to {', '.join(sorted(FITS[type(self.fault)]))}"
                raise ConfigError("operations", operation, allowed)
        if not 0 <= self.probability <= 1:
            raise ConfigError("probability", self.probability, "give 0 to 1")
        _check_figures(self.fault)

    @property
    def names(self) -> tuple[Operation, ...]:
        """The operations, also where it is one."""
        return (self.operations,) if isinstance(self.operations, str) else self.operations


class FaultPlan(msgspec.Struct, frozen=True):
    """All rules of a run, and the seed of what is drawn. `FaultPlan.of(rule, ...)` is shorter.

    What several rules say of one operation adds up: latencies one after the other; of bandwidths the slowest counts, of
    errors the first.
    """

    rules: tuple[Rule, ...] = ()
    seed: int = 0

    @classmethod
    def of(cls, *rules: Rule, seed: int = 0) -> FaultPlan:
        """A plan of these rules."""
        return cls(rules, seed)

    def to_json(self) -> str:
        """For another process; `from_json` is the way back."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> FaultPlan:
        """What `to_json` wrote.

        Raises:
            ConfigError: it is none.
        """
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
