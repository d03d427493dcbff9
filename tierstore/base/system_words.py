"""What the system has refused, in words: with the call, or with the limit of the process that was reached; and how a
process has ended."""

from __future__ import annotations

import errno
import linecache
import os
import re
import resource
import signal
from itertools import islice
from types import TracebackType

_LIMITS = {
    errno.EFBIG: (resource.RLIMIT_FSIZE, "the limit on the size of files is {} bytes, see `ulimit -f`"),
    errno.EMFILE: (resource.RLIMIT_NOFILE, "the limit is {}, see `ulimit -n`"),
    errno.ENOMEM: (resource.RLIMIT_AS, "the limit on addresses is {} bytes, see `ulimit -v`"),
}
_NAME_OF_NOTHING = re.compile(r"^/proc/self/fd/\d+: ")  # of a file without a name, as LMDB is given
_NAME_OF_CALL = re.compile(r"(?:await )?(?:self\.)?_*([\w.]+?)(?:\.__init__)?\(", re.ASCII)
_OF_LOOP = "one of the event loop's, such as epoll_create1, epoll_ctl, eventfd2, socketpair, connect, fcntl or ioctl"
_OF_LMDB = "one of LMDB's, such as pread64, pwrite64, lseek or fdatasync"


def words_of(error: BaseException, place: str = "") -> str:
    """The error in words; its kind, if it has none. `place`: what the reader is told beside it, so a file's name that
    is part of it is left out."""
    text = _NAME_OF_NOTHING.sub("", str(error)) or type(error).__name__
    name = getattr(error, "filename", None)
    if isinstance(name, (str, bytes, os.PathLike)) and os.fsdecode(name) in place.split(", "):
        text = text.removesuffix(f": {name!r}")
    number = getattr(error, "errno", None) or getattr(error, "code", None)  # the latter: of an lmdb.Error
    if number in _LIMITS:
        what, words = _LIMITS[number]
        limit, _ = resource.getrlimit(what)
        return text if limit == resource.RLIM_INFINITY else f"{text} ({words.format(limit)})"
    if number in (errno.EPERM, errno.ENOSYS):  # as a filter of system calls says (seccomp(2))
        call = _call_in(error.__traceback__) if isinstance(error, OSError) else _OF_LMDB
        return text if call is None else f"{text} (the call: {call})"
    return text


def _call_in(traceback: TracebackType | None) -> str | None:
    """The call that raised, by the text of its line; None: it was no call, or the error names it already."""
    call: str | None = None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        line, _, column, _ = next(islice(code.co_positions(), traceback.tb_lasti // 2, None), (None,) * 4)
        source = linecache.getline(code.co_filename, line or 0)
        if code.co_filename.startswith("uvloop"):
            call = _OF_LOOP
        elif source:
            found = _NAME_OF_CALL.match(source[column:])
            call = found and found[1]
        else:  # what is refused may be needed to read the source, too
            call = f"one in {code.co_qualname}"
        traceback = traceback.tb_next
    return call


def ending_of(exit_code: int) -> str:
    """How a process has ended, by its exit code; a negative one names the signal."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was ended by {signal.Signals(-exit_code).name}" + " (out of memory?)" * (exit_code == -signal.SIGKILL)
