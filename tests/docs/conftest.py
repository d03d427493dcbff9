"""Fixtures of others that tests of the pages use."""

from tests.daemon.conftest import short_directory, start_daemon

__all__ = ["short_directory", "start_daemon"]
