"""A daemon whose system calls fail as a plan says.

    python -m tierstore.testing.faulty_daemon PLAN --path /nvme --socket /tmp/faulty/t.sock

PLAN is what `FaultPlan.to_json` gives, for "pwritev", "preadv" and "fallocate". Where PLAN is "-", each line of
standard input is the plan from then on; the answer, one line of JSON, says that it holds, and what was injected so
far. Without torch."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

from ..base.threads import start_thread
from ..daemon.logs import set_up_logging
from ..daemon.options import ServeSettings, settings_of
from ..daemon.server import Daemon
from ..disk.file_layout import NamedFileLayout
from ..disk.local import LocalDisk
from .faults import Faults
from .plan import FaultPlan
from .system_calls import FaultyCalls, FaultyExecutor


class FaultyDaemon(Daemon):
    """A `Daemon` whose system calls on files fail as a plan says."""

    def __init__(self, settings: ServeSettings, faults: Faults) -> None:
        super().__init__(settings)
        self._faults = faults

    def _open_drive(self, path: Path, layout: NamedFileLayout, disk_bytes: int, threads: Executor) -> LocalDisk:
        return super()._open_drive(path, layout, disk_bytes, FaultyExecutor(threads, FaultyCalls(self._faults)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the daemon until it is told to end. Blocks."""
    import uvloop

    parser = argparse.ArgumentParser(prog="python -m tierstore.testing.faulty_daemon", description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("--path", action="append", default=argparse.SUPPRESS)
    for name in ("socket", "codec", "disk-bytes", "grace-seconds"):
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS)
    line = vars(parser.parse_args(arguments))
    text = line.pop("plan")
    faults = Faults(FaultPlan() if text == "-" else FaultPlan.from_json(text))
    settings = settings_of(line, os.environ)
    set_up_logging(settings.log_level, settings.log_format)
    if text == "-":
        start_thread(lambda: _take_plans(faults), "tierstore-plans")
    uvloop.run(FaultyDaemon(settings, faults).run())


def _take_plans(faults: Faults) -> None:
    for line in sys.stdin:
        faults.set(FaultPlan.from_json(line))
        print(json.dumps(faults.injected), flush=True)


if __name__ == "__main__":
    main()
