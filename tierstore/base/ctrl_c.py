"""Holds Ctrl-C back while the books of a store are half changed."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` without its enums
import ctypes
import os
import signal
import sys
import threading
from typing import Any

_SIGINT = int(signal.SIGINT)
_ACTION_BYTES = 256
"""At least the size of `struct sigaction`."""
_FUNCTION, _FLAGS = slice(0, 8), slice(136, 140)
"""Where it has them on 64-bit Linux (bits/sigaction.h of glibc, signal.h of musl). Of the mask between, which has 128
bytes, glibc fills in the first 8."""


class CtrlC:
    """Holds Ctrl-C back while the main thread changes the books of a store, so that it finds them whole.

    SIGINT has another handler only in this moment, in which nothing of the program runs: the program, asyncio and
    notebooks find their own wherever they look. Under a handler that Python did not install, such as that of
    cysignals, nothing is held back. A second Ctrl-C never is. Another signal's handler may raise at any instruction
    below, so `hold` takes nothing for granted that an earlier call has left.

    Attributes:
        is_held: it is held back.
    """

    def __init__(self) -> None:
        self.is_held = self._has_come = False
        self._handler: Any = None
        self._of_python: bytes | None = None
        self._sigaction = ctypes.CDLL(None).sigaction
        self._sigaction.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._action = ctypes.create_string_buffer(_ACTION_BYTES)
        self._address = ctypes.addressof(self._action)
        self._main_thread = threading.main_thread().ident
        os.register_at_fork(after_in_child=self._begin_again)

    def hold(self) -> None:
        """Hold it back until `let_through`. Does nothing on other threads, where Python raises none."""
        if threading.get_ident() != self._main_thread:
            return
        self.is_held = False
        self._sigaction(_SIGINT, None, self._address)
        action = self._action.raw
        if action[_FUNCTION] + action[_FLAGS] != (self._of_python or self._learn()):
            return
        handler = _signal.getsignal(_SIGINT)
        if handler != self._note:
            self._handler = handler
        try:
            _signal.signal(_SIGINT, self._note)
            self.is_held = True
        except (OSError, ValueError):
            if not self._is_refused():
                raise

    def let_through(self) -> bool:
        """Raise what was held back. Returns whether it was, until this call. Does nothing on other threads."""
        if not self.is_held or threading.get_ident() != self._main_thread:
            return False
        _signal.signal(_SIGINT, self._handler)
        self.is_held = False
        if self._has_come:
            self._has_come = False
            self._handler(_SIGINT, sys._getframe())  # not `raise_signal`: the wake-up descriptor was told already
        return True

    def _note(self, *_: object) -> None:
        if self.is_held and not self._has_come:
            self._has_come = True
        else:
            self.is_held = self._has_come = True
            self.let_through()

    def _learn(self) -> bytes:
        """Function and flags of a handler that Python has installed. SIGINT's stays as it is."""
        self._sigaction(_SIGINT, None, self._address)
        before, handler = self._action.raw, _signal.getsignal(_SIGINT)
        if not callable(handler):  # it is none of Python's
            return b""
        self._handler = handler  # for `_note`
        try:
            _signal.signal(_SIGINT, self._note)
        except (OSError, ValueError):
            if not self._is_refused():
                raise
            return b""
        self._sigaction(_SIGINT, None, self._address)
        action = self._action.raw
        self._of_python = action[_FUNCTION] + action[_FLAGS]
        _signal.signal(_SIGINT, handler)
        self._sigaction(_SIGINT, before, None)
        return self._of_python

    def _is_refused(self) -> bool:
        """Whether the handler was not set: a filter of system calls forbids it, or `threading` was first imported on
        another thread than Python's main one. Else another signal's handler has raised the error."""
        return bool(_signal.getsignal(_SIGINT) != self._note)

    def _begin_again(self) -> None:
        """In a forked child, whose main thread is the one that forked."""
        self._main_thread, self._has_come = threading.get_ident(), False
        self.let_through()


CTRL_C = CtrlC()
