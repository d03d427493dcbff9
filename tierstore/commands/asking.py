"""Asks a daemon for its report. If there is no daemon, the error says how to start one."""

from __future__ import annotations

from dataclasses import replace

from ..base.address import find_address, start_line
from ..errors import DaemonUnavailableError
from ..sidecar.inspection import inspect_daemon

__all__ = ["ask_daemon"]


def ask_daemon(address: str | None, daemon_uid: int | None = None) -> tuple[str, bytes]:
    """The address of a daemon, and its report in JSON. Blocks for 5 seconds at most. None: look in the usual places.

    `daemon_uid`: as `inspect_daemon`'s.

    Raises:
        DaemonUnavailableError, ProtocolError: as `inspect_daemon`'s. It says how to start a daemon if nobody listens.
    """
    address = find_address() if address is None else address
    try:
        return address, inspect_daemon(address, daemon_uid=daemon_uid)
    except DaemonUnavailableError as error:
        if not isinstance(error.__cause__, (FileNotFoundError, ConnectionRefusedError)):
            raise
        reason = f"{error.reason}. Start one with: {start_line(address)}"
        raise replace(error, reason=reason) from error.__cause__
