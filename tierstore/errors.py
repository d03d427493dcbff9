"""The errors that tierstore raises, as one small tree.

::

    TierStoreError
    ├── ConfigError (also a ValueError)           an option, a path or a size is not usable
    │   └── ConfigTypeError (also a TypeError)    a keyword is unknown, or a value is of the wrong type
    ├── StoreClosedError                          the store was closed, or belongs to another process
    ├── StoreBusyError                            a signal handler or finalizer called a store where it may not
    ├── StoreFullError (also a MemoryError)       host memory and disk budget are both exhausted
    │   └── QuotaExceededError                    the daemon's quota for this session is used up
    ├── CorruptDataError                          bytes on disk are not the bytes that were written
    ├── StorageIOError                            the device or the file system failed
    ├── ModifiedInPlaceError (also a RuntimeError)  a saved tensor was changed before backward used it
    ├── DaemonUnavailableError                    the daemon did not come back in time
    ├── UnsupportedTorchError (also an ImportError)  this torch lacks names that tierstore needs
    └── ProtocolError                             the peer on the socket does not speak our protocol
    TierStoreWarning (a UserWarning)              valid, but probably not what was meant

Every error has its figures as fields. The message is made from them and says where the data is now. None can be made
from its text alone: `torch.utils.data` would make it again so, in the process that reads from a worker, and the text
would be taken for a field; as it is, it raises `RuntimeError` with that text. Errors of
background work are raised on the thread that trains, with their cause chained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .plain_text import plain

_MOST_SHOWN = 500
_CANNOT_BE = "cannot be "
_SHORTEST_WAIT_SECONDS = 0.1
"""Shorter ones are not told: the program did not wait."""


class TierStoreError(Exception):
    """Base of every error that tierstore raises on purpose.

    What a class says of itself is made plain: it repeats paths, names and words of others, and somebody prints it."""

    _words = ""  # of the message; the fields fill it in

    def __str__(self) -> str:
        return plain(self._message(), kept="\n")

    def _message(self) -> str:
        return self._words.format(**vars(self)) or super().__str__()

    def __reduce__(self) -> tuple[Callable[..., TierStoreError], tuple[Any, ...]]:
        # Exceptions are pickled by their positional `args`. Ours are dataclasses, so they are pickled by their fields.
        names: Iterable[str] = getattr(self, "__dataclass_fields__", ())
        return (_rebuild, (type(self), {name: getattr(self, name) for name in names}))


class TierStoreWarning(UserWarning):
    """A valid use, but probably not what was meant. The message says what to do instead."""


def _shown(given: object) -> str:
    """The value as text, cut short. It may be of any length or depth, or a number that Python refuses to print."""
    try:
        text = repr(given)
    except (ValueError, RecursionError):
        return f"<{type(given).__name__}>"
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."


def _rebuild(kind: type[TierStoreError], values: dict[str, Any]) -> TierStoreError:
    return kind(**values)


@dataclass(eq=False)
class ConfigError(TierStoreError, ValueError):
    """An option is not usable. Nothing was opened or changed.

    Attributes:
        option: the name of the argument, option or file.
        given: the value, as the caller wrote it; None also if an option or a key of a file is missing.
        allowed: the accepted values, or why a file "cannot be read", "created" or "written", in words.
    """

    option: str
    given: object
    allowed: str

    def _message(self) -> str:
        is_known = not self.allowed.startswith("there is no such")
        if self.given is None and is_known and not self.option.isidentifier():  # an argument may be given as None
            return f"{self.option} is missing: {self.allowed}"
        problem = "" if self.allowed.startswith(_CANNOT_BE) else "cannot be used: "
        return f"{self.option}={_shown(self.given)} {problem}{self.allowed}"


@dataclass(eq=False)
class ConfigTypeError(ConfigError, TypeError):
    """There is no argument of that name, or its value is of the wrong type. Python itself raises `TypeError` then."""


@dataclass(eq=False)
class StoreClosedError(TierStoreError):
    """The store is closed; the tensors it held are gone.

    Attributes:
        store: which store (its path or address).
        reason: why it is closed, in words.
    """

    store: str
    reason: str

    _words = "the store at {store} cannot be used: {reason}; the tensors it held are freed"


@dataclass(eq=False)
class StoreBusyError(TierStoreError):
    """A signal handler, finalizer or trace function called a store where it may not.

    It may not in the middle of this thread's call of any store. And on a thread that a store has started, where garbage
    collection may run finalizers too, it may not do what has to wait: the wait would be for that thread. Nothing was
    done. If a handler lets this error pass into the call that it interrupted, the store is closed. Python only prints
    what a finalizer raises. Modes of torch cannot cause it: they do not see what happens inside such a call.

    Attributes:
        store: which store (its path or address).
        place: where it was called, in words.
    """

    store: str
    place: str

    _words = (
        "store {store}: a signal handler, a finalizer or a trace function called it {place}; "
        "nothing was done. Set a flag in it instead, and call the store where your program checks the flag"
    )


@dataclass(eq=False)
class StoreFullError(TierStoreError, MemoryError):
    """Neither host memory nor disk can take the bytes. They are still where they were; nothing was lost.

    Attributes:
        needed_bytes: size of the request.
        disk_bytes: bytes held on disk at that moment.
        disk_budget_bytes: the most bytes the store may hold on disk.
        host_bytes: bytes held in host memory at that moment (0 if the error comes from the disk tier alone).
        host_budget_bytes: the most bytes the store may hold in host memory (likewise).
        reason: why it was refused: the budget is used up, or the file system's own words.
        advice: what to do besides freeing a graph, in words.
    """

    needed_bytes: int
    disk_bytes: int
    disk_budget_bytes: int
    host_bytes: int = 0
    host_budget_bytes: int = 0
    reason: str = "the disk budget is used up"
    advice: str = "raise disk_bytes or host_bytes"

    _words = (
        "no room for {needed_bytes} bytes: {reason} "
        "(disk {disk_bytes} of {disk_budget_bytes} bytes, "
        "host {host_bytes} of {host_budget_bytes} bytes); "
        "the data is still in memory. {what_helps}"
    )

    @property
    def what_helps(self) -> str:
        if self.disk_budget_bytes < self.needed_bytes > self.host_budget_bytes:
            return f"It is larger than either budget, so freeing others does not help: {self.advice}"
        return f"Free a graph, or {self.advice}"

    def _message(self) -> str:
        return self._words.format(**vars(self), what_helps=self.what_helps)


@dataclass(eq=False)
class QuotaExceededError(StoreFullError):
    """The daemon's quota for this session is used up. The bytes are still in the client's memory.

    Attributes:
        session: the session's name, as the daemon shows it.
    """

    advice: str = "raise host_bytes, or the daemon's limit: --session-disk-bytes, or of records --max-records-per-user"
    session: str = ""

    _words = f"session {{session!r}}: {StoreFullError._words}"


@dataclass(eq=False)
class CorruptDataError(TierStoreError):
    """The bytes read are not the bytes written. They are lost; no tensor was made from them.

    Attributes:
        key: the record's key (a handle's number).
        place: where the record lies, in words (segment and offset, or the index).
        expected: checksum or length, as the index has it.
        found: the one that was read.
    """

    key: int
    place: str
    expected: str
    found: str

    _words = (
        "handle {key}: damaged data in {place}: expected {expected}, found {found}; "
        "the saved tensor is lost, run the step again"
    )


@dataclass(eq=False)
class StorageIOError(TierStoreError):
    """The device or file system failed; the cause is chained.

    Attributes:
        operation: "write", "read", "open", ...
        place: the path, or segment and offset.
        reason: the system's own words.
        data: where the bytes are now, in words.
    """

    operation: str
    place: str
    reason: str
    data: str = "the data is still in memory"

    _words = "{operation} failed at {place}: {reason}; {data}"


@dataclass(eq=False)
class ModifiedInPlaceError(TierStoreError, RuntimeError):
    """A saved tensor was changed between forward and backward; PyTorch without hooks raises here too.

    Attributes:
        tensor: dtype and shape, in words.
        saved_version: its version counter when it was saved.
        current_version: its version counter now.
        needed_by: the operation whose gradient needs it, as torch's anomaly mode names it; "": none is computed.
    """

    tensor: str
    saved_version: int
    current_version: int
    needed_by: str = ""

    def _message(self) -> str:
        found = (
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{self.tensor}] is at version {self.current_version}; expected version {self.saved_version} instead. "
        )
        if not self.needed_by:
            return f"{found}The gradient was not computed"
        return (
            f"{found}{self.needed_by} needs it: its gradient was not computed. "
            "torch.autograd.set_detect_anomaly(True) shows the line of forward that saved it"
        )


@dataclass(eq=False)
class DaemonUnavailableError(TierStoreError):
    """The daemon cannot be reached, or refuses.

    Attributes:
        address: the socket's path.
        waited_seconds: how long the client tried.
        reason: the last failure, in words.
        data: where the bytes are now, in words; "" if it was given none.
    """

    address: str
    waited_seconds: float
    reason: str
    data: str = "data that it has acknowledged cannot be read until it is back; the rest is still in memory"

    def _message(self) -> str:
        after = f" after {self.waited_seconds:.1f} s" if self.waited_seconds >= _SHORTEST_WAIT_SECONDS else ""
        where = f"; {self.data}" if self.data else ""
        return f"no daemon is available at {self.address}{after}: {self.reason}{where}"


@dataclass(eq=False)
class ProtocolError(TierStoreError):
    """The peer sent something that our protocol does not allow. The connection was closed.

    Attributes:
        peer: the other side, in words.
        reason: what was wrong.
    """

    peer: str
    reason: str

    _words = "{peer} broke the protocol: {reason}; the connection was closed"


@dataclass(eq=False)
class UnsupportedTorchError(TierStoreError, ImportError):
    """The installed torch lacks private names that tierstore uses. Nothing was imported.

    Attributes:
        torch_version: the installed version.
        missing: the names that torch lacks.
        tried: the releases of torch that were tried, in words.
        what: what cannot run: tierstore, or `offload_backend` alone.
    """

    torch_version: str
    missing: tuple[str, ...]
    tried: str
    what: str = "tierstore"

    def _message(self) -> str:
        lacks = f", which has no {', '.join(self.missing)}" if self.missing else ""
        return (
            f"{self.what} cannot run with torch {self.torch_version}{lacks}; "
            f"it was tried with torch {self.tried}: install one of these, or a newer tierstore"
        )
