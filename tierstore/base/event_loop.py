"""The event loop of an engine, and of a daemon."""

from __future__ import annotations

import os

import uvloop

_STANDARD_STREAMS = range(3)


def new_event_loop() -> uvloop.Loop:
    """A new loop. Raises OSError: no descriptor is left, or the system refuses a call that a loop needs.

    Standard streams that are closed are /dev/null from then on: libuv aborts the process when it closes one of these
    descriptors itself (`uv__close`, src/unix/core.c), and what C libraries print must not go to a store's file."""
    for stream in _STANDARD_STREAMS:
        try:
            os.fstat(stream)
        except OSError:  # it is closed, and so the lowest number that is free
            os.open(os.devnull, os.O_RDWR)
    for descriptor in os.pipe2(os.O_CLOEXEC):  # libuv aborts the process where it gets no pipe (src/unix/signal.c)
        os.close(descriptor)
    return uvloop.new_event_loop()
