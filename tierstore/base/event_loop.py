"""The event loop of an engine, and of a daemon."""

from __future__ import annotations

import os

import uvloop


def new_event_loop() -> uvloop.Loop:
    """A new loop. Raises OSError: no descriptor is left, or the system refuses a call that a loop needs."""
    for descriptor in os.pipe2(os.O_CLOEXEC):  # libuv aborts the process where it gets no pipe (src/unix/signal.c)
        os.close(descriptor)
    return uvloop.new_event_loop()
