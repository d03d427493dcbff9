"""`tierstore serve`."""

from __future__ import annotations

import inspect
import os
from typing import Annotated, Any

import typer

from ..daemon.options import CONFIG, OPTIONS, Given, Option


def serve(**given: Given | None) -> None:
    """Run the daemon: one disk tier for all training processes of this host that use TierStore.connect().

    SIGTERM and SIGINT end the daemon. It then completes the requests that it has accepted, keeps the stored data for
    the next start, and exits with 0. A second signal ends it at once.

    A session is one client: a TierStore.connect() of a training process. A record is what is stored as one: a tensor
    with its views, or many small ones.

    By default it listens at /run/tierstore/tierstore.sock for root, at $XDG_RUNTIME_DIR/tierstore/tierstore.sock for
    other users, or without that directory at /tmp/tierstore-UID/tierstore.sock. Clients look there.

    Each option can also be set by an environment variable (TIERSTORE_DISK_BYTES for --disk-bytes), or in the file of
    --config (disk_bytes). The command line takes precedence over the environment, and the environment over the file.
    """
    from ..daemon.logs import set_up_logging
    from ..daemon.options import settings_of
    from ..daemon.server import serve as serve_until_told

    line = {name: value for name, value in given.items() if value is not None and value != []}
    settings = settings_of(line, os.environ)
    set_up_logging(settings.log_level, settings.log_format)
    serve_until_told(settings)


def _parameter(name: str, option: Option) -> inspect.Parameter:
    kind: Any = str | None if option.gather is None else list[str] | None
    shown = typer.Option(metavar=option.metavar, help=option.help)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, shown])


serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [_parameter(name, option) for name, option in (OPTIONS | {"config": CONFIG}).items()]
)
